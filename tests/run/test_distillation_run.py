"""Runs that distil a teacher: its weights stay, bits are equal on any devices, and other vocabularies are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from lm_trainer.checkpoint.store import CheckpointStore
from lm_trainer.config.loader import load
from lm_trainer.core.errors import ConfigError, UserError
from lm_trainer.data.tokenizer.bytes import ByteTokenizer
from lm_trainer.profile.workload import random_batch
from lm_trainer.run.build.model import loss_function, trace_model
from lm_trainer.run.build.setup import TrainingSetup, plan_training
from lm_trainer.run.config.run_config import RunConfig
from lm_trainer.run.weights.teacher import find_teacher, resolve_teacher
from tests.conftest import run_here
from tests.data.test_formats import with_specials
from tests.run.conftest import MakeConfig
from tests.run.frozen_weights import KEYS, ROWS, check_commands, train
from tests.run.test_adapters import VOCAB, write_base


def distillation_changes(loss: dict[str, Any], **changes: Any) -> dict[str, Any]:
    trainer = {**KEYS, "initialize_from": None, **changes.pop("trainer", {})}
    # Narrower than the teacher.
    model = {"resid_pdrop": 0.1, "embed_pdrop": 0.0, "attn_pdrop": 0.0, "hidden_dim": 16, **changes.pop("model", {})}
    return {
        "loss": {"type": "distillation", "teacher": "base", **loss},
        "model": model,
        "trainer": trainer,
        **changes,
    }


def configuration(make_config: MakeConfig, loss: dict[str, Any], **changes: Any) -> RunConfig:
    return resolve_teacher(load(make_config(**distillation_changes(loss, **changes)), [], RunConfig).config)


def plan(config: RunConfig, devices: int) -> TrainingSetup:
    store = CheckpointStore(Path("checkpoints/run"), config.trainer.checkpointer)
    teacher = find_teacher(config, store, ByteTokenizer(), VOCAB)
    store.close()
    assert teacher is not None
    return plan_training(
        config.trainer,
        config.optimizer,
        teacher.with_weights(trace_model(config, VOCAB)),
        loss_function(config),
        devices=jax.devices()[:devices],
        seq_len=32,
    )


def train_on(config: RunConfig, devices: int) -> tuple[list[dict[str, float]], dict[str, np.ndarray]]:
    return train(config, plan(config, devices))


@pytest.mark.parametrize(
    ("gather", "numbers"),
    [
        pytest.param("model", (3,), marks=pytest.mark.slow),
        pytest.param("model", (2, 4, 8), marks=pytest.mark.exhaustive),
        pytest.param("layer", (2, 3, 4, 8), marks=pytest.mark.exhaustive),
    ],
)
def test_bits_are_the_same_on_any_number_of_devices(
    gather: str, numbers: tuple[int, ...], make_config: MakeConfig, in_tmp_path: Path
) -> None:
    teacher = write_base(Path("base"), seed=0)
    loss, keys = {"weight": 0.7, "temperature": 2.0, "top_k": 20}, {"gather": gather, "elastic_shards": 8}
    config = configuration(make_config, loss, trainer=keys)
    metrics, params = train_on(config, 1)
    assert metrics[-1]["loss"] < metrics[0]["loss"]
    for devices in numbers:
        other_metrics, other_params = train_on(config, devices)
        assert other_metrics == metrics
        for name, x in params.items():
            np.testing.assert_array_equal(x, other_params[name], err_msg=name)
    for name, x in teacher.items():
        np.testing.assert_array_equal(params[f"reference.{name}"], x)


@pytest.mark.slow
def test_one_layer_at_a_time(make_config: MakeConfig, in_tmp_path: Path) -> None:
    """The same loss, and the same bits on any number of devices; the teacher has no backward pass."""
    write_base(Path("base"), seed=0)
    loss = {"weight": 0.7, "temperature": 2.0}
    expected, _ = train_on(configuration(make_config, loss), 1)
    config = configuration(make_config, loss, trainer={"gather": "layer", "microbatches_per_gather": 2})
    setup = plan(config, 1)
    metrics, params = train(config, setup)
    for of_step, like in zip(metrics, expected, strict=True):
        assert of_step == {name: pytest.approx(x, rel=1e-4, abs=1e-5) for name, x in like.items()}
    names = setup.step.compile(random_batch(ROWS, 32, VOCAB)).by_name  # pyright: ignore[reportAttributeAccessIssue]
    assert [name for name in names if name.startswith("teacher")] == ["teacher enter", "teacher layer 0"]
    other_metrics, other_params = train_on(config, 2)
    assert other_metrics == metrics
    jax.tree.map(np.testing.assert_array_equal, other_params, params)


@pytest.mark.slow
def test_the_teacher_may_be_in_hugging_face_format(make_config: MakeConfig, in_tmp_path: Path) -> None:
    write_base(Path("base"), seed=0)
    assert run_here("export-hf", "base", "exported").returncode == 0
    (metrics, _), (other_metrics, _) = (
        train_on(configuration(make_config, {"teacher": teacher}), 1) for teacher in ("base", "exported")
    )
    assert metrics == other_metrics


@pytest.mark.slow
def test_the_commands_from_the_teacher_to_the_export(make_config: MakeConfig, in_tmp_path: Path) -> None:
    write_base(Path("base"), seed=0)
    keys = {"max_devices": 1, "checkpointer": {"keep": [{"every": 2}]}}
    path = make_config(**distillation_changes({}, trainer=keys))
    dry = run_here("train", path, "--dry-run")
    assert dry.returncode == 0, dry.stderr
    assert "eval/kl" in check_commands(path, "teacher_step")


def test_teachers_of_other_tokens_are_refused(make_config: MakeConfig, in_tmp_path: Path) -> None:
    write_base(Path("base"), seed=0)
    config = configuration(make_config, {})
    store = CheckpointStore(Path("checkpoints/run"), config.trainer.checkpointer)
    with pytest.raises(UserError, match=r"loss\.teacher: base was made for another tokenizer than data\.tokenizer"):
        find_teacher(config, store, with_specials("<x>"), VOCAB)
    with pytest.raises(UserError, match=f"base predicts {VOCAB} tokens, but the student has {VOCAB + 7} rows"):
        find_teacher(config, store, ByteTokenizer(), VOCAB + 7)
    # A teacher in Hugging Face format.
    assert run_here("export-hf", "base", "exported").returncode == 0
    exported = configuration(make_config, {"teacher": "exported"})
    with pytest.raises(UserError, match=r"not that of loss\.teacher: exported: .*: write data\.tokenizer: exported$"):
        find_teacher(exported, store, with_specials("<x>"), VOCAB)
    store.close()
    with pytest.raises(UserError, match=r"reads at most 32 tokens, but rows have 64; lower model\.seq_len"):
        configuration(make_config, {}, model={"seq_len": 64})
    with pytest.raises(UserError, match=r"^loss\.teacher: nobody: no run"):
        configuration(make_config, {"teacher": "nobody"})


def test_without_its_teacher_the_loss_is_refused(make_config: MakeConfig, in_tmp_path: Path) -> None:
    config = load(make_config(**distillation_changes({})), [], RunConfig).config
    with pytest.raises(UserError, match="the teacher has not been loaded"):
        loss_function(config)(trace_model(config, VOCAB).build(), None, None)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"adapter": {}, "trainer": {"initialize_from": "base"}}, "adapter: loss: distillation trains all parameters"),
        ({"z_loss_weight": 1e-4}, "z_loss_weight has no effect with loss: distillation"),
        ({"data": {"format": {"type": "preference"}}}, "distillation is computed on documents, but"),
    ],
)
def test_settings_that_do_not_fit_are_refused(
    changes: dict[str, Any], message: str, make_config: MakeConfig, in_tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        load(make_config(**distillation_changes({}, **changes)), [], RunConfig)
