"""`parametrization`: multipliers by hand from the tables of the papers, and training against a twin that has them in
its forward pass.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import numpy as np
import pytest
from pydantic import ValidationError

from lm_trainer.checkpoint.store import Restored
from lm_trainer.optim import Multipliers
from lm_trainer.profile.workload import random_batch
from lm_trainer.run.build.setup import build_setup
from lm_trainer.run.build.transfer import Transfer, find_transfer
from lm_trainer.run.config.run_config import RunConfig, config_hash
from lm_trainer.run.weights.saved_state import abstract_checkpoint, arrays_to_save, restore_state
from lm_trainer.step.state.train_state import TrainState, to_host
from tests.run.scaled_twin import train_twin

VOCAB, ROWS, LENGTH, STEPS = 32, 4, 16, 5
GPT2 = {"type": "gpt2", "seq_len": LENGTH, "hidden_dim": 32, "num_layers": 4, "num_heads": 2, "resid_pdrop": 0.0}
LLAMA = {
    "type": "llama",
    "seq_len": LENGTH,
    "hidden_dim": 32,
    "num_layers": 4,
    "num_heads": 2,
    "num_kv_heads": 1,
    "intermediate_dim": 48,
}
GPT2_BASE = {"hidden_dim": 8, "num_layers": 2, "num_heads": 2}
LLAMA_BASE = {"hidden_dim": 8, "num_layers": 2, "intermediate_dim": 12}
OPTIMIZER = {
    "type": "adam",
    "learning_rate": 0.01,
    "lr_schedule": "constant",
    "warmup": 0,
    "weight_decay": 0.3,
    "epsilon": 1e-3,
    "max_grad_norm": None,
}


def make_config(model: dict[str, Any], parametrization: dict[str, Any] | None = None, **sections: Any) -> RunConfig:
    return RunConfig.model_validate(
        {
            "model": model,
            "optimizer": OPTIMIZER,
            "trainer": {"train_batch_size": ROWS, "num_train_steps": STEPS, "elastic_shards": 2},
            **({} if parametrization is None else {"parametrization": parametrization}),
            **sections,
        }
    )


def train(config: RunConfig, devices: int = 1) -> tuple[dict[str, np.ndarray], list[float], TrainState]:
    """Trains on one batch. Returns the initial weights, the loss of each step and the last state."""
    setup = build_setup(config, VOCAB, jax.devices()[:devices])
    batch = random_batch(ROWS, LENGTH, VOCAB)
    setup.step.compile(batch)
    state = setup.init()
    initial, losses = to_host(state.params), []
    for _ in range(config.trainer.num_train_steps):
        state, metrics = setup.take_step(state, batch)
        losses.append(float(metrics["loss"]))
    return initial, losses, state


def initial_factors(transfer: Transfer) -> dict[str, float]:
    return {name: change.total for name, change in transfer.initial.items()}


def test_multipliers_of_a_tied_model_by_hand() -> None:
    """m_N = 4, m_L = 2, and heads that are 4 times as large: scores have sqrt(4) / 16 instead of 1 / sqrt(16)."""
    transfer = find_transfer(make_config(GPT2, {"type": "completep", "base": GPT2_BASE}), VOCAB)
    attention, mlp = "blocks.0.attention.", "blocks.0.mlp."
    expected = {
        # Table 1 of arXiv 2505.01618, alpha = 1: rate 1, epsilon 1 / m_N.
        "embed.tokens": (1, 1, 1 / 4),
        "embed.positions": (1, 1, 1 / 4),
        # Layers: the epsilon 1 / (m_N m_L); matrices: the rate 1 / m_N and the variance 1 / m_N.
        "blocks.0.attention_pre_norm.scale": (1, 1, 1 / 8),
        "blocks.0.attention_pre_norm.bias": (1, 1, 1 / 8),
        "blocks.0.mlp_pre_norm.scale": (1, 1, 1 / 8),
        "blocks.0.mlp_pre_norm.bias": (1, 1, 1 / 8),
        f"{attention}k.weight": (1 / 2, 1 / 4, 1 / 8),
        f"{attention}k.bias": (1, 1, 1 / 8),
        f"{attention}v.weight": (1 / 2, 1 / 4, 1 / 8),
        f"{attention}v.bias": (1, 1, 1 / 8),
        f"{mlp}up.weight": (1 / 2, 1 / 4, 1 / 8),
        f"{mlp}up.bias": (1, 1, 1 / 8),
        # A factor of 1 / 2 of the scores.
        f"{attention}q.weight": (1 / 4, 1 / 8, 1 / 4),
        f"{attention}q.bias": (1 / 2, 1 / 2, 1 / 4),
        # A factor of 1 / m_L of the result. The values for 4 layers are sqrt(2) smaller than the values for 2.
        f"{attention}out.weight": (math.sqrt(2) / 4, 1 / 8, 1 / 4),
        f"{attention}out.bias": (1 / 2, 1 / 2, 1 / 4),
        f"{mlp}down.weight": (math.sqrt(2) / 4, 1 / 8, 1 / 4),
        f"{mlp}down.bias": (1 / 2, 1 / 2, 1 / 4),
        # A factor of 1 / m_N of the input of the head.
        "final_norm.scale": (1 / 4, 1 / 4, 1),
        "final_norm.bias": (1 / 4, 1 / 4, 1),
    }
    assert transfer.multipliers == {name: Multipliers(*values[1:]) for name, values in expected.items()}
    assert initial_factors(transfer) == pytest.approx({name: values[0] for name, values in expected.items()})


def test_multipliers_of_an_untied_model_by_hand() -> None:
    base = {"hidden_dim": 8, "intermediate_dim": 12, "num_heads": 2, "num_kv_heads": 1, "head_dim": 4}
    wide = {**LLAMA, "num_heads": 8, "num_kv_heads": 4}
    transfer = find_transfer(make_config(wide, {"type": "mup", "base": base}), VOCAB)
    matrices = {f"blocks.0.{name}.weight" for name in ("attention.q", "attention.k", "attention.v", "attention.out")}
    matrices |= {f"blocks.0.mlp.{name}.weight" for name in ("up", "gate", "down")}
    scales = {"blocks.0.attention_pre_norm.scale", "blocks.0.mlp_pre_norm.scale", "final_norm.scale"}
    # Tables 3 and 8 of arXiv 2203.03466, and epsilon 1 / m_N.
    expected = {
        **dict.fromkeys(matrices, (1 / 2, 1 / 4, 1 / 4)),
        **dict.fromkeys({"embed.tokens", *scales}, (1, 1, 1 / 4)),
        # With the multiplier 1 / m_N, the gradients of the head do not depend on the width.
        "head": (1 / 4, 1 / 4, 1),
    }
    assert transfer.multipliers == {name: Multipliers(*values[1:]) for name, values in expected.items()}
    assert initial_factors(transfer) == {name: values[0] for name, values in expected.items()}


@pytest.mark.slow
@pytest.mark.parametrize(("model", "base"), [(GPT2, GPT2_BASE), (LLAMA, LLAMA_BASE)], ids=["gpt2", "llama"])
def test_training_equals_a_twin_with_the_multipliers_in_its_forward_pass(
    model: dict[str, Any], base: dict[str, Any]
) -> None:
    config = make_config(model, {"type": "completep", "base": base})
    initial, losses, _ = train(config)
    twin = train_twin(config, initial, random_batch(ROWS, LENGTH, VOCAB), steps=STEPS)
    assert losses[0] - losses[-1] > 0.1
    np.testing.assert_allclose(losses, twin, rtol=1e-5)
    # The settings of the optimizer matter for this result.
    _, standard, _ = train(make_config(model))
    assert not np.allclose(standard[1:], twin[1:], rtol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("model", [GPT2, LLAMA], ids=["gpt2", "llama"])
def test_at_the_size_of_the_base_all_bits_are_those_of_the_standard(model: dict[str, Any]) -> None:
    base = {"hidden_dim": model["hidden_dim"], "num_layers": model["num_layers"]}
    *plain, state = train(make_config(model))
    *transferred, same_state = train(make_config(model, {"type": "completep", "base": base}))
    np.testing.assert_equal(transferred, plain)
    np.testing.assert_equal(to_host(same_state.params), to_host(state.params))


@pytest.mark.slow
@pytest.mark.optimised
@pytest.mark.parametrize(
    ("kind", "optimizer", "gather"),
    [
        ("completep", "adam", "model"),
        ("completep", "adam", "layer"),
        ("completep", "muon", "model"),
        ("completep", "muon", "layer"),
        ("mup", "adam", "layer"),
        ("mup", "muon", "layer"),
    ],
)
def test_bits_are_equal_on_every_mesh(kind: str, optimizer: str, gather: str) -> None:
    config = make_transferred(kind, optimizer, gather)
    _, losses, state = train(config)
    for devices in (2, 4):
        _, other_losses, other = train(config, devices)
        assert other_losses == losses
        np.testing.assert_equal(to_host(other.params), to_host(state.params))


def make_transferred(kind: str, optimizer: str, gather: str) -> RunConfig:
    """The configuration of a Llama with a base; the depth is part of the base of CompleteP alone."""
    base = {key: size for key, size in LLAMA_BASE.items() if kind == "completep" or key != "num_layers"}
    return make_config(
        LLAMA,
        {"type": kind, "base": base},
        optimizer={"type": optimizer, "warmup": 0},
        trainer={"train_batch_size": ROWS, "num_train_steps": 3, "elastic_shards": 4, "gather": gather},
    )


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "optimizer"), [("mup", "adam"), ("completep", "adam"), ("completep", "muon")])
def test_a_run_resumed_on_other_devices_has_the_same_bits(kind: str, optimizer: str) -> None:
    """By layers: two steps on one device, and the third on two, from what a checkpoint holds."""
    config, batch = make_transferred(kind, optimizer, "layer"), random_batch(ROWS, LENGTH, VOCAB)
    alone, other = (build_setup(config, VOCAB, jax.devices()[:devices]) for devices in (1, 2))
    for setup in (alone, other):
        setup.step.compile(batch)
    state = alone.init()
    for _ in range(2):
        state, _ = alone.take_step(state, batch)
    shapes = abstract_checkpoint(other)
    saved = {n: jax.device_put(np.asarray(x), shapes[n].sharding) for n, x in arrays_to_save(state, alone).items()}
    state, _ = alone.take_step(state, batch)
    resumed, _ = other.take_step(restore_state(Restored(2, saved, {}), other, other.init), batch)
    np.testing.assert_equal(to_host(resumed.params), to_host(state.params))
    np.testing.assert_equal(*(jax.tree.map(np.asarray, x.opt_state) for x in (resumed, state)))


def test_the_standard_parametrization_has_the_hash_of_runs_before_there_was_a_choice() -> None:
    assert config_hash(make_config(GPT2)) == config_hash(make_config(GPT2, {"type": "standard"}))
    other = make_config(GPT2, {"type": "completep", "base": GPT2_BASE})
    assert config_hash(other) != config_hash(make_config(GPT2))


@pytest.mark.parametrize(
    ("model", "parametrization", "sections", "error"),
    [
        (GPT2, {"type": "mup", "base": GPT2_BASE}, {}, "mup transfers over widths alone"),
        (GPT2, {"type": "completep", "base": {"hidden_dim": 8}}, {}, "base.num_layers is missing"),
        (GPT2, {"type": "mup", "base": {}}, {}, "at least 1 item"),
        (GPT2, {"type": "mup", "base": {"hiden_dim": 8}}, {}, "base.hiden_dim.*did you mean 'hidden_dim'"),
        (GPT2, {"type": "mup", "base": {"hidden_dim": 7}}, {}, "base: hidden_dim=7 is not a multiple"),
        (GPT2, {"type": "mup", "base": {"type": "llama"}}, {}, "base.type"),
        (GPT2, {"type": "mup", "base": {"initializer_range": 0.1}}, {}, "different initial standard deviations"),
        (GPT2, {"type": "mup", "base": {"hidden_dim": 8}}, {"optimizer": {"type": "soap"}}, "soap: there is no rule"),
        (GPT2, {"type": "mup", "base": {"hidden_dim": 8}}, {"optimizer": {"type": "adamh"}}, "keep their norms"),
        (GPT2, {"type": "mup", "base": {"hidden_dim": 8}}, {"optimizer": {"type": "mars"}}, "max_grad_norm: null"),
        (
            {**LLAMA, "tie_word_embeddings": True, "use_layer_norm_weight": False},
            {"type": "mup", "base": {"hidden_dim": 8}},
            {},
            "no such gain; untie the head",
        ),
        (
            {"type": "mpt", "hidden_dim": 32, "num_heads": 2, "num_layers": 2, "clip_qkv": 6.0},
            {"type": "mup", "base": {"hidden_dim": 8}},
            {},
            "queries are clipped",
        ),
        (
            {"type": "backpack", "hidden_dim": 32, "num_heads": 2, "num_layers": 2, "num_senses": 4},
            {"type": "mup", "base": {"hidden_dim": 8}},
            {},
            "sense vectors",
        ),
        (
            {**LLAMA, "type": "gemma4", "num_global_kv_heads": 2, "layer_embedding_dim": 8},
            {"type": "mup", "base": {"hidden_dim": 8, "layer_embedding_dim": 4}},
            {},
            "a token embedding of its own, of size 4 in the base and 8 in the model",
        ),
    ],
)
def test_parts_without_a_rule_are_refused_by_name(
    model: dict[str, Any], parametrization: dict[str, Any], sections: dict[str, Any], error: str
) -> None:
    with pytest.raises(ValidationError, match=error):
        make_config(model, parametrization, **sections)


def test_a_change_in_the_number_of_experts_is_refused() -> None:
    model = {**LLAMA, "type": "mixtral", "n_routed_experts": 8, "num_experts_per_tok": 2}
    make_config(model, {"type": "mup", "base": {"hidden_dim": 8}})
    with pytest.raises(ValidationError, match="the base has 4 experts, 2 for each token, and the model 8"):
        make_config(model, {"type": "mup", "base": {"hidden_dim": 8, "n_routed_experts": 4}})
