"""Causes that are planted, and found: another row, a document of garbage, one line of code."""

from __future__ import annotations

import io
import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from benchmarks.lying_devices import LyingDevice, lying, once
from lm_trainer.reproduce.record import RunRecord
from lm_trainer.reproduce.rerun import QuietProgress, Rerun, open_rerun
from lm_trainer.reproduce.step_trace import StepTrace, find_first_difference, trace_step
from lm_trainer.step.loss.gradient import Sums
from tests.conftest import ROOT, lmt_environment, refused, run_here
from tests.reproduce.conftest import as_json, metrics, on_one_device, write_config


@pytest.fixture(scope="module", autouse=True)
def _one_device() -> Iterator[None]:
    with on_one_device():
        yield


def trace(**changes: Any) -> StepTrace:
    """A step of two microbatches of two rows, and of a model with two layers."""
    stages = {"embedding": 1, "layer 0": 2, "layer 1": 3, "head": 4}
    sums = {"loss": [5], "blocks.0.mlp": [6, 7], "embed.tokens": [8], "final_norm": [9]}
    fields = {"tokens": list("abcd"), "targets": list("efgh")}
    layers = {"blocks.0.mlp": range(2)}
    values = {"train/loss": 1.0, "optim/grad_norm": 2.0, "optim/learning_rate": 0.1}
    plain = StepTrace(3, 2, {"params.x": "1"}, fields, [stages] * 2, [sums] * 2, layers, values, {"params.x": "2"})
    return replace(plain, **changes)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"state": {"params.x": "0"}}, "step 3, state before the step: params.x"),
        (
            {"batch": {"tokens": list("abxd"), "targets": list("efgh")}, "state": {"params.x": "1"}, "metrics": {}},
            "step 3, microbatch 1, row 2 of the batch, batch: tokens",
        ),
        ({"rows": 1}, "step 3, division into microbatches: rows in a microbatch: 2 and 1"),
        (
            {"streams": [trace().streams[0], {"embedding": 1, "layer 0": 2, "layer 1": 0, "head": 0}]},
            "step 3, microbatch 1, layer 1, forward pass: residual stream after the layer",
        ),
        (
            # A difference in layer 1 reaches the layers below, and not the head.
            {"sums": [{**trace().sums[0], "blocks.0.mlp": [0, 0], "embed.tokens": [0]}, trace().sums[1]]},
            "step 3, microbatch 0, layer 1, gradient: blocks.0.mlp",
        ),
        (
            {"metrics": {**trace().metrics, "optim/grad_norm": 3.0, "optim/learning_rate": 0.2}},
            "step 3, sum over microbatches: optim/grad_norm",
        ),
        ({"metrics": {**trace().metrics, "optim/learning_rate": 0.2}}, "step 3, update: optim/learning_rate"),
        ({"after": {"params.x": "0"}}, "step 3, update: params.x"),
    ],
)
def test_the_first_operand_in_the_order_of_the_computation(changes: dict[str, Any], expected: str) -> None:
    assert find_first_difference(trace(), trace()) is None
    location = find_first_difference(trace(), trace(**changes))
    assert location is not None
    assert location.describe() == expected


