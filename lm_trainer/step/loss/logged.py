"""Values that are logged inside a loss, brought out of it as metrics.

The loss is traced, and its jaxpr evaluated again with the logged values as additional results of every loop and every
rematerialised part on their way out. That happens before the loss is differentiated, so that each value is there once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Literal, jaxprs_in_params

from lm_trainer.core.errors import UserError
from lm_trainer.nn.log import Entry, listening, log_p

Losses = tuple[jax.Array, jax.Array, dict[str, jax.Array]]
"""As a `LossFn` returns them."""

Found = dict[Entry, jax.Array]
"""The values of each call of `log`, float32 [times that it ran], in the order of execution."""

_WORDS = {
    "while": "jax.lax.while_loop (or a fori_loop whose length is computed)",
    "custom_vjp_call": "a function with jax.custom_vjp",
    "custom_jvp_call": "a function with jax.custom_jvp",
    "shard_map": "jax.shard_map",
}
"""Primitives out of which no value is brought, as a user knows them."""


def with_logged(losses: Callable[..., Losses]) -> Callable[..., Losses]:
    """Returns `losses`, a function of arrays, with what is logged inside it among its metrics.

    Where nothing is logged, exactly `losses` is called. The returned function raises UserError where a value cannot be
    brought out, and for names that are not unique.
    """
    # Traced twice only once: each group of devices asks for a program of its own.
    without: set[Any] = set()

    def joined(*args: Any) -> Losses:
        leaves, structure = jax.tree.flatten(args)
        shape = structure, tuple((x.shape, x.dtype) for x in leaves)
        with listening():
            if shape in without:
                return losses(*args)
            # A function of its own each time, since JAX would take the trace of one that it knows.
            closed, shapes = jax.make_jaxpr(lambda *given: losses(*given), return_shape=True)(*args)
            if not _logs(closed.jaxpr):
                without.add(shape)
                # Here, where JAX remembers the traces of inner functions from just before.
                return losses(*args)
        results, found = _evaluate(closed.jaxpr, closed.consts, leaves)
        total, weight, metrics = jax.tree.unflatten(jax.tree.structure(shapes), results)
        check_logged_names(found, metrics)
        return total, weight, {**metrics, **logged_metrics(found, weight)}

    return joined


def logged_shapes(function: Callable[..., Any], *shapes: Any) -> Mapping[Entry, jax.ShapeDtypeStruct]:
    """The shapes of what is logged inside `function` for arguments of these shapes."""
    with listening():
        if not _logs(jax.make_jaxpr(lambda *given: function(*given))(*shapes).jaxpr):
            return {}
    return jax.eval_shape(lambda *given: with_found(function)(*given)[1], *shapes)


def with_found(function: Callable[..., Any]) -> Callable[..., tuple[Any, Found]]:
    """Returns `function`, of arrays, with what is logged inside it beside its results; raises as that of `with_logged`.

    Where nothing is logged, exactly `function` is called.
    """

    def joined(*args: Any) -> tuple[Any, Found]:
        with listening():
            closed, shapes = jax.make_jaxpr(lambda *given: function(*given), return_shape=True)(*args)
            if not _logs(closed.jaxpr):
                return function(*args), {}
        results, found = _evaluate(closed.jaxpr, closed.consts, jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(shapes), results), found

    return joined


def logged_metrics(found: Found, weight: jax.Array) -> dict[str, jax.Array]:
    """Sums that give what is to be reported when they are added over microbatches and divided by the sum of weights."""
    metrics = {}
    for entry, values in found.items():
        if entry.reduce == "mean":
            # A microbatch of padding alone has no say, whatever a mean over nothing came to.
            values = jnp.where(weight == 0, 0.0, values * weight)
        metrics[entry.name] = jnp.mean(values) if values.size > 1 else values[0]
        if entry.each:
            metrics |= {f"{entry.name}/{index}": value for index, value in enumerate(values)}
    return metrics


def check_logged_names(found: Found, metrics: Mapping[str, Any]) -> None:
    places: dict[str, str] = dict.fromkeys(metrics, "the metrics that the loss returns")
    for entry in found:
        if entry.name in places:
            raise UserError(
                f"log: {entry.name!r} is the name of two values, at {entry.place} and "
                f"{'in ' if entry.name in metrics else 'at '}{places[entry.name]}; give each a name of its own"
            )
        places[entry.name] = entry.place


def _logs(jaxpr: Any) -> bool:
    return any(equation.primitive is log_p or _has_logs(equation) for equation in jaxpr.eqns)


def _has_logs(equation: Any) -> bool:
    return any(map(_logs, jaxprs_in_params(equation.params)))


def _entries(jaxpr: Any) -> Iterator[Entry]:
    for equation in jaxpr.eqns:
        if equation.primitive is log_p:
            yield equation.params["entry"]
        for inner in jaxprs_in_params(equation.params):
            yield from _entries(inner)


def _evaluate(jaxpr: Any, consts: Sequence[Any], args: Sequence[Any]) -> tuple[list[Any], Found]:
    """Evaluates a jaxpr as `jax.core.eval_jaxpr` does, and returns what it logs beside its results."""
    values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))
    found: dict[Entry, list[jax.Array]] = {}

    def read(variable: Any) -> Any:
        return variable.val if isinstance(variable, Literal) else values[variable]

    for equation in jaxpr.eqns:
        given = [read(variable) for variable in equation.invars]
        if equation.primitive is log_p:
            found.setdefault(equation.params["entry"], []).append(given[0][None])
            continue
        with ExitStack() as stack:
            stack.enter_context(equation.ctx.manager)
            if scope := str(equation.source_info.name_stack):
                stack.enter_context(jax.named_scope(scope))
            if _has_logs(equation):
                results, inner = _handler(equation)(equation, given)
                for entry, more in inner.items():
                    found.setdefault(entry, []).append(more)
            else:
                results = equation.primitive.bind(*given, **equation.primitive.get_bind_params(equation.params))
                results = results if equation.primitive.multiple_results else [results]
        values.update(zip(equation.outvars, results, strict=True))
    return [read(variable) for variable in jaxpr.outvars], {
        entry: jnp.concatenate(parts) if len(parts) > 1 else parts[0] for entry, parts in found.items()
    }


def _handler(equation: Any) -> Callable[[Any, list[Any]], tuple[list[Any], Found]]:
    name = equation.primitive.name
    if name not in _HANDLERS:
        entries = {f"{e.name!r} ({e.place})" for inner in jaxprs_in_params(equation.params) for e in _entries(inner)}
        raise UserError(
            f"log: {', '.join(sorted(entries))} cannot be brought out of {_WORDS.get(name, name)}; return the value "
            f"from there and log it outside"
        )
    return _HANDLERS[name]


def _call(equation: Any, given: list[Any]) -> tuple[list[Any], Found]:
    params = equation.params
    inner = params["jaxpr"] if "jaxpr" in params else params["call_jaxpr"]
    return _evaluate(inner.jaxpr, inner.consts, given)


def _checkpoint(equation: Any, given: list[Any]) -> tuple[list[Any], Found]:
    params = equation.params
    run = jax.checkpoint(
        lambda *args: _evaluate(params["jaxpr"], (), args),
        policy=params["policy"],
        prevent_cse=params["prevent_cse"],
    )
    return run(*given)


def _scan(equation: Any, given: list[Any]) -> tuple[list[Any], Found]:
    params, inner = equation.params, equation.params["jaxpr"]
    # Versions of JAX write the numbers of operands differently: those of the loop have one axis more outside of it.
    num_carry = _same_rank(equation.outvars, inner.jaxpr.outvars)
    last = _same_rank(equation.invars, inner.jaxpr.invars)
    first = last - num_carry
    consts, start, items = given[:first], given[first:last], given[last:]

    def body(carry: list[Any], item: list[Any]) -> tuple[list[Any], Any]:
        results, found = _evaluate(inner.jaxpr, inner.consts, [*consts, *carry, *item])
        return results[:num_carry], (results[num_carry:], found)

    options = {name: params[name] for name in ("length", "reverse", "unroll")}
    carry, (stacked, found) = jax.lax.scan(body, start, items, **options)
    in_order = slice(None, None, -1 if params["reverse"] else 1)
    return [*carry, *stacked], {entry: values[in_order].reshape(-1) for entry, values in found.items()}


def _same_rank(outside: Sequence[Any], inside: Sequence[Any]) -> int:
    return sum(len(a.aval.shape) == len(b.aval.shape) for a, b in zip(outside, inside, strict=True))


def _cond(equation: Any, given: list[Any]) -> tuple[list[Any], Found]:
    index, *operands = given
    entries: dict[Any, Entry] = {}

    def run(branch: Any) -> Callable[..., Any]:
        def evaluated(*args: Any) -> tuple[list[Any], dict[Any, jax.Array]]:
            results, found = _evaluate(branch.jaxpr, branch.consts, args)
            check_logged_names(found, {})
            # Branches differ in the lines of their calls; the values of a name are one whichever runs.
            for entry in found:
                entries.setdefault(_alike(entry), entry)
            return results, {_alike(entry): values for entry, values in found.items()}

        return evaluated

    branches = [run(branch) for branch in equation.params["branches"]]
    logged = [jax.eval_shape(branch, *operands)[1] for branch in branches]
    if any(each != logged[0] for each in logged):
        places = ", ".join(sorted(f"{entry.name!r} ({entry.place})" for entry in entries.values()))
        raise UserError(f"log: {places} must be logged alike in all branches of jax.lax.cond; log it outside of it")
    results, found = jax.lax.switch(index, branches, *operands)
    return results, {entries[key]: values for key, values in found.items()}


def _alike(entry: Entry) -> tuple[str, str, bool]:
    return entry.name, entry.reduce, entry.each


_HANDLERS = {
    "jit": _call,
    "pjit": _call,
    "closed_call": _call,
    "checkpoint": _checkpoint,
    "remat2": _checkpoint,
    "scan": _scan,
    "cond": _cond,
}
"""By the name of a primitive: its evaluation with what is logged inside."""
