"""Compilation for tests, most of whose time XLA takes for programs that run for milliseconds."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax


@functools.cache
def _unoptimised() -> dict[str, Any]:
    """Options of the compiler; XLA of jax 0.12 does without the second one."""
    least = {"xla_backend_optimization_level": 0}
    both = {**least, "xla_cpu_use_fusion_emitters": False}
    try:
        jax.jit(lambda: 0, compiler_options=both).lower().compile()
    except jax.errors.JaxRuntimeError:
        return least
    return both


def quick_jit(function: Callable[..., Any], **options: Any) -> Any:
    """`jax.jit` without XLA's expensive optimisations: a quarter of the time to compile, and slower code.

    For tests that compare a computation with its formula, within a tolerance. Tests of a run's own programs and of
    equal bits compile as a run does.
    """
    return jax.jit(function, compiler_options=_unoptimised(), **options)
