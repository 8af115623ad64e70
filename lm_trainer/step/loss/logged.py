"""Turns values that are logged inside a loss into metrics that it returns.

The loss is traced, and its jaxpr is evaluated in such a way that logged values become additional results of all
enclosing loops and rematerialised parts. This happens before differentiation, so each value is logged once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr, JaxprEqn, jaxprs_in_params

from lm_trainer.core.errors import UserError
from lm_trainer.core.jax_types import PyTree
from lm_trainer.core.jaxpr import evaluate_jaxpr
from lm_trainer.nn.log import Entry, collecting_logs, log_p

if TYPE_CHECKING:
    from jax.extend.core import ClosedJaxpr

Losses = tuple[jax.Array, jax.Array, dict[str, jax.Array]]
"""Results of a `LossFn`."""


LoggedValues = dict[Entry, jax.Array]
"""Values of each call of `log`, float32 [number of executions], in order of execution."""

_WORDS = {
    "while": "jax.lax.while_loop (or a fori_loop whose length is computed)",
    "custom_vjp_call": "a function with jax.custom_vjp",
    "custom_jvp_call": "a function with jax.custom_jvp",
    "shard_map": "jax.shard_map",
}
"""Maps primitives inside which logging is not supported to their names for users."""


def with_logged(losses: Callable[..., Losses]) -> Callable[..., Losses]:
    """Returns a version of `losses`, a function of arrays, whose metrics include the logged values.

    If nothing is logged, `losses` itself is called. The returned function raises UserError if a value cannot be
    returned from a primitive, or if names are not unique.
    """
    # Remembers shapes, so that the loss is traced twice only once, although each group of devices compiles its own
    # program.
    without_logs: set[PyTree] = set()

    def losses_with_logs(*args: PyTree) -> Losses:
        leaves, structure = jax.tree.flatten(args)
        shape = structure, tuple((x.shape, x.dtype) for x in leaves)
        with collecting_logs():
            if shape in without_logs:
                return losses(*args)
            # A new function each time, because JAX would reuse the trace of a known function.
            closed, shapes = jax.make_jaxpr(lambda *xs: losses(*xs), return_shape=True)(*args)
            if not _calls_log(closed.jaxpr):
                without_logs.add(shape)
                # Called inside the context, where JAX reuses the traces of inner functions from the line above.
                return losses(*args)
        results, values = _evaluate_jaxpr(closed.jaxpr, closed.consts, leaves)
        total, weight, metrics = jax.tree.unflatten(jax.tree.structure(shapes), results)
        check_logged_names(values, metrics)
        return total, weight, {**metrics, **logged_metrics(values, weight)}

    return losses_with_logs


def logged_shapes(function: Callable[..., PyTree], *shapes: PyTree) -> Mapping[Entry, jax.ShapeDtypeStruct]:
    """Returns the shapes of the values logged inside `function` when its arguments have these shapes."""
    with collecting_logs():
        if not _calls_log(jax.make_jaxpr(lambda *xs: function(*xs))(*shapes).jaxpr):
            return {}
    return jax.eval_shape(lambda *xs: with_logged_values(function)(*xs)[1], *shapes)


def with_logged_values(function: Callable[..., PyTree]) -> Callable[..., tuple[PyTree, LoggedValues]]:
    """Returns a version of `function`, a function of arrays, that also returns its logged values; raises as
    `with_logged`.

    If nothing is logged, `function` itself is called.
    """

    def call_with_logs(*args: PyTree) -> tuple[PyTree, LoggedValues]:
        with collecting_logs():
            closed, shapes = jax.make_jaxpr(lambda *xs: function(*xs), return_shape=True)(*args)
            if not _calls_log(closed.jaxpr):
                return function(*args), {}
        results, values = _evaluate_jaxpr(closed.jaxpr, closed.consts, jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(shapes), results), values

    return call_with_logs


def logged_metrics(logged: LoggedValues, weight: jax.Array) -> dict[str, jax.Array]:
    """Returns metrics as sums: added over microbatches and divided by the sum of weights, they give the values."""
    metrics = {}
    for entry, values in logged.items():
        if entry.reduce == "mean":
            # A microbatch that is only padding does not count, even if its mean is NaN.
            values = jnp.where(weight == 0, 0.0, values * weight)
        metrics[entry.name] = jnp.mean(values) if values.size > 1 else values[0]
        if entry.each:
            metrics |= {f"{entry.name}/{index}": value for index, value in enumerate(values)}
    return metrics


def check_logged_names(logged: LoggedValues, metrics: Mapping[str, jax.Array]) -> None:
    places: dict[str, str] = dict.fromkeys(metrics, "the metrics that the loss returns")
    for entry in logged:
        if entry.name in places:
            raise UserError(
                f"log: {entry.name!r} is the name of two values, at {entry.place} and "
                f"{'in ' if entry.name in metrics else 'at '}{places[entry.name]}; give each a name of its own"
            )
        places[entry.name] = entry.place


def _calls_log(jaxpr: Jaxpr) -> bool:
    return any(equation.primitive is log_p or _contains_log(equation) for equation in jaxpr.eqns)


def _contains_log(equation: JaxprEqn) -> bool:
    return any(map(_calls_log, jaxprs_in_params(equation.params)))


def _find_entries(jaxpr: Jaxpr) -> Iterator[Entry]:
    for equation in jaxpr.eqns:
        if equation.primitive is log_p:
            yield equation.params["entry"]
        for inner in jaxprs_in_params(equation.params):
            yield from _find_entries(inner)


def _evaluate_jaxpr(
    jaxpr: Jaxpr, consts: Sequence[PyTree], args: Sequence[jax.Array]
) -> tuple[list[jax.Array], LoggedValues]:
    """Evaluates a jaxpr. Returns its results and its logged values."""
    logged: dict[Entry, list[jax.Array]] = {}

    def collect(equation: JaxprEqn, inputs: list[jax.Array]) -> list[jax.Array] | None:
        if equation.primitive is log_p:
            logged.setdefault(equation.params["entry"], []).append(inputs[0][None])
            return []
        if not _contains_log(equation):
            return None
        results, inner = _find_handler(equation)(equation, inputs)
        for entry, values in inner.items():
            logged.setdefault(entry, []).append(values)
        return results

    results = evaluate_jaxpr(jaxpr, consts, args, collect)
    return results, {entry: jnp.concatenate(parts) if len(parts) > 1 else parts[0] for entry, parts in logged.items()}


def _find_handler(equation: JaxprEqn) -> Handler:
    name = equation.primitive.name
    if name not in _HANDLERS:
        entries = {
            f"{e.name!r} ({e.place})" for inner in jaxprs_in_params(equation.params) for e in _find_entries(inner)
        }
        raise UserError(
            f"log: {', '.join(sorted(entries))} cannot be brought out of {_WORDS.get(name, name)}; return the value "
            f"from there and log it outside"
        )
    return _HANDLERS[name]


def _evaluate_call(equation: JaxprEqn, inputs: list[jax.Array]) -> tuple[list[jax.Array], LoggedValues]:
    params = equation.params
    inner = params["jaxpr"] if "jaxpr" in params else params["call_jaxpr"]
    return _evaluate_jaxpr(inner.jaxpr, inner.consts, inputs)


def _evaluate_checkpoint(equation: JaxprEqn, inputs: list[jax.Array]) -> tuple[list[jax.Array], LoggedValues]:
    params = equation.params
    run = jax.checkpoint(
        lambda *args: _evaluate_jaxpr(params["jaxpr"], (), args),
        policy=params["policy"],
        prevent_cse=params["prevent_cse"],
    )
    return run(*inputs)


def _evaluate_scan(equation: JaxprEqn, inputs: list[jax.Array]) -> tuple[list[jax.Array], LoggedValues]:
    params, inner = equation.params, equation.params["jaxpr"]
    # The params that count operands differ between versions of JAX. Scanned operands have one more axis outside the
    # loop.
    num_carry = _count_equal_ranks(equation.outvars, inner.jaxpr.outvars)
    last = _count_equal_ranks(equation.invars, inner.jaxpr.invars)
    first = last - num_carry
    consts, start, items = inputs[:first], inputs[first:last], inputs[last:]

    def body(carry: list[jax.Array], item: list[jax.Array]) -> tuple[list[jax.Array], PyTree]:
        results, logged = _evaluate_jaxpr(inner.jaxpr, inner.consts, [*consts, *carry, *item])
        return results[:num_carry], (results[num_carry:], logged)

    options = {name: params[name] for name in ("length", "reverse", "unroll")}
    carry, (stacked, logged) = jax.lax.scan(body, start, items, **options)
    in_order = slice(None, None, -1 if params["reverse"] else 1)
    return [*carry, *stacked], {entry: values[in_order].reshape(-1) for entry, values in logged.items()}


def _count_equal_ranks(outside: Sequence[PyTree], inside: Sequence[PyTree]) -> int:
    return sum(len(a.aval.shape) == len(b.aval.shape) for a, b in zip(outside, inside, strict=True))


def _evaluate_cond(equation: JaxprEqn, inputs: list[jax.Array]) -> tuple[list[jax.Array], LoggedValues]:
    index, *operands = inputs
    entries: dict[tuple[str, str, bool], Entry] = {}

    def make_branch(
        branch: ClosedJaxpr,
    ) -> Callable[..., tuple[list[jax.Array], dict[tuple[str, str, bool], jax.Array]]]:
        def evaluated(*args: jax.Array) -> tuple[list[jax.Array], dict[tuple[str, str, bool], jax.Array]]:
            results, logged = _evaluate_jaxpr(branch.jaxpr, branch.consts, args)
            check_logged_names(logged, {})
            # Branches call `log` at different lines; values with the same name are joined over all branches.
            for entry in logged:
                entries.setdefault(_branch_key(entry), entry)
            return results, {_branch_key(entry): values for entry, values in logged.items()}

        return evaluated

    branches = [make_branch(branch) for branch in equation.params["branches"]]
    shapes = [jax.eval_shape(branch, *operands)[1] for branch in branches]
    if any(branch_shapes != shapes[0] for branch_shapes in shapes):
        places = ", ".join(sorted(f"{entry.name!r} ({entry.place})" for entry in entries.values()))
        raise UserError(f"log: {places} must be logged alike in all branches of jax.lax.cond; log it outside of it")
    results, logged = jax.lax.switch(index, branches, *operands)
    return results, {entries[key]: values for key, values in logged.items()}


def _branch_key(entry: Entry) -> tuple[str, str, bool]:
    return entry.name, entry.reduce, entry.each


Handler = Callable[[JaxprEqn, list[jax.Array]], tuple[list[jax.Array], LoggedValues]]
"""Evaluates an equation. Returns its results and its logged values."""

_HANDLERS: dict[str, Handler] = {
    "jit": _evaluate_call,
    "pjit": _evaluate_call,
    "closed_call": _evaluate_call,
    "checkpoint": _evaluate_checkpoint,
    "remat2": _evaluate_checkpoint,
    "scan": _evaluate_scan,
    "cond": _evaluate_cond,
}
"""Maps the name of a primitive to the function that evaluates it with logged values."""
