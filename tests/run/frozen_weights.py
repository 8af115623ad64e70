"""Runs whose loss also reads frozen weights: of a reference, or of a teacher."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np

from lm_trainer.checkpoint.store import read_record
from lm_trainer.data import open_data
from lm_trainer.nn.reference import is_reference_param
from lm_trainer.run.build.setup import TrainingSetup
from lm_trainer.run.config.run_config import RunConfig
from lm_trainer.step.state.train_state import to_host
from tests.conftest import run_here
from tests.run.test_adapters import TRAINER, write_base

STEPS, ROWS = 3, 8
KEYS: dict[str, Any] = {
    **TRAINER,
    "train_batch_size": ROWS,
    "elastic_shards": 4,
    "num_train_steps": STEPS,
    "steps_per_eval": STEPS,
}


def train(config: RunConfig, setup: TrainingSetup) -> tuple[list[dict[str, float]], dict[str, np.ndarray]]:
    """The metrics of all steps, and the weights after them."""
    data = open_data(config.data, seq_len=config.model.seq_len, seed=0)
    state, metrics = setup.init(), []
    for batch in data.train(ROWS, rows=range(ROWS), num_steps=STEPS):
        if not metrics:
            setup.step.compile(batch)
        state, of_step = setup.step(state, setup.step.put(batch), 1e-2)
        metrics.append({name: float(x) for name, x in of_step.items()})
    data.close()
    return metrics, to_host({**state.frozen, **state.params})


def check_commands(path: Path, step_key: str) -> str:
    """Trains beside the model `base`, resumes, exports, and starts again after `base` has changed.

    `step_key` is the entry of a checkpoint's record with the step of the frozen weights. Returns what the first command
    printed.
    """
    done = run_here("train", path)
    assert done.returncode == 0, done.stderr
    record = read_record(Path("checkpoints/run"), STEPS)
    assert record[step_key] == 0
    assert not [name for name in record["shapes"] if is_reference_param(name.removeprefix("params."))]
    first = dict(record["hashes"])

    # From its checkpoint of step 2, the run comes to the same weights.
    shutil.rmtree(f"checkpoints/run/{STEPS}")
    resumed = run_here("train", path)
    assert "resumed at step 2" in resumed.stdout, resumed.stderr
    assert read_record(Path("checkpoints/run"), STEPS)["hashes"] == first

    assert run_here("export-hf", "run", "out").returncode == 0
    assert Path("out/model.safetensors").is_file()
    shutil.rmtree("base")
    write_base(Path("base"), seed=1)
    shutil.rmtree(f"checkpoints/run/{STEPS}")
    refused = run_here("train", path)
    assert refused.returncode == 2
    assert "was trained beside other frozen weights" in refused.stderr
    return done.stdout
