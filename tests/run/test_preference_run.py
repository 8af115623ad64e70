"""Runs with a preference loss: from files of pairs to steps, the reference model, and equal bits on any devices."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from lm_trainer.checkpoint.store import CheckpointStore
from lm_trainer.config.loader import load
from lm_trainer.core.errors import ConfigError, UserError
from lm_trainer.data.tokenizer.bytes import ByteTokenizer
from lm_trainer.objectives import DpoConfig
from lm_trainer.run.build.model import loss_function, trace_model
from lm_trainer.run.build.setup import TrainingSetup, plan_training
from lm_trainer.run.config.run_config import RunConfig, changed_keys, config_hash, numeric_identity
from lm_trainer.run.weights.adapters import find_base_checkpoint
from lm_trainer.run.weights.reference import find_reference, with_reference_weights
from tests.data.test_formats import with_specials
from tests.run.conftest import MakeConfig
from tests.run.frozen_weights import KEYS, check_commands, train
from tests.run.test_adapters import VOCAB, write_base


def write_pairs(path: Path, count: int, seed: int, *, labelled: bool = False) -> str:
    rng = np.random.default_rng(seed)

    def words(least: int, most: int) -> str:
        return "".join(rng.choice(list("abcdefgh "), rng.integers(least, most)))

    records = []
    for number in range(count):
        prompt, chosen, rejected = words(2, 7), words(1, 5) + "!", words(1, 6) + "?"
        label = number % 3 == 0
        records.append(
            {"prompt": prompt, "completion": chosen if label else rejected, "label": label}
            if labelled
            else {"prompt": prompt, "chosen": chosen, "rejected": rejected}
        )
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def preference_changes(loss: dict[str, Any], **changes: Any) -> dict[str, Any]:
    labelled = loss["type"] == "kto"
    files = {
        f"{split}_urls": [write_pairs(Path(f"{split}.jsonl"), count, seed, labelled=labelled)]
        for split, count, seed in (("train", 200, 0), ("validation", 20, 1))
    }
    format = {"type": "unpaired_preference" if labelled else "preference"}
    return {
        "data": {**files, "format": format},
        "loss": loss,
        "model": {"resid_pdrop": 0.0, "embed_pdrop": 0.0, "attn_pdrop": 0.0},
        "trainer": {**KEYS, **changes.pop("trainer", {})},
        **changes,
    }


def configuration(make_config: MakeConfig, loss: dict[str, Any], **changes: Any) -> RunConfig:
    return load(make_config(**preference_changes(loss, **changes)), [], RunConfig).config


def plan(config: RunConfig, devices: int) -> TrainingSetup:
    store = CheckpointStore(Path("checkpoints/run"), config.trainer.checkpointer)
    model = trace_model(config, VOCAB)
    if base := find_base_checkpoint(config, store):
        model = base.with_initial_weights(model)
    model = with_reference_weights(model, config, find_reference(config, store, ByteTokenizer(), VOCAB))
    trainer = config.trainer.model_copy(update={"initialize_from": None})
    store.close()
    return plan_training(
        trainer, config.optimizer, model, loss_function(config), devices=jax.devices()[:devices], seq_len=32
    )


def train_on(config: RunConfig, devices: int) -> tuple[list[dict[str, float]], dict[str, np.ndarray]]:
    return train(config, plan(config, devices))


LOSSES = {
    "dpo": ({"type": "dpo", "beta": 0.5}, {}),
    "dpo-lora": ({"type": "dpo", "beta": 0.5}, {"adapter": {"rank": 2, "alpha": 6.0, "dropout": 0.1}}),
    "orpo": ({"type": "orpo"}, {}),
    "kto": ({"type": "kto", "beta": 0.5}, {}),
}


REPRESENTATIVES = ("dpo-lora", "kto")
"""Losses of pairs and of single answers, beside a frozen base and beside a copy of the initial weights."""


@pytest.mark.parametrize(
    ("name", "numbers"),
    [
        *(pytest.param(name, (3,), marks=pytest.mark.slow) for name in REPRESENTATIVES),
        *(pytest.param(name, (2, 4, 8), marks=pytest.mark.exhaustive) for name in REPRESENTATIVES),
        *(pytest.param(n, (2, 3, 4, 8), marks=pytest.mark.exhaustive) for n in LOSSES if n not in REPRESENTATIVES),
    ],
)
def test_bits_are_the_same_on_any_number_of_devices(
    name: str, numbers: tuple[int, ...], make_config: MakeConfig, in_tmp_path: Path
) -> None:
    loss, changes = LOSSES[name]
    write_base(Path("base"), seed=0)
    config = configuration(make_config, loss, **changes, trainer={"elastic_shards": 8})
    metrics, params = train_on(config, 1)
    assert metrics[-1]["loss"] < metrics[0]["loss"]
    for devices in numbers:
        other_metrics, other_params = train_on(config, devices)
        assert other_metrics == metrics
        for name, x in params.items():
            np.testing.assert_array_equal(x, other_params[name], err_msg=name)


@pytest.mark.slow
def test_the_reference_is_the_start_and_stays(make_config: MakeConfig, in_tmp_path: Path) -> None:
    base = write_base(Path("base"), seed=0)
    metrics, params = train_on(configuration(make_config, {"type": "dpo", "beta": 0.5}), 1)
    np.testing.assert_allclose(metrics[0]["loss"], np.log(2), rtol=1e-6)
    assert metrics[0]["rewards/margin"] == 0
    assert metrics[-1]["rewards/margin"] > 0.01
    for name, x in base.items():
        np.testing.assert_array_equal(params[f"reference.{name}"], x)
        assert not np.array_equal(params[name], x), name
    # Another reference moves the first loss.
    write_base(Path("other"), seed=1)
    config = configuration(make_config, {"type": "dpo", "beta": 0.5, "reference": "other"})
    metrics, params = train_on(config, 1)
    assert abs(metrics[0]["loss"] - np.log(2)) > 1e-3
    store = CheckpointStore(Path("checkpoints/run"), config.trainer.checkpointer)
    with pytest.raises(UserError, match=r"loss\.reference: other was made for another tokenizer than data\.tokenizer"):
        find_reference(config, store, with_specials("<x>"), VOCAB)
    with pytest.raises(UserError, match=f"other predicts {VOCAB} tokens, but the trained model has {VOCAB + 7} rows"):
        find_reference(config, store, ByteTokenizer(), VOCAB + 7)
    missing = config.model_copy(update={"loss": DpoConfig(reference="nobody")})
    with pytest.raises(UserError, match=r"^loss\.reference: nobody: no run of this name"):
        find_reference(missing, store, ByteTokenizer(), VOCAB)
    store.close()


@pytest.mark.slow
@pytest.mark.parametrize("trainer", [{"determinism": "fast"}, {"model_axis_size": 2}], ids=str)
def test_other_programs_compute_the_same_loss(trainer: Any, make_config: MakeConfig, in_tmp_path: Path) -> None:
    write_base(Path("base"), seed=0)
    loss = {"type": "dpo", "beta": 0.5}
    expected, _ = train_on(configuration(make_config, loss), 1)
    actual, _ = train_on(configuration(make_config, loss, trainer=trainer), 4)
    for of_step, like in zip(actual, expected, strict=True):
        assert of_step == {name: pytest.approx(x, rel=1e-3, abs=1e-4) for name, x in like.items()}


@pytest.mark.optimised
@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["dpo", "dpo-lora"])
def test_one_layer_at_a_time(name: str, make_config: MakeConfig, in_tmp_path: Path) -> None:
    """The same loss with a reference of its own and with the base of an adapter, and the same bits on any devices."""
    loss, changes = LOSSES[name]
    write_base(Path("base"), seed=0)
    whole, layered = (
        configuration(make_config, loss, **changes, trainer={"gather": gather, "elastic_shards": 8})
        for gather in ("model", "layer")
    )
    expected, _ = train_on(whole, 1)
    metrics, params = train_on(layered, 1)
    for of_step, like in zip(metrics, expected, strict=True):
        assert of_step == {name: pytest.approx(x, rel=1e-4, abs=1e-5) for name, x in like.items()}
    for devices in (2, 3, 4, 8):
        other_metrics, other_params = train_on(layered, devices)
        assert other_metrics == metrics
        jax.tree.map(np.testing.assert_array_equal, other_params, params)


@pytest.mark.slow
def test_the_division_into_microbatches_does_not_change_the_reference_point(
    make_config: MakeConfig, in_tmp_path: Path
) -> None:
    write_base(Path("base"), seed=0)
    # With another reference, the two models differ from the first step on.
    write_base(Path("other"), seed=1)
    loss = {"type": "kto", "beta": 0.5, "reference": "other"}
    (one, _), (eight, _) = (
        train_on(configuration(make_config, loss, trainer={"elastic_shards": shards}), 1) for shards in (1, 8)
    )
    assert one[0]["kl"] > 0
    for of_step, like in zip(eight, one, strict=True):
        assert of_step == {name: pytest.approx(x, rel=1e-3, abs=1e-4) for name, x in like.items()}


@pytest.mark.slow
def test_the_commands_from_pairs_to_the_export(make_config: MakeConfig, in_tmp_path: Path) -> None:
    write_base(Path("base"), seed=0)
    changes = preference_changes({"type": "dpo"}, trainer={"max_devices": 1, "checkpointer": {"keep": [{"every": 2}]}})
    printed = check_commands(make_config(**changes), "base_step")
    assert "34,720 trained and 34,720 frozen parameters" in printed
    assert "eval/rewards/accuracy" in printed


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"loss": {"type": "dpo"}},
            r"dpo is computed on pairs, but data\.format: text makes documents; write loss: .*",
        ),
        ({"data": {"format": {"type": "preference"}}}, r"next_token is .* makes pairs; write loss: \{type: dpo\}"),
        ({"data": {"format": {"type": "unpaired_preference"}}}, r"makes examples; write loss: \{type: kto\}"),
        (
            {"loss": {"type": "dpo"}, "data": {"format": {"type": "preference"}}},
            r"training starts from random weights; name a run or checkpoint as trainer\.initialize_from",
        ),
    ],
)
def test_losses_fit_their_data_and_start(changes: dict[str, Any], message: str, make_config: MakeConfig) -> None:
    with pytest.raises(ConfigError, match=message):
        load(make_config(**changes), [], RunConfig)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"loss": {"type": "kto"}, "trainer": {"gather": "layer"}}, r"gather: layer: loss: kto also runs .* use model"),
        ({"trainer": {"context_axis_size": 2}}, r"trainer\.context_axis_size: .* set it to 1"),
        (
            {"loss": {"type": "dpo", "reference": "x"}, "adapter": {}, "trainer": {"initialize_from": "y"}},
            r"loss\.reference: with an adapter, the reference of loss: dpo is its frozen base",
        ),
        ({"z_loss_weight": 1e-4}, "z_loss_weight has no effect with loss: orpo"),
        ({"optimizer": {"type": "sophia-h"}}, "estimates the curvature of a cross-entropy"),
    ],
)
def test_settings_that_a_preference_loss_does_not_have_are_refused(
    changes: dict[str, Any], message: str, make_config: MakeConfig, in_tmp_path: Path
) -> None:
    trainer = {"initialize_from": None, **changes.get("trainer", {})}
    loss = changes.get("loss", {"type": "orpo"})
    others = {key: value for key, value in changes.items() if key not in ("loss", "trainer")}
    with pytest.raises(ConfigError, match=message):
        configuration(make_config, loss, trainer=trainer, **others)


def test_runs_from_before_the_key_keep_their_identity() -> None:
    config = RunConfig()
    old = {key: value for key, value in numeric_identity(config).items() if key != "loss"}
    assert changed_keys(old, numeric_identity(config), config) == {}
    assert config_hash(config) == "b87b605c", "the hash of the default configuration, which is a part of run names"
