"""Credentials in URLs are blanked, and everything else stays as it is."""

from __future__ import annotations

from pathlib import Path

import pytest

from lm_trainer.config.diff import differences_from_defaults
from lm_trainer.config.loader import load
from lm_trainer.config.render import to_yaml
from lm_trainer.core.credentials import without_credentials
from lm_trainer.core.errors import ConfigError, UserError
from lm_trainer.data import DataConfig
from lm_trainer.run.config.run_config import RunConfig, config_hash


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


SECRETS = {
    "a header": "curl -H 'Authorization: Bearer {}' https://host/x",
    "basic": 'curl -H "authorization: Basic {}" https://host/x',
    "another header": "curl --header 'X-Api-Key: {}' https://host",
    "an option": "./notify --to me --token {} --config x.yaml",
    "an option with =": "./notify --api-key={}",
    "a quoted option": "./notify --password '{} {}'",
    "a variable": "env SLACK_TOKEN={} ./notify",
    "a variable of a shell": "sh -c 'MY_SECRET={} ./notify | tee log'",
    "a login": "curl -u me:{} https://host",
    "a login in a URL": "curl https://me:{}@host/x",
    "a query": "curl https://host/x?token={}",
    "JSON": 'curl -d \'{{"token": "{}", "text": "x"}}\' https://host',
    "a web hook of Slack": "curl -d @- https://hooks.slack.com/services/T00/B00/{}",
    "one of Discord": "curl https://discord.com/api/webhooks/123/{}",
    "a bot of Telegram": "curl https://api.telegram.org/bot123:{}/sendMessage",
    "an address that nobody guesses": "curl https://events.host/integration/{}0f8fad5bd9cb469fa/enqueue",
}


@pytest.mark.parametrize("command", SECRETS.values(), ids=SECRETS)
def test_secrets_of_a_command_are_blanked_wherever_it_is_shown(command: str, tmp_path: Path) -> None:
    secret = "s3cr3tVALUE"
    config = RunConfig.model_validate({"trainer": {"alerts": {"command": command.format(secret, secret)}}})
    shown = [
        to_yaml(config, redact=True),
        str(differences_from_defaults(config)),
        str(without_credentials(config.model_dump(mode="json"))),
    ]
    assert all(secret not in text and "***" in text for text in shown)
    # It is what runs all the same, and what a launcher hands on.
    assert secret in to_yaml(config)
    file = tmp_path / "c.yaml"
    file.write_text(to_yaml(config, redact=True))
    assert load(file, [], RunConfig).config.trainer.alerts.command is not None


@pytest.mark.parametrize(
    "command",
    [
        "./notify --to me --tokenizer x",
        "python -m notify --run-id 2024-01-01-a-long-name-of-a-run-3 --keep 5",
        "curl -d @- https://ntfy.sh/my-topic",
        "sh -c './notify | tee /data/logs/alerts-of-2024-01-01.txt'",
    ],
)
def test_the_rest_of_a_command_stays(command: str) -> None:
    assert without_credentials({"command": command}) == {"command": command}


def test_a_setting_is_quoted_without_its_secrets() -> None:
    for setting in ("trainer.alerts.command='./n --token s3cr3t' ", "trainer.alerts={command: './n --token s3cr3t'}"):
        with pytest.raises(ConfigError) as raised:
            load(Path("configs/gpt2_nano.yaml"), [setting, "trainer.alerts.commando=1"], RunConfig)
        assert "s3cr3t" not in str(raised.value)
    with pytest.raises(ConfigError, match=r"\*\*\*") as raised:
        load(Path("configs/gpt2_nano.yaml"), ["trainer.alerts.command=./n --token s3cr3t | x"], RunConfig)
    assert "s3cr3t" not in str(raised.value)


def test_tokens_are_blanked_by_their_form() -> None:
    token = "hf_" + "abcdEFGH" * 4
    assert without_credentials(f"cannot read {token}: refused") == "cannot read ***: refused"
    assert without_credentials("sk-learn-corpus-of-many-words") == "sk-learn-corpus-of-many-words"
