"""The matrix product that gives the reference rate, in a separate process with its own turn."""

from __future__ import annotations

from pathlib import Path

import jax

from benchmarks.peers.shapes import Shape
from lm_trainer.profile.matmul import MatmulProbe


class MatmulTrainer:
    """A `Trainer` that does not train. A step is one chain of matrix products."""

    def __init__(self) -> None:
        self.device = jax.default_backend()
        self._probe = MatmulProbe(jax.devices()[:1], "float32" if self.device == "cpu" else "bfloat16")
        self.facts = {"flops": self._probe.flops}

    def step(self, index: int) -> float:
        self._probe.run()
        return 0.0

    def norm(self) -> float:
        return 0.0


def make(shape: Shape, weights: Path) -> MatmulTrainer:
    return MatmulTrainer()
