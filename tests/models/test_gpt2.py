from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from lm_trainer.models import Gpt2Config
from tests.models.common import VOCAB

CHANGES: dict[str, Any] = {
    "seq_len": 512,
    "hidden_dim": 384,
    "num_layers": 3,
    "num_heads": 4,
    "mlp_scale": 2,
    "initializer_range": 0.1,
    "embed_pdrop": 0.1,
    "resid_pdrop": 0.1,
    "attn_pdrop": 0.1,
    "layer_norm_epsilon": 1e-6,
    "activation_function": "relu",
    "scale_attn_by_inverse_layer_idx": True,
    "upcast_attn": True,
    "use_bias": False,
    "gradient_checkpointing": "dots",
    "scan_layers": True,
    "attn_backend": "xla",
    "use_flash_attention": True,
    "flash_attention_block_size": 256,
    "attn_max_documents": 1,
}
NOT_IN_THE_SPEC = {"type", "cross_entropy_block_size", "reference_checkpoint"}


def test_every_field_matters():
    assert set(CHANGES) | NOT_IN_THE_SPEC == set(Gpt2Config.model_fields)
    default = Gpt2Config().spec(VOCAB)
    for field, value in CHANGES.items():
        assert Gpt2Config(**{field: value}).spec(VOCAB) != default, field


def test_defaults_are_gpt2_small():
    config = Gpt2Config()
    spec = config.spec(50257)
    assert (config.seq_len, config.hidden_dim, config.num_layers, config.num_heads) == (1024, 768, 12, 12)
    assert spec.blocks[0].attention.head_dim == 64
    mlp = spec.blocks[0].mlp
    assert mlp is not None
    assert mlp.hidden_dim == 3072
    assert spec.remat == "full"
    assert not spec.scan
    assert Gpt2Config(num_layers=13).spec(VOCAB).scan
    assert Gpt2Config(gradient_checkpointing=False).spec(VOCAB).remat == "none"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"hidden_dim": 100, "num_heads": 12}, "hidden_dim=100 is not a multiple of num_heads=12"),
        ({"num_layers": 0}, "greater than 0"),
        ({"attn_pdrop": 1.0}, "less than 1"),
        ({"activation_function": "mish"}, "gelu_new"),
        ({"gradient_checkpointing": "some"}, "dots_no_batch"),
        ({"attn_backend": "triton"}, "'xla', 'cudnn', 'splash', 'ring' or 'auto'"),
        ({"use_flash_attention": False, "flash_attention_block_size": 8}, "contradicts flash_attention_block_size: 8"),
        ({"cross_entropy_block_size": 0}, "greater than 0"),
    ],
)
def test_wrong_values_are_refused(fields, message):
    with pytest.raises(ValidationError, match=message):
        Gpt2Config(**fields)


def test_flash_attention_has_a_default_block():
    def block(**fields: Any) -> int | None:
        return Gpt2Config(**fields).spec(VOCAB).blocks[0].attention.scores.block_size

    assert block() is block(use_flash_attention=False) is None
    assert block(use_flash_attention=True) == 1024
    assert block(use_flash_attention=True, flash_attention_block_size=64) == block(flash_attention_block_size=64) == 64
