"""The trainers that are compared: every kind by name, with the settings for its process."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from benchmarks.peers.shapes import Shape
from lm_trainer.core.runtime import prepare_process

MATMUL = "matmul"
"""Name of the matrix product that gives the reference rate. It is not a trainer."""


class Trainer(Protocol):
    """A model, its optimizer and its batches, all on the device."""

    facts: Mapping[str, float]
    """Facts for the driver, by name."""
    device: str
    """`cpu` or `gpu`."""

    def step(self, index: int) -> float:
        """Trains on a batch. Returns the loss before the update, after the update is finished."""
        ...

    def norm(self) -> float:
        """Computes the Euclidean norm of all weights."""
        ...


@dataclass(frozen=True)
class Kind:
    """A kind of trainer, and settings for making it."""

    module: str
    """Name of a module of this package, whose `make(shape, weights, **options)` makes the trainer."""
    options: Mapping[str, Any] = field(default_factory=dict)
    prepares: bool = False
    """True if the allocator has the same settings as in `lmt` on a CPU."""


KINDS = {
    "lmt": Kind("lmt_step", {"determinism": "elastic"}, prepares=True),
    "lmt fast": Kind("lmt_step", {"determinism": "fast"}, prepares=True),
    "jax twin": Kind("jax_twin", prepares=True),
    "nnx": Kind("nnx_step"),
    "levanter": Kind("levanter_step"),
    "torch eager": Kind("torch_step"),
    "torch compile": Kind("torch_step", {"compiled": True}),
    "torch eager+alloc": Kind("torch_step", prepares=True),
    "torch compile+alloc": Kind("torch_step", {"compiled": True}, prepares=True),
    "transformers": Kind("torch_step", {"transformers": True}),
}


def make(name: str, shape: Shape, weights: Path) -> Trainer:
    """Makes the trainer of a kind, or the matrix product, in this process, before jax and torch are imported.

    Args:
        name: name of the kind.
        shape: the workload.
        weights: file of initial weights with their transformers names.

    Raises:
        ModuleNotFoundError: if a package is not installed.
    """
    kind = Kind("matmul_step", prepares=True) if name == MATMUL else KINDS[name]
    if kind.prepares:
        prepare_process()
    module = importlib.import_module(f"benchmarks.peers.{kind.module}")
    return module.make(shape, weights, **kind.options)


def euclidean_norm(arrays: Iterable[Any]) -> float:
    """Returns the norm of all elements, summed in float64, so that their order does not matter."""
    return sum(float(np.sum(np.square(np.asarray(x), dtype=np.float64))) for x in arrays) ** 0.5


def read_weights(path: Path) -> dict[str, np.ndarray]:
    """Reads float32 arrays by their transformers names."""
    with np.load(path) as file:
        return {name: file[name] for name in file.files}
