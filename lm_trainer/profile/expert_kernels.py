"""Work of the kernels that compute the experts of a layer."""

from __future__ import annotations

import math
import re

from lm_trainer.nn.expert_spec import MoeSpec
from lm_trainer.nn.spec import DecoderSpec, MlpSpec
from lm_trainer.nn.triton_product import GRADIENT_NAME, PRODUCT_NAME, tile_slots
from lm_trainer.profile.hlo import Computation, Instruction, array_dimensions

TRITON = "__gpu$xla.gpu.triton"
"""Target of the custom calls of Pallas kernels for GPUs in compiled programs."""
_NAME = re.compile(rf'"{re.escape(TRITON)}".* name = "({PRODUCT_NAME}|{GRADIENT_NAME})"')


def grouped_kernel_flops(op: Instruction, computation: Computation) -> float:
    """Returns the FLOPs of a grouped product in a compiled program for GPUs; 0 for any other instruction.

    The last tile of each expert is half empty in the mean over all numbers of tokens. If devices share the experts, the
    rows of all of them are counted, although each device computes only its part.
    """
    match = _NAME.search(op.attributes)
    if match is None:
        return 0.0
    result, rows, second = (
        array_dimensions(shape) for shape in (op.shape, *(computation[name].shape for name in op.operands[:2]))
    )
    if match[1] == GRADIENT_NAME:
        # Tiles of the gradient are small in the direction of the slots.
        return 2.0 * rows[0] * math.prod(result[1:])
    computed = rows[0] + second[0] * tile_slots(rows[0], second[0]) / 2
    return 2.0 * computed * rows[1] * result[1]


def unneeded_expert_flops(spec: DecoderSpec, platform: str) -> int:
    """Returns the FLOPs per token of a training step for experts that the token did not choose.

    `dense` computes every expert. XLA's grouped product on TPUs computes the gradient of the weights as one product
    over all assignments for each expert. Empty slots of grouped kernels are not counted.
    """
    return sum(
        _unneeded_flops(block.mlp, spec.hidden_dim, platform)
        for block in spec.all_blocks
        if isinstance(block.mlp, MoeSpec)
    )


def _unneeded_flops(spec: MoeSpec, hidden: int, platform: str) -> int:
    of_expert = 2 * 3 * hidden * spec.hidden_dim
    match spec.kernel_on(platform):
        case "dense":
            return 3 * of_expert * (spec.num_experts - spec.top_k)
        case "ragged_dot":
            return of_expert * spec.top_k * (spec.num_experts - 1)
        case _:
            return 0


def expected_targets(mlp: MoeSpec, devices: int) -> float:
    """Returns the mean number of devices that have any expert of a token, if all choices of experts are equally likely.

    Args:
        mlp: the experts.
        devices: number of devices that share the experts.
    """
    elsewhere = mlp.num_experts - mlp.num_experts // devices
    return devices * (1 - math.comb(elsewhere, mlp.top_k) / math.comb(mlp.num_experts, mlp.top_k))


def expert_copies(mlp: MlpSpec | MoeSpec, hidden: int, platform: str, devices: int = 1) -> int:
    """Returns the number of values per token in the copies of tokens and results for the experts of a layer.

    Args:
        mlp: the MLP or the experts.
        hidden: width of a token.
        platform: platform of the devices.
        devices: number of devices that share the experts.
    """
    if not isinstance(mlp, MoeSpec):
        return 0
    copies = 0 if mlp.kernel_on(platform) == "dense" else _max_assignments(mlp, devices)
    if devices > 1:
        # The sent tokens and returned results of this device, and the received tokens and their results.
        copies += min(mlp.top_k, devices) + devices
    return 2 * copies * hidden


def computed_mlp_width(mlp: MlpSpec | MoeSpec, platform: str, devices: int = 1) -> int:
    """Returns the width of the MLP that a device has memory for per token, over experts and the shared expert.

    The kernel `dense` computes all experts. Other kernels compute the experts that a token chose; if devices share the
    experts, each has memory for all tokens that the others might send.
    """
    if not isinstance(mlp, MoeSpec):
        return mlp.hidden_dim
    experts = mlp.num_experts if mlp.kernel_on(platform) == "dense" else _max_assignments(mlp, devices)
    return mlp.hidden_dim * experts + (0 if mlp.shared is None else mlp.shared.hidden_dim)


def _max_assignments(mlp: MoeSpec, devices: int) -> int:
    """Returns the maximum number of assignments that a device computes, per token of its own."""
    return devices * min(mlp.top_k, mlp.num_experts // devices)
