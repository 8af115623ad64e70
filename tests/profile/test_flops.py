from __future__ import annotations

import pytest

from lm_trainer.models import Gpt2Config
from lm_trainer.profile.flops import flops_per_token


@pytest.mark.parametrize(
    ("config", "vocab_size", "forward"),
    [
        (Gpt2Config(), 50257, 285_255_168),
        (Gpt2Config(hidden_dim=32, num_layers=2, num_heads=4), 50257, 3_552_320),
        (Gpt2Config(hidden_dim=32, num_layers=2, num_heads=4), 8192, 860_160),
    ],
)
def test_published_figures(config, vocab_size, forward):
    """What Levanter computes for the same models."""
    count = flops_per_token(config.spec(vocab_size), 1024)
    assert count.forward == forward
    assert count.training == 3 * forward


def test_terms_one_by_one():
    config = Gpt2Config(hidden_dim=6, num_heads=3, num_layers=2, mlp_scale=5, seq_len=7)
    count = flops_per_token(config.spec(11), 7)
    assert count.qkv == 2 * (2 * 6 * 18)
    assert count.attention_out == 2 * (2 * 6 * 6)
    assert count.attention_product == 2 * (2 * 7 * 6 + 2 * 7 * 6)
    assert count.attention_softmax == 2 * (3 * 7 * 3)
    assert count.mlp == 2 * (2 * 6 * 30 + 2 * 30 * 6)
    assert count.head == 2 * 6 * 11
    assert count.forward_matmul == count.forward - count.attention_softmax
