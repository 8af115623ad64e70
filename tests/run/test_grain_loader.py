"""A pipeline of Grain in a loop of one's own: it goes on from the checkpoint, in the bits of an undisturbed run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grain
import numpy as np
import pytest

from lm_trainer.checkpoint.store import list_steps, read_record
from lm_trainer.core.errors import Preempted, UserError
from lm_trainer.run.trainer import Trainer
from tests.run.own_model import OPTIMIZER, ROWS, SEQ, STEPS, VOCAB, Bigrams, loss, settings


def record(seed: int) -> dict[str, np.ndarray]:
    """A row of its own for each number."""
    tokens = np.random.default_rng(seed).integers(0, VOCAB, SEQ + 1, dtype=np.int32)
    positions = np.arange(SEQ, dtype=np.int32)
    weights = np.ones(SEQ, np.float32)
    return {
        "tokens": tokens[:-1],
        "targets": tokens[1:],
        "weights": weights,
        "positions": positions,
        "segments": np.zeros_like(positions),
    }


class Records:
    """A source with a name, by which Grain knows it again."""

    def __len__(self) -> int:
        return 500

    def __getitem__(self, index: Any) -> dict[str, np.ndarray]:
        return record(int(index))

    def __repr__(self) -> str:
        return "500 records"


def pipeline(kind: str) -> Any:
    """Rows in a random order, in batches."""
    rows = grain.MapDataset.range(500).seed(3).shuffle().map(record)
    if kind == "map":
        return rows.repeat().batch(ROWS)
    if kind == "iter":
        return rows.repeat().to_iter_dataset().batch(ROWS)
    return grain.load(Records(), seed=3, batch_size=ROWS)


def run(directory: Path, kind: str, *, stop_after: int | None = None, **flags: Any) -> dict[str, np.ndarray]:
    config = settings(num_train_steps=STEPS, log_dir=str(directory / "logs"), **flags)
    places = config.checkpointer.model_copy(update={"base_path": str(directory / "checkpoints")})
    config = config.model_copy(update={"checkpointer": places})
    with Trainer(config, OPTIMIZER, loss) as trainer:
        state = trainer.initial_state(model_init=Bigrams)

        def stop(info: Any) -> None:
            if info.step == stop_after:
                trainer.attempt.stop.requested = "SIGTERM"  # pyright: ignore[reportAttributeAccessIssue]

        trainer.add_hook(stop)
        state = trainer.train(state, trainer.data_loader(pipeline(kind)))
    return {name: np.asarray(x) for name, x in state.params.items()}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["map", pytest.param("iter", marks=pytest.mark.slow), "loader"])
def test_a_resume_goes_on_where_the_loader_was(tmp_path: Path, kind: str) -> None:
    undisturbed = run(tmp_path / "a", kind)
    with pytest.raises(Preempted):
        run(tmp_path / "b", kind, stop_after=2)
    (checkpoints,) = (tmp_path / "b/checkpoints").iterdir()
    # The hook asks in step 2, which ends before it is noticed.
    assert list_steps(checkpoints)[-1] == 3
    (state,) = read_record(checkpoints, 3)["loader"]
    assert len(str(state)) < 2000
    resumed = run(tmp_path / "b", kind)
    for name, x in undisturbed.items():
        np.testing.assert_array_equal(resumed[name], x)


@pytest.mark.slow
def test_the_state_of_another_pipeline_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Preempted):
        run(tmp_path, "map", stop_after=2)
    with pytest.raises(UserError, match="cannot go on from the state in the checkpoint"):
        run(tmp_path, "loader")