def test_what_cannot_be_bisected_is_said(finished: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(finished)
    refused(run_here("bisect", "runs", "run", "logs/run"), "run is given twice")
    refused(run_here("bisect", "spike", "run", "--step", "7"), "there is no step 7", "steps 1 to 6")
    # git must not mistake a wrong command for a bad commit.
    for args, word in (
        (("rum", "--step", "3"), "no run of this name"),
        (("run", "--step", "7"), "has recorded the steps 1 to 6"),
        (("run", "--step", "3", "--code", "logs"), "no package lm_trainer"),
    ):
        result = run_here("bisect", "code", *args)
        assert (result.returncode, word in result.stderr) == (128, True), result.stderr


@pytest.mark.slow
def test_the_row_that_differs_between_two_runs_is_located(copied: Path) -> None:
    result = run_here("data", "at", "run.yaml", "--step", "5", "--row", "3", "--json")
    (row,) = as_json(result)["rows"]
    text = (copied / "text.txt").read_text()
    changed = row["of_set"] * 16 + 7
    letter = "x" if text[changed] != "x" else "y"
    (copied / "other.txt").write_text(f"{text[:changed]}{letter}{text[changed + 1 :]}")
    result = run_here("train", "run.yaml", "trainer.id=other", "data.train_urls=[other.txt]")
    assert result.returncode == 0, result.stderr
    result = run_here("bisect", "runs", "run", "other", "--json")
    assert result.returncode == 1, result.stderr
    report = as_json(result)
    location = report["location"]
    assert (report["step"], location["step"], location["part"]) == (5, 5, "batch")
    assert (location["microbatch"], location["row"], location["operand"]) == (3, 3, "tokens")
    assert (location["others"], location["microbatches"]) == (["targets"], [3])
    assert report["reproduced"] == {"run": True, "other": True}
    assert "first differ in step 5, microbatch 3, row 3 of the batch, batch: tokens" in report["sentence"]

    # A run whose record is wrong: both come out equal here.
    shutil.copytree("logs/run", "logs/wrong")
    file = copied / "logs/wrong/run.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "id": "wrong"}))
    lines = metrics(copied, "wrong")
    for line in lines:
        if line["step"] == 4 and "train/loss" in line:
            line["train/loss"] = float(np.nextafter(np.float32(line["train/loss"]), np.float32(9)))
    (copied / "logs/wrong/metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    report = as_json(run_here("bisect", "runs", "run", "logs/wrong", "--json"))
    assert (report["location"], report["step"]) == (None, 4)
    assert report["reproduced"] == {"run": True, "wrong": False}
    assert "step 4 of wrong was computed wrong" in report["sentence"]


@pytest.mark.slow
def test_norms_of_rows_are_those_of_torch(copied: Path) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    result = run_here("bisect", "spike", "run", "--step", "3", "--json")
    assert result.returncode == 0, result.stderr
    report = as_json(result)
    recorded = next(line for line in metrics(copied) if line["step"] == 3)
    assert report["size"]["loss"] == recorded["train/loss"]
    assert report["size"]["grad_norm"] == recorded["optim/grad_norm"]
    assert run_here("export-hf", "run", "out", "--step", "2").returncode == 0
    model = transformers.AutoModelForCausalLM.from_pretrained("out", attn_implementation="eager").float().eval()
    rows = as_json(run_here("data", "at", "run.yaml", "--step", "3", "--json"))["rows"]
    text = (copied / "text.txt").read_bytes()
    for entry in report["rows"]:
        first = rows[entry["row"]]["of_set"] * 16
        ids = torch.tensor([list(text[first : first + 17])])
        logits = model(ids[:, :-1]).logits[0]
        loss = torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="sum")
        model.zero_grad()
        loss.backward()
        norm = math.sqrt(sum(float(x.grad.square().sum()) for x in model.parameters()))
        assert entry["loss"] == pytest.approx(float(loss.detach()) / 16, rel=1e-4)
        assert entry["norm"] == pytest.approx(norm / 128, rel=1e-3)
    assert [entry["norm"] for entry in report["rows"]] == sorted((x["norm"] for x in report["rows"]), reverse=True)
    # All tokens are of the only document: nothing is left without it.
    (document,) = report["documents"]
    assert (document["document"], document["without"]) == (0, {"loss": 0.0, "grad_norm": 0.0, "tokens": 0.0})


@pytest.mark.slow
def test_a_document_of_garbage_is_found_and_named(in_tmp_path: Path) -> None:
    texts = ["abcdefgh" * (3 + n % 3) for n in range(60)]
    texts[37] = "".join(chr(0x100 + (7 * n * n) % 1500) for n in range(20))
    (in_tmp_path / "lines.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    optimizer = {"learning_rate": 2e-2, "lr_schedule": "constant"}
    config = write_config(
        in_tmp_path, data={"train_urls": ["lines.jsonl"]}, trainer={"num_train_steps": 21}, optimizer=optimizer
    )
    assert run_here("train", config).returncode == 0
    found = as_json(run_here("data", "find", "run", texts[37][2:8], "--json"))["found"]
    assert found[0]["document"] == 37
    losses = {
        line["step"]: line["train/loss"] for line in metrics(in_tmp_path) if line["step"] > 15 and "train/loss" in line
    }
    step = max(losses, key=losses.__getitem__)
    report = as_json(run_here("bisect", "spike", "run", "--step", str(step), "--json"))
    first = report["documents"][0]
    assert (first["set"], first["document"], report["explained"]) == ("train", 37, True)
    assert first["without"]["grad_norm"] < report["size"]["grad_norm"] / 2
    assert first["without"]["loss"] < report["size"]["loss"]
    assert {entry["row"] for entry in report["rows"][:1]} <= {*first["rows"]}
    assert "document 37 of train (lines.jsonl:38) makes it" in report["sentence"]
    assert report["tokens"][0]["norm"] > 0
    assert report["steps"] < 12


@pytest.mark.slow
def test_git_bisect_run_finds_the_commit(copied: Path) -> None:
    checkout = copied / "checkout"
    shutil.copytree(ROOT / "lm_trainer", checkout / "lm_trainer", ignore=shutil.ignore_patterns("__pycache__"))
    git_settings = {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull}
    environment = lmt_environment(env=git_settings)

    def git(*args: str) -> str:
        identity = ("-c", "user.name=t", "-c", "user.email=t@example.org")
        done = subprocess.run(
            ["git", *identity, *args], cwd=checkout, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def commit(message: str, file: str, old: str, new: str) -> None:
        path = checkout / file
        assert old in path.read_text()
        path.write_text(path.read_text().replace(old, new))
        git("commit", "-qam", message)

    git("init", "-q")
    git("add", "-A")
    git("commit", "-qm", "good")
    commit("harmless", "lm_trainer/nn/norm.py", "from __future__", "# A comment.\nfrom __future__")
    commit("culprit", "lm_trainer/step/updates/update.py", "g / divisor.astype", "1.5 * g / divisor.astype")
    commit("later", "lm_trainer/nn/norm.py", "# A comment.", "# Another comment.")
    helper = "import sys; sys.argv = ['lmt', *sys.argv[1:]]; from cli.main import main; main()"
    # With -P, the helper is not the code of the checkout, in which it runs.
    run = (str(copied / "logs/run"), "--step", "4", "--code", ".")
    command = [sys.executable, "-P", "-c", helper, "bisect", "code", *run]
    git("bisect", "start", "HEAD", "HEAD~3")
    output = git("bisect", "run", *command)
    assert "culprit" in output
    assert "is the first bad commit" in output
    assert "step 4 has the recorded bits with this code" in output
    assert "has other bits with this code: " in output
    # Code that cannot be run is skipped.
    git("bisect", "reset")
    (checkout / "lm_trainer/reproduce/verify.py").write_text("raise ImportError('a broken commit')\n")
    done = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, "a broken commit" in done.stdout) == (125, True), done.stderr


DEEPSEEK = {
    "type": "deepseek_v3",
    "seq_len": 16,
    "hidden_dim": 16,
    "intermediate_dim": 24,
    "num_layers": 4,
    "num_heads": 2,
    "q_lora_rank": 6,
    "kv_lora_rank": 6,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 4,
    "v_head_dim": 4,
    "moe_intermediate_dim": 8,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 2,
    "scan_layers": True,
}
"""Two layers without experts, then two with experts."""


class WrongLayer(LyingDevice):
    """A device whose gradient of one parameter is wrong in one layer, in every microbatch."""

    def __init__(self, name: str, row: int, rows: int, microbatches: int, *, stacked: bool):
        super().__init__(0, once(-1))
        self._name, self._row, self._rows, self._microbatches = name, row, rows, microbatches
        self._stacked = stacked
        self._seen = 0

    def corrupt(self, sums: Sums, row: int) -> Sums:
        x = sums.tree.get(self._name)
        if x is None:
            return sums
        if self._stacked:
            return sums._replace(tree={**sums.tree, self._name: x.at[:, self._row].multiply(2)})
        # The layers come one after the other, the last one first.
        from_last = self._seen // self._microbatches % self._rows
        self._seen += 1
        if from_last != self._rows - 1 - self._row:
            return sums
        return sums._replace(tree={**sums.tree, self._name: 2 * x})


@pytest.mark.slow
@pytest.mark.parametrize("gather", ["model", "layer"])
def test_a_layer_before_the_repeated_ones_is_named_rightly(in_tmp_path: Path, gather: str) -> None:
    config = write_config(in_tmp_path, trainer={"num_train_steps": 2, "gather": gather})
    config.write_text(yaml.safe_dump({**yaml.safe_load(config.read_text()), "model": DEEPSEEK}))
    result = run_here("train", config)
    assert result.returncode == 0, result.stderr
    record = RunRecord.read("run")

    def trace_with(edit: Callable[[Rerun], LyingDevice | None] = lambda _: None) -> StepTrace:
        with QuietProgress(2, stream=io.StringIO()) as progress, open_rerun(record, 0, progress=progress) as rerun:
            rerun.compile()
            wrong = edit(rerun)
            with nullcontext() if wrong is None else lying(wrong):
                return trace_step(rerun)

    plain = trace_with()
    assert len(plain.streams[0]) == 6, "an embedding, four layers and a head"
    # Slot 0 has the layers of the prefix, 0 and 1, and slot 1 the layers 2 and 3.
    for slot, row, layer in ((0, 1, 1), (1, 0, 2)):
        name = f"blocks.{slot}.attention.out.weight"

        def change_weight(rerun: Rerun, name: str = name, row: int = row) -> None:
            params = rerun.state.params
            x = params[name]
            rerun.state = rerun.state._replace(params={**params, name: x.at[row].multiply(2)})

        def change_gradient(rerun: Rerun, name: str = name, row: int = row) -> LyingDevice:
            del rerun
            return WrongLayer(name, row, rows=2, microbatches=8, stacked=gather == "model")

        location = find_first_difference(plain, trace_with(change_gradient))
        assert location is not None
        assert location.describe() == f"step 1, microbatch 0, layer {layer}, gradient: {name}"
        assert (location.others, location.microbatches) == ((), (*range(8),))
        if gather == "model":  # the forward pass is traced in the same way
            planted = trace_with(change_weight)
            location = find_first_difference(plain, planted)
            assert location is not None
            assert (location.part, location.operand) == ("state before the step", f"params.{name}")
            # The forward pass, as if both had begun with the same state.
            location = find_first_difference(plain, replace(planted, state=plain.state))
            assert location is not None
            assert location.describe() == (
                f"step 1, microbatch 0, layer {layer}, forward pass: residual stream after the layer"
            )
