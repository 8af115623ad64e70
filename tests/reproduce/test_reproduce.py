"""Verify, replay and diff, and a configuration that changes on the way: on one tiny run and its copies."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import yaml
from safetensors.numpy import load_file

from lm_trainer.core.checksummed import with_checksum
from lm_trainer.reproduce.lost_metrics import ChangedMetrics, find_changed_metrics
from lm_trainer.reproduce.record import RunRecord
from tests.conftest import RunLmt, refused, run_here
from tests.reproduce.conftest import STEPS, as_json, metrics, on_one_device, write_config


@pytest.fixture(scope="module", autouse=True)
def _one_device() -> Iterator[None]:
    with on_one_device():
        yield


def change_metrics(directory: Path, change: Callable[[dict[str, Any]], None]) -> None:
    lines = metrics(directory)
    for line in lines:
        change(line)
    (directory / "logs/run/metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def read_files(directory: Path) -> dict[str, bytes]:
    return {str(p.relative_to(directory)): p.read_bytes() for p in sorted(directory.rglob("*")) if p.is_file()}


def test_a_fingerprint_comes_with_every_checkpoint(finished: Path) -> None:
    fingerprints = {line["step"]: line["fingerprint"] for line in metrics(finished) if "fingerprint" in line}
    assert list(fingerprints) == [2, 4, 6]
    assert len({*fingerprints.values()}) == 3
    assert {len(value) for value in fingerprints.values()} == {16}


def test_verify_repeats_a_segment_and_adds_a_line_alone(finished: Path, in_tmp_path: Path) -> None:
    before = read_files(finished)
    result = run_here("verify", finished / "logs/run", "--seed", "1", "--json")
    assert result.returncode == 0, result.stderr
    report = as_json(result)
    assert (report["run"], report["equal"]) == ("run", True)
    (part,) = report["stretches"]
    assert part["end"] - part["start"] == part["steps"] == 2
    assert (part["fingerprints"], part["difference"], part["notes"]) == (1, None, [])
    after = read_files(finished)
    line = json.loads(after.pop("logs/run/verified.jsonl"))
    assert (line["equal"], line["seed"], len(line["segments"])) == (True, 1, 1)
    assert after == before
    assert list(in_tmp_path.iterdir()) == []


def test_replay_shows_what_the_step_was(finished: Path, in_tmp_path: Path) -> None:
    result = run_here(
        "replay", finished / "logs/run", "--step", "3", "--show-batch", "--dump-grads", "g", "--top-k", "128", "--json"
    )
    assert result.returncode == 0, result.stderr
    report = as_json(result)
    assert (report["step"], report["start"], report["applied"]) == (3, 2, True)
    line = next(line for line in metrics(finished) if line["step"] == 3)
    assert report["now"] == report["recorded"] == {name: line[name] for name in report["now"]}
    assert {"train/loss", "optim/grad_norm", "optim/learning_rate"} <= report["now"].keys()

    grads = load_file(in_tmp_path / "g/gradients-3.safetensors")
    total = math.sqrt(sum(float(np.square(g.astype(np.float64)).sum()) for g in grads.values()))
    assert total == pytest.approx(line["optim/grad_norm"], rel=1e-5)
    up = grads["blocks.0.mlp.up.weight"]
    for layer in range(2):
        norm = report["norms"][f"blocks.0.mlp.up.weight/{layer}"]
        assert norm["gradient"] == pytest.approx(np.linalg.norm(up[layer]), rel=1e-5)
        # Adam with a learning rate of 1e-2 moves no element further than that, but for weight decay.
        assert 0 < norm["update"] < 1.1e-2 * math.sqrt(up[layer].size)
        assert norm["parameter"] > norm["update"]

    tokens = report["tokens"]
    assert len(tokens) == 8 * 16
    assert [t["loss"] for t in tokens] == sorted((t["loss"] for t in tokens), reverse=True)
    assert np.mean([t["loss"] for t in tokens]) == pytest.approx(line["train/loss"], rel=1e-5)
    assert tokens[0]["source"].endswith("text.txt")
    rows = {row["row"]: "".join(p["text"] for p in row["passages"]) for row in report["rows"]}
    assert len(rows) == 8
    for token in tokens:
        text = rows[token["row"]]
        assert text[: token["position"] + 1].endswith(token["before"])
        if token["position"] < 15:
            assert (token["token"] + token["after"]).startswith(text[token["position"] + 1])


def test_what_cannot_be_done_is_said(finished: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(finished)
    refused(run_here("verify", "rum"), "no run of this name", "runs here: run")
    refused(run_here("verify", "checkpoints/run"), "is a checkpoint directory; name the run directory")
    refused(run_here("verify", "run", "trainer.seed=5"), "would give other numbers", "trainer.seed: was 0, now 5")
    refused(run_here("verify", "--segment", "run"), "no such option")
    for step in ("0", "7"):
        refused(run_here("replay", "run", "--step", step), f"there is no step {step}", "steps 1 to 6")


def test_verify_and_diff_name_the_first_difference(copied: Path) -> None:
    shutil.copytree("logs/run", "logs/other")

    def nudge(line: dict[str, Any]) -> None:
        if line["step"] == 1 and "train/loss" in line:
            line["train/loss"] = float(np.nextafter(np.float32(line["train/loss"]), np.float32(9)))

    change_metrics(copied, nudge)
    attempts = json.loads(Path("logs/run/env.json").read_text())
    attempts[0]["packages"]["jax"] = "0.1"
    Path("logs/run/env.json").write_text(json.dumps(attempts))
    for step in (2, 4, 6):
        shutil.rmtree(f"checkpoints/run/{step}")
    result = run_here("verify", "run", "--max-steps", "2")
    assert result.returncode == 1
    assert f"  jax: 0.1 -> {jax.__version__}\n" in result.stdout.split("steps  ")[0], "said before it compares"
    assert "first difference: step 1, train/loss" in result.stdout
    original, changed = (metrics(copied, run)[0]["train/loss"] for run in ("other", "run"))
    assert f"recorded {changed!r}" in result.stdout
    assert f"now      {original!r}" in result.stdout

    result = run_here("diff", "other", "run", "--json")
    assert result.returncode == 1
    report = as_json(result)
    assert report["parting"] == {"step": 1, "after": None, "values": {"train/loss": [original, changed]}}
    assert (report["common"], report["last"]) == (STEPS, STEPS)
    assert report["causes"] == {"code and packages": [f"jax: {jax.__version__} -> 0.1"]}
    shutil.copyfile("logs/other/env.json", "logs/run/env.json")
    assert "nothing that the runs have written down explains it" in run_here("diff", "other", "run").stdout
    result = run_here("diff", "other", "other")
    assert (result.returncode, result.stdout.splitlines()[-1]) == (0, "equal, bit for bit")


@pytest.mark.slow
def test_a_run_goes_on_with_another_configuration_when_told_to(copied: Path) -> None:
    shutil.copytree("logs/run", "logs/before")
    file = Path("logs/before/run.json")
    file.write_text(file.read_text().replace("checkpoints/run", "checkpoints/before"))
    shutil.copytree("checkpoints/run", "checkpoints/before")
    shutil.rmtree("checkpoints/run/6")
    config = write_config(copied, optimizer={"learning_rate": 2e-2}, trainer={"steps_per_log": 2})
    result = run_here("train", config)
    refused(result, "optimizer.learning_rate: was 0.01, now 0.02", "--allow-config-change", "trainer.id")
    result = run_here("train", config, "--allow-config-change")
    assert result.returncode == 0, result.stderr
    assert "from step 4 on with another configuration:\n  optimizer.learning_rate: was 0.01, now 0.02" in result.stdout
    (change,) = json.loads(Path("logs/run/run.json").read_text())["changes"]
    assert (change["step"], change["differences"]) == (4, ["optimizer.learning_rate: was 0.01, now 0.02"])
    assert (
        yaml.safe_load((Path("logs/run") / change["config_before"]).read_text())["optimizer"]["learning_rate"] == 0.01
    )

    # Another interval of logging: of steps 5 and 6 only the second is there.
    report = as_json(run_here("diff", "before", "run", "--json"))
    assert (report["parting"]["step"], report["parting"]["after"], report["common"]) == (6, 4, 5)
    assert report["checkpoint"] == 6
    assert len(report["parameters"]) > 10
    assert report["causes"]["configuration"][0] == "optimizer.learning_rate: 0.01 -> 0.02"

    # Each side of the change is computed with the configuration of its own.
    result = run_here("verify", "run", "--segments", "9", "--json")
    assert result.returncode == 0, result.stdout
    assert [(part["start"], part["end"]) for part in as_json(result)["stretches"]] == [(0, 2), (2, 4), (4, 6)]


@pytest.mark.slow
def test_verify_on_other_devices(copied_from_four: Path, run_lmt: RunLmt) -> None:
    result = run_lmt("verify", "run", "--segments", "2", "--seed", "0")
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.splitlines()[-1] == "equal, bit for bit: 4 steps"


def remove_lines(directory: Path, *steps: int) -> str:
    """Removes the lines of some steps; returns the file as it was, without what belongs to the day."""
    file = directory / "logs/run/metrics.jsonl"
    files_before = read_reproducible_lines(directory)
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(line for line in lines if json.loads(line)["step"] not in steps))
    return files_before


def read_reproducible_lines(directory: Path) -> str:
    """The lines of the metrics without times, speeds and memory."""
    of_the_day = re.compile(r"time$|^memory/|^throughput/(?!total_tokens)")
    return "\n".join(
        json.dumps({name: value for name, value in line.items() if not of_the_day.search(name)})
        for line in metrics(directory)
    )


@pytest.mark.slow
def test_lost_metrics_are_named_and_put_back_bit_for_bit(copied: Path) -> None:
    files_before = remove_lines(copied, 3, 4)
    result = run_here("train", "run.yaml")
    assert "run run has all its steps, but not all their metrics, after step 6" in result.stdout
    assert "lacks lines that were there at the checkpoint of step 6: train/loss of 3 to 4" in result.stdout
    missing = {"metrics.jsonl": {"train/loss": [3, 4], "fingerprint": [4]}}
    verified = run_here("verify", "run", "--seed", "0")
    assert verified.returncode == 0
    assert "warning: " in verified.stdout
    assert "train/loss of 3 to 4; fingerprint of 4. `lmt replay run --metrics`" in verified.stdout
    assert as_json(run_here("verify", "run", "--json"))["missing"] == missing
    report = as_json(run_here("replay", "run", "--metrics", "--json"))
    assert report["lines"] == missing
    assert (report["left"], report["proved"]) == ({}, [4])
    assert read_reproducible_lines(copied) == files_before
    assert "was complete already" in run_here("train", "run.yaml").stdout


@pytest.mark.parametrize("name", ["train/loss", "optim/grad_norm"])
def test_a_flipped_digit_of_a_loss_is_found_by_the_checkpoints(copied: Path, name: str) -> None:
    assert find_changed_metrics(RunRecord.read("run")) is None
    file = copied / "logs/run/metrics.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    (line,) = (line for line in lines if line["step"] == 3 and name in line)
    value = np.float32(line[name])
    # The neighbouring number of float32, a number beyond float32, and no number.
    for other in (float(np.nextafter(value, np.float32(np.inf))), 1e300, [1]):
        line[name] = other
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))
        changed = find_changed_metrics(RunRecord.read("run"))
        assert changed is not None
        assert changed == ChangedMetrics(3, 4)
        assert "the steps 3 to 4 is not what the run logged" in ChangedMetrics(3, 4).describe(Path("logs/run"), "run")
    # Where not every step is logged, nothing can be said.
    file.write_text("".join(json.dumps(line) + "\n" for line in lines if line["step"] != 2))
    assert find_changed_metrics(RunRecord.read("run")) is None


@pytest.mark.slow
def test_metrics_that_do_not_come_out_again_are_not_written(copied: Path) -> None:
    remove_lines(copied, 3, 4)
    record = json.loads((copied / "checkpoints/run/4/_CHECKPOINT_METADATA").read_text())
    record["custom_metadata"] = with_checksum({**record["custom_metadata"], "fingerprint": "0" * 16})
    (copied / "checkpoints/run/4/_CHECKPOINT_METADATA").write_text(json.dumps(record))
    metrics_before = (copied / "logs/run/metrics.jsonl").read_bytes()
    refused(run_here("replay", "run", "--metrics"), "come out otherwise here", "lmt verify")
    assert (copied / "logs/run/metrics.jsonl").read_bytes() == metrics_before
    refused(run_here("replay", "run"), "--step N, or give --metrics")
    refused(run_here("replay", "run", "--metrics", "--step", "3"), "--step N, or give --metrics")


@pytest.mark.slow
def test_evaluations_watched_norms_and_histograms_come_back_too(in_tmp_path: Path) -> None:
    watch = {"interval": 2, "include_histograms": True}
    config = write_config(
        in_tmp_path, trainer={"watch": watch, "steps_per_eval": 3}, data={"validation_urls": ["text.txt"]}
    )
    assert run_here("train", config).returncode == 0
    contents_before = read_reproducible_lines(in_tmp_path), (in_tmp_path / "logs/run/histograms.jsonl").read_text()
    (in_tmp_path / "logs/run/histograms.jsonl").unlink()
    (in_tmp_path / "logs/run/metrics.jsonl").unlink()
    assert as_json(run_here("replay", "run", "--metrics", "--json"))["left"] == {}
    assert read_reproducible_lines(in_tmp_path) == contents_before[0]
    restored_text = (in_tmp_path / "logs/run/histograms.jsonl").read_text()
    assert re.sub(r'"time": [\d.]+', "", restored_text) == re.sub(r'"time": [\d.]+', "", contents_before[1])


@pytest.mark.slow
def test_a_branch_with_the_same_configuration_is_the_same_run(copied: Path) -> None:
    result = run_here("train", "run.yaml", "trainer.id=branch", "trainer.load_checkpoint_path=checkpoints/run/4")
    assert result.returncode == 0, result.stderr
    fingerprints = [
        {line["step"]: line["fingerprint"] for line in metrics(copied, run) if "fingerprint" in line}
        for run in ("run", "branch")
    ]
    assert fingerprints[1] == {6: fingerprints[0][6]}
    result = run_here("diff", "run", "branch", "--json")
    assert (result.returncode, as_json(result)["parting"]) == (0, None)
    report = as_json(run_here("verify", "branch", "--json"))
    assert (report["equal"], report["stretches"][0]["fingerprints"]) == (True, 1)
    # Versions that began a branch's fingerprint anew wrote down no chain: theirs cannot be compared with another run's.
    record = copied / "logs/branch/env.json"
    (attempt,) = json.loads(record.read_text())
    record.write_text(json.dumps([{name: value for name, value in attempt.items() if name != "chain"}]))
    file = copied / "logs/branch/metrics.jsonl"
    file.write_text(file.read_text().replace(fingerprints[0][6], "0" * 16))
    assert run_here("diff", "run", "branch").returncode == 0


def test_a_branch_that_does_not_fit_is_told_what_a_branch_can_do(copied: Path) -> None:
    (copied / "other.txt").write_text("other text " * 300)
    options = ("trainer.id=branch", "trainer.load_checkpoint_path=checkpoints/run/4")
    result = run_here("train", "run.yaml", *options, "data.train_urls=[other.txt]")
    refused(result, "was trained on other data", "take its weights alone by trainer.initialize_from")
    assert "set trainer.id" not in result.stderr
