"""Rounded products: a transformation that keeps compilers from contracting a product and a sum.

Where a product feeds an addition, a compiler may contract both to a fused multiply-add (FMA), which rounds once instead
of twice. Whether it does depends on the fusion around it, hence on the shapes that a device holds, hence on the mesh:
the same element-wise formula then has other bits on other meshes. No option of XLA forbids it on a CPU
(`--xla_cpu_enable_fast_math=false` does not, jax 0.10), so the jaxpr is rewritten instead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Literal

_PRODUCTS = frozenset({"mul", "square", "integer_pow"})
"""Primitives that end in a multiplication."""
_CALLS = frozenset({"pjit", "jit", "closed_call", "custom_jvp_call", "custom_vjp_call"})
"""Primitives that only call another jaxpr; `pjit` was renamed `jit`."""


def without_fma(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `function` with every product rounded before it is added to anything.

    The returned function takes one more argument in front: a uint32 scalar of value 0, which must be an argument of the
    compiled program, so that the compiler does not know its value. Each product is combined bit by bit with that zero,
    which changes nothing and stands between the product and the addition. Products inside loops and branches are left
    as they are.
    """

    def rounded(zero: jax.Array, *args: Any) -> Any:
        closed, shapes = jax.make_jaxpr(function, return_shape=True)(*args)
        results = _evaluate(closed.jaxpr, closed.consts, jax.tree.leaves(args), zero)
        return jax.tree.unflatten(jax.tree.structure(shapes), results)

    return rounded


def _evaluate(jaxpr: Any, consts: Sequence[Any], args: Sequence[Any], zero: jax.Array) -> list[Any]:
    """Interprets a jaxpr equation by equation, as `jax.core.eval_jaxpr` does, and rounds products on the way."""
    values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))

    def read(variable: Any) -> Any:
        return variable.val if isinstance(variable, Literal) else values[variable]

    for equation in jaxpr.eqns:
        given = [read(variable) for variable in equation.invars]
        name, inner = equation.primitive.name, equation.params.get("jaxpr", equation.params.get("call_jaxpr"))
        if name in _CALLS and inner is not None:
            # Calls are inlined, since a product inside one may feed an addition outside. That drops custom gradients,
            # which is harmless: updates are not differentiated.
            results = _evaluate(inner.jaxpr, inner.consts, given, zero)
        else:
            found = equation.primitive.bind(*given, **equation.primitive.get_bind_params(equation.params))
            results = found if equation.primitive.multiple_results else [found]
        if name in _PRODUCTS:
            results = [_opaque(x, zero) for x in results]
        values.update(zip(equation.outvars, results, strict=True))
    return [read(variable) for variable in jaxpr.outvars]


def _opaque(x: jax.Array, zero: jax.Array) -> jax.Array:
    """Returns the same bits as a value with which no operation is contracted."""
    # Integer products are exact, contracted or not.
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return x
    # An exclusive-or with an unknown value is the cheapest operation found that compilers cannot see through. On a CPU
    # (jax 0.10) these leave the contraction in place: `lax.optimization_barrier`, `lax.reduce_precision` to float32,
    # and a bitcast there and back without the zero.
    bits = jnp.dtype(f"uint{8 * x.dtype.itemsize}")
    return jax.lax.bitcast_convert_type(jax.lax.bitcast_convert_type(x, bits) ^ zero.astype(bits), x.dtype)
