"""Measures the time to save and restore checkpoints, the time that a save costs training, and the speed of the disk."""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import jax
import numpy as np

from lm_trainer.checkpoint.store import CheckpointStore
from lm_trainer.core.files import ensure_writable_directory, local_path
from lm_trainer.profile.peak_memory import PeakMemory
from lm_trainer.profile.timing import BenchResult, Spread, format_si, measure_interleaved, time_call
from lm_trainer.run.build.example_batch import example_batch
from lm_trainer.run.config.run_config import RunConfig
from lm_trainer.run.dry_run import configure_and_build_setup
from lm_trainer.run.weights.pretrained import resolve_model
from lm_trainer.run.weights.saved_state import arrays_to_save, save_state


def measure_checkpoints(config: RunConfig, *, repeats: int, steps: int) -> BenchResult:
    """Measures saves and restores of a run's state, in a temporary directory next to the checkpoints of the run.

    Three measurements alternate: `steps` training steps, the same number of steps with a save before the first one, and
    a plain write of the same number of bytes.

    Raises:
        UserError: as for `configure_and_build_setup`, or if the directory cannot be written.
    """
    base = local_path(config.trainer.checkpointer.base_path)
    # Directories to remove at the end, the innermost first.
    missing = [directory for directory in (base, *base.parents) if not directory.exists()]
    ensure_writable_directory(base, "trainer.checkpointer.base_path")
    with tempfile.TemporaryDirectory(dir=base, prefix=".bench-") as directory:
        store = CheckpointStore(Path(directory) / "checkpoints", config.trainer.checkpointer)
        with closing(store):
            run = _Run(resolve_model(config, "bench"), store, steps)
            write = _build_timed_writer(Path(directory) / "plain", run.num_bytes)
            # The first calls are not timed, because they compile, allocate memory and create files.
            for warm in (run.time_steps, run.time_save_and_steps, write):
                warm()
            run.blocked.clear()
            run.finished.clear()
            # The measurements are interleaved, so that a slowdown of the machine affects all of them alike.
            timings = measure_interleaved(
                {"alone": run.time_steps, "saving": run.time_save_and_steps, "write": write}, repeats
            )
            restores = [time_call(run.restore) for _ in range(repeats)]
            host_bytes = run.measure_host_bytes()
    for directory in missing:
        # The directory cannot be removed if other processes have written files there.
        with contextlib.suppress(OSError):
            directory.rmdir()
    return _build_report(run, timings, restores, host_bytes)


class _Run:
    """A run that trains, saves and restores when its methods are called."""

    def __init__(self, config: RunConfig, store: CheckpointStore, steps: int):
        self._program, vocab_size = configure_and_build_setup(config)
        step = self._program.step
        batch = example_batch(config, len(step.local_rows()), vocab_size)
        step.compile(batch)
        self._placed, self._state, self._store, self.steps = step.put(batch), self._program.init(), store, steps
        arrays = arrays_to_save(self._state, self._program)
        self.num_bytes = sum(x.nbytes for x in arrays.values())
        self._like = {n: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding) for n, x in arrays.items()}
        self.blocked: list[float] = []
        """Number of seconds for which each save blocked training."""
        self.finished: list[float] = []
        """Number of seconds from the start of each save until it was on disk and the concurrent steps were done."""

    def time_steps(self) -> float:
        """Runs `steps` training steps, waits for each of them, and returns the total time in seconds."""
        started = time.perf_counter()
        for _ in range(self.steps):
            self._state, metrics = self._program.step(self._state, self._placed, 1e-4)
            # A call returns before its step is computed. Without waiting, only the dispatch would be measured.
            jax.block_until_ready(metrics)
        return time.perf_counter() - started

    def time_save_and_steps(self) -> float:
        """Starts a save, runs the steps, and returns the time of both in seconds.

        Then waits until the save is on disk.
        """
        started = time.perf_counter()
        save_state(self._store, self._state, self._program, {})
        self.blocked.append(time.perf_counter() - started)
        seconds = self.blocked[-1] + self.time_steps()
        self._store.wait()
        self.finished.append(time.perf_counter() - started)
        return seconds

    def measure_host_bytes(self) -> int | None:
        """Returns by how many bytes a save raises the peak memory of the process while it trains; None if unknown."""
        peaks = []
        for run in (self.time_steps, self.time_save_and_steps):
            with PeakMemory() as memory:
                run()
            peaks.append(memory.peak_bytes)
        return max(0, peaks[1] - peaks[0]) if peaks[0] else None

    def restore(self) -> None:
        """Reads and verifies the newest checkpoint."""
        restored = self._store.restore(self._like)
        assert restored is not None, "it was saved before"
        jax.block_until_ready(restored.arrays)


def _build_timed_writer(path: Path, count: int) -> Callable[[], float]:
    # The content is random, so that no file system can compress it.
    content = np.random.default_rng(0).bytes(count)

    def write() -> float:
        started = time.perf_counter()
        with path.open("wb") as file:
            file.write(content)
            file.flush()
            # Without this call, only the copy to kernel memory would be timed.
            os.fsync(file.fileno())
        return time.perf_counter() - started

    return write


def _build_report(
    run: _Run, timings: dict[str, list[float]], restores: list[float], host_bytes: int | None
) -> BenchResult:
    count, steps = run.num_bytes, run.steps
    spreads = {
        "step": Spread.from_values([seconds / steps for seconds in timings["alone"]]),
        "blocked": Spread.from_values(run.blocked),
        "cost": Spread.from_values([b - a for a, b in zip(timings["alone"], timings["saving"], strict=True)]),
        "finished": Spread.from_values(run.finished),
        "restore": Spread.from_values(restores),
        "plain_write": Spread.from_values(timings["write"]),
    }
    values = {
        "bytes": count,
        "host_bytes_of_a_save": host_bytes,
        "steps_beside_a_save": steps,
        "samples": len(restores),
        **{f"{name}_seconds": spread.as_dict() for name, spread in spreads.items()},
    }
    rate = format_si(count / spreads["plain_write"].median)
    table = [
        ("checkpoint", f"{count / 2**20:,.1f} MiB of arrays"),
        ("timed", f"{steps} steps alone, {steps} beside a save, and a plain write in turn; {len(restores)} of each"),
        ("step alone", spreads["step"].format_milliseconds()),
        ("save: the run waits", spreads["blocked"].format_milliseconds()),
        ("save: costs in all", f"{spreads['cost'].format_milliseconds()}, copies, threads and disk over {steps} steps"),
        ("save: on disk within", f"{spreads['finished'].format_milliseconds()}, those steps included"),
        *(
            []
            if host_bytes is None
            else [("save: host memory", f"{host_bytes / 2**20:,.1f} MiB more than steps alone")]
        ),
        (
            "restore, verified",
            f"{spreads['restore'].format_milliseconds()}, {format_si(count / spreads['restore'].median)}B/s",
        ),
        ("plain write", f"{spreads['plain_write'].format_milliseconds()}, {rate}B/s, flushed to the disk"),
    ]
    return BenchResult(table, values)
