from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from lm_trainer.models import Gpt2Config, MixtralConfig
from lm_trainer.nn.loss import token_loss
from lm_trainer.profile.flops import flops_per_token, recomputed_flops_per_token, recomputed_product_flops
from lm_trainer.profile.workload import random_batch


@pytest.mark.parametrize(
    ("config", "vocab_size", "forward"),
    [
        (Gpt2Config(), 50257, 285_255_168),
        (Gpt2Config(hidden_dim=32, num_layers=2, num_heads=4), 50257, 3_552_320),
        (Gpt2Config(hidden_dim=32, num_layers=2, num_heads=4), 8192, 860_160),
    ],
)
def test_published_figures(config, vocab_size, forward):
    """Figures that Levanter computes for the same models."""
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


LAYERS, VOCAB, LENGTH = 6, 64, 16
SMALL: dict[str, Any] = {"hidden_dim": 8, "num_layers": LAYERS, "num_heads": 2, "seq_len": LENGTH}


def recomputed(checkpointing: Any, **fields: Any) -> int:
    config = Gpt2Config(**SMALL, gradient_checkpointing=checkpointing, **fields)
    return recomputed_flops_per_token(config.spec(VOCAB), LENGTH)


def test_full_recomputation_is_a_third_more_for_the_blocks_and_none_nothing():
    count = flops_per_token(Gpt2Config(**SMALL).spec(VOCAB), LENGTH)
    blocks = 3 * (count.forward - count.head)
    for full in (True, "full", "recompute", "offload"):
        assert 3 * (blocks + recomputed(full)) == 4 * blocks
    for none in (False, "save_all"):
        assert recomputed(none) == 0


@pytest.mark.parametrize("checkpointing", [False, "dots", {"nested": 2}])
def test_layer_by_layer_all_blocks_are_computed_again_whatever_the_policy(checkpointing: Any):
    config = Gpt2Config(**SMALL, gradient_checkpointing=checkpointing, scan_layers=True)
    assert recomputed_flops_per_token(config.spec(VOCAB), LENGTH, every_layer=True) == recomputed(True)


def products(jaxpr: Any) -> int:
    """The operations of all products in a traced function; a loop's count as often as it turns."""
    total = 0
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            (contracted, _), _ = eqn.params["dimension_numbers"]
            left = eqn.invars[0].aval.shape
            total += 2 * int(np.prod(eqn.outvars[0].aval.shape)) * int(np.prod([left[d] for d in contracted]))
        inner = [x for x in jax.tree.leaves(list(eqn.params.values())) if hasattr(x, "eqns")]
        total += sum(map(products, inner)) * eqn.params.get("length", 1)
    return total


def traced_products(config: Gpt2Config) -> int:
    """The operations of the products of a training step, per token, as JAX traces it."""
    model = nnx.eval_shape(lambda: config.build(VOCAB, rngs=nnx.Rngs(0)))
    graphdef, params = nnx.split(model, nnx.Param)
    batch = random_batch(1, LENGTH, VOCAB)
    grad = jax.grad(lambda p: token_loss(nnx.merge(graphdef, p), batch, dtype=jnp.float32)[0])
    return products(jax.make_jaxpr(grad)(params).jaxpr) // LENGTH


@pytest.mark.parametrize(
    ("checkpointing", "layers_again", "unneeded"),
    [
        (True, LAYERS, True),
        ("dots", LAYERS, False),
        ("dots_no_batch", LAYERS, False),
        ({"save_block_internals": ["attention"]}, LAYERS, True),
        ({"save_block_internals": ["attention", "mlp"]}, LAYERS, False),
        ({"offload_block_internals": ["mlp"]}, LAYERS, False),
        ({"nested": 2}, 2 * LAYERS, True),
        ({"nested": 4}, LAYERS + 4, True),
    ],
    ids=str,
)
def test_recomputed_products_are_those_that_jax_traces(checkpointing: Any, layers_again: int, unneeded: bool):
    """`unneeded`: the MLP's last product, which counts, and which JAX leaves out as no gradient needs it."""
    plain = Gpt2Config(**SMALL, gradient_checkpointing=False, scan_layers=True)
    config = Gpt2Config(**SMALL, gradient_checkpointing=checkpointing, scan_layers=True)
    recomputed_flops = traced_products(config) - traced_products(plain)
    softmax = layers_again * 3 * LENGTH * SMALL["num_heads"]
    left_out = LAYERS * 2 * 4 * SMALL["hidden_dim"] ** 2 if unneeded else 0
    assert recomputed(checkpointing, scan_layers=True) == recomputed_flops + softmax + left_out
    # Without kernels, JAX keeps the scores with "dots".
    scores = 0 if checkpointing == "dots" else layers_again * 4 * LENGTH * SMALL["hidden_dim"]
    assert recomputed_product_flops(config.spec(VOCAB)) == recomputed_flops - scores


def test_experts_are_computed_again_where_products_are_kept():
    """JAX's policies keep no product of groups."""
    config = MixtralConfig(
        seq_len=LENGTH, hidden_dim=8, intermediate_dim=12, num_layers=3, num_heads=2, num_kv_heads=2,
        n_routed_experts=4, num_experts_per_tok=2, gradient_checkpointing="dots",
    )  # fmt: skip
    softmax, experts = 3 * LENGTH * 2, 2 * 2 * 3 * 8 * 12
    assert recomputed_flops_per_token(config.spec(VOCAB), LENGTH) == 3 * (softmax + experts)
