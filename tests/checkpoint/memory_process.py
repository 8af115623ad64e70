"""`python -m tests.checkpoint.memory_process ADDRESS COUNT INDEX DIRECTORY ACTION`: one process of a run with copies.

`save` writes a checkpoint of step 3 and a copy of step 5, then kills itself; `restore` prints the restored step and its
checksums.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from datetime import timedelta
from pathlib import Path

import jax

from lm_trainer.checkpoint.digest import compute_checksums
from lm_trainer.checkpoint.policy import CheckpointerConfig, MemoryCopiesConfig
from lm_trainer.checkpoint.store import CheckpointStore
from tests.checkpoint.steps import abstract_arrays, arrays, sharding_over


def main(address: str, count: int, index: int, directory: Path, action: str) -> None:
    if count > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(address, count, index)
    copies = MemoryCopiesConfig(every=5, directory=str(directory / "memory"))
    config = CheckpointerConfig(save_interval=timedelta(days=1), keep=(), memory=copies)
    store = CheckpointStore(directory / "checkpoints", config)
    sharding = sharding_over(jax.device_count())
    if action == "save":
        store.save(3, arrays(3, sharding), {})
        store.wait()
        store.save_copy(5, arrays(5, sharding), {})
        assert store._copies is not None
        store._copies.wait()
        # All processes have written before the first one ends.
        store.restore(abstract_arrays(sharding))
        os.kill(os.getpid(), signal.SIGKILL)
    restored = store.restore(abstract_arrays(sharding))
    assert restored is not None
    print(json.dumps([restored.step, compute_checksums(restored.arrays)]))
    store.close()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]), sys.argv[5])
