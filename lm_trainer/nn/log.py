"""`log`: reports a value from inside a model or a loss, wherever in it the value is computed.

While a step is traced, a call leaves an equation of the primitive `log_p` in the jaxpr, which
`lm_trainer.step.loss.logged` turns into a result of the loss. Otherwise a call does nothing, and leaves nothing in any
program.
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
"""Names that a step gives to scalars of its own."""

# A context that JAX counts into the keys of its caches of traced functions: a function that was traced while nobody
# listened is traced again. None: nobody listens; "": a step does; else the reason why a value cannot be taken here.
_listener = jax.make_user_context(None)


class Entry(NamedTuple):
    """A call of `log` in the source of a program."""

    name: str
    reduce: Literal["mean", "sum"]
    each: bool
    place: str
    """File and line."""


def log(name: str, value: jax.typing.ArrayLike, *, reduce: Literal["mean", "sum"] = "mean", each: bool = False) -> None:
    """Logs a scalar as `train/NAME` and, in evaluation, `eval/NAME`; see docs/how-to/track-a-run.md.

    May be called under `jit`, `scan`, `cond` (alike in all branches) and `jax.checkpoint`. No gradient flows through
    it. A call that runs more than once in a microbatch, as one in a layer does, gives the mean of its values. Outside
    of a training step or an evaluation it does nothing.

    Args:
        name: of one call in the source; may have a group, as `attention/entropy`.
        value: a scalar, which becomes float32.
        reduce: `mean`: a property of the microbatch, averaged over microbatches by the sums of their weights. `sum`: a
            sum over tokens, each times its weight, which is added over microbatches and divided by the sum of weights.
        each: also log the values of one call by themselves, as `NAME/0`, `NAME/1`, ... in the order of execution.

    Raises:
        UserError: for a value that is no scalar, a name that is reserved, or a place from which no value can be taken.
    """
    listener = _listener.value
    if listener is None:
        return
    frame = sys._getframe(1)
    entry = Entry(name, reduce, bool(each), f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}")
    if listener:
        raise UserError(f"log: {name!r} ({entry.place}) cannot be logged here: {listener}")
    _check(entry)
    x = jax.lax.stop_gradient(jnp.asarray(value, jnp.float32))
    if x.shape:
        raise UserError(
            f"log: {name!r} ({entry.place}) has the shape {x.shape}; log scalars, such as its mean, under names of "
            f"their own"
        )
    log_p.bind(x, entry=entry)


def listening() -> AbstractContextManager[Any]:
    """Lets calls of `log` leave their equations in what is traced meanwhile."""
    return _listener("")


def refusing(reason: str) -> AbstractContextManager[Any]:
    """Refuses calls of `log` with this reason in what is traced meanwhile, where a step would lose their values."""
    return _listener(reason)


def _check(entry: Entry) -> None:
    if not isinstance(entry.name, str) or not entry.name:
        raise UserError(f"log ({entry.place}): the first argument is a name, not {entry.name!r}")
    if entry.name in RESERVED:
        raise UserError(f"log: {entry.name!r} ({entry.place}) is a name of the step's own; choose another")
    if entry.reduce not in ("mean", "sum"):
        raise UserError(f"log: {entry.name!r} ({entry.place}): reduce is 'mean' or 'sum', not {entry.reduce!r}")


def _batched(values: Any, dims: Any, *, entry: Entry) -> Any:
    del values, dims
    raise UserError(
        f"log: {entry.name!r} ({entry.place}) is called under jax.vmap, where each row has its own value; log "
        f"their mean outside of it"
    )


def _differentiated(primals: Any, tangents: Any, *, entry: Entry) -> Any:
    del tangents  # of a value through which no gradient flows
    return log_p.bind(*primals, entry=entry), []


log_p = Primitive("log")
"""Takes a float32 scalar and its `Entry`, and has no result."""
log_p.multiple_results = True
log_p.def_abstract_eval(lambda _, **__: [])
batching.primitive_batchers[log_p] = _batched
ad.primitive_jvps[log_p] = _differentiated
