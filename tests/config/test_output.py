"""Output from a configuration: YAML, differences and the JSON schema."""

from datetime import timedelta
from typing import Any

import pytest
import yaml

from lm_trainer.config.diff import differences, differences_from_defaults
from lm_trainer.config.loader import load
from lm_trainer.config.render import to_yaml
from lm_trainer.config.schema import json_schema
from lm_trainer.core.config import format_duration, parse_duration
from tests.config.samples import Board, Checkpointer, Cloud, Data, Files, Keep, Run, SmallModel, Trainer, WideModel

FULL = Run(
    model=WideModel(rope_theta=5e5),
    trainer=Trainer(
        id="6E-4",
        tracker=(Cloud(project="on", tags=["010", "a: b", "12:30:00"]), Board(logdir="line\nbreak")),
        checkpointer=Checkpointer(
            save_interval=timedelta(milliseconds=1500), keep=(Keep(every=3, until=9), Keep(every=9))
        ),
        jax_config={"a key": 1e-5, "010": "null", "on": None, "x": True},
    ),
    data=Data(train_urls=["gs://b/x.{1..3}.jsonl", ""], tokenizer="no"),
)


@pytest.mark.parametrize("config", [Run(), FULL], ids=["defaults", "full"])
@pytest.mark.parametrize("comments", [False, True])
def test_yaml_reads_back_as_an_equal_configuration(files: Files, config: Run, comments: bool) -> None:
    text = to_yaml(config, (lambda path: f"at {path}") if comments else None)
    assert load(files.write(text), [], Run).config == config


def test_yaml_is_laid_out_for_people() -> None:
    assert to_yaml(FULL.trainer) == (
        "seed: 0\n"
        "id: '6E-4'\n"
        "num_train_steps: 10\n"
        "train_batch_size: 8\n"
        "crash_on_nan: true\n"
        "tracker:\n"
        "  - type: cloud\n"
        "    project: on\n"
        "    mode: online\n"
        "    tags: ['010', 'a: b', '12:30:00']\n"
        "  - type: board\n"
        '    logdir: "line\\nbreak"\n'
        "checkpointer:\n"
        "  save_interval: 1.5s\n"
        "  keep:\n"
        "    - every: 3\n"
        "      until: 9\n"
        "    - every: 9\n"
        "      until: null\n"
        "jax_config:\n"
        "  a key: 1.0e-05\n"
        "  '010': 'null'\n"
        "  on: null\n"
        "  x: true\n"
        "rules: {}\n"
        "stages: []\n"
        "sets: {}\n"
    )


def test_other_yaml_readers_see_the_same_values() -> None:
    """Whoever reads a saved configuration with plain PyYAML; only words that YAML 1.1 has for booleans differ."""
    plain = Run(data=Data(train_urls=["a", "b: c"], tokenizer="t"))
    assert yaml.safe_load(to_yaml(plain)) == plain.model_dump(mode="json")


def test_comments_stand_in_one_column_behind_values_only() -> None:
    lines = to_yaml(Run(), lambda path: ".".join(map(str, path))).splitlines()
    assert lines[0] == "model:"
    assert lines[1].split("  # ") == ["  type: small".ljust(lines[1].index("#") - 2), "model.type"]
    assert len({line.index("#") for line in lines if "#" in line}) == 1


def test_a_difference_names_key_and_both_values() -> None:
    old = Run(trainer=Trainer(tracker=(Board(), Board(logdir="x"))))
    new = Run(trainer=Trainer(tracker=(Board(),), seed=3), model=SmallModel(checkpointing="full"))
    assert list(map(str, differences(old, new))) == [
        "model.checkpointing: true -> full",
        "trainer.seed: 0 -> 3",
        "trainer.tracker.1.type: board -> (absent)",
        "trainer.tracker.1.logdir: x -> (absent)",
    ]
    assert differences(new, new) == []


