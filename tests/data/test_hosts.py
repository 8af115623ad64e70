"""Real `jax.distributed` processes: global batches do not depend on their number, nor on when it changes."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from lm_trainer.core.piecewise import BatchSchedule, Piecewise
from lm_trainer.data import DataConfig, open_data
from tests.conftest import lmt_environment
from tests.data import host

DEVICES = 4


def free_address() -> str:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{server.getsockname()[1]}"


def run_hosts(config: Path, count: int, steps: range) -> dict[str, np.ndarray]:
    """Returns all that the hosts together hold of each step."""
    address = free_address()
    environment = lmt_environment(devices=DEVICES // count)
    arguments = [str(config), str(config.parent), address, str(count)]
    processes = [
        subprocess.Popen(
            [sys.executable, host.__file__, *arguments, str(index), str(steps.start), str(steps.stop)],
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for index in range(count)
    ]
    for process in processes:
        _, errors = process.communicate(timeout=300)
        assert process.returncode == 0, errors
    arrays: dict[str, np.ndarray] = {}
    for index in range(count):
        with np.load(config.parent / f"{count}-{index}-{steps.start}.npz") as file:
            arrays |= dict(file)
    return arrays


@pytest.mark.slow
def test_the_global_batch_is_the_same_on_any_number_of_processes(tmp_path: Path, documents: list[str]) -> None:
    """A run on 2 processes that goes on with 4 and then with 1, in batches of changing size."""
    sets = {}
    for index, name in enumerate("ab"):
        path = tmp_path / f"{name}.jsonl"
        path.write_text("".join(json.dumps({"text": text[:2000]}) + "\n" for text in documents[index::2]))
        sets[name] = {"train_urls": str(path)}
    config = DataConfig.model_validate(
        {
            "configs": sets,
            "train_weights": [[0, {"a": 0.6, "b": 0.4}], [5, {"a": 0.2, "b": 0.8}]],
            "tokenizer": "bytes",
            "cache_dir": str(tmp_path / "caches"),
        }
    )
    file = tmp_path / "config.json"
    file.write_text(config.model_dump_json(exclude_unset=True))
    data = open_data(config, seq_len=host.SEQ_LEN, seed=3)
    schedule = BatchSchedule(Piecewise.from_phases(list(host.BATCH)))
    expected = list(data.train(schedule, rows=range, num_steps=9))
    data.close()
    for count, steps in ((2, range(4)), (4, range(4, 8)), (1, range(8, 9))):
        arrays = run_hosts(file, count, steps)
        assert bytes(arrays.pop("fingerprint")).decode() == data.fingerprint()
        for step in steps:
            for name, full in expected[step]._asdict().items():
                if full is None:
                    continue
                parts = {int(key.rpartition("/")[2]): key for key in arrays if key.startswith(f"{step}/{name}/")}
                assert len(parts) == DEVICES
                joined = np.concatenate([arrays[parts[start]] for start in sorted(parts)])
                np.testing.assert_array_equal(joined, full, err_msg=f"{step} {name}")
