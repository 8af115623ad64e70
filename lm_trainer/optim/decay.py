"""Weight decay, and the selection of the parameters that decay."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

from lm_trainer.core.errors import UserError
from lm_trainer.core.jax_types import PyTree
from lm_trainer.optim.module_names import levanter_names
from lm_trainer.optim.params import Arrays, Param, Params

if TYPE_CHECKING:
    import jax
    import optax

ALIASES: Mapping[str, str] = {
    "attention": "attn",
    "embed.tokens": "token_embeddings",
    "embed.positions": "position_embeddings",
    "head": "lm_head",
}
"""Maps parts of parameter names to their names in configurations of other frameworks; patterns may use either."""

_KINDS = ("weight", "bias", "scale")


def decays_by_default(param: Param) -> bool:
    """Returns true for matrices and heads; false for biases, norms, and embedding and position tables."""
    return param.role in ("matrix", "head")


def matchable_names(name: str) -> tuple[str, ...]:
    """Returns the names by which patterns can match a parameter.

    They are its own name, and the name with every part replaced by its alias and with `.weight` appended if the name
    does not end in a kind of parameter (as the name of a table does not).
    """
    alias = name
    for part, alias_part in ALIASES.items():
        alias = re.sub(rf"(?<![^.]){re.escape(part)}(?![^.])", alias_part, alias)
    if alias.rsplit(".", 1)[-1] not in _KINDS:
        alias += ".weight"
    return (name,) if alias == name else (name, alias)


def match_names(patterns: str | Iterable[str], params: Params) -> frozenset[str]:
    """Returns the parameters whose name matches a regular expression from its start, or contains one of several parts.

    Names are the `matchable_names` and, for modules named in the pattern, the `levanter_names`.

    Raises:
        UserError: if a pattern matches no parameter.
    """
    if isinstance(patterns, str):
        return _match_pattern(patterns, re.compile(patterns).match, params)
    return frozenset().union(*(_match_pattern(part, lambda name, part=part: part in name, params) for part in patterns))


def _match_pattern(pattern: str, matches: Callable[[str], object], params: Params) -> frozenset[str]:
    every = {name: (*matchable_names(name), *levanter_names(param, pattern)) for name, param in params.items()}
    names = [name for name, spelt in every.items() if any(map(matches, spelt))]
    if names:
        return frozenset(names)
    words = re.findall(r"\w{3,}", pattern)
    parts = {
        part: name for name in reversed(list(params)) for s in matchable_names(name) for part in (s, *s.split("."))
    }
    near = [parts[part] for word in words for part in difflib.get_close_matches(word, parts, n=1, cutoff=0.6)]
    named = "near it are" if near else "some are"
    raise UserError(
        f"optimizer.weight_decay_modules: {pattern!r} matches no parameter; {named} "
        f"{', '.join(list(dict.fromkeys(near or params))[:6])}"
    )


def decay_weights(
    strength: float, mask: Mapping[str, bool], *, peak: float | None = None
) -> optax.GradientTransformationExtraArgs:
    """Adds `strength` times the parameter to the updates of parameters whose `mask` is true, before the learning rate.

    With `peak`, the strength is multiplied by the argument `learning_rate` over `peak` (Defazio 2025, arXiv 2506.02285,
    algorithm 1).
    """
    import jax.numpy as jnp
    import optax

    def update(
        updates: Arrays,
        state: optax.OptState,
        params: PyTree = None,
        /,
        *,
        learning_rate: jax.Array,
        **extra_args: PyTree,
    ) -> tuple[Arrays, optax.OptState]:
        del extra_args
        factor = strength if peak is None else strength * (learning_rate / peak)

        def decay_update(name: str, u: jax.Array) -> jax.Array:
            return u + params[name] * jnp.asarray(factor, u.dtype) if mask[name] else u

        return {name: decay_update(name, u) for name, u in updates.items()}, state

    return optax.GradientTransformationExtraArgs(optax.init_empty_state, update)  # pyright: ignore[reportArgumentType]
