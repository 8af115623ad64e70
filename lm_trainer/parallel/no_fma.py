"""Products that are rounded before anything is added to them, whatever a compiler makes of it.

Where a product feeds an addition, a compiler may contract both to a fused multiply-add, which rounds once instead of
twice. Whether it does depends on what else uses the product, and so on how the program was fused, which depends on the
shapes that a device holds. Elementwise computations then have other bits on other meshes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Literal

_PRODUCTS = frozenset({"mul", "square", "integer_pow"})
_CALLS = frozenset({"pjit", "jit", "closed_call", "custom_jvp_call", "custom_vjp_call"})


def without_fma(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` with one more argument in front: a uint32 scalar of value 0 that the compiler must not know.

    Each product is combined bit by bit with that zero, which changes nothing and stands between it and what is added.
    Products inside loops and branches are left as they are.
    """

    def rounded(zero: jax.Array, *args: Any) -> Any:
        closed, shapes = jax.make_jaxpr(function, return_shape=True)(*args)
        results = _evaluate(closed.jaxpr, closed.consts, jax.tree.leaves(args), zero)
        return jax.tree.unflatten(jax.tree.structure(shapes), results)

    return rounded


def _evaluate(jaxpr: Any, consts: Sequence[Any], args: Sequence[Any], zero: jax.Array) -> list[Any]:
    values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))

    def read(variable: Any) -> Any:
        return variable.val if isinstance(variable, Literal) else values[variable]

    for equation in jaxpr.eqns:
        given = [read(variable) for variable in equation.invars]
        name, inner = equation.primitive.name, equation.params.get("jaxpr", equation.params.get("call_jaxpr"))
        if name in _CALLS and inner is not None:
            results = _evaluate(inner.jaxpr, inner.consts, given, zero)
        else:
            found = equation.primitive.bind(*given, **equation.primitive.get_bind_params(equation.params))
            results = found if equation.primitive.multiple_results else [found]
        if name in _PRODUCTS:
            results = [_stored(x, zero) for x in results]
        values.update(zip(equation.outvars, results, strict=True))
    return [read(variable) for variable in jaxpr.outvars]


def _stored(x: jax.Array, zero: jax.Array) -> jax.Array:
    """The same bits, as a value that no operation is contracted with."""
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return x
    bits = jnp.dtype(f"uint{8 * x.dtype.itemsize}")
    return jax.lax.bitcast_convert_type(jax.lax.bitcast_convert_type(x, bits) ^ zero.astype(bits), x.dtype)
