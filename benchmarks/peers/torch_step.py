"""Training step in PyTorch as its documentation recommends: SDPA, fused AdamW, eager or compiled, autocast on a GPU.

Shape letters: B rows, S positions.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.peers.kinds import read_weights
from benchmarks.peers.shapes import (
    BETAS,
    EPSILON,
    LEARNING_RATE,
    MAX_GRAD_NORM,
    NORM_EPSILON,
    ROPE_THETA,
    WEIGHT_DECAY,
    Shape,
    is_decayed,
    make_batches,
)
from benchmarks.peers.torch_models import plain_model
from lm_trainer.core.runtime import available_cores


def transformers_model(shape: Shape, weights: dict[str, np.ndarray]) -> nn.Module:
    """Makes the module of transformers with the given weights on the CPU."""
    import transformers

    if shape.family == "gpt2":
        config = transformers.GPT2Config(
            vocab_size=shape.vocab,
            n_positions=shape.seq_len,
            n_embd=shape.width,
            n_layer=shape.layers,
            n_head=shape.heads,
            layer_norm_epsilon=NORM_EPSILON,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            bos_token_id=None,
            eos_token_id=None,
            use_cache=False,
        )
        architecture: Any = transformers.GPT2LMHeadModel
    else:
        config = transformers.LlamaConfig(
            vocab_size=shape.vocab,
            hidden_size=shape.width,
            intermediate_size=shape.mlp_width,
            num_hidden_layers=shape.layers,
            num_attention_heads=shape.heads,
            num_key_value_heads=shape.kv_heads,
            max_position_embeddings=shape.seq_len,
            rms_norm_eps=NORM_EPSILON,
            rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
            use_cache=False,
        )
        architecture = transformers.LlamaForCausalLM
    config._attn_implementation = "sdpa"
    model = architecture(config)
    missing, unknown = model.load_state_dict({n: torch.tensor(x) for n, x in weights.items()}, strict=False)
    tied = ["lm_head.weight"] if shape.family == "gpt2" else []
    assert (missing, unknown) == (tied, []), (missing, unknown)
    return model.train()


class TorchTrainer:
    """A `Trainer` in PyTorch."""

    def __init__(self, shape: Shape, model: nn.Module, *, compiled: bool):
        self.facts: dict[str, float] = {}
        self._cuda = torch.cuda.is_available()
        self.device, device = ("gpu", "cuda") if self._cuda else ("cpu", "cpu")
        self._model = model.to(device)
        self._batches = [
            tuple(torch.tensor(x, dtype=torch.long, device=device) for x in b) for b in make_batches(shape)
        ]
        self._loss = torch.compile(self._forward) if compiled else self._forward
        named = list(self._model.named_parameters())
        self._parameters = [p for _, p in named]
        groups = [
            {"params": [p for n, p in named if is_decayed(n, p.shape) == decaying], "weight_decay": strength}
            for decaying, strength in ((True, WEIGHT_DECAY), (False, 0.0))
        ]
        self._optimizer = torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=BETAS, eps=EPSILON, fused=True)

    def _forward(self, tokens_BS: Tensor, targets_BS: Tensor) -> Tensor:
        # As for every kind, float32 on a CPU and bfloat16 products on a GPU.
        with torch.autocast("cuda", torch.bfloat16, enabled=self._cuda):
            output = self._model(tokens_BS)
            logits_BSV = output if isinstance(output, Tensor) else output.logits
            return F.cross_entropy(logits_BSV.flatten(0, 1), targets_BS.flatten())

    def step(self, index: int) -> float:
        loss = self._loss(*self._batches[index % len(self._batches)])
        loss.backward()
        nn.utils.clip_grad_norm_(self._parameters, MAX_GRAD_NORM)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        if self._cuda:
            # Calls return before the GPU has finished, so wait for the end of the step.
            torch.cuda.synchronize()
        return float(loss.detach())

    def norm(self) -> float:
        return sum(float(p.detach().double().square().sum()) for p in self._parameters) ** 0.5


def make(shape: Shape, weights: Path, *, compiled: bool = False, transformers: bool = False) -> TorchTrainer:
    torch.set_num_threads(available_cores())
    model = (transformers_model if transformers else plain_model)(shape, read_weights(weights))
    return TorchTrainer(shape, model, compiled=compiled)
