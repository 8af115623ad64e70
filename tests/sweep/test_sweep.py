"""`lmt sweep`: its runs, their names, how it goes on, and its table."""

from __future__ import annotations

import itertools
import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lm_trainer.report.comparison import compare_runs_in_table
from lm_trainer.report.run import read_run
from lm_trainer.run.config.run_id import explain_invalid_run_id
from lm_trainer.sweep import running
from lm_trainer.sweep.settings import plan_runs, split_overrides, split_values
from tests.conftest import Lmt, RunLmt, refused, run_here
from tests.run.test_token_probabilities import page_data

CONFIG = """
model: {type: gpt2, hidden_dim: 16, num_layers: 1, num_heads: 2, seq_len: 32}
data: {tokenizer: bytes, train_urls: [train.txt], validation_urls: [held.txt]}
optimizer: {learning_rate: 3e-3, warmup: 0}
trainer: {num_train_steps: 4, steps_per_eval: 2, train_batch_size: 8, elastic_shards: 8, sample_tokens: 0,
          token_probabilities: 0, max_eval_batches: 1, tracker: [], max_devices: 1}
"""


@pytest.fixture
def swept(in_tmp_path: Path) -> Path:
    (in_tmp_path / "run.yaml").write_text(CONFIG)
    (in_tmp_path / "train.txt").write_text("some text to train on, and some more of it.\n" * 30)
    (in_tmp_path / "held.txt").write_text("some text that is held out, and some more of it.\n" * 9)
    return in_tmp_path


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("1e-4,3e-4", ["1e-4", "3e-4"]),
        ("[1, 2],[3]", ["[1, 2]", "[3]"]),
        ("{a: 1, b: [2, 3]}", ["{a: 1, b: [2, 3]}"]),
        ("'a,b',c", ["'a,b'", "c"]),
        ("a", ["a"]),
    ],
)
def test_commas_outside_brackets_separate_values(text: str, values: list[str]) -> None:
    assert split_values(text) == values


def test_a_grid_has_every_combination_and_seeds_are_innermost() -> None:
    words = ["optimizer.learning_rate=1e-3,3e-3", "trainer.num_train_steps=5", "--model.num_layers", "1,2"]
    fixed, keys = split_overrides(words)
    assert fixed == ["trainer.num_train_steps=5"]
    runs = plan_runs("my", fixed, keys, seeds=["0", "7"])
    expected = list(itertools.product(["1e-3", "3e-3"], ["1", "2"], ["0", "7"]))
    assert [tuple(value for _, value in run.settings) for run in runs] == expected
    assert len({run.run_id for run in runs}) == 8
    assert runs[0].run_id == "my-learning_rate-1e-3-num_layers-1-seed-0"
    assert runs[0].overrides == (
        "trainer.num_train_steps=5",
        "optimizer.learning_rate=1e-3",
        "model.num_layers=1",
        "trainer.seed=0",
        "trainer.id=my-learning_rate-1e-3-num_layers-1-seed-0",
    )


def test_paired_values_are_combined_by_position() -> None:
    _, keys = split_overrides(["model.hidden_dim=16,32", "optimizer.learning_rate=2e-3,1e-3"])
    runs = plan_runs("my", [], keys, paired=True)
    assert [[value for _, value in run.settings] for run in runs] == [["16", "2e-3"], ["32", "1e-3"]]


