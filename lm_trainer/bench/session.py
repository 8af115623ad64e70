"""Runs the training step of a configuration on random tokens."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jax

from lm_trainer.core.jax_types import PyTree
from lm_trainer.profile.flops import flops_per_token, parameter_count, recomputed_flops_per_token
from lm_trainer.run.build.example_batch import example_batch
from lm_trainer.run.build.model import recomputes_layers
from lm_trainer.run.build.setup import TrainingSetup
from lm_trainer.run.config.gather import with_resolved_gather
from lm_trainer.run.config.run_config import RunConfig
from lm_trainer.run.config.trainer_config import TrainerConfig
from lm_trainer.run.dry_run import configure_and_build_setup
from lm_trainer.run.weights.adapters import training_flops
from lm_trainer.run.weights.pretrained import resolve_model
from lm_trainer.step.dispatch.executable import Executable, Executables
from lm_trainer.step.state.train_state import TrainState


@dataclass
class BenchSession:
    """A training step that can be run repeatedly, with its size and devices."""

    config: RunConfig
    """Configuration with its model section and `trainer.gather` resolved."""
    tokens_per_step: int
    flops_per_token: float
    """Number of FLOPs per token of a training step, forward and backward."""
    recomputed_flops_per_token: float
    """Number of additional FLOPs per token due to rematerialisation."""
    device_kind: str
    device_count: int
    dtype: str
    """Dtype of the matrix products."""
    num_params: int
    vocab_size: int
    gradient: Executable | Executables
    """The program or programs that compute the gradient of a microbatch, or of the step if it is a single program."""
    gradients_per_step: int
    """Number of gradient computations per device and step."""
    _program: TrainingSetup
    _state: TrainState
    _batch: Any

    @property
    def mesh(self) -> dict[str, int]:
        """Mesh axis -> number of devices."""
        return dict(self._program.sharding.mesh.shape)

    def dispatch_step(self) -> PyTree:
        """Enqueues one full training step. Returns its results, which may still be computed."""
        self._state, metrics = self._program.compute_step(self._state, self._batch)
        # The metrics depend only on some of the programs.
        return self._state.params, metrics

    def run_step(self) -> None:
        """Runs one full training step, and returns when its result has been computed."""
        jax.block_until_ready(self.dispatch_step())


@contextmanager
def open_bench_session(config: RunConfig) -> Iterator[BenchSession]:
    """Compiles the training step of `lmt train` for `config`, with a batch of random tokens. Writes no files.

    Raises:
        UserError: if the configuration does not fit the devices or the sharding rules.
    """
    setup, vocab_size = configure_and_build_setup(config := resolve_model(config, "bench"))
    config = with_resolved_gather(config, vocab_size)
    trainer, seq_len, spec = config.trainer, config.model.seq_len, config.model.spec(vocab_size)
    rows = setup.step.local_rows()
    batch = example_batch(config, len(rows), vocab_size)
    gradient = setup.step.compile(batch)
    devices = setup.sharding.mesh.devices
    yield BenchSession(
        config=config,
        tokens_per_step=trainer.batch_schedule.at(0) * seq_len,
        flops_per_token=training_flops(flops_per_token(spec, seq_len), setup.model, config.loss),
        recomputed_flops_per_token=recomputed_flops_per_token(
            spec, seq_len, every_layer=recomputes_layers(trainer, spec)
        ),
        device_kind=devices.flat[0].device_kind,
        device_count=devices.size,
        dtype=trainer.mp.compute,
        num_params=parameter_count(spec),
        vocab_size=vocab_size,
        gradient=gradient,
        gradients_per_step=_gradients_per_step(trainer, setup),
        _program=setup,
        _state=setup.init(),
        _batch=setup.step.put(batch),
    )


def _gradients_per_step(trainer: TrainerConfig, setup: TrainingSetup) -> int:
    if not trainer.bitwise:
        return 1
    return setup.step.plans.at(0).divide_microbatches(setup.sharding.mesh).max_terms
