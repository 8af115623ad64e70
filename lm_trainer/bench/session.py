"""A configuration's training step on made-up tokens."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from lm_trainer.adapters import describe_size, training_flops
from lm_trainer.bench.vocabulary import find_vocabulary
from lm_trainer.config.run import RunConfig
from lm_trainer.config.trainer import TrainerConfig
from lm_trainer.core.batch import Batch
from lm_trainer.core.runtime import configure_jax
from lm_trainer.lanes import Executable
from lm_trainer.optim.schedule import Schedule
from lm_trainer.pretrained import find_start, settled
from lm_trainer.profile.flops import flops_per_token, parameter_count
from lm_trainer.program import Program, build_program, check_devices, describe_mesh
from lm_trainer.run_dir import run_id
from lm_trainer.train_state import TrainState


@dataclass
class BenchSession:
    """One training step after another, and what one does."""

    tokens_per_step: int
    flops_per_token: float
    """Of a training step, forward and backward."""
    device_kind: str
    device_count: int
    dtype: str
    """Of the matrix products."""
    num_params: int
    vocab_size: int
    gradient: Executable
    """The program that computes the gradient of a microbatch, or, where that is one program, of the step."""
    gradients_per_step: int
    """How often each device runs it in a step."""
    _program: Program
    _state: TrainState
    _batch: Any
    _learning_rate: Schedule

    def run_step(self) -> None:
        """One whole training step; returns when its result is there."""
        self._state, metrics = self._program.step(self._state, self._batch, self._learning_rate(self._state.step))
        jax.block_until_ready((self._state.params, metrics))


@contextmanager
def bench_session(config: RunConfig) -> Iterator[BenchSession]:
    """Compiles the step of `lmt train` for `config` and gives it a batch of random tokens; writes nothing.

    Raises:
        UserError: when the devices or the sharding rules do not fit.
    """
    program, vocab_size = plan_bench(config := settled(config, "bench"))
    trainer, seq_len, spec = config.trainer, config.model.seq_len, config.model.spec(vocab_size)
    rows = program.step.local_rows()
    batch = random_batch(len(rows), seq_len, vocab_size)
    gradient = program.step.compile(batch)
    devices = program.placement.mesh.devices
    yield BenchSession(
        tokens_per_step=trainer.batch_schedule.at(0) * seq_len,
        flops_per_token=training_flops(flops_per_token(spec, seq_len), program.model),
        device_kind=devices.flat[0].device_kind,
        device_count=devices.size,
        dtype=trainer.mp.compute,
        num_params=parameter_count(spec),
        vocab_size=vocab_size,
        gradient=gradient,
        gradients_per_step=_gradients(trainer, program),
        _program=program,
        _state=program.init(),
        _batch=program.step.put(batch),
        _learning_rate=config.learning_rate(),
    )


def _gradients(trainer: TrainerConfig, program: Program) -> int:
    if trainer.determinism == "fast":
        return 1
    return program.step.plans.at(0).per_shard(program.placement.mesh)


def random_batch(rows: int, seq_len: int, vocab_size: int) -> Batch:
    """Rows of one document each, of random tokens."""
    tokens = np.random.default_rng(0).integers(0, vocab_size, (rows, seq_len + 1), dtype=np.int32)
    positions = np.broadcast_to(np.arange(seq_len, dtype=np.int32), (rows, seq_len))
    return Batch(
        np.ascontiguousarray(tokens[:, :-1]),
        np.ascontiguousarray(tokens[:, 1:]),
        np.ones((rows, seq_len), np.float32),
        np.ascontiguousarray(positions),
        np.zeros((rows, seq_len), np.int32),
    )


def dry_run(config: RunConfig, *, name: str) -> list[str]:
    """What `train` would do, as lines of text; writes nothing, reads no data, allocates nothing on the devices.

    Raises:
        UserError: when the devices, the sharding rules or the Hugging Face checkpoint to start from do not fit.
    """
    run = run_id(config, name)
    start = find_start(config, run)
    config = config if start is None else start.config
    vocab_size, note = find_vocabulary(config) if start is None else (start.vocab_size, None)
    program, _ = plan_bench(config, vocab_size)
    trainer = config.trainer
    spec, seq_len = config.model.spec(vocab_size), config.model.seq_len
    flops = training_flops(flops_per_token(spec, seq_len), program.model)
    plan, schedule = program.step.plans.at(0), trainer.batch_schedule
    return [
        f"run {run} on {describe_mesh(program.placement.mesh)}",
        *(() if start is None else start.notes),
        *(() if note is None else (f"note: {note}",)),
        f"{describe_size(program.model)} with a vocabulary of {vocab_size:,}, {flops:,} FLOPs per token",
        f"{trainer.num_train_steps:,} steps, the first of {schedule.at(0) * seq_len:,} tokens in {plan.count} "
        f"microbatches, {schedule.rows_before(trainer.num_train_steps) * seq_len:,} tokens in all",
        "nothing was written",
    ]


def plan_bench(config: RunConfig, vocab_size: int | None = None) -> tuple[Program, int]:
    """The program of a configuration, and the vocabulary that it was planned with; None: that of `find_vocabulary`.

    Raises:
        UserError: when the devices or the sharding rules do not fit, or as `find_vocabulary`.
    """
    trainer = config.trainer
    configure_jax(trainer.jax_config, trainer.jax_compilation_cache_dir, trainer.cpu_threads)
    check_devices(trainer)
    rows = find_vocabulary(config).rows if vocab_size is None else vocab_size
    return build_program(config, rows), rows
