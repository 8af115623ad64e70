"""Compilation for tests, most of whose time XLA takes for programs that run for milliseconds."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


@functools.cache
def _unoptimised() -> dict[str, Any]:
    """Options of the compiler; XLA of jax 0.12 does without the second one."""
    import jax

    least = {"xla_backend_optimization_level": 0}
    both = {**least, "xla_cpu_use_fusion_emitters": False}
    try:
        jax.jit(lambda: 0, compiler_options=both).lower().compile()
    except jax.errors.JaxRuntimeError:
        return least
    return both


class _Compiler:
    """JAX's choice of options for XLA, with ours laid under those of a caller while `quick`."""

    quick = False
    given: Callable[..., Any] | None = None

    @classmethod
    def options(cls, *args: Any, **options: Any) -> Any:
        assert cls.given is not None
        if cls.quick:
            options["env_options_overrides"] = {**_unoptimised(), **(options.get("env_options_overrides") or {})}
        return cls.given(*args, **options)


def compile_quickly(quick: bool) -> None:
    """Lets JAX compile without XLA's expensive optimisations (a third of the time, slower code), or with them again.

    Nothing that was compiled the other way is used any more: one comparison never has programs of both kinds.
    """
    import jax
    from jax._src import compiler  # JAX has no public default for the options of all programs

    if _Compiler.given is None:
        _unoptimised()  # which compiles by itself
        _Compiler.given = compiler.get_compile_options
        compiler.get_compile_options = _Compiler.options
    if _Compiler.quick != quick:
        _Compiler.quick = quick
        jax.clear_caches()


def flags_of_processes() -> list[str]:
    """The flags with which XLA compiles in other processes as it does in this one."""
    return [f"--{name}={str(value).lower()}" for name, value in _unoptimised().items()] if _Compiler.quick else []


def quick_jit(function: Callable[..., Any], **options: Any) -> Any:
    """`jax.jit` without XLA's expensive optimisations, in a test that is marked `optimised` as well."""
    import jax

    return jax.jit(function, compiler_options=_unoptimised(), **options)
