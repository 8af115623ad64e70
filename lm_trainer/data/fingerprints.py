"""The identity of a run's data, as fingerprints that differ if any batch may differ."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lm_trainer.data.cache.format import fingerprint
from lm_trainer.data.config import DataConfig
from lm_trainer.data.rows.row_builder import RowBuilder
from lm_trainer.data.rows.train_sets import TrainSets
from lm_trainer.data.rows.uncounted import uncounted_digests
from lm_trainer.data.tokenize.open_cache import OpenCache


@dataclass(frozen=True)
class DataIdentity:
    """Hashes data in two ways: by their tokens, and by the sources from which the tokens are made.

    If `step` is not None, the set weights from this step on are ignored, so that a continued run may change them.
    """

    config: DataConfig
    row_builder: RowBuilder
    caches: Mapping[str, OpenCache]
    train_sets: TrainSets

    def hash_tokens(self, step: int | None) -> str:
        """Hashes the tokens, their meaning and the order, regardless of their source. Needs finished caches."""
        orders = [
            [train.name, train.num_rows, train.seed, train.shuffle.model_dump(mode="json")]
            for train in self.train_sets.current_sets()
        ]
        tokens = {name: cache.ledger.sha256 for name, cache in self.caches.items()}
        return fingerprint({"tokens": tokens, "orders": orders, **self._token_settings(step)})

    def hash_sources(self, step: int | None) -> str:
        """Hashes the manifests (files with sizes and times, tokenizer, rules) and the order. Available immediately."""
        config = self.config
        seeds = {name: self.row_builder.seed_for_set(name) for name in config.trained}
        return fingerprint(
            {
                "made_of": {name: cache.identity for name, cache in self.caches.items()},
                "shuffle": config.shuffle_config.model_dump(mode="json"),
                "seeds": seeds,
                "held_out": [config.value_for_set(config.num_validation_sequences, name) for name in config.sets],
                **self._token_settings(step),
            }
        )

    def _token_settings(self, step: int | None) -> dict[str, object]:
        config, tokenizer = self.config, self.row_builder.tokenizer
        return {
            "eos_id": tokenizer.eos_id,
            "vocab_size": tokenizer.vocab_size,
            "seq_len": self.row_builder.seq_len,
            # The first stage always counts, since step 0 has weights, too.
            "stages": [stage for stage in config.stages if step is None or stage[0] < max(step, 1)],
            "packing": config.packing,
            "limits": [config.value_for_set(config.max_train_batches, name) for name in config.trained],
            **self._long_document_settings(),
            **({"excluded": excluded} if (excluded := self._exclusion_digests()) else {}),
            **({"without": digests} if (digests := uncounted_digests(self.row_builder.uncounted)) else {}),
            **self._feature_settings(),
        }

    def _long_document_settings(self) -> dict[str, object]:
        """Returns the treatment of long documents; empty if they are split, as in data before there was a choice."""
        treatments = {name: self.config.too_long_of(name) for name in self.config.sets}
        changed = {name: treatment for name, treatment in treatments.items() if treatment not in ("split", "raise")}
        return {"too_long": changed} if changed else {}

    def _exclusion_digests(self) -> dict[str, str]:
        return {name: cache.exclusion.digest for name, cache in self.caches.items() if cache.exclusion is not None}

    def _feature_settings(self) -> dict[str, object]:
        """Returns the settings that determine features.

        Empty for text, so that the hashes of text data stay the same.
        """
        formats = {name: set_config.format for name, set_config in self.config.sets.items()}
        if self.config.features_shape is None:
            return {}
        return {"heard": {name: format.model_dump(mode="json") for name, format in formats.items()}}
