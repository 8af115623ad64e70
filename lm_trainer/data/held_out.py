"""Opens held-out sets for an existing model, with the model's tokenizer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from lm_trainer.core.errors import UserError
from lm_trainer.data.config import DataConfig
from lm_trainer.data.provenance import Passage, iter_passages
from lm_trainer.data.rows.eval_set import EvalSet
from lm_trainer.data.rows.row_builder import RowBuilder
from lm_trainer.data.sources.prebuilt import PrebuiltCache
from lm_trainer.data.tokenize.cache_spec import find_caches
from lm_trainer.data.tokenize.open_cache import OpenCache, open_cache, read_excluded_documents
from lm_trainer.data.tokenize.plan import plan_builds
from lm_trainer.data.tokenize.progress import BuildCallbacks, OnProgress
from lm_trainer.data.tokenize.tokenizer_setup import find_tokenizer
from lm_trainer.data.tokenizer import BytesTokenizer, HfTokenizer, Pretrained
from lm_trainer.data.tokenizer.bytes import ByteTokenizer


@dataclass(frozen=True)
class HeldOut:
    """A held-out set and its documents."""

    name: str
    """Name of the set as in the configuration; `validation` for a single set."""
    rows: EvalSet
    cache: OpenCache
    ends_D: np.ndarray
    """int64 [D]: exclusive end in the stream of each of the set's documents."""

    def first_passage(self, document: int, tokens: int) -> Passage:
        """Returns the beginning of a document and its origin."""
        start = int(self.ends_D[document - 1]) if document else self.rows.first_token
        count = min(tokens, int(self.ends_D[document]) - start)
        return next(iter(iter_passages(self.cache, self.rows.tokenizer, start, count)))


class HeldOutData(NamedTuple):
    """The held-out sets of a configuration, with notes for the user."""

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
    """Opens the held-out text of a configuration, and tokenises it first if it is not cached yet.

    Args:
        config: the `data` section. If it names another tokenizer, the text is tokenised with `tokenizer`.
        tokenizer: the model's tokenizer.
        seq_len: number of inputs of each row.
        stride: see `EvalSet`.
        on_progress: called with the progress of tokenising.

    Raises:
        UserError: if text is missing, damaged or empty, tokens are of another tokenizer, or there is no held-out text.
        MachineError: if the disk is full.
    """
    config, notes = _with_tokenizer(config, tokenizer)
    directory, specs = find_caches(config)
    held_out_specs = {name: spec for name, spec in specs.items() if _is_held_out(config, name)}
    if not held_out_specs:
        raise UserError(
            "there is no text to evaluate on: name files as data.validation_urls, or set data.num_validation_sequences"
        )
    callbacks, plan = BuildCallbacks(on_progress), plan_builds(config, directory, held_out_specs, tokenizer)
    excluded = read_excluded_documents(config)
    caches = {
        name: open_cache(build, build.run(callbacks), excluded.get(name), name) for name, build in plan.builds.items()
    }
    by_stream = {id(cache.stream): cache for cache in caches.values()}
    sets = []
    for rows in RowBuilder(config, plan.tokenizer, seq_len, seed=0).eval_sets(caches):
        assert isinstance(rows, EvalSet), "all caches are finished"
        sets.append(_make_held_out(rows.with_stride(stride) if stride else rows, by_stream[id(rows.stream)]))
    return HeldOutData(sets, notes)


def _make_held_out(rows: EvalSet, cache: OpenCache) -> HeldOut:
    ends_D = np.cumsum(cache.document_lengths())
    # A set cut from the end of a training text may begin within a document, whose remainder is its first document.
    return HeldOut(rows.name, rows, cache, ends_D[ends_D > rows.first_token])


def _is_held_out(config: DataConfig, cache: str) -> bool:
    name, _, split = cache.rpartition("/")
    return split == "validation" or config.value_for_set(config.num_validation_sequences, name) is not None


def _with_tokenizer(config: DataConfig, tokenizer: HfTokenizer) -> tuple[DataConfig, list[str]]:
    """Returns the configuration with caches for this tokenizer. It is unchanged if it names the same tokenizer."""
    configured = _find_named_tokenizer(config)
    if configured is not None and configured.identity() == tokenizer.identity():
        return config, []
    if any(
        isinstance(set_config.source, PrebuiltCache) or set_config.format.type == "ids"
        for set_config in config.sets.values()
    ):
        raise UserError(
            "the data are tokens of another tokenizer than the model's; name the text that they were made from"
        )
    is_bytes = isinstance(tokenizer, ByteTokenizer)
    # The cache name contains a hash of the tokenizer, so all models with this tokenizer share the tokenised text.
    new_tokenizer: BytesTokenizer | Pretrained = (
        BytesTokenizer() if is_bytes else Pretrained(name=f"sha256-{tokenizer.identity()['sha256'][:16]}")
    )
    sets = {name: set_config.model_copy(update={"cache_dir": None}) for name, set_config in config.configs.items()}
    changed = config.model_copy(update={"tokenizer": new_tokenizer, "cache_dir": None, "configs": sets})
    note = "" if configured is None else "data.tokenizer is another one than the model's, which is used"
    return changed, [note] if note else []


def _find_named_tokenizer(config: DataConfig) -> HfTokenizer | None:
    """Returns the tokenizer that a configuration names, if it is available."""
    try:
        directory, specs = find_caches(config)
        return find_tokenizer(config, directory, specs)
    except UserError:
        return None
