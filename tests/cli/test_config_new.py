"""`lmt config new`: what it writes is valid, has the promised size, and trains."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest

from lm_trainer.config.loader import load
from lm_trainer.profile.flops import parameter_count
from lm_trainer.run.config.first_file import FAMILIES, SIZES
from lm_trainer.run.config.run_config import RunConfig
from tests.conftest import Lmt, RunLmt, refused

VOCABULARY = {"15M": 4096, "125M": 50257, "350M": 50257, "1B": 50257, "3B": 50257, "8B": 128256}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("size", SIZES)
def test_a_file_is_valid_and_of_its_size(lmt: Lmt, in_tmp_path: Path, family: str, size: str) -> None:
    result = lmt("config", "new", "my.yaml", "--model", family, "--size", size, "--devices", "8xH100")
    assert result.returncode == 0, result.stderr
    assert lmt("config", "check", "my.yaml", "--no-files").returncode == 0
    config = load(in_tmp_path / "my.yaml", [], RunConfig).config
    assert config.model.type == family
    named = SIZES[size].params
    assert parameter_count(config.model.spec(VOCABULARY[size])) == pytest.approx(named, rel=0.35)
    tokens = config.trainer.batch_schedule.at(0) * config.model.seq_len * config.trainer.num_train_steps
    assert tokens == pytest.approx(20 * named, rel=0.01)


def test_data_is_files_a_set_of_the_hub_or_the_text_of_python(lmt: Lmt, in_tmp_path: Path) -> None:
    data = {"python": (None, None), "org/name": (None, "org/name"), "text/*.jsonl": (["text/*.jsonl"], None)}
    for number, (answer, expected) in enumerate(data.items()):
        assert lmt("config", "new", f"{number}.yaml", "--data", answer).returncode == 0
        section = load(in_tmp_path / f"{number}.yaml", [], RunConfig).config.data
        assert (section.train_urls, section.id) == expected


@pytest.mark.parametrize(
    ("size", "held_out", "times"),
    [(4 * 256 * 20 * 7, 7, "8,371"), (4 * 256 * 20 * 4000, 512, "15"), (40, 1, "30,000,000")],
)
def test_a_short_text_is_not_held_out_as_a_whole(
    lmt: Lmt, in_tmp_path: Path, size: int, held_out: int, times: str
) -> None:
    """A twentieth of the rows of 256 tokens, at 4 bytes a token; 300 million tokens are 20 for each parameter."""
    with (in_tmp_path / "text.txt").open("wb") as file:
        file.truncate(size)
    result = lmt("config", "new", "my.yaml", "--data", "*.txt")
    assert load(in_tmp_path / "my.yaml", [], RunConfig).config.data.num_validation_sequences == held_out
    assert f"note: the text has about {size // 4:,} tokens, so the run reads it about {times} times" in result.stderr


@pytest.mark.parametrize(
    "data",
    [
        "it's/*.txt",
        "FILES/FILE.txt",
        "x'], text_key: y #.txt",
        'a"b\\n.txt',
        "a\n  text_key: y\nb.txt",
        "é\x85\u2028.txt",
    ],
)
def test_names_of_files_are_values_and_nothing_else(lmt: Lmt, in_tmp_path: Path, data: str) -> None:
    assert lmt("config", "new", "new\nmodel: x.yaml", "--data", data).returncode == 0
    section = load(in_tmp_path / "new\nmodel: x.yaml", [], RunConfig).config.data
    assert (section.train_urls, section.text_key) == ([data], "text")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["my.yaml", "--size", "2B"], "there is no size '2B'; write one of 15M"),
        (["my.yaml", "--model", "gpt3"], "'gpt3' is not one of llama"),
        (["my.yaml", "--devices", "H100"], "is not a number and a kind"),
        (["my.yaml", "--devices", "1000xH100"], "trains on at most 8 devices"),
        (["there.yaml"], "there is such a file already"),
        (["my.json"], "write my.json.yaml"),
    ],
)
def test_wrong_answers_are_refused(lmt: Lmt, in_tmp_path: Path, arguments: list[str], message: str) -> None:
    (in_tmp_path / "there.yaml").write_text("{}")
    refused(lmt("config", "new", *arguments), message)
    assert not (in_tmp_path / "my.yaml").exists()


def test_a_terminal_is_asked_for_what_options_leave_out(
    in_tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from cli import config_new

    answers = io.StringIO("olmo2\n\n\n4xH100\n")
    monkeypatch.setattr(answers, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stdin", answers)
    config_new.new(in_tmp_path / "my.yaml", size="125M", model=None, data=None, devices=None)
    asked = capsys.readouterr().out
    assert "Model family" in asked
    assert "Parameters" not in asked, "an option has answered it"
    config = load(in_tmp_path / "my.yaml", [], RunConfig).config
    assert (config.model.type, config.model.seq_len, config.data.id) == ("olmo2", 1024, None)


@pytest.mark.slow
def test_the_default_file_trains(run_lmt: RunLmt, in_tmp_path: Path) -> None:
    assert run_lmt("config", "new", "my.yaml", cwd=in_tmp_path).returncode == 0
    trainer = ("num_train_steps=3", "train_batch_size=8", "max_eval_batches=1", "id=my", "sample_tokens=0")
    short = (*(f"trainer.{setting}" for setting in trainer), "model.num_layers=1", "model.seq_len=64")
    result = run_lmt("train", "my.yaml", *short, cwd=in_tmp_path)
    assert result.returncode == 0, result.stderr
    assert json.loads((in_tmp_path / "logs/my/summary.json").read_text())["step"] == 3
