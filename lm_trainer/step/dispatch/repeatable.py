"""Compilation to programs that compute the same bits in every run, because they contain no nondeterministic kernels."""

from __future__ import annotations

from typing import Any

import jax

from lm_trainer.core.jax_internals import configure_custom_calls, remove_kernel_locations
from lm_trainer.profile.expert_kernels import TRITON

_OPTIONS: dict[str, dict[str, str | bool]] = {"gpu": {"xla_gpu_exclude_nondeterministic_ops": True}}
"""Platform -> compiler options. On GPUs, the gradients of embeddings and of cuDNN attention would otherwise be added by
atomics, in an order that varies between runs. The other platforms have no such kernels."""
_ATTENTION, _BACKWARD = "__cudnn$fmha", "Backward"


def compile_repeatable(lowered: jax.stages.Lowered, platform: str) -> jax.stages.Compiled:
    """Compiles a program for devices of the given platform such that it computes the same bits in every run."""
    options = _OPTIONS.get(platform)
    if options:
        ask_for_fixed_order(lowered)
        remove_kernel_locations(lowered, TRITON)
    return lowered.compile(options)


def ask_for_fixed_order(lowered: jax.stages.Lowered) -> None:
    """Makes the backward passes of cuDNN attention in a lowered program add in a fixed order.

    The compiler option does so only for the first of several equal passes. XLA then looks up the kernels of the other
    passes under a name other than that under which they are stored, and the program fails when it runs: with jaxlib
    0.11.2 on an H100, by `IndexError: absl::container_internal::raw_hash_map<>::at`.
    """

    def force_determinism(config: dict[str, Any]) -> None:
        config["cudnn_fmha_backend_config"]["force_deterministic"] = True

    configure_custom_calls(
        lowered, lambda target: target.startswith(_ATTENTION) and target.endswith(_BACKWARD), force_determinism
    )