def test_a_block_of_another_type_is_compared_with_the_defaults_of_its_type() -> None:
    config = Run(model=WideModel(rope_theta=3.0), trainer=Trainer(seed=2, tracker=Cloud()))
    assert list(map(str, differences_from_defaults(config))) == [
        "model.type: small -> wide",
        "model.rope_theta: 10000.0 -> 3.0",
        "trainer.seed: 0 -> 2",
        "trainer.tracker.type: board -> cloud",
    ]
    assert differences_from_defaults(Run()) == []


def test_a_type_that_has_no_defaults_is_compared_with_the_plain_ones() -> None:
    config = Run.model_validate({"data": {"tokenizer": {"type": "named", "name": "x"}}})
    assert list(map(str, differences_from_defaults(config))) == [
        "data.tokenizer.type: (absent) -> named",
        "data.tokenizer.name: (absent) -> x",
        "data.tokenizer: null -> (absent)",
    ]


@pytest.fixture(scope="module")
def is_valid() -> Any:
    validator = pytest.importorskip("jsonschema").Draft202012Validator(json_schema(Run))
    validator.check_schema(validator.schema)
    return validator.is_valid


class TestSchema:
    @pytest.mark.parametrize(
        "text",
        [
            "{}",
            "{model: {num_layers: 3}}",
            "{model: {type: wide, rope_theta: 3}}",
            "{trainer: {tracker: {logdir: x}}}",
            "{trainer: {tracker: [{type: cloud}, {logdir: x}]}}",
            "{trainer: {checkpointer: {save_interval: 1h30m, keep: [{every: 3}]}}}",
            "{data: {tokenizer: bytes}}",
            "{data: {tokenizer: {type: named, name: x}}}",
            "{data: {train_urls: one.txt}}",
            "{trainer: {steps: 3, tuning: {size: 8}, eager: false}}",
        ],
    )
    def test_what_the_loader_takes_is_valid(self, files: Files, is_valid: Any, text: str) -> None:
        files.load(text)
        assert is_valid(yaml.safe_load(text))

    @pytest.mark.parametrize(
        "text",
        [
            "{modle: {}}",
            "{model: {hiden_dim: 3}}",
            "{model: {type: other}}",
            "{model: {type: small, rope_theta: 3}}",
            "{model: {num_layers: 0}}",
            "{trainer: {seed: x}}",
            "{trainer: {checkpointer: {save_interval: soon}}}",
            "{trainer: {checkpointer: {save_interval: ''}}}",
            "{trainer: {checkpointer: {save_interval: 15}}}",
            "{trainer: {checkpointer: {keep: [{until: 3}]}}}",
            "{data: {tokenizer: {type: named}}}",
            "{trainer: {eager: true}}",
        ],
    )
    def test_what_the_loader_refuses_is_not(self, files: Files, is_valid: Any, text: str) -> None:
        assert files.problems(text)
        assert not is_valid(yaml.safe_load(text))

    def test_all_defaults_are_valid_as_they_are_shown(self, is_valid: Any) -> None:
        assert is_valid(Run().model_dump(mode="json"))
        assert is_valid(FULL.model_dump(mode="json"))

    def test_editors_see_descriptions_and_defaults_as_they_are_written(self) -> None:
        schema = json_schema(Run)
        rate = schema["$defs"]["Adam"]["properties"]["learning_rate"]
        assert (rate["description"], rate["default"]) == ("The peak.", 1e-4)
        checkpointer = schema["$defs"]["Checkpointer"]["properties"]
        assert checkpointer["save_interval"]["default"] == "15m"
        assert checkpointer["keep"]["default"] == [{"every": 10, "until": None}]
        assert schema["properties"]["model"]["default"]["hidden_dim"] == 64


@pytest.mark.parametrize("text", ["15m", "90s", "1.5s", "2d", "36h", "0.000001s", "100000.5s", "0s"])
def test_durations_are_written_so_that_they_read_back(text: str) -> None:
    value = parse_duration(text)
    assert parse_duration(format_duration(value)) == value
