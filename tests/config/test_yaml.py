"""The text of a file: numbers, text, positions, and text that is refused."""

import os
from pathlib import Path
from typing import Any

import pytest
from yaml.nodes import ScalarNode

from lm_trainer.config.yaml_nodes import MAX_BYTES, read_file
from lm_trainer.config.yaml_syntax import compose, parse_scalar, to_flow_yaml
from tests.config.samples import Files


def value_of(text: str) -> Any:
    node = compose(text)
    assert isinstance(node, ScalarNode)
    return parse_scalar(node)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("6E-4", 6e-4),
        ("1e-4", 1e-4),
        ("5e5", 5e5),
        ("5.e5", 5e5),
        (".5", 0.5),
        ("+1.5", 1.5),
        ("-1", -1),
        ("1_000", 1000),
        ("1_000.5", 1000.5),
        ("0", 0),
        ("-0.0", 0.0),
        ("0.05", 0.05),
        ("0x1F", 31),
        ("0o17", 15),
        ("true", True),
        ("False", False),
        ("null", None),
        ("~", None),
        # YAML 1.1 takes these for booleans, numbers in base 60, dates and merges.
        ("on", "on"),
        ("no", "no"),
        ("yes", "yes"),
        ("12:30:00", "12:30:00"),
        ("1:2", "1:2"),
        ("2026-01-01", "2026-01-01"),
        ("=", "="),
        # Not quite numbers.
        ("1__0", "1__0"),
        ("_1", "_1"),
        ("1e", "1e"),
        ("e5", "e5"),
        ("1.2.3", "1.2.3"),
        ("15m", "15m"),
        ("0x", "0x"),
        (".", "."),
        ("p=f32,c=bfloat16", "p=f32,c=bfloat16"),
        ("'6E-4'", "6E-4"),
        ('"010"', "010"),
    ],
)
def test_plain_scalars_mean_what_a_person_means(text: str, value: Any) -> None:
    assert value_of(text) == value
    assert type(value_of(text)) is type(value)


@pytest.mark.parametrize(("text", "remedy"), [("010", "10"), ("-007", "-7"), ("00", "0"), ("01.5", "1.5")])
def test_a_leading_zero_is_refused_with_the_remedy(text: str, remedy: str) -> None:
    with pytest.raises(ValueError, match=f"{text} has a leading zero.*write {remedy}, or quote it"):
        value_of(text)


TRICKY = [
    "6E-4", "1e-4", "010", "on", "12:30:00", "2026-01-01", "1_000", "null", "~", "", " padded ", "a: b", "# no comment",
    "[x]", "{1..3}", "gs://b/x.{1..3}.jsonl", "line\nbreak", "tab\there", "'quoted'", '"double"', "!include x", "<<",
    "é ü 漢", "\u2028", "a,b", "- item", "true", "0x1F", "=", "&a", "*a", "%", "@", "\\", "x" * 500,
]  # fmt: skip


@pytest.mark.parametrize("text", TRICKY)
def test_text_is_written_so_that_it_reads_back_as_the_same_text(text: str) -> None:
    assert value_of(to_flow_yaml(text)) == text
    assert "\n" not in to_flow_yaml(text)


@pytest.mark.parametrize("value", [1e-5, 6e-4, 1e16, 0.1 + 0.2, 5e-324, -1.0, 10**30, 1e22])
def test_numbers_are_written_exactly(value: float) -> None:
    assert value_of(to_flow_yaml(value)) == value
    assert type(value_of(to_flow_yaml(value))) is type(value)


def test_flow_writes_nested_data_on_one_line() -> None:
    value = {"a": [1, "2", None, True], "b": {}, "c": []}
    assert to_flow_yaml(value) == "{a: [1, '2', null, true], b: {}, c: []}"


def test_positions_are_those_of_values_and_keys(files: Files) -> None:
    path = files.write("""
        model:
          num_layers:   3
        data: {train_urls: [a, b]}
    """)
    document = read_file(path)
    assert document.data == {"model": {"num_layers": 3}, "data": {"train_urls": ["a", "b"]}}
    assert document.keys["model", "num_layers"].text == "run.yaml:2:3"
    assert document.values["model", "num_layers"].text == "run.yaml:2:17"
    assert document.values["data", "train_urls", 1].text == "run.yaml:3:24"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "is empty; write {} for all defaults"),
        ("# only a comment\n", "is empty; write {} for all defaults"),
        ("- a\n- b\n", "1:1: expected `key: value` lines at the top level"),
        ("just text", "1:1: expected `key: value` lines at the top level"),
        ("a: 1\n\tb: 2\n", "2:1: a tab; indent with spaces"),
        ("a: [1, 2\nb: 3\n", "2:2: expected ',' or ']', but got ':' (while parsing a flow sequence)"),
        ("a: *nowhere\n", "1:4: found undefined alias 'nowhere'"),
        ("a: 1\n---\nb: 2\n", "2:1: a second document (---); one file holds one configuration"),
        ("a: \x07\n", "1:4: the character #x0007 is not allowed in YAML"),
        ("!include base.yaml", "1:1: a whole file cannot be an !include; include the value of a key"),
        ("!!map {a: 1}", "1:1: the tag !!map is not supported, only !include"),
        ("[" * 900, "1:1: nested more than 50 levels deep"),
    ],
)
def test_a_file_that_is_no_configuration(files: Files, text: str, problem: str) -> None:
    problems = files.problems(text)
    assert len(problems) == 1
    assert problems[0].startswith(problem), problems


def test_values_nested_too_deeply(files: Files) -> None:
    assert "1:56: nested more than 50 levels deep" in files.problems(f"data: {'[' * 60}{']' * 60}")


