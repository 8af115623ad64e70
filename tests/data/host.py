"""One host of several: reads its rows of some steps, and writes down the rows of the global arrays that it holds."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

BATCH = ((0, 8), (3, 16), (7, 4))
SEQ_LEN = 32


def main(config: Path, out: Path, address: str, count: int, index: int, steps: range) -> None:
    import jax
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    from lm_trainer.core.piecewise import BatchSchedule, Piecewise
    from lm_trainer.data import DataConfig, open_data

    jax.distributed.initialize(address, count, index)
    assert jax.process_count() == count
    sharding = NamedSharding(Mesh(np.array(jax.devices()), ("data",)), PartitionSpec("data"))

    def rows(size: int) -> range:
        indices = sharding.addressable_devices_indices_map((size, SEQ_LEN)).values()
        ranges = [index[0].indices(size) for index in indices if index]
        return range(min(start for start, _, _ in ranges), max(stop for _, stop, _ in ranges))

    data = open_data(DataConfig.model_validate_json(config.read_text()), seq_len=SEQ_LEN, seed=3)
    schedule = BatchSchedule(Piecewise.from_phases(list(BATCH)))
    arrays: dict[str, np.ndarray] = {"fingerprint": np.frombuffer(data.fingerprint().encode(), np.uint8)}
    batches = data.train(schedule, rows=rows, first_step=steps.start, num_steps=len(steps))
    for step, batch in zip(steps, batches, strict=True):
        for name, local in batch._asdict().items():
            if local is None:
                continue
            global_batch = jax.make_array_from_process_local_data(sharding, local, (schedule.at(step), SEQ_LEN))
            for shard in global_batch.addressable_shards:
                arrays[f"{step}/{name}/{shard.index[0].start or 0}"] = np.asarray(shard.data)
    data.close()
    np.savez(out / f"{count}-{index}-{steps.start}.npz", **arrays)  # pyright: ignore[reportArgumentType]


if __name__ == "__main__":
    _, config, out, address, count, index, first, stop = sys.argv
    main(Path(config), Path(out), address, int(count), int(index), range(int(first), int(stop)))
