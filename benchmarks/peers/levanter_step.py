"""The training step of Levanter's trainer with Levanter's models, as `pip install levanter` installs it.

The loss is Levanter's cross-entropy over the targets of the batch. Levanter itself takes the targets from the same row
of tokens, and so leaves out the last position; its loss would differ from the losses of the other kinds.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import equinox as eqx  # pyright: ignore[reportMissingImports]
import haliax as hax  # pyright: ignore[reportMissingImports]
import haliax.state_dict  # pyright: ignore[reportMissingImports]
import jax
import jmp  # pyright: ignore[reportMissingImports]
import numpy as np
from levanter.distributed import DistributedConfig, RayConfig  # pyright: ignore[reportMissingImports]
from levanter.layers.attention import AttentionMask  # pyright: ignore[reportMissingImports]
from levanter.layers.rotary import DefaultRotaryEmbeddingsConfig  # pyright: ignore[reportMissingImports]
from levanter.models.gpt2 import Gpt2Config  # pyright: ignore[reportMissingImports]
from levanter.models.llama import LlamaConfig  # pyright: ignore[reportMissingImports]
from levanter.models.loss import cross_entropy_and_logsumexp_penalty  # pyright: ignore[reportMissingImports]
from levanter.optim import AdamConfig  # pyright: ignore[reportMissingImports]
from levanter.tracker import NoopConfig  # pyright: ignore[reportMissingImports]
from levanter.trainer import Trainer, TrainerConfig  # pyright: ignore[reportMissingImports]

from benchmarks.peers.kinds import euclidean_norm, read_weights
from benchmarks.peers.shapes import (
    BETAS,
    EPSILON,
    LEARNING_RATE,
    MAX_GRAD_NORM,
    NORM_EPSILON,
    ROPE_THETA,
    WEIGHT_DECAY,
    Shape,
    make_batches,
)

_STEPS = 1_000_000
"""Steps of the constant schedule, more than any measurement takes."""


def model_config(shape: Shape) -> Any:
    sizes: dict[str, Any] = {
        "seq_len": shape.seq_len,
        "hidden_dim": shape.width,
        "num_layers": shape.layers,
        "num_heads": shape.heads,
        "layer_norm_epsilon": NORM_EPSILON,
        "gradient_checkpointing": False,
    }
    if shape.family == "gpt2":
        return Gpt2Config(**sizes)
    rope = DefaultRotaryEmbeddingsConfig(theta=ROPE_THETA)
    return LlamaConfig(**sizes, intermediate_dim=shape.mlp_width, num_kv_heads=shape.kv_heads, rope=rope)


def mean_loss(model: Any, tokens: Any, targets: Any, *, key: jax.Array) -> tuple[Any, dict[str, Any]]:
    logits = model(tokens, AttentionMask.causal(), key=key).astype(np.float32)
    one_hot = hax.nn.one_hot(targets, model.Vocab, dtype=np.float32)
    return cross_entropy_and_logsumexp_penalty(model.Vocab, logits, one_hot), {}


class LevanterTrainer:
    """A `Trainer` with Levanter's step."""

    def __init__(self, shape: Shape, weights: Path):
        self.facts: dict[str, float] = {}
        self.device = jax.default_backend()
        config = TrainerConfig(
            mp=jmp.get_policy("f32" if self.device == "cpu" else "p=f32,c=bfloat16"),
            train_batch_size=shape.rows,
            num_train_steps=_STEPS,
            tracker=NoopConfig(),
            log_dir=weights.parent / "levanter",
            log_jaxprs=False,
            log_xla_hlo=False,
            load_checkpoint=False,
            require_accelerator=False,
            distributed=DistributedConfig(initialize_jax_distributed=False),
            ray=RayConfig(auto_start_cluster=False),
        )
        config.initialize()
        optimizer = AdamConfig(
            learning_rate=LEARNING_RATE,
            weight_decay=WEIGHT_DECAY,
            beta1=BETAS[0],
            beta2=BETAS[1],
            epsilon=EPSILON,
            max_grad_norm=MAX_GRAD_NORM,
            lr_schedule="constant",
            warmup=0,
        ).build(_STEPS)
        self._trainer = Trainer(config, optimizer, mean_loss, add_default_hooks=False)
        self._trainer.__enter__()
        model_section, vocab = model_config(shape), hax.Axis("vocab", shape.vocab)
        prefix = "transformer." if shape.family == "gpt2" else ""
        arrays = {name.removeprefix(prefix): x for name, x in read_weights(weights).items()}

        def load() -> Any:
            model = model_section.build(vocab, key=jax.random.key(0))
            return haliax.state_dict.from_torch_compatible_state_dict(model, arrays)

        self._state = self._trainer.initial_state(jax.random.PRNGKey(0), model_init=load)
        axes = (config.TrainBatch, model_section.Pos)
        self._batches = [tuple(hax.named(x, axes) for x in batch) for batch in make_batches(shape)]

    def step(self, index: int) -> float:
        info = self._trainer.train_step(self._state, *self._batches[index % len(self._batches)])
        self._state = jax.block_until_ready(info.state)
        return float(info.loss)

    def norm(self) -> float:
        return euclidean_norm(jax.tree.leaves(eqx.filter(self._state.model, eqx.is_inexact_array)))


def make(shape: Shape, weights: Path) -> LevanterTrainer:
    return LevanterTrainer(shape, weights)
