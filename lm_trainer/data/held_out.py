"""Opening of held-out sets alone, for a model that is there already and decides the tokenizer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from lm_trainer.core.errors import UserError
from lm_trainer.data.config import DataConfig
from lm_trainer.data.provenance import Passage, passages
from lm_trainer.data.rows.eval_set import EvalSet
from lm_trainer.data.rows.row_builder import RowBuilder
from lm_trainer.data.sources.prebuilt import PrebuiltCache
from lm_trainer.data.tokenize.cache_spec import find_caches
from lm_trainer.data.tokenize.open_cache import OpenCache, excluded_of, open_cache
from lm_trainer.data.tokenize.plan import plan_builds
from lm_trainer.data.tokenize.progress import BuildCallbacks, OnProgress
from lm_trainer.data.tokenize.tokenizer_setup import find_tokenizer
from lm_trainer.data.tokenizer import BytesTokenizer, HfTokenizer, Pretrained
from lm_trainer.data.tokenizer.bytes import ByteTokenizer


@dataclass(frozen=True)
class HeldOut:
    """A held-out set with its documents."""

    name: str
    """As in the configuration; `validation` where there is one set alone."""
    rows: EvalSet
    cache: OpenCache
    ends_D: np.ndarray
    """int64 [D]: the token of the stream after each document of the set."""

    def passage(self, document: int, tokens: int) -> Passage:
        """The beginning of a document, and where it comes from."""
        start = int(self.ends_D[document - 1]) if document else self.rows.first_token
        count = min(tokens, int(self.ends_D[document]) - start)
        return next(iter(passages(self.cache, self.rows.tokenizer, start, count)))


class HeldOutData(NamedTuple):
    """The held-out sets of a configuration, and what is said of them."""

    sets: list[HeldOut]
    notes: list[str]


def open_held_out(
    config: DataConfig,
    tokenizer: HfTokenizer,
    *,
    seq_len: int,
    stride: int | None = None,
    on_progress: OnProgress | None = None,
) -> HeldOutData:
    """Tokenises the held-out text that is not yet cached, and opens it.

    Args:
        config: the `data` section. Where it names another tokenizer, the text is tokenised again.
        tokenizer: that of the model.
        seq_len: of the rows.
        stride: as in `EvalSet`.
        on_progress: told how far the tokenising is.

    Raises:
        UserError: for missing, damaged or empty text, tokens of another tokenizer, and where nothing is held out.
        MachineError: if the disk is full.
    """
    config, notes = _with_tokenizer(config, tokenizer)
    directory, specs = find_caches(config)
    wanted = {name: spec for name, spec in specs.items() if _is_held_out(config, name)}
    if not wanted:
        raise UserError(
            "there is no text to evaluate on: name files as data.validation_urls, or set data.num_validation_sequences"
        )
    callbacks, plan = BuildCallbacks(on_progress), plan_builds(config, directory, wanted, tokenizer)
    excluded = excluded_of(config)
    caches = {
        name: open_cache(build, build.run(callbacks), excluded.get(name), name) for name, build in plan.builds.items()
    }
    by_stream = {id(cache.stream): cache for cache in caches.values()}
    sets = []
    for rows in RowBuilder(config, plan.tokenizer, seq_len, seed=0).eval_sets(caches):
        assert isinstance(rows, EvalSet), "all caches are finished"
        sets.append(_held_out(rows.in_order(stride) if stride else rows, by_stream[id(rows.stream)]))
    return HeldOutData(sets, notes)


def _held_out(rows: EvalSet, cache: OpenCache) -> HeldOut:
    ends_D = np.cumsum(cache.document_lengths())
    # A set that is the end of a training text may begin inside of a document, whose rest then is its first one.
    return HeldOut(rows.name, rows, cache, ends_D[ends_D > rows.first_token])


def _is_held_out(config: DataConfig, cache: str) -> bool:
    name, _, split = cache.rpartition("/")
    return split == "validation" or config.of_set(config.num_validation_sequences, name) is not None


def _with_tokenizer(config: DataConfig, tokenizer: HfTokenizer) -> tuple[DataConfig, list[str]]:
    """The configuration with the caches of this tokenizer: its own, where it names the same one."""
    theirs = _tokenizer_of(config)
    if theirs is not None and theirs.identity() == tokenizer.identity():
        return config, []
    if any(isinstance(each.source, PrebuiltCache) or each.format.type == "ids" for each in config.sets.values()):
        raise UserError(
            "the data are tokens of another tokenizer than the model's; name the text that they were made from"
        )
    same = isinstance(tokenizer, ByteTokenizer)
    # The hash stands for the tokenizer in the name of the cache: all models that have it share what is tokenised.
    named: Any = BytesTokenizer() if same else Pretrained(name=f"sha256-{tokenizer.identity()['sha256'][:16]}")
    sets = {name: each.model_copy(update={"cache_dir": None}) for name, each in config.configs.items()}
    changed = config.model_copy(update={"tokenizer": named, "cache_dir": None, "configs": sets})
    note = "" if theirs is None else "data.tokenizer is another one than the model's, which is used"
    return changed, [note] if note else []


def _tokenizer_of(config: DataConfig) -> HfTokenizer | None:
    """The tokenizer that a configuration names, if it is at hand."""
    try:
        directory, specs = find_caches(config)
        return find_tokenizer(config, directory, specs)
    except UserError:
        return None
