"""`log`: reports a value computed anywhere inside a model or a loss.

While a step is traced, each call adds an equation with the primitive `log_p` to the jaxpr, which
`lm_trainer.step.loss.logged` turns into a result of the loss. Otherwise a call has no effect on the program.
"""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching

from lm_trainer.core.errors import UserError

RESERVED = frozenset({"loss", "weight", "grad_norm", "tokens", "squares", "learning_rate"})
"""Names that steps use for their own scalars; calls of `log` may not use them."""

# JAX includes this context in the cache keys of traced functions: a function traced without a listener is traced a
# second time with one. None: there is no listener; "": a step listens; otherwise the reason why values cannot be logged
# here.
_listener = jax.make_user_context(None)


class Entry(NamedTuple):
    """A call of `log` in the source code of a program."""

    name: str
    reduce: Literal["mean", "sum"]
    each: bool
    place: str
    """File name and line of the call."""


def log(name: str, value: jax.typing.ArrayLike, *, reduce: Literal["mean", "sum"] = "mean", each: bool = False) -> None:
    """Logs a scalar as `train/NAME` and, in evaluation, `eval/NAME`; see docs/how-to/track-a-run.md.

    May be called under `jit`, `scan`, `cond` (identically in all branches) and `jax.checkpoint`. No gradient flows
    through the value. A call that runs several times in a microbatch, for example in a layer, reports the mean of its
    values. Outside of a training step or an evaluation a call has no effect.

    Args:
        name: name of the scalar, used by only one call in the source; may have a group, as in `attention/entropy`.
        value: a scalar, which is converted to float32.
        reduce: `mean` for a property of the microbatch, which is averaged over microbatches, weighted by their sums of
            weights; `sum` for a weighted sum over tokens, which is added over microbatches and divided by the sum of
            weights.
        each: also log each execution of the call separately, as `NAME/0`, `NAME/1`, ... in the order of execution.

    Raises:
        UserError: if the value is not a scalar, the name is reserved, or the code around the call cannot return values.
    """
    listener = _listener.value
    if listener is None:
        return
    frame = sys._getframe(1)
    entry = Entry(name, reduce, bool(each), f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}")
    if listener:
        raise UserError(f"log: {name!r} ({entry.place}) cannot be logged here: {listener}")
    _check_entry(entry)
    x = jax.lax.stop_gradient(jnp.asarray(value, jnp.float32))
    if x.shape:
        raise UserError(
            f"log: {name!r} ({entry.place}) has the shape {x.shape}; log scalars, such as its mean, under names of "
            f"their own"
        )
    log_p.bind(x, entry=entry)


def collecting_logs() -> AbstractContextManager[None]:
    """Makes `log` add an equation for each call to programs that are traced in this context."""
    return _listener("")


def refusing_logs(reason: str) -> AbstractContextManager[None]:
    """Rejects calls of `log`, with this reason, in programs traced in this context, which would lose the values."""
    return _listener(reason)


def _check_entry(entry: Entry) -> None:
    if not isinstance(entry.name, str) or not entry.name:
        raise UserError(f"log ({entry.place}): the first argument is a name, not {entry.name!r}")
    if entry.name in RESERVED:
        raise UserError(f"log: {entry.name!r} ({entry.place}) is a name of the step's own; choose another")
    if entry.reduce not in ("mean", "sum"):
        raise UserError(f"log: {entry.name!r} ({entry.place}): reduce is 'mean' or 'sum', not {entry.reduce!r}")


def _refuse_batching(values: Any, dims: Any, *, entry: Entry) -> Any:
    del values, dims
    raise UserError(
        f"log: {entry.name!r} ({entry.place}) is called under jax.vmap, where each row has its own value; log "
        f"their mean outside of it"
    )


def _jvp_rule(primals: Any, tangents: Any, *, entry: Entry) -> Any:
    del tangents  # a value without a gradient
    return log_p.bind(*primals, entry=entry), []


log_p = Primitive("log")
"""Takes a float32 scalar and its `Entry`, and returns no result."""
log_p.multiple_results = True
log_p.def_abstract_eval(lambda _, **__: [])
batching.primitive_batchers[log_p] = _refuse_batching
ad.primitive_jvps[log_p] = _jvp_rule
