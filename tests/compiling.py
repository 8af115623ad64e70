"""Compilation for tests, most of whose time XLA takes for programs that run for milliseconds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

_UNOPTIMISED = {"xla_backend_optimization_level": 0, "xla_cpu_use_fusion_emitters": False}


def quick_jit(function: Callable[..., Any], **options: Any) -> Any:
    """`jax.jit` without XLA's expensive optimisations: a quarter of the time to compile, and slower code.

    For tests that compare a computation with its formula, within a tolerance. Tests of a run's own programs and of
    equal bits compile as a run does.
    """
    return jax.jit(function, compiler_options=_UNOPTIMISED, **options)
