"""Validation: every problem at once, at its place, in words that say what to write instead."""

from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar

import pytest
from pydantic import ValidationError, field_validator

from lm_trainer.config.loader import load
from lm_trainer.core.config import Config
from lm_trainer.core.credentials import is_secret_name
from lm_trainer.core.errors import ConfigError, UserError
from tests.config.samples import AnyTracker, Board, Cloud, Files, Run, WideModel


def test_a_file_becomes_the_value_that_it_describes(files: Files) -> None:
    loaded = files.load("""
        model:
          type: wide
          rope_theta: 5e5
        trainer:
          num_train_steps: 5e2
          checkpointer:
            save_interval: 1h30m
            keep: [{every: 1000, until: 10000}, {every: 5000}]
        optimizer:
          learning_rate: 6E-4
    """)
    config = loaded.config
    assert config.model == WideModel(rope_theta=500000.0)
    assert config.trainer.num_train_steps == 500
    assert config.trainer.checkpointer.save_interval == timedelta(minutes=90)
    assert [entry.until for entry in config.trainer.checkpointer.keep] == [10000, None]
    assert config.optimizer.learning_rate == 6e-4
    assert loaded.data["optimizer"] == {"type": "adam", "learning_rate": 6e-4}
    assert loaded.origin("optimizer.learning_rate") == "run.yaml:10:18"
    assert loaded.origin("optimizer.warmup") == "default"
    assert loaded.origin("trainer.checkpointer.keep.1.every") == "run.yaml:8:49"


def test_an_empty_mapping_and_sections_left_empty_are_all_defaults(files: Files) -> None:
    assert files.load("{}").config == Run()
    assert files.load("model:\ntrainer:\n  checkpointer:\n  # nothing yet\n").config == Run()


def test_an_unknown_type_hides_none_of_the_mistakes_beside_it(files: Files) -> None:
    text = """
        model:
          type: medium
          hidden_dim: much
          num_layers: 0
          rope_theta: 1
          checkpointing: [1]
          colour: red
        trainer:
          tracker: [{type: clod, tags: x, logdir: ok}]
    """
    assert files.problems(text) == [
        "2:9: model.type: unknown type 'medium', expected 'small' or 'wide'",
        "3:15: model.hidden_dim: expected a whole number, got 'much'",
        "4:15: model.num_layers: expected a number greater than 0, got 0",
        "6:18: model.checkpointing: expected true or false or 'full' or 'dots', got a list of 1",
        "7:3: model.colour: unknown key; there are type, hidden_dim, num_heads, num_layers, checkpointing, rope_theta",
        "9:20: trainer.tracker.0.type: unknown type 'clod', expected 'cloud' or 'board'; did you mean 'cloud'?",
        "9:32: trainer.tracker.0.tags: expected a list, got 'x'",
    ]


