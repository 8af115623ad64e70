"""Function transformation that keeps compilers from fusing a product and a sum into one operation (FMA).

If a product is an operand of an addition, a compiler may contract both to a fused multiply-add (FMA), which rounds once
instead of twice. Its choice depends on the surrounding fusion, hence on the shapes on a device, and hence on the mesh:
the same element-wise formula then gives different bits on different meshes. No option of XLA prevents this on a CPU
(`--xla_cpu_enable_fast_math=false` does not, jax 0.10), so the jaxpr is rewritten.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr, JaxprEqn

from lm_trainer.core.jax_types import PyTree
from lm_trainer.core.jaxpr import apply_primitive, evaluate_jaxpr

_PRODUCTS = frozenset({"mul", "square", "integer_pow"})
"""Primitives whose last operation is a multiplication."""
_CALLS = frozenset({"pjit", "jit", "closed_call", "custom_jvp_call", "custom_vjp_call"})
"""Primitives that only call another jaxpr; newer versions of JAX call `pjit` `jit`."""


def without_fma(function: Callable[..., PyTree]) -> Callable[..., PyTree]:
    """Returns a version of `function` in which every product is rounded before it is added.

    The returned function has an additional first argument: a uint32 scalar whose value is 0. It must be an argument of
    the compiled program, so that the compiler does not know its value. Each product is XORed with that zero, which
    changes no bit but separates the product from the addition. Products inside loops and branches are not changed.
    """

    def rounded(zero: jax.Array, *args: PyTree) -> PyTree:
        closed, shapes = jax.make_jaxpr(function, return_shape=True)(*args)
        results = _evaluate_rounded(closed.jaxpr, closed.consts, jax.tree.leaves(args), zero)
        return jax.tree.unflatten(jax.tree.structure(shapes), results)

    return rounded


def _evaluate_rounded(
    jaxpr: Jaxpr, consts: Sequence[PyTree], args: Sequence[jax.Array], zero: jax.Array
) -> list[jax.Array]:
    """Evaluates a jaxpr, and rounds products."""

    def round_products(equation: JaxprEqn, inputs: list[jax.Array]) -> list[jax.Array] | None:
        name, inner = equation.primitive.name, equation.params.get("jaxpr", equation.params.get("call_jaxpr"))
        if name in _CALLS and inner is not None:
            # Calls are inlined, because a product inside a call may be added outside of it. Inlining drops custom
            # gradients, which is harmless: updates are not differentiated.
            return _evaluate_rounded(inner.jaxpr, inner.consts, inputs, zero)
        if name in _PRODUCTS:
            return [_make_opaque(x, zero) for x in apply_primitive(equation, inputs)]
        return None

    return evaluate_jaxpr(jaxpr, consts, args, round_products)


def _make_opaque(x: jax.Array, zero: jax.Array) -> jax.Array:
    """Returns the same bits in a form that no compiler contracts with another operation."""
    # Integer products are exact, whether or not they are contracted.
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return x
    # XOR with an unknown value is the cheapest operation found that compilers cannot see through. On a CPU (jax 0.10)
    # the following do not prevent the contraction: `lax.optimization_barrier`, `lax.reduce_precision` to float32, and a
    # bitcast and its inverse without the zero.
    bits = jnp.dtype(f"uint{8 * x.dtype.itemsize}")
    return jax.lax.bitcast_convert_type(jax.lax.bitcast_convert_type(x, bits) ^ zero.astype(bits), x.dtype)
