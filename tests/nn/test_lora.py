"""Adapters: which layers get one, what they compute, what is merged."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from pydantic import ValidationError

from lm_trainer.core.errors import UserError
from lm_trainer.core.tree import from_named_leaves, named_leaves
from lm_trainer.models.peft import module_names
from lm_trainer.nn.linear import Linear
from lm_trainer.nn.lora import Lora, attach_lora, merge_lora
from lm_trainer.nn.lora_config import LoraConfig
from lm_trainer.nn.lora_weights import WeightLora
from tests.compiling import quick_jit
from tests.models.common import SEQ, TINY, VOCAB, change, positions, tokens

ALL = ("attention.k", "attention.out", "attention.q", "attention.v", "mlp.down", "mlp.gate", "mlp.up")


def adapted(family: str, lora: LoraConfig, **changes: Any) -> nnx.Module:
    config = change(TINY[family], **changes)
    model = config.build(VOCAB, rngs=nnx.Rngs(0))
    attach_lora(model, lora, module_names(config, VOCAB), rngs=nnx.Rngs(1))
    return model


def layers(family: str, **lora: Any) -> list[str]:
    """The linear layers that get an adapter, without the number of their place in the period."""
    model = nnx.eval_shape(lambda: adapted(family, LoraConfig(**lora)))
    places = [path for path, node in nnx.iter_graph(model) if isinstance(node, Linear) and node.lora is not None]
    return sorted({".".join(map(str, path[2:])) for path in places})


@pytest.mark.parametrize(
    ("target_modules", "expected"),
    [
        (None, ALL),
        ("all-linear", ALL),
        (["q_proj", "v_proj"], ("attention.q", "attention.v")),
        (["self_attn.o_proj", "mlp.up"], ("attention.out", "mlp.up")),
        (["attention.*"], ALL[:4]),
        (r"model\.layers\.\d+\.mlp\..*", ALL[4:]),
        (r"blocks\..*\.(q|gate)", ("attention.q", "mlp.gate")),
    ],
)
def test_targets_are_named_as_here_or_as_in_transformers(target_modules: Any, expected: tuple[str, ...]) -> None:
    assert layers("llama", target_modules=target_modules) == list(expected)


def test_a_name_of_joined_layers_means_all_of_them() -> None:
    assert layers("gpt2", target_modules=["c_attn"]) == ["attention.k", "attention.q", "attention.v"]
    assert layers("mixtral") == list(ALL[:4])


@pytest.mark.parametrize(
    ("family", "target_modules", "message"),
    [
        ("llama", ["q_porj"], r"'q_porj' matches no layer that can be adapted; did you mean 'q_proj'\?"),
        ("llama", ["q_proj", "ln"], r"'ln' matches no .* There are: .*attention\.q, .*self_attn\.q_proj"),
        ("gpt2", ["lm_head"], r"'lm_head' matches no .* There are: .*embed\.tokens"),
        ("backpack", ["wte"], r"'wte' matches no layer"),
        ("llama", r"model\.layers\.[01]\..*", r"layers\.0\.self_attn\.\w+ but not model\.layers\.2\.self_attn"),
        ("mixtral", r"model\.layers\.0\.mlp.*", r"0\.mlp\.experts\.gate_up_proj but not model\.layers\.1"),
    ],
)
def test_targets_that_cannot_be_adapted_are_refused(family: str, target_modules: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        layers(family, target_modules=target_modules)


def test_other_weights_are_adapted_if_they_are_named() -> None:
    def adapters(family: str, *target_modules: str, **changes: Any) -> set[str]:
        lora = LoraConfig(target_modules=target_modules)
        model = nnx.eval_shape(lambda: adapted(family, lora, **changes))
        names = (".".join(map(str, path)) for path, node in nnx.iter_graph(model) if isinstance(node, WeightLora))
        return set(names)

    experts = {f"blocks.0.mlp.{name}_lora" for name in ("gate", "up", "down")}
    assert adapters("mixtral", "experts.*") == experts
    assert adapters("mixtral", "gate_up_proj") == experts - {"blocks.0.mlp.down_lora"}
    assert adapters("mixtral", "lm_head", "q_proj") == {"head_lora"}
    assert adapters("llama", "embed.tokens", tie_word_embeddings=True) == {"embed.tokens_lora"}
    assert not adapters("llama", "*"), "a pattern for all layers means the layers alone"


def test_dropout_is_refused_for_weights_without_an_input() -> None:
    with pytest.raises(UserError, match=r"adapter\.dropout: an adapter of blocks\.0\.mlp\.down changes the weight"):
        layers("mixtral", dropout=0.1, target_modules=["experts.down_proj"])


@pytest.mark.parametrize("target_modules", [[], "", [""], "(", ["q_proj", ""]])
def test_targets_without_meaning_are_refused(target_modules: Any) -> None:
    with pytest.raises(ValidationError, match=r"names nothing|not a regular expression"):
        LoraConfig(target_modules=target_modules)


@pytest.mark.parametrize(
    ("family", "changes", "lora"),
    [
        ("llama", {"num_layers": 2, "gradient_checkpointing": True}, {"dropout": 0.5}),
        pytest.param("gemma3", {"scan_layers": True}, {"use_rslora": True}, marks=pytest.mark.slow),
        ("gemma", {}, {"target_modules": ["embed_tokens"]}),
        ("mixtral", {}, {"target_modules": ["experts.*", "lm_head", "embed_tokens"]}),
        pytest.param("olmoe", {"expert_kernel": "grouped"}, {"target_modules": ["experts.*"]}, marks=pytest.mark.slow),
    ],
)
def test_an_adapted_model_computes_what_the_merged_one_does(family: str, changes: Any, lora: Any) -> None:
    lora = LoraConfig(rank=3, alpha=5.0, **lora)
    rng, inputs = np.random.default_rng(0), (tokens(), positions(), np.zeros((2, SEQ), np.int32))

    def program(build: Any) -> tuple[Any, dict[str, Any]]:
        graphdef, state = nnx.split(nnx.eval_shape(build), nnx.Param)
        like = nnx.to_pure_dict(state)
        run = quick_jit(lambda params: nnx.merge(graphdef, from_named_leaves(like, params))(*inputs))
        return run, named_leaves(like)

    run, shapes = program(lambda: adapted(family, lora, **changes))
    plain, base_shapes = program(lambda: change(TINY[family], **changes).build(VOCAB, rngs=nnx.Rngs(0)))
    params = {name: 0.2 * rng.standard_normal(x.shape, np.float32) for name, x in shapes.items()}
    idle = {name: np.zeros_like(x) if name.endswith("lora.b") else x for name, x in params.items()}
    merged = merge_lora(params, lora)
    assert merged.keys() == base_shapes.keys()
    np.testing.assert_allclose(run(params), plain(merged), atol=1e-4)
    np.testing.assert_allclose(run(idle), plain({name: params[name] for name in merged}), atol=1e-5)
    assert np.abs(run(params) - run(idle)).max() > 0.1


def test_dropout_acts_on_what_enters_the_adapter_alone() -> None:
    lora = LoraConfig(rank=4, alpha=4.0, dropout=0.5, target_modules=("q_proj",))
    linear = Linear({"embed": 8}, {"mlp": 8}, bias=False, init=_init())
    attached = nnx.Dict(blocks=nnx.Dict({"0": nnx.Dict(q_proj=linear, other=nnx.clone(linear))}))
    linear.weight = nnx.Param(jnp.zeros((8, 8)), logical_axes=("embed", "mlp"))
    attach_lora(attached, lora, {}, rngs=nnx.Rngs(0))
    assert isinstance(linear.lora, Lora)
    a, b = linear.lora.a[...], linear.lora.b[...]
    assert 0.2 < float(jnp.abs(a).max()) <= 8**-0.5
    assert not b.any(), "training starts at the frozen model"
    linear.lora.a = nnx.Param(jnp.concatenate([jnp.eye(4), jnp.zeros((4, 4))]))
    linear.lora.b = nnx.Param(jnp.concatenate([jnp.eye(4), jnp.zeros((4, 4))], axis=1))
    x_MD = jnp.ones((500, 8))
    y_MD = np.asarray(linear(x_MD, key=jax.random.key(0)))
    assert set(np.unique(y_MD[:, :4])) == {0.0, 2.0}
    assert y_MD[:, :4].mean() == pytest.approx(1.0, abs=0.1)
    np.testing.assert_array_equal(linear(x_MD)[:, :4], 1.0)
    assert (np.asarray(linear(x_MD, key=jax.random.key(1))) != y_MD).any()


def _init() -> Any:
    from lm_trainer.nn.init import Initializer

    return Initializer(nnx.Rngs(0), 0.02, 0.02)