def test_all_problems_are_reported_at_once_in_the_order_of_the_file(files: Files) -> None:
    text = """
        learning_rate: 3
        model:
          hiden_dim: 3
          num_layers: 0
          checkpointing: ful
        trainer:
          wandb: x
          id: 123
          batch_size: 4
          crash_on_nan: 2
          tracker:
            - type: cloud
              mode: ofline
          checkpointer:
            save_interval: 15
            keep:
              - until: 4
        optimizer:
          lr: 4
          warmup: soon
          learning_rate: -1
    """
    assert files.problems(text, "trainer.sede=1", "model.num_layers=two") == [
        "1:1: learning_rate: unknown key; did you mean 'optimizer.learning_rate'?",
        "3:3: model.hiden_dim: unknown key; did you mean 'hidden_dim'?",
        "5:18: model.checkpointing: expected true or false or 'full' or 'dots', got 'ful'; did you mean 'full'?",
        "7:3: trainer.wandb: refused: use `tracker`",
        "8:7: trainer.id: expected text, got 123; quote it to make it text",
        "9:3: trainer.batch_size: unknown key; did you mean 'train_batch_size'?",
        "10:17: trainer.crash_on_nan: expected true or false, got 2",
        "13:13: trainer.tracker.0.mode: expected 'online' or 'offline', got 'ofline'; did you mean 'offline'?",
        "15:20: trainer.checkpointer.save_interval: a bare number is ambiguous; write 15s, 15m or 15h",
        "17:9: trainer.checkpointer.keep.0.every: required, but missing",
        "19:3: optimizer.lr: unknown key; did you mean 'learning_rate'?",
        "20:11: optimizer.warmup: expected a whole number or a number, got 'soon'",
        "21:18: optimizer.learning_rate: expected a number greater than 0, got -1",
        "override `trainer.sede=1`: trainer.sede: unknown key; did you mean 'trainer.seed'?",
        "override `model.num_layers=two`: model.num_layers: expected a whole number, got 'two'",
    ]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("trainer: 3", "1:10: trainer: expected a block of keys, got 3"),
        ("trainer: [a]", "1:10: trainer: expected a block of keys, got a list of 1"),
        ("model: small", "1:8: model: expected a block with type: 'small' or 'wide', got 'small'"),
        ("trainer: {seed: 1.5}", "1:17: trainer.seed: expected a whole number, got 1.5"),
        ("trainer: {seed: }", "1:16: trainer.seed: expected a whole number, got nothing"),
        ("trainer: {seed: {a: 1}}", "1:17: trainer.seed: expected a whole number, got a block of keys"),
        ("optimizer: {learning_rate: .inf}", "1:28: optimizer.learning_rate: expected a finite number, got inf"),
        ("optimizer: {learning_rate: 1e999}", "1:28: optimizer.learning_rate: expected a finite number, got inf"),
        ("trainer: {crash_on_nan: yes}", None),
        ("trainer: {seed: true}", "1:17: trainer.seed: expected a number, got true"),
        ("model: {num_layers: true}", "1:21: model.num_layers: expected a number, got true"),
        ("optimizer: {warmup: false}", "1:21: optimizer.warmup: expected a number, got false"),
        ("data: {validation_urls: x}", "1:25: data.validation_urls: expected a list, got 'x'"),
        ("data: {validation_urls: [x, 3]}", "1:29: data.validation_urls.1: expected text, got 3; quote it to make"),
        ("data: {tokenizer: [a]}", "1:19: data.tokenizer: expected text or a block with type: 'trained' or 'named'"),
        ("data: {tokenizer: 3}", "1:19: data.tokenizer: expected text, got 3; quote it to make it text"),
        ("data: {tokenizer: {type: named}}", "1:19: data.tokenizer.name: required, but missing"),
        ("data: {tokenizer: {vocab_size: x}}", "1:32: data.tokenizer.vocab_size: expected a whole number, got 'x'"),
        ("trainer: {tracker: 3}", "1:20: trainer.tracker: expected a block with type: 'cloud' or 'board' or a list"),
        ("trainer: {tracker: [3]}", "1:21: trainer.tracker.0: expected a block with type: 'cloud' or 'board', got 3"),
        ("trainer: {tracker: {logdir: 3}}", "1:29: trainer.tracker.logdir: expected text, got 3"),
        ("trainer: {jax_config: {x: [1]}}", "1:27: trainer.jax_config.x: expected text or a whole number or a number"),
        ("trainer: {jax_config: 3}", "1:23: trainer.jax_config: expected a block of keys, got 3"),
        ("data: {sample_tokens: '" + "x" * 90 + "'}", "1:23: data.sample_tokens: expected a whole number, got 'xxx"),
    ],
)
def test_what_was_found_and_what_is_expected(files: Files, text: str, problem: str | None) -> None:
    if problem is None:
        assert files.load(text).config.trainer.crash_on_nan
        return
    problems = files.problems(text)
    assert len(problems) == 1, problems
    assert problems[0].startswith(problem), problems
    assert len(problems[0]) < 200


