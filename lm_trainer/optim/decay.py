"""Weight decay, and the choice of the parameters that decay."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from lm_trainer.core.errors import UserError
from lm_trainer.optim.module_names import module_spellings
from lm_trainer.optim.params import Param, Params

if TYPE_CHECKING:
    import jax
    import optax

ALIASES: Mapping[str, str] = {
    "attention": "attn",
    "embed.tokens": "token_embeddings",
    "embed.positions": "position_embeddings",
    "head": "lm_head",
}
"""Parts of parameter names -> their spelling in other frameworks' configurations; patterns may use either."""

_KINDS = ("weight", "bias", "scale")


def decays_by_default(param: Param) -> bool:
    """True for matrices and heads; False for biases, norms, embedding and position tables."""
    return param.role in ("matrix", "head")


def spellings(name: str) -> tuple[str, ...]:
    """Returns the names under which patterns find a parameter: its own, and the one with every part replaced by its
    alias, and with `.weight` at the end where it does not say its kind, as that of a table does not.
    """
    alias = name
    for ours, theirs in ALIASES.items():
        alias = re.sub(rf"(?<![^.]){re.escape(ours)}(?![^.])", theirs, alias)
    if alias.rsplit(".", 1)[-1] not in _KINDS:
        alias += ".weight"
    return (name,) if alias == name else (name, alias)


def matched_names(patterns: str | Iterable[str], params: Params) -> frozenset[str]:
    """Returns the parameters whose name matches a regular expression from its start, or contains a part of a list.

    A name is any of `spellings` and, for the modules that the pattern names, of `module_spellings`.

    Raises:
        UserError: when a pattern matches no parameter.
    """
    if isinstance(patterns, str):
        return _found(patterns, re.compile(patterns).match, params)
    return frozenset().union(*(_found(part, lambda name, part=part: part in name, params) for part in patterns))


def _found(pattern: str, matches: Callable[[str], object], params: Params) -> frozenset[str]:
    every = {name: (*spellings(name), *module_spellings(param, pattern)) for name, param in params.items()}
    names = [name for name, spelt in every.items() if any(map(matches, spelt))]
    if names:
        return frozenset(names)
    words = re.findall(r"\w{3,}", pattern)
    parts = {part: name for name in reversed(list(params)) for s in spellings(name) for part in (s, *s.split("."))}
    near = [parts[part] for word in words for part in difflib.get_close_matches(word, parts, n=1, cutoff=0.6)]
    named = "near it are" if near else "some are"
    raise UserError(
        f"optimizer.weight_decay_modules: {pattern!r} matches no parameter; {named} "
        f"{', '.join(list(dict.fromkeys(near or params))[:6])}"
    )


def decay_weights(
    strength: float, mask: Mapping[str, bool], *, peak: float | None = None
) -> optax.GradientTransformationExtraArgs:
    """Adds `strength` times the parameter to the updates of those that `mask` names, before the learning rate.

    With `peak`, the strength is multiplied by the argument `learning_rate` over it (Defazio 2025, arXiv 2506.02285,
    algorithm 1).
    """
    import jax.numpy as jnp
    import optax

    def update(
        updates: Any, state: Any, params: Any = None, /, *, learning_rate: jax.Array, **extra_args: Any
    ) -> tuple[Any, Any]:
        del extra_args
        factor = strength if peak is None else strength * (learning_rate / peak)

        def decayed(name: str, u: jax.Array) -> jax.Array:
            return u + params[name] * jnp.asarray(factor, u.dtype) if mask[name] else u

        return {name: decayed(name, u) for name, u in updates.items()}, state

    return optax.GradientTransformationExtraArgs(optax.init_empty_state, update)  # pyright: ignore[reportArgumentType]