def test_names_are_valid_and_depend_on_the_run_alone() -> None:
    """A value that is added later does not rename the runs that exist."""
    few = split_overrides(["data.weights={a: 0.5, b: 1},{a: 1}", "optimizer.eps=1e-8,-1"])[1]
    more = split_overrides(["data.weights={a: 0.5, b: 1},{a: 1}", "optimizer.eps=1e-8,-1,2"])[1]
    names = {run.settings: run.run_id for run in plan_runs("my", [], more)}
    for run in plan_runs("my", [], few):
        assert names[run.settings] == run.run_id
        assert explain_invalid_run_id(run.run_id) is None
    long = plan_runs("my", [], split_overrides([f"data.cache_dir={'a' * 200},{'a' * 200}b"])[1])
    assert len({run.run_id for run in long}) == 2
    assert all(len(run.run_id) < 120 for run in long)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["optimizer.learning_rate=1e-3"], "no key has several values; write for example"),
        (["optimizer.learning_rate=1,,2"], "one of the values is empty"),
        (["optimizer.learning_rate=1,1"], "a value occurs twice"),
        (["trainer.seed=1,2", "--seeds", "3,4"], "trainer.seed has several values, and --seeds too"),
        (["trainer.id=a,b"], "a sweep names its runs itself"),
        (["model.num_layers=1,2", "optimizer.learning_rate=1,2,3", "--paired"], "num_layers has 2, optimizer"),
        (["optimizer.learning_rate=1e-3,fast"], "optimizer.learning_rate"),
        (["optimizer.lerning_rate=1,2"], "did you mean"),
        (["trainer.seed=1,2", "--name", "a b"], "cannot name a directory"),
    ],
)
def test_mistakes_are_found_before_the_first_run(lmt: Lmt, swept: Path, arguments: list[str], message: str) -> None:
    refused(lmt("sweep", "run.yaml", *arguments), message)
    assert not (swept / "logs").exists()


class Trained:
    """Runs the commands of a sweep in this process, and can be stopped."""

    def __init__(self) -> None:
        self.commands: list[list[str]] = []
        self.codes: dict[int, int] = {}

    def __call__(self, arguments: Any) -> int:
        self.commands.append(list(arguments))
        code = self.codes.get(len(self.commands))
        return run_here(*arguments[3:]).returncode if code is None else code


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> Trained:
    trained = Trained()
    monkeypatch.setattr(running, "_run_and_wait", trained)
    return trained


@pytest.mark.slow
def test_a_stopped_sweep_goes_on_and_finished_runs_are_not_run_again(lmt: Lmt, swept: Path, trained: Trained) -> None:
    arguments = ("sweep", "run.yaml", "optimizer.learning_rate=1e-3,3e-2", "--name", "s")
    trained.codes = {2: 75}
    assert lmt(*arguments).returncode == 75
    assert [name.name for name in (swept / "logs").iterdir()] == ["s-learning_rate-1e-3"]
    states = lmt(*arguments, "--dry-run").stdout.splitlines()
    assert [line.split("  ")[1] for line in states] == ["done", "not begun"]
    listed = json.loads(lmt(*arguments, "--dry-run", "--json").stdout)["runs"]
    assert [(run["state"], run["values"]) for run in listed] == [
        ("done", {"optimizer.learning_rate": "1e-3"}),
        ("not begun", {"optimizer.learning_rate": "3e-2"}),
    ]
    assert listed[0]["command"][:3] == ["lmt", "train", "run.yaml"]
    trained.commands, trained.codes = [], {}
    result = lmt(*arguments)
    assert result.returncode == 0, result.stderr
    assert [words[-1] for words in trained.commands] == ["trainer.id=s-learning_rate-3e-2"]
    # Another run of the same command has nothing to do, and prints the same table.
    trained.commands = []
    again = lmt(*arguments)
    assert trained.commands == []
    assert again.stdout == result.stdout
    heads, *rows = [line.split() for line in again.stdout.splitlines()[:3]]
    assert heads == ["run", "state", "step", "optimizer.learning_rate", "eval/loss", "train/loss"]
    losses = {}
    for name in ("s-learning_rate-1e-3", "s-learning_rate-3e-2"):
        lines = [json.loads(line) for line in (swept / f"logs/{name}/metrics.jsonl").read_text().splitlines()]
        losses[name] = [line["eval/loss"] for line in lines if "eval/loss" in line][-1]
    best = min(losses, key=losses.__getitem__)
    assert [row[0] for row in rows if row[5] == "*"] == [best]
    table = json.loads(lmt(*arguments, "--json").stdout)
    assert {run["run"]: run["losses"]["eval/loss"] for run in table["runs"]} == losses
    assert (table["best"]["eval/loss"], table["page"]) == (best, "s-sweep.html")
    comparison = page_data((swept / "s-sweep.html").read_text())["comparison"]
    assert comparison["keys"] == ["optimizer.learning_rate"]
    column = comparison["metrics"].index("eval/loss")
    assert [losses[name] for name in sorted(losses)] == pytest.approx([row[1][column] for row in comparison["rows"]])
    # A run that is done with another configuration is not taken for one of this sweep.
    refused(lmt(*arguments, "trainer.num_train_steps=5"), "this run is done, but with another configuration", "--name")