class TestBlocksWithAType:
    def test_a_block_without_type_takes_the_default_of_its_key(self, files: Files) -> None:
        assert files.load("model: {num_layers: 3}").config.model.type == "small"
        # The default stands second in the union, and is not what the first would be.
        assert files.load("trainer: {tracker: {logdir: x}}").config.trainer.tracker == Board(logdir="x")
        assert files.load("data: {tokenizer: {vocab_size: 3}}").config.data.tokenizer.type == "trained"

    def test_an_item_without_type_is_read_like_one_block_without_type(self, files: Files) -> None:
        class Several(Config):
            tracker: AnyTracker | tuple[AnyTracker, ...] = (Board(),)

        for text in ("tracker: {project: p}", "tracker: [{project: p}, {type: board, logdir: x}]"):
            tracker = load(files.write(text), (), Several).config.tracker
            first = tracker[0] if isinstance(tracker, tuple) else tracker
            assert first == Cloud(project="p")

    def test_one_or_a_list(self, files: Files) -> None:
        loaded = files.load("trainer: {tracker: [{type: cloud, project: p}, {logdir: x}]}")
        assert loaded.config.trainer.tracker == (Cloud(project="p"), Board(logdir="x"))

    def test_a_short_form_beside_a_block(self, files: Files) -> None:
        assert files.load("data: {tokenizer: bytes}").config.data.tokenizer == "bytes"
        assert files.load("data: {train_urls: one.txt}").config.data.train_urls == ["one.txt"]

    def test_an_unknown_type_is_reported_at_the_type(self, files: Files) -> None:
        assert files.problems("model:\n  type: smal\n  hidden_dim: 8\n") == [
            "2:9: model.type: unknown type 'smal', expected 'small' or 'wide'; did you mean 'small'?"
        ]
        assert files.problems("optimizer: {type: adamw}") == [
            "1:19: optimizer.type: expected 'adam', got 'adamw'; did you mean 'adam'?"
        ]

    def test_a_key_of_another_type_says_whose_it_is(self, files: Files) -> None:
        assert files.problems("trainer: {tracker: {project: p}}") == [
            "1:21: trainer.tracker.project: a key of type 'cloud', but this block has type 'board' by default; "
            "set its `type`"
        ]
        assert files.problems("trainer: {tracker: [{type: board, project: p}]}") == [
            "1:35: trainer.tracker.0.project: a key of type 'cloud', but this block has type 'board'; set its `type`"
        ]


def test_a_validator_speaks_at_the_key_that_it_names(files: Files) -> None:
    message = "model: hidden_dim (30) must be a multiple of num_heads (4)"
    assert files.problems("model:\n  num_layers: 1\n  hidden_dim: 30\n") == [f"3:15: {message}"]
    # Where the first of two keys is a default, the other one is the cause.
    assert files.problems("model:\n  num_layers: 1\n  num_heads: 5\n")[0].startswith("3:14: model: hidden_dim (64)")
    assert files.problems("model:\n  num_heads: 4\n", "model.hidden_dim=30") == [
        f"override `model.hidden_dim=30`: {message}"
    ]
    assert files.problems("trainer:\n  checkpointer:\n    keep: [{every: 1}, {every: 2}]\n") == [
        "3:11: trainer.checkpointer.keep: only the last entry may lack `until`"
    ]
    # What the file does not have at all comes from the override that made it.
    assert files.problems("trainer: {seed: 1}", "trainer.checkpointer.keep=[{every: 1}, {every: 2}]") == [
        "override `trainer.checkpointer.keep=[{every: 1}, {every: 2}]`: trainer.checkpointer.keep: "
        "only the last entry may lack `until`"
    ]
    rules = "trainer.rules: no axis 'bach'; there are batch, embed and token"
    assert files.problems("trainer:\n  rules:\n    embed: data\n    bach: data\n") == [f"4:11: {rules}"]
    assert files.problems("trainer: {seed: 1}", "trainer.rules.bach=x") == [f"override `trainer.rules.bach=x`: {rules}"]


def test_refused_keys_say_why_for_overrides_as_well(files: Files) -> None:
    assert files.problems("{}", "trainer.wandb=x") == [
        "override `trainer.wandb=x`: trainer.wandb: refused: use `tracker`"
    ]


