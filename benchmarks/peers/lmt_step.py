"""The training step that `lmt train` runs, and the initial weights for all kinds."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np

from benchmarks.peers.kinds import euclidean_norm, read_weights
from benchmarks.peers.shapes import (
    BETAS,
    EPSILON,
    LEARNING_RATE,
    MAX_GRAD_NORM,
    NORM_EPSILON,
    ROPE_THETA,
    SHAPES,
    WEIGHT_DECAY,
    Shape,
    make_batches,
)
from lm_trainer.models import hf
from lm_trainer.profile.flops import flops_per_token, parameter_count
from lm_trainer.profile.workload import random_batch
from lm_trainer.run.build.setup import TrainingSetup, build_setup
from lm_trainer.run.config.run_config import RunConfig
from lm_trainer.step.state.train_state import to_host


def run_config(shape: Shape, determinism: Literal["elastic", "fast"]) -> RunConfig:
    """Returns a configuration with float32 on a CPU, bfloat16 products on a GPU, and no recomputation."""
    cpu = jax.default_backend() == "cpu"
    model = {
        **shape.model_section(),
        "initializer_range": shape.init_std,
        "layer_norm_epsilon": NORM_EPSILON,
        "gradient_checkpointing": False,
        "attn_backend": "auto",
    }
    if shape.family == "llama":
        model["rope"] = {"type": "default", "theta": ROPE_THETA}
    return RunConfig.model_validate(
        {
            "model": model,
            "data": {"tokenizer": "bytes"},
            "trainer": {
                "train_batch_size": shape.rows,
                "elastic_shards": shape.elastic_shards,
                "determinism": determinism,
                "mp": "f32" if cpu else "p=f32,c=bfloat16",
            },
            "optimizer": {
                "type": "adam",
                "learning_rate": LEARNING_RATE,
                "beta1": BETAS[0],
                "beta2": BETAS[1],
                "epsilon": EPSILON,
                "weight_decay": WEIGHT_DECAY,
                "max_grad_norm": MAX_GRAD_NORM,
            },
        }
    )


class LmtTrainer:
    """A `Trainer` with `lmt`'s step."""

    def __init__(self, shape: Shape, weights: Path, determinism: Literal["elastic", "fast"]):
        config = run_config(shape, determinism)
        self._program: TrainingSetup = build_setup(config, shape.vocab, jax.devices()[:1])
        nested = hf.params_from_hf(config.model, shape.vocab, read_weights(weights))
        self._state = self._program.from_weights(self._program.model.flatten(nested))
        plain = random_batch(shape.rows, shape.seq_len, shape.vocab)
        rows = [plain._replace(tokens=tokens, targets=targets) for tokens, targets in make_batches(shape)]
        self._program.step.compile(rows[0])
        self._batches = [self._program.step.put(batch) for batch in rows]
        self.device = jax.default_backend()
        spec = config.model.spec(shape.vocab)
        self.facts = {
            "flops_per_token": flops_per_token(spec, shape.seq_len).training,
            "parameters": parameter_count(spec),
        }

    def step(self, index: int) -> float:
        batch: Any = self._batches[index % len(self._batches)]
        self._state, metrics = self._program.step(self._state, batch, LEARNING_RATE)
        # The loss may be ready before the new state is.
        jax.block_until_ready((self._state, metrics))
        return float(metrics["loss"])

    def norm(self) -> float:
        return euclidean_norm(to_host(self._state.params).values())


def make(shape: Shape, weights: Path, *, determinism: Literal["elastic", "fast"]) -> LmtTrainer:
    return LmtTrainer(shape, weights, determinism)


def write_weights(shape: Shape, path: Path) -> None:
    """Writes `lmt`'s initial weights, but with random biases and gains, because zeros and ones would hide errors."""
    config = run_config(shape, "elastic")
    setup = build_setup(config, shape.vocab, jax.devices()[:1])
    tensors = hf.params_to_hf(config.model, setup.model.nest(to_host(setup.init().params)))
    generator = np.random.default_rng(1)
    moved = {n: x + 0.1 * generator.standard_normal(x.shape, np.float32) for n, x in tensors.items() if x.ndim == 1}
    arrays: dict[str, Any] = {**tensors, **moved}
    np.savez(path, **arrays)


def main() -> None:
    parser = argparse.ArgumentParser(description="Writes the weights that all kinds start from.")
    parser.add_argument("shape", choices=list(SHAPES))
    parser.add_argument("path", type=Path)
    options = parser.parse_args()
    write_weights(SHAPES[options.shape], options.path)


if __name__ == "__main__":
    main()
