"""Workloads by name, their batches, and the optimizer settings that all kinds use.

Shape letters: B rows, S positions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from lm_trainer.run.config.default_shards import default_microbatches

LEARNING_RATE, BETAS, EPSILON, WEIGHT_DECAY, MAX_GRAD_NORM = 1e-3, (0.9, 0.95), 1e-8, 0.1, 1.0
NORM_EPSILON = 1e-5
ROPE_THETA = 10_000.0
BATCHES = 4
"""Number of batches. Step i uses batch i modulo this number."""

_EMBEDDINGS = ("wte.weight", "wpe.weight", "embed_tokens.weight")


@dataclass(frozen=True)
class Shape:
    """One workload."""

    family: Literal["gpt2", "llama"]
    layers: int
    width: int
    heads: int
    seq_len: int
    rows: int
    vocab: int
    kv_heads: int = 0
    """Number of key and value heads of a Llama."""
    mlp_width: int = 0
    """MLP width of a Llama. The MLP of a GPT-2 is four times as wide as the model."""

    @property
    def head_dim(self) -> int:
        return self.width // self.heads

    @property
    def tokens(self) -> int:
        """Number of tokens per step."""
        return self.rows * self.seq_len

    @property
    def elastic_shards(self) -> int:
        """Default number of microbatches in `lmt`."""
        return math.gcd(default_microbatches(self.tokens), self.rows)

    @property
    def init_std(self) -> float:
        """Standard deviation of initial weights, so large that every part affects the loss from the first step on."""
        return self.width**-0.5

    def model_section(self) -> dict[str, Any]:
        """Returns the section `model` of a configuration of `lmt`."""
        section: dict[str, Any] = {
            "type": self.family,
            "seq_len": self.seq_len,
            "hidden_dim": self.width,
            "num_layers": self.layers,
            "num_heads": self.heads,
        }
        if self.family == "llama":
            section |= {"num_kv_heads": self.kv_heads, "intermediate_dim": self.mlp_width}
        return section

    def describe(self) -> str:
        family = {"gpt2": "GPT-2", "llama": "Llama"}[self.family]
        groups = f", {self.kv_heads} of keys and values, an MLP of {self.mlp_width}" if self.family == "llama" else ""
        return (
            f"{family} of {self.layers} layers, width {self.width}, {self.heads} heads{groups}, a vocabulary of "
            f"{self.vocab:,}; {self.rows} rows of {self.seq_len} tokens"
        )


SHAPES = {
    "tiny": Shape("gpt2", 2, 64, 2, seq_len=32, rows=8, vocab=256),
    "llama-tiny": Shape("llama", 2, 64, 4, seq_len=32, rows=8, vocab=256, kv_heads=2, mlp_width=128),
    "levanter-nano": Shape("gpt2", 2, 32, 4, seq_len=1024, rows=32, vocab=8192),
    "nano": Shape("gpt2", 4, 128, 4, seq_len=128, rows=32, vocab=256),
    "30m": Shape("gpt2", 6, 384, 6, seq_len=256, rows=4, vocab=50_304),
    "llama-30m": Shape("llama", 6, 384, 6, seq_len=256, rows=4, vocab=50_304, kv_heads=2, mlp_width=1024),
    "124m": Shape("gpt2", 12, 768, 12, seq_len=512, rows=2, vocab=50_304),
    "124m-gpu": Shape("gpt2", 12, 768, 12, seq_len=1024, rows=16, vocab=50_304),
    "llama-1b": Shape("llama", 16, 2048, 32, seq_len=2048, rows=8, vocab=50_304, kv_heads=8, mlp_width=8192),
}


def make_batches(shape: Shape) -> list[tuple[np.ndarray, np.ndarray]]:
    """Makes tokens and targets of all batches, int32 [B, S]. Small ids are more frequent, which the model can learn."""
    generator = np.random.default_rng(0)
    drawn = generator.random((BATCHES, shape.rows, shape.seq_len + 1))
    tokens = (shape.vocab * drawn**3).astype(np.int32)
    return [(np.ascontiguousarray(rows[:, :-1]), np.ascontiguousarray(rows[:, 1:])) for rows in tokens]


def is_decayed(name: str, dims: Sequence[int]) -> bool:
    """Returns True if weight decay applies to the weight with this transformers name: matrices except embeddings."""
    return len(dims) == 2 and not name.endswith(_EMBEDDINGS)
