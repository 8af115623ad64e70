"""Work of the kernels that compute the experts of a layer."""

from __future__ import annotations

import math
import re

from lm_trainer.nn import tpu_product, triton_product
from lm_trainer.nn.expert_spec import MoeSpec
from lm_trainer.nn.grouped_product import CPU_SLOTS
from lm_trainer.nn.spec import DecoderSpec, MlpSpec
from lm_trainer.nn.triton_product import GRADIENT_NAME, PRODUCT_NAME
from lm_trainer.profile.hlo import Computation, Instruction, array_dimensions

TRITON = "__gpu$xla.gpu.triton"
"""Target of the custom calls of Pallas kernels for GPUs in compiled programs."""
_TRITON_KERNEL = re.compile(rf'"{re.escape(TRITON)}".* name = "({PRODUCT_NAME}|{GRADIENT_NAME})"')
_TPU_KERNEL = re.compile(r'"tpu_custom_call".*op_name="[^"]*jit\((gmm|tgmm)\)')


def grouped_kernel_flops(op: Instruction, computation: Computation) -> float:
    """Returns the FLOPs of a grouped product in a compiled program for GPUs or TPUs; 0 for any other instruction.

    On GPUs, the last tile of each expert is half empty in the mean over all numbers of tokens. On TPUs, a tile with
    slots of two experts is computed for both. If devices share the experts, the rows of all of them are counted,
    although each device computes only its part.
    """
    if match := _TRITON_KERNEL.search(op.attributes):
        operands, is_gradient, platform = op.operands[:2], match[1] == GRADIENT_NAME, "gpu"
    elif match := _TPU_KERNEL.search(op.attributes):
        # Rows and matrices come after the arrays that describe the groups.
        operands, is_gradient, platform = op.operands[-2:], match[1] == "tgmm", "tpu"
    else:
        return 0.0
    result, rows, second = (array_dimensions(shape) for shape in (op.shape, *(computation[x].shape for x in operands)))
    experts, dim, width = (result[0], *result[1:]) if is_gradient else (second[0], rows[1], result[1])
    return 2.0 * (rows[0] + _count_empty_slots(platform, rows[0], experts, is_gradient=is_gradient)) * dim * width


def _count_empty_slots(platform: str, slots: int, experts: int, *, is_gradient: bool) -> float:
    """Returns the number of slots without a token of the expert for which a kernel computes them, in the mean.

    Args:
        platform: platform of the kernel.
        slots: number of slots of the rows.
        experts: number of experts of a device.
        is_gradient: true for the gradient of the matrices.
    """
    match platform:
        case "gpu":
            # Tiles of the gradient are small in the direction of the slots.
            return 0 if is_gradient else experts * triton_product.tile_slots(slots, experts) / 2
        case "tpu":
            return (experts - 1) * tpu_product.tile_slots(slots, experts)
        case _:
            return experts * CPU_SLOTS / 2


def unneeded_expert_flops(spec: DecoderSpec, platform: str, tokens: float, devices: int = 1) -> float:
    """Returns the FLOPs per token of a training step for experts that the token did not choose.

    `dense` computes every expert. XLA's grouped product on TPUs computes the gradient of the weights as one product
    over all assignments for each expert. Grouped kernels compute tiles that contain slots without a token.

    Args:
        spec: the model.
        platform: platform of the devices.
        tokens: number of tokens of a device in a microbatch.
        devices: number of devices that share the experts.
    """
    return sum(
        _unneeded_flops(block.mlp, spec.hidden_dim, platform, tokens, devices)
        for block in spec.all_blocks
        if isinstance(block.mlp, MoeSpec)
    )


def _unneeded_flops(spec: MoeSpec, hidden: int, platform: str, tokens: float, devices: int) -> float:
    of_expert = 2 * 3 * hidden * spec.hidden_dim
    match spec.kernel_on(platform):
        case "dense":
            return 3 * of_expert * (spec.num_experts - spec.top_k)
        case "ragged_dot":
            return of_expert * spec.top_k * (spec.num_experts - 1)
        case _:
            slots, experts = int(tokens * _max_assignments(spec, devices)), spec.num_experts // devices
            # The products of the forward pass, and of the gradients of rows and of matrices.
            empty = sum(
                _count_empty_slots(platform, slots, experts, is_gradient=is_gradient)
                for is_gradient in (False, False, True)
            )
            return of_expert * empty / tokens


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