class TestSecrets:
    @pytest.mark.parametrize(
        "name", ["hf_token", "token", "HF_TOKEN", "apiKey", "api_key", "wandb-api-key", "dbPassword", "client_secret"]
    )
    def test_names_of_secrets(self, name: str) -> None:
        assert is_secret_name(name)

    @pytest.mark.parametrize(
        "name", ["tokenizer", "tokens", "max_tokens", "key", "secretary", "api", "tokenize", "keyed", "pad_token_id"]
    )
    def test_names_of_other_things(self, name: str) -> None:
        assert not is_secret_name(name)

    def test_a_secret_is_refused_anywhere_and_never_shown(self, files: Files) -> None:
        problems = files.problems(
            """
            trainer:
              hf_token: hf_CANARY
              jax_config: {api_key: CANARY}
              tracker: {type: cloud, password: CANARY, tags: [x]}
            """,
            "data.hf_token=hf_CANARY",
            "--trainer.tracker.secret",
            "CANARY",
            "trainer.jax_config={auth_token: CANARY}",
            "trainer.my_token",
            "CANARY",
        )
        assert len(problems) == 6
        for problem in problems:
            assert "looks like a secret, and a configuration is saved with the run" in problem
            assert "set it in the environment" in problem
        assert not any("CANARY" in problem for problem in problems)

    @pytest.mark.parametrize(
        "text", ["rules: {token: data}", "stages: [[0, {token: 0.5}]]", "sets: {token: {every: 3}}"]
    )
    def test_names_of_axes_and_sets_are_not_taken_for_secrets(self, files: Files, text: str) -> None:
        key, written = text.split(": ", 1)
        from_file = files.load(f"trainer: {{{text}}}").config
        assert "token" in str(getattr(from_file.trainer, key))
        assert files.load("{}", f"trainer.{key}={written}").config == from_file

    def test_a_secret_inside_a_named_block_is_refused(self, files: Files) -> None:
        (problem,) = files.problems("trainer: {sets: {token: {every: 3, password: CANARY}}}")
        assert "trainer.sets.token.password: looks like a secret" in problem
        assert "CANARY" not in problem

    def test_declared_and_refused_keys_are_not_taken_for_secrets(self, files: Files) -> None:
        assert files.load("data: {sample_tokens: 3}").config.data.sample_tokens == 3
        assert files.problems("trainer: {auth_token: x}") == ["1:11: trainer.auth_token: refused: not needed"]


def test_any_class_can_be_the_root(files: Files) -> None:
    class Inner(Config):
        refused_keys: ClassVar[Mapping[str, str]] = {"old": "use `new`"}
        new: int

        @field_validator("new")
        @classmethod
        def _even(cls, value: int) -> int:
            if value % 2:
                raise ValueError(f"must be even, got {value}")
            return value

    class Outer(Config):
        inner: dict[str, Inner] = {}

    path = files.write("inner:\n  a: {new: 1}\n  b: {new: 2, old: 3}\n  c: {}\n")
    with pytest.raises(ConfigError) as caught:
        load(path, [], Outer)
    assert caught.value.exit_code == 2
    assert caught.value.problems == (
        "run.yaml:2:12: inner.a.new: must be even, got 1",
        "run.yaml:3:15: inner.b.old: refused: use `new`",
        "run.yaml:4:6: inner.c.new: required, but missing",
    )


def test_a_user_error_of_a_validator_is_one_of_the_problems(files: Files) -> None:
    class Root(Config):
        axis: str = "batch"

        @field_validator("axis")
        @classmethod
        def _refuse_axis(cls, value: str) -> str:
            raise UserError(f"no axis {value!r}")

    with pytest.raises(ConfigError, match=r"run\.yaml:1:1: no axis 'x'"):
        load(files.write("axis: x"), [], Root)


def test_a_configuration_cannot_be_changed(files: Files) -> None:
    config = files.load("{}").config
    with pytest.raises(ValidationError, match="frozen"):
        config.trainer.seed = 3  # type: ignore[misc]


def test_loading_reads_nothing_but_the_files(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[Any] = []
    real = Path.open

    def record(self: Path, *args: Any, **kwargs: Any) -> Any:
        opened.append(self)
        return real(self, *args, **kwargs)

    files.write("[x]", "urls.yaml")
    path = files.write("data: {train_urls: !include urls.yaml}")
    monkeypatch.setattr(Path, "open", record)
    load(path, [], Run)
    assert opened == [Path("run.yaml"), Path("urls.yaml")]
