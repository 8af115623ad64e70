"""The rows of a run as a dataset of Grain, beside the batches that the run reads."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import grain
import jax
import numpy as np
import pytest

from lm_trainer.core.batch import Batch
from lm_trainer.core.errors import UserError
from lm_trainer.core.piecewise import BatchSchedule, Piecewise
from lm_trainer.data.config import DataConfig
from lm_trainer.data.dataset import Data
from lm_trainer.data.pipeline import open_data

SCHEDULE, STEPS = BatchSchedule(Piecewise.from_phases([(0, 3), (4, 6)])), 12
CONFIGS: dict[str, dict[str, Any]] = {
    "shuffled": {},
    "in order, once": {"shuffle": False, "stop_strategy": "first_exhausted"},
    "packed": {"packing": "best_fit"},
    "in eras": {"shuffle": {"type": "era", "first": 8}},
    "mixture": {"train_weights": [[0, {"a": 0.7, "b": 0.3}], [5, {"a": 0.2, "b": 0.8}]]},
}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("grain")
    for number, name in enumerate("ab"):
        lines = [f"{name} {n}: " + "some words " * ((n + number) % 5 + 1) for n in range(200)]
        (directory / f"{name}.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    return directory


def open_corpus(corpus: Path, settings: dict[str, Any]) -> Data:
    several = "train_weights" in settings
    files = {name: [str(corpus / f"{name}.jsonl")] for name in "ab"}
    sets: dict[str, Any] = {"configs": {name: {"train_urls": files[name]} for name in files}}
    source = sets if several else {"train_urls": [*files["a"], *files["b"]]}
    config = {"tokenizer": "bytes", "cache_dir": str(corpus / f"cache-{several}"), **source, **settings}
    return open_data(DataConfig.model_validate(config), seq_len=24, seed=5)


@pytest.mark.parametrize("name", CONFIGS)
def test_rows_are_those_of_the_run(corpus: Path, name: str) -> None:
    data = open_corpus(corpus, CONFIGS[name])
    rows = data.train_rows(SCHEDULE)
    assert isinstance(rows, grain.MapDataset)
    batches = [*data.train(SCHEDULE, rows=lambda size: range(size), num_steps=STEPS)]
    for step, batch in enumerate(batches):
        first, size = SCHEDULE.rows_before(step), SCHEDULE.at(step)
        # Grain's own slices and batches.
        expected_batch = rows[first : first + size].batch(size)[0]
        assert isinstance(expected_batch, Batch)
        for field, expected in zip(jax.tree.leaves(expected_batch), jax.tree.leaves(batch), strict=True):
            assert field.dtype == expected.dtype
            np.testing.assert_array_equal(field, expected)
    # Any row by itself, without those before it, and far beyond the first epoch where the data do not end.
    end = data.train_order(SCHEDULE).length
    assert len(rows) == (sys.maxsize if end is None else end)
    assert end is None or name == "in order, once"
    far = len(rows) - 1 if end is not None else 10**12
    alone = rows[far]
    assert alone is not None
    np.testing.assert_array_equal(alone.tokens, data.train_order(SCHEDULE).read(np.array([far])).tokens[0])
    hosts = [rows[host::2].to_iter_dataset() for host in range(2)]
    first = [next(iter(host)).tokens for host in hosts]
    np.testing.assert_array_equal(first, batches[0].tokens[:2])
    data.close()


def test_a_loader_that_was_saved_elsewhere_is_refused(corpus: Path) -> None:
    data = open_corpus(corpus, {})
    batches = data.train(4, rows=range(4), first_step=7, num_steps=9)
    assert batches.get_state() == {"next_index": 7}
    next(batches)
    assert batches.get_state() == {"next_index": 8}
    batches.restore_state({"next_index": 8})
    with pytest.raises(UserError, match="the batches go on after step 8, but the loader was saved after step 6"):
        batches.restore_state({"next_index": 6})
    data.close()
