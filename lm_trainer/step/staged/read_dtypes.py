"""Finds which parameters a function reads, and the narrowest dtype in which each of them can be passed.

If a function only casts a parameter, casting before the gather sends fewer bytes, and the function computes the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Var
from jax.interpreters.partial_eval import dce_jaxpr

from lm_trainer.core.jax_types import PyTree

if TYPE_CHECKING:
    from jax.typing import DTypeLike

_CAST = "convert_element_type"
_MOVES = frozenset(
    ("broadcast_in_dim", "copy", "dynamic_slice", "gather", "reshape", "rev", "slice", "squeeze", "transpose")
)
"""Primitives that move elements of their first argument and change none, so that a cast may come first."""
_LOOP = "scan"
_CALLS = frozenset(("checkpoint", "closed_call", "custom_jvp_call", "custom_vjp_call", "jit", "pjit", _LOOP))
"""Primitives that call a function with their arguments; a loop, with slices of some of them."""


def find_read_dtypes(
    function: Callable[..., PyTree], params: Mapping[str, jax.ShapeDtypeStruct], *others: PyTree
) -> dict[str, DTypeLike]:
    """Returns the parameters that a function reads, each with the dtype of its gradient.

    That is the dtype of a cast if the function only casts the parameter: the gradient of the cast value is the same.

    Args:
        function: `function(params, *others)`.
        params: name -> shape of each parameter that the function may read.
        others: shapes of the other arguments.
    """
    uses = _find_uses(jax.make_jaxpr(function)(dict(params), *others).jaxpr, params)
    return {
        name: _narrowest(params[name].dtype, {_cast_dtype(equation) for equation in equations})
        for name, equations in uses.items()
    }


def find_value_dtypes(
    function: Callable[..., PyTree], params: Mapping[str, jax.ShapeDtypeStruct], *others: PyTree
) -> dict[str, DTypeLike]:
    """Returns the parameters whose values a function needs, each with the narrowest dtype that holds what it uses.

    That is the dtype of a cast if the function casts all that it takes of the parameter, such as the rows of a table.
    Arguments as for `find_read_dtypes`.
    """
    closed = jax.make_jaxpr(function)(dict(params), *others)
    # JAX also traces what nothing uses, such as the looked-up rows in the gradient of a look-up.
    jaxpr, used = dce_jaxpr(closed.jaxpr, [True] * len(closed.jaxpr.outvars))
    names = [name for name, is_used in zip(sorted(params), used, strict=False) if is_used]
    inputs = zip(names, jaxpr.invars, strict=False)
    return {name: _narrowest(params[name].dtype, {*_casts_of(var, _Scope(jaxpr))}) for name, var in inputs}


def _find_uses(jaxpr: Jaxpr, params: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, list[JaxprEqn]]:
    uses: dict[Var, list[JaxprEqn]] = {}
    for equation in jaxpr.eqns:
        for var in equation.invars:
            # The other variables are literals, such as the 1 of x + 1.
            if isinstance(var, Var):
                uses.setdefault(var, []).append(equation)
    # Dicts are flattened in the order of their keys.
    arguments = zip(sorted(params), jaxpr.invars, strict=False)
    return {name: uses[var] for name, var in arguments if var in uses}


def _cast_dtype(equation: JaxprEqn) -> np.dtype | None:
    return jnp.dtype(equation.params["new_dtype"]) if equation.primitive.name == _CAST else None


def _narrowest(dtype: np.dtype, casts: set[np.dtype | None]) -> DTypeLike:
    """Returns the dtype of the only cast, if it is narrower. In `casts`, None means a use other than a cast."""
    narrow = casts.pop() if len(casts) == 1 else None
    return narrow if narrow is not None and narrow.itemsize < dtype.itemsize else dtype


class _Scope(NamedTuple):
    """A traced function, and where it is called."""

    jaxpr: Jaxpr
    equation: JaxprEqn | None = None
    """The equation that calls it; None for the outermost function."""
    outer: _Scope | None = None
    """The function that this equation is a part of."""


def _casts_of(var: Var, scope: _Scope) -> Iterator[np.dtype | None]:
    """Yields the dtypes to which elements of a variable are cast, and None for any other use."""
    for index, result in enumerate(scope.jaxpr.outvars):
        if result is var:
            if scope.equation is None or scope.outer is None or scope.equation.primitive.name == _LOOP:
                yield None
            else:
                yield from _casts_of(scope.equation.outvars[index], scope.outer)
    for equation in scope.jaxpr.eqns:
        name, called = equation.primitive.name, _called(equation)
        for position, argument in enumerate(equation.invars):
            if argument is not var:
                continue
            if name in _MOVES and position == 0:
                yield from _casts_of(equation.outvars[0], scope)
            elif called is not None:
                yield from _casts_of(called.invars[position], _Scope(called, equation, scope))
            else:
                yield _cast_dtype(equation)


def _called(equation: JaxprEqn) -> Jaxpr | None:
    """Returns the function that an equation calls with its arguments, or with slices of them."""
    if equation.primitive.name not in _CALLS:
        return None
    function = next(equation.params[key] for key in ("jaxpr", "call_jaxpr") if key in equation.params)
    return function.jaxpr if isinstance(function, ClosedJaxpr) else function
