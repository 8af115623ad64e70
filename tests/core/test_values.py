"""Values as people write them in YAML."""

from __future__ import annotations

import json
import re
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from lm_trainer.config.loader import load
from lm_trainer.core.config import Config, Duration, format_duration, parse_duration, resolve_steps
from lm_trainer.core.errors import ConfigError
from lm_trainer.core.precision import Policy, PrecisionPolicy, format_policy, parse_policy
from lm_trainer.models import Gpt2Config
from lm_trainer.optim import AdamConfig
from lm_trainer.optim.safeguards import SkipStepConfig
from lm_trainer.run.config.run_config import RunConfig
from lm_trainer.run.config.trainer_config import TrainerConfig


@pytest.mark.parametrize(
    ("text", "seconds"), [("15m", 900), ("1h30m", 5400), ("90s", 90), ("0.5h", 1800), ("2d", 172800), ("250ms", 0.25)]
)
def test_durations(text: str, seconds: float) -> None:
    assert parse_duration(text) == timedelta(seconds=seconds)
    assert parse_duration(format_duration(parse_duration(text))) == parse_duration(text)


@pytest.mark.parametrize("text", ["", "m", "15 minutes", "1m2h", "-5m", None, True])
def test_what_is_no_duration(text: object) -> None:
    with pytest.raises(ValueError, match="expected a duration"):
        parse_duration(text)


def test_a_bare_number_has_no_unit() -> None:
    with pytest.raises(ValueError, match="ambiguous; write 15s, 15m or 15h"):
        parse_duration(15)


@pytest.mark.parametrize(
    ("value", "steps"),
    [
        (0.01, 10),
        (0.29, 290),
        (0.057, 57),
        (0.0019, 1),
        (1.0, 1000),
        (1, 1),
        (250, 250),
        (250.0, 250),
        (0, 0),
        (0.0, 0),
    ],
)
def test_fractions_and_steps(value: float, steps: int) -> None:
    assert resolve_steps(value, 1000) == steps


def test_fractions_are_decimal() -> None:
    assert 0.29 * 100 < 29 == resolve_steps(0.29, 100)


@pytest.mark.parametrize("value", [-1, -0.5, 2.5])
def test_neither_fraction_nor_steps(value: float) -> None:
    with pytest.raises(ValueError, match="step"):
        resolve_steps(value, 1000)


@pytest.mark.parametrize(
    ("text", "policy"),
    [
        ("f32", Policy("float32", "float32", "float32")),
        ("bfloat16", Policy("bfloat16", "bfloat16", "bfloat16")),
        ("p=f32,c=bfloat16", Policy("float32", "bfloat16", "bfloat16")),
        ("params=float32, compute=bf16, output=f32", Policy("float32", "bfloat16", "float32")),
        ("c=half", Policy("float32", "float16", "float16")),
    ],
)
def test_precision_policies(text: str, policy: Policy) -> None:
    assert parse_policy(text) == policy
    assert parse_policy(format_policy(policy)) == policy


@pytest.mark.parametrize(
    ("text", "message"), [("f33", "unknown dtype 'f33'"), ("x=f32", "unknown part 'x'"), ("p=f32,p=f32", "twice")]
)
def test_wrong_precision_policies(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_policy(text)


class Example(Config):
    wait: Duration = timedelta(minutes=15)
    mp: PrecisionPolicy = Policy()


def test_values_survive_a_round_trip_as_plain_data() -> None:
    example = Example.model_validate({"wait": "1h30m", "mp": "p=f32,c=bfloat16"})
    plain = example.model_dump(mode="json")
    assert plain == {"wait": "90m", "mp": "p=float32,c=bfloat16,o=bfloat16"}
    assert Example.model_validate(plain) == example


def test_unknown_keys_and_changes_are_refused() -> None:
    with pytest.raises(ValidationError, match="Extra inputs"):
        Example.model_validate({"wiat": "1m"})
    with pytest.raises(ValidationError, match="frozen"):
        Example().wait = timedelta(1)  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("2 days, 4:13:02", "2d4h13m2s"),
        ("4:13:02", "4h13m2s"),
        ("1 day 0:30:00", "1d30m"),
        ("+32 m 1 s", "32m1s"),
        ("+15m", "15m"),
    ],
)
def test_durations_as_others_write_them_are_answered_with_ours(text: str, meant: str) -> None:
    with pytest.raises(ValueError, match=rf"got '{re.escape(text)}'; write {meant}$"):
        parse_duration(text)
    parse_duration(meant)


@pytest.mark.parametrize("text", ["soon", "4:13", "+", "0:00:00", ""])
def test_other_texts_are_no_durations(text: str) -> None:
    with pytest.raises(ValueError, match=rf"got '{re.escape(text)}'$"):
        parse_duration(text)


@pytest.mark.parametrize(
    ("config", "name", "instead"),
    [
        (SkipStepConfig, "from_bool_int_or_config", r"use SkipStepConfig\.parse"),
        (SkipStepConfig, "wrap", "use skip_bad_steps"),
        (AdamConfig, "default_choice_name", "the default of the field `type`"),
        (Gpt2Config, "default_choice_name", "the default of the field `type`"),
        (TrainerConfig, "initialize", "use `with Trainer"),
        (AdamConfig, "build_weight_decay_mask", "use decay_mask"),
    ],
)
def test_methods_of_other_frameworks_are_answered_with_ours(config: Any, name: str, instead: str) -> None:
    for owner in (config, config()):
        with pytest.raises(AttributeError, match=rf"there is no {config.__name__}\.{name}: .*{instead}"):
            getattr(owner, name)
        with pytest.raises(AttributeError, match="no_such_name"):
            getattr(owner, "no_such_name")  # noqa: B009 - type checkers know that there is none


@pytest.mark.parametrize(
    ("section", "advice"),
    [
        (
            {"trainer": {"replica_dcn_axis_size": -1}},
            "as many as there are slices, is not found out; write their number",
        ),
        ({"data": {"train_split": "train"}}, r"splits: \[TRAIN, VALIDATION\]"),
        ({"data": {"validation_split": "dev"}}, r"splits: \[TRAIN, VALIDATION\]"),
    ],
)
def test_keys_of_levanter_name_what_to_write(section: dict[str, Any], advice: str, tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(json.dumps(section))
    with pytest.raises(ConfigError, match=advice):
        load(file, [], RunConfig)
