"""The page about runs: what it holds, of runs that are done, killed and strange, and what a browser makes of it."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lm_trainer.health.alerts.predicted_curve import PredictedCurve, RegisteredCurve
from lm_trainer.report.downsample import downsample
from lm_trainer.report.page import GROUPS, build_report_page
from lm_trainer.report.run import ReportedRun, read_run
from lm_trainer.report.saved import compute_token_savings
from tests.browser import needs_browser, render
from tests.conftest import Lmt, refused, run_here
from tests.run.test_token_probabilities import page_data

CONFIG = """
model: {type: gpt2, hidden_dim: 16, num_layers: 1, num_heads: 2, seq_len: 32}
data: {tokenizer: bytes, train_urls: [train.txt], validation_urls: [held.jsonl]}
optimizer: {learning_rate: 3e-3, warmup: 0}
trainer: {num_train_steps: 4, steps_per_eval: 2, train_batch_size: 8, elastic_shards: 8, sample_tokens: 4,
          tracker: [], max_devices: 1}
"""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working directory with two runs that differ in the learning rate."""
    root = tmp_path_factory.mktemp("reported")
    (root / "run.yaml").write_text(CONFIG)
    (root / "train.txt").write_text("some text to train on, and some more of it.\n" * 30)
    (root / "held.jsonl").write_text(json.dumps({"text": "held out </script><b>text</b>, and more of it"}) + "\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        for name, *overrides in (("a",), ("b", "optimizer.learning_rate=1e-3")):
            assert run_here("train", "run.yaml", f"trainer.id={name}", *overrides).returncode == 0
    return root


@pytest.fixture
def lmt(root: Path, monkeypatch: pytest.MonkeyPatch) -> Lmt:
    monkeypatch.chdir(root)
    return run_here


def read_report_data(lmt: Lmt, *args: str) -> dict[str, Any]:
    result = lmt("report", *args, "--out", "page.html")
    assert result.returncode == 0, result.stderr
    page = Path("page.html").read_text()
    assert "</script><b>" not in page
    reaches = r"""(src|href)\s*=\s*["']?http|url\(\s*["']?http|@import|fetch\(|XMLHttp"""
    assert not re.search(reaches, page), "it needs no network"
    return page_data(page)


def test_a_page_holds_what_the_run_recorded(lmt: Lmt) -> None:
    data = read_report_data(lmt, "a")
    (run,) = data["runs"]
    assert (run["name"], run["state"], run["step"], run["steps"]) == ("a", "done", 4, 4)
    assert run["changes"]["model.hidden_dim"] == "16"
    assert run["changes"]["trainer.num_train_steps"] == "4"
    assert "model.initializer_range" not in run["changes"], "it is at its default"
    lines = [json.loads(line) for line in Path("logs/a/metrics.jsonl").read_text().splitlines()]
    losses = {line["step"]: line["train/loss"] for line in lines if "train/loss" in line}
    charts = {chart["name"]: chart["curves"] for group in data["groups"] for chart in group["charts"]}
    (curve,) = charts["train/loss"]
    assert dict(zip(curve["x"], curve["y"], strict=True)) == pytest.approx(losses, rel=1e-6)
    assert charts["eval/loss"][0]["x"] == [2, 4]
    assert run["last"]["eval/loss"] == pytest.approx(charts["eval/loss"][0]["y"][-1], rel=1e-6)
    prints = [line["fingerprint"] for line in lines if "fingerprint" in line]
    assert run["fingerprint"] == [4, prints[-1]]
    assert run["samples"][0][0] == 4
    assert run["attempts"][0]["step"] == 0
    assert "cpu" in run["attempts"][0]["devices"]
    assert "Token probabilities" in data["tokens"]["page"]
    assert data["tokens"]["note"] == ""
    assert data["pairs"] == []


def test_a_page_says_what_the_data_and_the_speed_were(lmt: Lmt) -> None:
    (run,) = read_report_data(lmt, "a")["runs"]
    lines = [json.loads(line) for line in Path("logs/a/metrics.jsonl").read_text().splitlines()]
    trained = max(line.get("throughput/total_tokens", 0) for line in lines)
    assert run["data"][-1][:2] == ["trained on", trained]
    assert all(tokens > 0 for _, tokens, *_ in run["data"])
    assert run["parameters"] > 0
    figures = dict(run["throughput"])
    assert 0 < figures["goodput of all attempts"] < 1
    assert figures["memory of the host, GiB, most"] > 0.1
    assert "MFU, median, %" not in figures, "a CPU has no datasheet"


@pytest.mark.slow
def test_a_page_says_what_verify_found(lmt: Lmt) -> None:
    assert read_report_data(lmt, "b")["runs"][0]["verifications"] == []
    assert lmt("verify", "b").returncode == 0
    (verification,) = read_report_data(lmt, "b")["runs"][0]["verifications"]
    assert (verification["equal"], verification["difference"]) == (True, None)
    assert verification["steps"] > 0
    file = Path("logs/b/metrics.jsonl")
    original_text = file.read_text()
    lines = [json.loads(line) for line in original_text.splitlines()]
    for line in lines:
        if "train/loss" in line:
            line["train/loss"] += 1.0
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert lmt("verify", "b").returncode == 1
    file.write_text(original_text)
    _, other = read_report_data(lmt, "b")["runs"][0]["verifications"]
    assert not other["equal"]
    assert other["difference"].endswith("train/loss")


def test_a_page_names_metrics_that_are_lost(lmt: Lmt) -> None:
    file = Path("logs/b/metrics.jsonl")
    original_text = file.read_text()
    assert read_report_data(lmt, "b")["runs"][0]["gaps"] == []
    file.write_text("".join(line for line in original_text.splitlines(keepends=True) if '"step": 2,' not in line))
    (gap,) = read_report_data(lmt, "b")["runs"][0]["gaps"]
    assert "lacks lines" in gap
    assert "train/loss of 2" in gap
    file.write_text(original_text)


@pytest.mark.slow
def test_several_runs_stand_beside_one_another(lmt: Lmt) -> None:
    data = read_report_data(lmt, "a", "b")
    (pair,) = data["pairs"]
    assert pair["configuration"] == [["optimizer.learning_rate", "0.003", "0.001"]]
    # The first update is another one, and the loss after it.
    assert pair["bits"] == "part at step 1"
    charts = {chart["name"]: chart["curves"] for group in data["groups"] for chart in group["charts"]}
    assert [curve["run"] for curve in charts["train/loss"]] == [0, 1]
    # The same figures without the page.
    facts = json.loads(lmt("report", "a", "b", "--out", "page.html", "--json").stdout)
    assert (facts["page"], facts["pairs"]) == ("page.html", data["pairs"])
    assert [run["name"] for run in facts["runs"]] == ["a", "b"]
    losses = [run["losses"]["train/loss"] for run in facts["comparison"]["runs"]]
    assert losses == pytest.approx([curve["y"][-1] for curve in charts["train/loss"]], rel=1e-6)
    assert facts["comparison"]["best"]["train/loss"] == "ab"[losses.index(min(losses))]
    (comparison,) = read_report_data(lmt, "a", "a")["pairs"]
    assert comparison["bits"] == "equal in all 4 steps that both have"


@pytest.mark.slow
def test_runs_of_one_name_and_of_other_documents_are_told_apart(lmt: Lmt, root: Path) -> None:
    shutil.copytree(root / "logs/a", root / "elsewhere/a", dirs_exist_ok=True)
    data = read_report_data(lmt, "a", "elsewhere/a")
    names = [run["name"] for run in data["runs"]]
    assert len({*names}) == 2
    assert len(page_data(data["tokens"]["page"])["runs"]) == 2
    file = root / "elsewhere/a/token-probabilities.jsonl"
    file.write_text(file.read_text().replace('{"documents":[[', '{"documents":[[1,'))
    assert "other documents" in read_report_data(lmt, "a", "elsewhere/a")["tokens"]["note"]


def test_a_run_that_was_killed_in_the_middle_of_a_line_is_reported(lmt: Lmt, root: Path) -> None:
    shutil.copytree(root / "logs/a", root / "logs/killed")
    file = root / "logs/killed/metrics.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    kept_lines = [line for line in lines if json.loads(line)["step"] <= 3 and "eval/loss" not in json.loads(line)]
    file.write_text("".join(kept_lines) + '{"step": 4, "train/lo')
    (root / "logs/killed/summary.json").unlink()
    for name in ("texts.jsonl", "token-probabilities.jsonl"):
        (root / "logs/killed" / name).unlink()
    data = read_report_data(lmt, "killed")
    (run,) = data["runs"]
    assert (run["state"], run["step"], run["last"]) == ("stopped", 3, {})
    assert data["tokens"] is None
    file.write_text("")
    refused(lmt("report", "killed"), "lacks lines that were there", "`lmt replay killed --metrics`")
    refused(lmt("report", "nowhere"), "no run of this name")


@pytest.mark.slow
@pytest.mark.parametrize(
    "groups",
    [pytest.param((("Loss", "(train|eval)/loss"),), id="loss"), pytest.param(GROUPS, id="all", marks=pytest.mark.slow)],
)
def test_figures_are_written(lmt: Lmt, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, groups: Any) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr("lm_trainer.report.figures.GROUPS", groups)
    assert lmt("report", "a", "b", "--out", str(tmp_path / "x.html"), "--figures", str(tmp_path / "f")).returncode == 0
    assert (tmp_path / "f/train-loss.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (tmp_path / "f/eval-loss.svg").read_text()


def test_thin_curves_keep_every_extreme() -> None:
    rng = np.random.default_rng(0)
    x, y = np.arange(100_000), rng.normal(size=100_000)
    y[54_321], y[77_777], y[5] = 50.0, -50.0, np.nan
    few_x, few_y = downsample(x, y, 1000)
    assert len(few_x) <= 1002
    assert np.all(np.diff(few_x) > 0)
    assert (few_y[few_x == 54_321], few_y[few_x == 77_777]) == (50.0, -50.0)
    assert np.isfinite(few_y).all()
    # In every bucket, of 200 points, the picture is as high and as low as the curve.
    for start in range(1, 99_000, 200):
        inside = (few_x >= start) & (few_x < start + 200)
        stretch = y[start : start + 200]
        assert few_y[inside].max() == np.nanmax(stretch)
        assert few_y[inside].min() == np.nanmin(stretch)
    assert downsample(x[:10], y[:10], 1000)[0].tolist() == [0, 1, 2, 3, 4, 6, 7, 8, 9]


def curve(scale: float, seed: int, noise: float = 0.02, flops: float = 10.0) -> ReportedRun:
    """A run whose loss is 2 + 30 (scale * tokens)^-0.3."""
    steps = np.arange(1, 4001)
    tokens = steps * 1000.0
    loss = 2 + 30 * (scale * tokens) ** -0.3 + noise * np.random.default_rng(seed).standard_normal(len(steps))
    metrics = {"train/loss": (steps, loss), "throughput/total_tokens": (steps, tokens)}
    facts = {"flops_per_token": flops}
    return ReportedRun("x", Path(), "done", 4000, 4000, {}, {}, [], metrics, [], [], [], facts, [], None, [])


def test_tokens_saved_are_those_of_the_law() -> None:
    for scale in (2.0, 0.5):
        saved = compute_token_savings(curve(scale, seed=1), curve(1.0, seed=2))
        assert saved is not None
        assert saved.ratio == pytest.approx(1 / scale, rel=0.08)
        assert saved.compute == saved.ratio
        low, high = saved.interval
        assert low < 1 / scale < high
        assert high - low < 0.5 / scale
    larger = compute_token_savings(curve(2, seed=1, flops=30.0), curve(1, seed=2))
    assert larger is not None
    assert larger.compute == pytest.approx(1.5, rel=0.08)
    nothing = ReportedRun("y", Path(), "", 0, 0, {}, {}, [], {}, [], [], [], {}, [], None, [])
    assert compute_token_savings(curve(1, seed=1), nothing) is None


@needs_browser
@pytest.mark.slow
@pytest.mark.parametrize("width", [1280, 420])
def test_a_browser_draws_every_chart(root: Path, tmp_path: Path, width: int) -> None:
    page = build_report_page([read_run(str(root / "logs/a")), read_run(str(root / "logs/b"))])
    document = render(page, tmp_path, f"--window-size={width},900")
    shown = sum(len(group["charts"]) for group in page_data(page)["groups"] if group["title"] != "Everything else")
    body = document.partition("<main")[2].partition("<script>")[0]
    assert body.count('class="uplot') == shown
    assert "part at step 1" in body


@needs_browser
@pytest.mark.slow
def test_a_browser_draws_a_predicted_band(root: Path, tmp_path: Path) -> None:
    curve = PredictedCurve("train/loss", 0.9, 1, [2, 3, 4], [4.0, 3.9, 3.8], [3.0] * 3, [5.0] * 3)
    run = replace(read_run(str(root / "logs/a")), prediction=RegisteredCurve(curve, "2026-01-01", "ab" * 32, "a", {}))
    document = render(build_report_page([run]), tmp_path)
    body = document.partition("<main")[2].partition("<script>")[0]
    assert "of 3 windows inside the 90% band" in body
    assert body.count("predicted</div>") == 1