def test_a_run_that_fails_does_not_end_the_sweep(lmt: Lmt, swept: Path, trained: Trained) -> None:
    trained.codes = {1: 3, 2: 4}
    result = lmt("sweep", "run.yaml", "trainer.seed=0,1,2", "--name", "s")
    assert result.returncode == 3
    assert len(trained.commands) == 3
    assert "s-seed-0 failed with exit code 3; the sweep goes on" in result.stderr


@pytest.mark.parametrize("code", [76, 77, 143, -1])
def test_a_run_that_was_stopped_or_has_a_bad_device_ends_the_sweep(
    lmt: Lmt, swept: Path, trained: Trained, code: int
) -> None:
    trained.codes = {1: code}
    assert lmt("sweep", "run.yaml", "trainer.seed=0,1").returncode == (code if code > 0 else 130)
    assert len(trained.commands) == 1


def test_a_signal_that_comes_before_a_run_has_started_reaches_it(monkeypatch: pytest.MonkeyPatch) -> None:
    start = subprocess.Popen

    def signal_first(command: Any) -> Any:
        signal.raise_signal(signal.SIGTERM)
        return start(command)

    monkeypatch.setattr(subprocess, "Popen", signal_first)
    previous_handler = signal.getsignal(signal.SIGTERM)
    assert running._run_and_wait([sys.executable, "-Sc", "import time; time.sleep(60)"]) == -signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) is previous_handler


def test_every_run_is_started_by_a_launcher(lmt: Lmt, swept: Path, trained: Trained) -> None:
    trained.codes = {1: 0, 2: 0}
    assert lmt("sweep", "run.yaml", "trainer.seed=0,1", "--launch", "slurm --time 1:00:00 --submit").returncode == 0
    options = ["--time", "1:00:00", "--submit"]
    assert [words[3:] for words in trained.commands] == [
        ["launch", "slurm", "run.yaml", f"trainer.seed={seed}", f"trainer.id=run-seed-{seed}", *options]
        for seed in (0, 1)
    ]


@pytest.mark.slow
def test_seeds_of_a_setting_are_averaged(lmt: Lmt, swept: Path, trained: Trained) -> None:
    assert lmt("sweep", "run.yaml", "optimizer.learning_rate=1e-3,3e-2", "--seeds", "0,1").returncode == 0
    runs = [read_run(str(path)) for path in sorted((swept / "logs").iterdir())]
    compared = compare_runs_in_table(runs)
    column = compared.metrics.index("train/loss")
    for values, count, losses in compared.seed_groups():
        rate = compared.keys.index("optimizer.learning_rate")
        numbers = [row[column] or 0.0 for _, row_values, row in compared.rows if row_values[rate] in values]
        assert count == 2
        # The mean of two numbers, and the standard deviation with n - 1: their difference over the root of 2.
        assert losses[column] == pytest.approx((sum(numbers) / 2, abs(numbers[0] - numbers[1]) / 2**0.5))
    assert len(compared.seed_groups()) == 2


@pytest.mark.slow
def test_a_sweep_of_processes(run_lmt: RunLmt, swept: Path) -> None:
    assert run_here("train", "run.yaml", "trainer.seed=0", "trainer.id=run-seed-0").returncode == 0
    result = run_lmt("sweep", "run.yaml", "trainer.seed=0,1", cwd=swept)
    assert result.returncode == 0, result.stderr
    assert "run-seed-0  done" in result.stdout
    assert "run-seed-1  done" in result.stdout
