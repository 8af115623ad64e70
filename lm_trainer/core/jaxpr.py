"""An interpreter of jaxprs, for transformations that treat some operations differently."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack

import jax
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

from lm_trainer.core.jax_types import PyTree

Rule = Callable[[JaxprEqn, list[jax.Array]], Sequence[jax.Array] | None]
"""`rule(equation, inputs)` returns the results of an equation, or None to apply the primitive as it is."""


def evaluate_jaxpr(jaxpr: Jaxpr, consts: Sequence[PyTree], args: Sequence[jax.Array], rule: Rule) -> list[jax.Array]:
    """Evaluates a jaxpr equation by equation, like `jax.core.eval_jaxpr`, with a rule for some equations.

    The rule is not applied inside the jaxprs that an equation calls; a rule may evaluate them by this function.

    Args:
        jaxpr: the jaxpr to evaluate.
        consts: values of its constants.
        args: values of its arguments.
        rule: computes the results of some equations.
    """
    values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))

    def read(variable: Var | Literal) -> jax.Array:
        return variable.val if isinstance(variable, Literal) else values[variable]

    for equation in jaxpr.eqns:
        inputs = [read(variable) for variable in equation.invars]
        with ExitStack() as stack:
            stack.enter_context(equation.ctx.manager)
            if scope := str(equation.source_info.name_stack):
                stack.enter_context(jax.named_scope(scope))
            results = rule(equation, inputs)
            if results is None:
                results = apply_primitive(equation, inputs)
        values.update(zip(equation.outvars, results, strict=True))
    return [read(variable) for variable in jaxpr.outvars]


def apply_primitive(equation: JaxprEqn, inputs: Sequence[jax.Array]) -> list[jax.Array]:
    """Applies the primitive of an equation, and returns its results."""
    results = equation.primitive.bind(*inputs, **equation.primitive.get_bind_params(equation.params))
    return list(results) if equation.primitive.multiple_results else [results]
