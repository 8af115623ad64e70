"""Programs that compute the same bits each time: what a compiler has to be told to leave out kernels that do not."""

from __future__ import annotations

import json

import jax
from jaxlib.mlir import ir

_OPTIONS: dict[str, dict[str, str | bool]] = {"gpu": {"xla_gpu_exclude_nondeterministic_ops": True}}
"""Platform -> options of its compiler. On GPUs the gradients of an embedding and of cuDNN's attention would be added by
whichever thread comes first. On the others there is no such kernel."""
_ATTENTION, _BACKWARD = "__cudnn$fmha", "Backward"


def compile_repeatable(lowered: jax.stages.Lowered, platform: str) -> jax.stages.Compiled:
    """Compiles a program, for devices of that platform, to one that repeats its bits."""
    options = _OPTIONS.get(platform)
    if options:
        ask_for_fixed_order(lowered)
    return lowered.compile(options)


def ask_for_fixed_order(lowered: jax.stages.Lowered) -> None:
    """Has the backward passes of cuDNN's attention in a program that is not compiled yet add in a fixed order.

    The compiler's option alone asks for that in the first of several equal passes. XLA then looks for the kernels of
    the others under another name than it has kept them by, and the program fails when it runs: with jaxlib 0.11.2 on an
    H100 by `IndexError: absl::container_internal::raw_hash_map<>::at`.
    """

    def visit(operation: ir.Operation) -> ir.WalkResult:
        if operation.name == "stablehlo.custom_call":
            name = ir.StringAttr(operation.attributes["call_target_name"]).value
            if name.startswith(_ATTENTION) and name.endswith(_BACKWARD):
                _force(operation)
        return ir.WalkResult.ADVANCE

    module = lowered.compiler_ir("stablehlo")
    assert isinstance(module, ir.Module)
    # What is compiled is this module, and not a copy of it.
    module.operation.walk(visit)


def _force(operation: ir.Operation) -> None:
    key = next(key for key in ("backend_config", "mhlo.backend_config") if key in operation.attributes)
    config = json.loads(ir.StringAttr(operation.attributes[key]).value)
    config["cudnn_fmha_backend_config"]["force_deterministic"] = True
    with operation.context:
        operation.attributes[key] = ir.StringAttr.get(json.dumps(config))
