"""Credentials in URLs are blanked, and everything else stays as it is."""

from __future__ import annotations

import pytest

from lm_trainer.core.credentials import without_credentials
from lm_trainer.core.errors import ConfigError, UserError
from lm_trainer.data import DataConfig
from lm_trainer.run.config import RunConfig, config_hash


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        ("https://me:hunter2@host/x", "https://***@host/x"),
        ("cannot read https://me:p@ss@host:80/x: refused", "cannot read https://***@host:80/x: refused"),
        ("https://token@github.com/o/r.git", "https://***@github.com/o/r.git"),
        ("urls: ['s3://key:secret@b/x', 'gs://b']", "urls: ['s3://***@b/x', 'gs://b']"),
        ("https://h/x?a=1&X-Amz-Signature=abc&b=2", "https://h/x?a=1&X-Amz-Signature=***&b=2"),
        ("https://h/x?sig=abc", "https://h/x?sig=***"),
        ("https://h/x?hf_token=abc#top", "https://h/x?hf_token=***#top"),
    ],
)
def test_credentials_are_blanked(text, clean):
    assert without_credentials(text) == clean


@pytest.mark.parametrize("text", ["s3://bucket/a@b", "me@host", "https://h/x?keys=1&design=2", "a: b", "10m"])
def test_everything_else_is_left(text):
    assert without_credentials(text) == text


def test_containers_are_searched():
    value = {"a": ["https://u:p@h", 1.5, None], "b": {"c": ("https://u@h", True)}}
    assert without_credentials(value) == {"a": ["https://***@h", 1.5, None], "b": {"c": ["https://***@h", True]}}


def test_errors_for_the_user_show_none():
    assert str(UserError("cannot read https://u:p@h/x: gone")) == "cannot read https://***@h/x: gone"
    error = ConfigError(["c.yaml:1:2: a: cannot open s3://k:s@b", "c.yaml:2:2: b: expected text"])
    assert error.problems == ("c.yaml:1:2: a: cannot open s3://***@b", "c.yaml:2:2: b: expected text")
    assert str(error) == "\n".join(error.problems)


def test_a_run_is_the_same_with_another_password():
    runs = [
        RunConfig(data=DataConfig(train_urls=[f"https://{user}@host/{name}"]))
        for user, name in (("me:old", "x"), ("me:new", "x"), ("me:new", "y"))
    ]
    first, second, third = map(config_hash, runs)
    assert first == second != third
