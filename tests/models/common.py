"""One tiny configuration per family; what is tested over all families runs on these."""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np
from flax import nnx

from lm_trainer.models import AnyModel, Gpt2Config, LlamaConfig
from lm_trainer.nn.decoder import Decoder
from lm_trainer.nn.spec import DecoderSpec

VOCAB, SEQ = 61, 16

ROTARY: dict[str, Any] = {
    "seq_len": SEQ,
    "hidden_dim": 32,
    "intermediate_dim": 48,
    "num_layers": 3,
    "num_heads": 4,
    "num_kv_heads": 2,
    "initializer_range": 0.1,
    "gradient_checkpointing": False,
    "scan_layers": False,
}

TINY: dict[str, AnyModel] = {
    "gpt2": Gpt2Config(
        seq_len=SEQ,
        hidden_dim=32,
        num_layers=3,
        num_heads=4,
        initializer_range=0.1,
        gradient_checkpointing=False,
        scale_attn_by_inverse_layer_idx=True,
    ),
    "llama": LlamaConfig(**ROTARY),
}


def graphdef(config: AnyModel) -> nnx.GraphDef[Decoder]:
    return nnx.split(nnx.eval_shape(lambda: config.build(VOCAB, rngs=nnx.Rngs(0))), nnx.Param)[0]


def params(config: AnyModel) -> dict[str, Any]:
    """Fresh parameters, made under jit."""
    return _params(config.spec(VOCAB))


@functools.cache
def _params(spec: DecoderSpec) -> dict[str, Any]:
    return jax.jit(lambda: nnx.to_pure_dict(nnx.state(Decoder(spec, rngs=nnx.Rngs(0)), nnx.Param)))()


def change(config: AnyModel, **fields: Any) -> AnyModel:
    return type(config).model_validate({**config.model_dump(), **fields})


def tokens(rows: int = 2, length: int = SEQ, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, VOCAB, (rows, length)).astype(np.int32)


def positions(rows: int = 2, length: int = SEQ) -> np.ndarray:
    return np.tile(np.arange(length, dtype=np.int32), (rows, 1))