def test_duplicate_keys_name_both_places_and_do_not_hide_other_problems(files: Files) -> None:
    assert files.problems("""
        trainer:
          seed: four
          seed: 5
        model: {num_layers: 1}
        trainer: {}
    """) == [
        "2:9: trainer.seed: expected a whole number, got 'four'",
        "3:3: the key 'seed' stands here twice; the first is at run.yaml:2:3",
        "5:1: the key 'trainer' stands here twice; the first is at run.yaml:1:1",
    ]


@pytest.mark.parametrize("key", ["1", "1.5", "true", "null", "[a]", "{a: b}", "!!str a", "010"])
def test_keys_must_be_text(files: Files, key: str) -> None:
    problems = files.problems(f"trainer:\n  seed: 1\n  jax_config:\n    ? {key}\n    : 1\n")
    assert len(problems) == 1
    assert problems[0].startswith("4:7: a key must be text, got"), problems


def test_words_that_yaml_1_1_reads_as_booleans_are_keys(files: Files) -> None:
    assert files.load("trainer: {jax_config: {on: 1, no: off}}").config.trainer.jax_config == {"on": 1, "no": "off"}


@pytest.mark.parametrize(
    "value",
    ["!!python/object/apply:os.system ['touch broken']", "!!str 1", "!custom x", "! x", "!!binary aGk=", "!!set {a}"],
)
def test_explicit_tags_are_refused_and_run_nothing(files: Files, value: str) -> None:
    problems = files.problems(f"trainer:\n  id: {value}\n")
    assert len(problems) == 1
    assert problems[0].startswith("2:7: the tag !"), problems
    assert "is not supported, only !include" in problems[0]
    assert not Path("broken").exists()


def test_an_alias_bomb_is_refused_quickly(files: Files) -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 12)]
    problems = files.problems("\n".join(lines))
    assert len(problems) == 1
    assert "more than 50000 values, counting those of aliases" in problems[0]


@pytest.mark.parametrize("text", ["data: &a\n  train_urls: [*a]\n", "data: &a\n  <<: *a\n"])
def test_an_alias_that_contains_itself_is_refused(files: Files, text: str) -> None:
    assert any("alias" in problem for problem in files.problems(text))


def test_aliases_and_merges_work_and_own_keys_win(files: Files) -> None:
    loaded = files.load("""
        optimizer: {learning_rate: 1e-3}
        trainer:
          tracker:
            - &shared {type: cloud, project: p, mode: offline}
            - <<: *shared
              project: q
            - <<: [{mode: online}, *shared]
    """)
    first, second, third = loaded.config.trainer.tracker
    assert (first.project, first.mode) == ("p", "offline")
    assert (second.project, second.mode) == ("q", "offline")
    assert (third.project, third.mode) == ("p", "online")
    assert loaded.origin("trainer.tracker.1.mode") == "run.yaml:4:47"
    assert loaded.origin("trainer.tracker.1.project") == "run.yaml:6:16"


def test_a_missing_file_suggests_one_that_exists(files: Files) -> None:
    files.write("{}", "configs/gpt2_nano.yaml")
    assert files.problems_of("configs/gpt2-nano.yaml") == [
        "configs/gpt2-nano.yaml: no such file; did you mean configs/gpt2_nano.yaml?"
    ]
    assert files.problems_of("gpt2_nano") == ["gpt2_nano: no such file; did you mean configs/gpt2_nano.yaml?"]
    assert files.problems_of("configs/gpt2_nano")[0].endswith("did you mean configs/gpt2_nano.yaml?")
    assert files.problems_of("nowhere/x.yaml") == ["nowhere/x.yaml: no such file, nor a directory nowhere"]
    assert files.problems_of("unlike.yaml") == ["unlike.yaml: no such file"]


def test_a_directory_suggests_the_configuration_in_it(files: Files) -> None:
    files.write("{}", "logs/run-1/config.yaml")
    assert files.problems_of("logs/run-1") == [
        "logs/run-1: is a directory, expected a YAML file; did you mean logs/run-1/config.yaml?"
    ]
    assert files.problems_of("logs") == ["logs: is a directory, expected a YAML file"]


def test_files_that_are_not_utf8_text(files: Files) -> None:
    Path("latin.yaml").write_bytes("data:\n  # caf\xe9\n".encode("latin-1"))
    assert files.problems_of("latin.yaml") == ["latin.yaml: is not UTF-8 text (byte 0xe9 in line 2)"]
    Path("bom.yaml").write_bytes("\ufefftrainer: {seed: x}".encode())
    assert files.problems_of("bom.yaml") == ["bom.yaml:1:17: trainer.seed: expected a whole number, got 'x'"]


def test_a_huge_file_is_not_parsed(files: Files) -> None:
    with Path("huge.yaml").open("wb") as file:
        file.truncate(MAX_BYTES + 1)
    assert files.problems_of("huge.yaml") == ["huge.yaml: is larger than 4 MiB; is it a configuration?"]


def test_an_unreadable_file_says_why(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    path = files.write("{}")
    opened = Path.open

    def refuse(self: Path, *args: Any, **kwargs: Any) -> Any:
        if self == path:
            raise PermissionError(13, os.strerror(13))
        return opened(self, *args, **kwargs)

    monkeypatch.setattr(Path, "open", refuse)
    assert files.problems_of("run.yaml") == ["cannot be read: Permission denied"]


def test_a_self_linked_file_says_why(files: Files) -> None:
    Path("loop.yaml").symlink_to("loop.yaml")
    assert files.problems_of("loop.yaml")[0].startswith("loop.yaml: cannot be read: ")
