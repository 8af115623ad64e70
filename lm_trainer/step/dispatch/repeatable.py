"""Compilation to programs that compute the same bits in every run, because they contain no nondeterministic kernels."""

from __future__ import annotations

import json

import jax
from jaxlib.mlir import ir

_OPTIONS: dict[str, dict[str, str | bool]] = {"gpu": {"xla_gpu_exclude_nondeterministic_ops": True}}
"""Platform -> compiler options. On GPUs, the gradients of embeddings and of cuDNN attention would otherwise be added by
atomics, in an order that varies between runs. The other platforms have no such kernels."""
_ATTENTION, _BACKWARD = "__cudnn$fmha", "Backward"


def compile_repeatable(lowered: jax.stages.Lowered, platform: str) -> jax.stages.Compiled:
    """Compiles a program for devices of the given platform such that it computes the same bits in every run."""
    options = _OPTIONS.get(platform)
    if options:
        ask_for_fixed_order(lowered)
    return lowered.compile(options)


def ask_for_fixed_order(lowered: jax.stages.Lowered) -> None:
    """Makes the backward passes of cuDNN attention in a lowered program add in a fixed order.

    The compiler option does so only for the first of several equal passes. XLA then looks up the kernels of the other
    passes under a name other than that under which they are stored, and the program fails when it runs: with jaxlib
    0.11.2 on an H100, by `IndexError: absl::container_internal::raw_hash_map<>::at`.
    """

    def visit(operation: ir.Operation) -> ir.WalkResult:
        if operation.name == "stablehlo.custom_call":
            name = ir.StringAttr(operation.attributes["call_target_name"]).value
            if name.startswith(_ATTENTION) and name.endswith(_BACKWARD):
                _force_determinism(operation)
        return ir.WalkResult.ADVANCE

    module = lowered.compiler_ir("stablehlo")
    assert isinstance(module, ir.Module)
    # This module is the one that will be compiled, not a copy of it.
    module.operation.walk(visit)


def _force_determinism(operation: ir.Operation) -> None:
    key = next(key for key in ("backend_config", "mhlo.backend_config") if key in operation.attributes)
    config = json.loads(ir.StringAttr(operation.attributes[key]).value)
    config["cudnn_fmha_backend_config"]["force_deterministic"] = True
    with operation.context:
        operation.attributes[key] = ir.StringAttr.get(json.dumps(config))
