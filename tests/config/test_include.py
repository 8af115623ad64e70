from pathlib import Path

import pytest

from tests.config.samples import Files


def test_an_included_file_is_the_value_and_keeps_its_positions(files: Files) -> None:
    files.write("train_urls:\n  - a.jsonl\nsample_tokens: 3\n", "configs/parts/data.yaml")
    files.write("data: !include parts/data.yaml\ntrainer: {seed: 1}\n", "configs/run.yaml")
    loaded = files.load("""
        data: !include configs/parts/data.yaml
        trainer: {seed: 1}
    """)
    assert loaded.config.data.train_urls == ["a.jsonl"]
    assert loaded.origin("data.sample_tokens") == "configs/parts/data.yaml:3:16"
    assert loaded.origin("trainer.seed") == "run.yaml:2:17"


def test_paths_are_relative_to_the_including_file(files: Files) -> None:
    files.write("type: cloud\nproject: p\n", "shared/tracker.yaml")
    files.write("seed: 7\ntracker: [!include ../shared/tracker.yaml, {type: board}]\n", "configs/trainer.yaml")
    loaded = files.load("trainer: !include configs/trainer.yaml")
    assert loaded.config.trainer.seed == 7
    assert loaded.config.trainer.tracker[0].project == "p"
    assert loaded.origin("trainer.tracker.0.project") == "shared/tracker.yaml:2:10"


def test_problems_in_included_files_come_after_those_of_the_file_itself(files: Files) -> None:
    files.write("train_url: a\nsample_tokens: many\n", "data.yaml")
    assert files.problems("""
        data: !include data.yaml
        trainer:
          sed: 1
    """) == [
        "3:3: trainer.sed: unknown key; did you mean 'seed'?",
        "data.yaml:1:1: data.train_url: unknown key; did you mean 'train_urls'?",
        "data.yaml:2:16: data.sample_tokens: expected a whole number, got 'many'",
    ]


def test_a_list_can_be_included(files: Files) -> None:
    files.write("- a\n- b\n", "urls.yaml")
    assert files.load("data: {train_urls: !include urls.yaml}").config.data.train_urls == ["a", "b"]


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ("!include dat.yaml", "cannot include dat.yaml: no such file; did you mean data.yaml?"),
        ("!include sub", "cannot include sub: is a directory, expected a YAML file"),
        ("!include empty.yaml", "cannot include empty.yaml: is empty; write {} for all defaults"),
        ("!include gs://bucket/data.yaml", "cannot include gs://bucket/data.yaml: only local files can be included"),
        ("!include", "!include takes the name of a file, relative to this one"),
        ("!include [a, b]", "!include takes the name of a file, relative to this one"),
        ("!include run.yaml", "run.yaml includes itself: run.yaml -> run.yaml"),
    ],
)
def test_an_include_that_cannot_be_read(files: Files, value: str, problem: str) -> None:
    files.write("{}", "data.yaml")
    files.write("", "empty.yaml")
    Path("sub").mkdir()
    assert files.problems(f"trainer: {{}}\ndata: {value}\n") == [f"2:7: {problem}"]


def test_a_missing_file_is_not_taken_for_one_that_includes_it(files: Files) -> None:
    files.write("tokenizer: !include data/nan.yaml\n", "data/nano.yaml")
    assert files.problems("data: !include data/nano.yaml\n") == [
        "data/nano.yaml:1:12: cannot include data/data/nan.yaml: no such file, nor a directory data/data"
    ]
    files.write("tokenizer: !include nan.yaml\n", "data/nano.yaml")
    assert files.problems("data: !include data/nano.yaml\n") == [
        "data/nano.yaml:1:12: cannot include data/nan.yaml: no such file"
    ]


def test_a_cycle_names_its_files(files: Files) -> None:
    files.write("tokenizer: !include b.yaml\n", "a.yaml")
    files.write("name: !include ./a.yaml\n", "b.yaml")
    assert files.problems("data: !include a.yaml") == [
        "b.yaml:1:7: a.yaml includes itself: run.yaml -> a.yaml -> b.yaml -> a.yaml"
    ]


def test_the_same_file_may_be_included_twice(files: Files) -> None:
    files.write("[x]", "urls.yaml")
    data = files.load("data: {train_urls: !include urls.yaml, validation_urls: !include urls.yaml}").config.data
    assert data.train_urls == data.validation_urls == ["x"]


def test_a_syntax_error_in_an_included_file_leaves_the_other_problems(files: Files) -> None:
    files.write("a: [1\n", "data.yaml")
    problems = files.problems("data: !include data.yaml\ntrainer: {seed: x}\n")
    assert problems[0] == "1:17: trainer.seed: expected a whole number, got 'x'".replace("1:17", "2:17")
    assert problems[1].startswith("data.yaml:2:1: expected ',' or ']'")
    assert len(problems) == 2


def test_files_that_include_each_other_many_times_over_are_refused(files: Files) -> None:
    for n in range(8):
        files.write(f"[{', '.join([f'!include f{n + 1}.yaml'] * 9)}]", f"f{n}.yaml")
    files.write("[x]", "f8.yaml")
    (problem,) = files.problems("trainer: {jax_config: {x: !include f0.yaml}}\n")
    assert problem.endswith("more than 200 files are included")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("include: base.yaml\n", "1:1: include: unknown key; a file can stand for the value of a key"),
        ("<<: !include base.yaml\n", "1:5: !include cannot be merged with `<<`; include the value of a key instead"),
    ],
)
def test_whole_files_are_not_merged(files: Files, text: str, problem: str) -> None:
    files.write("trainer: {seed: 3}", "base.yaml")
    problems = files.problems(text)
    assert len(problems) == 1
    assert problems[0].startswith(problem)
