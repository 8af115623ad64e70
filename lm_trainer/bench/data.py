"""Measures how fast the data of a run can be loaded, and how long its steps wait for data."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import closing

import jax

from lm_trainer.core.batch import Batch
from lm_trainer.data import open_data
from lm_trainer.data.dataset import Data
from lm_trainer.profile.timing import BenchResult, Spread, format_si
from lm_trainer.run.build.setup import TrainingSetup
from lm_trainer.run.config.run_config import RunConfig
from lm_trainer.run.dry_run import configure_and_build_setup
from lm_trainer.run.weights.pretrained import resolve_model

_AHEAD = 8
"""Number of untimed batches before and after the timed ones, so that threads have read equally far ahead when the clock
starts and when it stops."""


def measure_data(config: RunConfig, *, batches: int, repeats: int) -> BenchResult:
    """Alternates between loading batches as fast as possible and loading them at the rate of training steps.

    Text without a token cache is tokenised first, into the cache that training would use.

    Raises:
        UserError: if data is missing or damaged, or as for `configure_and_build_setup`.
    """
    config = resolve_model(config, "bench")
    data = open_data(config.data, seq_len=config.model.seq_len, seed=config.trainer.seed)
    with closing(data):
        setup, _ = configure_and_build_setup(config, data.tokenizer.vocab_size)
        tokens = config.trainer.batch_schedule.at(0) * config.model.seq_len
        wall, cpu, waits, steps = [], [], [], []
        train = _build_timed_trainer(setup)
        for turn in range(repeats):
            # Each round reads different rows, because the rows of previous rounds are already in memory.
            start = turn * (batches + 2 * _AHEAD)
            seconds, work = _time_loading(_open_batches(config, data, setup, start, batches), batches)
            wall.append(seconds / batches)
            cpu.append(work / batches)
            for waited, step_seconds in train(_open_batches(config, data, setup, start, batches), batches):
                waits.append(waited / step_seconds)
                steps.append(step_seconds)
    loading, work, share, step = (
        Spread.from_values(wall),
        Spread.from_values(cpu),
        Spread.from_values(waits),
        Spread.from_values(steps),
    )
    values = {
        "tokens_per_batch": tokens,
        "batches": batches,
        "samples": repeats,
        "batch_seconds": loading.as_dict(),
        "batch_cpu_seconds": work.as_dict(),
        "tokens_per_second": tokens / loading.median,
        "tokens_per_cpu_second": tokens / work.median,
        "step_seconds": step.as_dict(),
        "waiting_fraction": share.as_dict(),
    }
    rate, worth = format_si(values["tokens_per_second"]), format_si(values["tokens_per_cpu_second"])
    table = [
        ("batch", f"{tokens:,} tokens; {repeats} x {batches} batches loaded, and trained on, in turn"),
        ("loaded alone in", f"{loading.format_milliseconds()}, {rate}tokens/s"),
        ("CPU time for it", f"{work.format_milliseconds()}, {worth}tokens per CPU-second"),
        ("a step takes", step.format_milliseconds()),
        ("of which it waits", f"{share.median:.2%} (quartiles {share.lower_quartile:.2%}-{share.upper_quartile:.2%})"),
    ]
    return BenchResult(table, values)


def _open_batches(config: RunConfig, data: Data, setup: TrainingSetup, first: int, count: int) -> Iterator[Batch]:
    plans = {plan.batch_size: plan for plan in setup.step.plans.values}
    return iter(
        data.train(
            config.trainer.batch_schedule,
            rows=lambda batch_size: setup.step.devices.local_rows(plans[batch_size]),
            first_step=first,
            num_steps=count + 2 * _AHEAD,
        )
    )


def _time_loading(batches: Iterator[Batch], count: int) -> tuple[float, float]:
    """Returns the wall-clock time and the CPU time of all threads for `count` batches, in seconds."""
    # Skips the batches that threads have read ahead before the clock starts.
    for _ in range(_AHEAD):
        next(batches)
    started, used = time.perf_counter(), time.process_time()
    for _ in range(count):
        next(batches)
    return time.perf_counter() - started, time.process_time() - used


def _build_timed_trainer(setup: TrainingSetup) -> Callable[[Iterator[Batch], int], list[tuple[float, float]]]:
    """Returns a function that trains on batches and returns two times in seconds for each: data wait and full step."""
    state = setup.init()

    def step(batches: Iterator[Batch]) -> tuple[float, float]:
        nonlocal state
        started = time.perf_counter()
        batch = next(batches)
        waited = time.perf_counter() - started
        # This happens at the first batch, which is not timed.
        if not setup.step.is_compiled(0):
            setup.step.compile(batch)
        state, metrics = setup.step(state, setup.step.put(batch), 1e-4)
        jax.block_until_ready(metrics)
        return waited, time.perf_counter() - started

    return lambda batches, count: [step(batches) for _ in range(_AHEAD + count)][_AHEAD:]
