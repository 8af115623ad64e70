"""Identity of the data of a run: fingerprints that differ whenever some batch may."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lm_trainer.data.cache.format import fingerprint
from lm_trainer.data.config import DataConfig
from lm_trainer.data.rows.row_builder import RowBuilder
from lm_trainer.data.rows.train_sets import TrainSets
from lm_trainer.data.tokenize.open_cache import OpenCache


@dataclass(frozen=True)
class DataIdentity:
    """Hashes data in two ways: by the tokens, and by the sources that the tokens are made of.

    A `step` leaves the weights of the sets from that step on out, so that they may change in a run that goes on.
    """

    config: DataConfig
    row_builder: RowBuilder
    caches: Mapping[str, OpenCache]
    train_sets: TrainSets

    def tokens(self, step: int | None) -> str:
        """Hashes the tokens, their meaning and the order, wherever they come from; needs finished caches."""
        orders = [
            [train.name, train.num_rows, train.seed, train.shuffle.model_dump(mode="json")]
            for train in self.train_sets.current()
        ]
        tokens = {name: cache.ledger.sha256 for name, cache in self.caches.items()}
        return fingerprint({"tokens": tokens, "orders": orders, **self._meaning(step)})

    def sources(self, step: int | None) -> str:
        """Hashes the manifests (files with sizes and times, tokenizer, rules) and the order; known at once."""
        config = self.config
        seeds = {name: self.row_builder.seed_of(name) for name in config.trained}
        return fingerprint(
            {
                "made_of": {name: cache.identity for name, cache in self.caches.items()},
                "shuffle": config.shuffle_config.model_dump(mode="json"),
                "seeds": seeds,
                "held_out": [config.of_set(config.num_validation_sequences, name) for name in config.sets],
                **self._meaning(step),
            }
        )

    def _meaning(self, step: int | None) -> dict[str, Any]:
        config, tokenizer = self.config, self.row_builder.tokenizer
        return {
            "eos_id": tokenizer.eos_id,
            "vocab_size": tokenizer.vocab_size,
            "seq_len": self.row_builder.seq_len,
            # The first stage always counts: at step 0 there are weights too.
            "stages": [stage for stage in config.stages if step is None or stage[0] < max(step, 1)],
            "packing": config.packing,
            "limits": [config.of_set(config.max_train_batches, name) for name in config.trained],
            **({"excluded": excluded} if (excluded := self._excluded()) else {}),
            **self._heard(),
        }

    def _excluded(self) -> dict[str, str]:
        return {name: cache.exclusion.digest for name, cache in self.caches.items() if cache.exclusion is not None}

    def _heard(self) -> dict[str, Any]:
        """Settings that decide features; absent where rows are text alone, whose hashes it leaves as they are."""
        formats = {name: each.format for name, each in self.config.sets.items()}
        if self.config.features_shape is None:
            return {}
        return {"heard": {name: format.model_dump(mode="json") for name, format in formats.items()}}
