"""Runs without documents: equal to runs that left them out from the start, and clear about what they do not remove."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Outcome, refused, run_here
from tests.reproduce.conftest import as_json, metrics, on_one_device, write_config

LINES = [f"{n} squared is {n * n}, cubed {n**3}" + " and so on" * (n % 3) for n in range(60)]
DATA = {"train_urls": ["lines.jsonl"], "shuffle": True, "packing": "best_fit"}


@pytest.fixture(scope="module", autouse=True)
def _one_device() -> Iterator[None]:
    with on_one_device():
        yield


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The directory of a run on short documents, in which the tests run."""
    directory = tmp_path_factory.mktemp("lines")
    (directory / "lines.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in LINES))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(directory)
        result = run_here("train", write_config(directory, data=DATA))
        assert result.returncode == 0, result.stderr
        yield directory


def first_steps(directory: Path) -> dict[int, int]:
    """The first step of each document, from the texts of all batches."""
    del directory
    firsts: dict[int, int] = {}
    for step in range(1, 7):
        for row in as_json(run_here("data", "at", "run.yaml", "--step", str(step), "--json"))["rows"]:
            for passage in row["passages"]:
                firsts.setdefault(int(passage["where"].rpartition(":")[2]) - 1, step)
    return firsts


def plan(*args: str) -> Any:
    result = run_here("without", "run", *args, "--dry-run", "--json")
    assert result.returncode == 0, result.stderr
    return as_json(result)


@pytest.mark.slow
def test_bits_are_those_of_a_run_that_left_the_document_out_from_the_start(lines: Path) -> None:
    firsts = first_steps(lines)
    document = next(number for number, step in firsts.items() if step == 5)
    report = plan(str(document))
    assert (report["first_step"], report["start"], report["steps"]) == (5, 4, 2)
    assert report["documents"] == {"train": 1}
    assert report["holds"][0].endswith(f"lines.jsonl:{document + 1}")
    assert report["holds"][1].startswith("tokens: the cache ")
    assert report["holds"][2:] == [f"checkpoint: {lines}/checkpoints/run/6"]

    result = run_here("without", "run", str(document))
    assert result.returncode == 0, result.stderr
    assert f"run-without-{document} begins at the checkpoint of step 4 of run" in result.stdout
    result = run_here("train", "run.yaml", "trainer.id=never", f"data.without.documents=[{document}]")
    assert result.returncode == 0, result.stderr
    steps = {
        run: {line["step"]: line for line in metrics(lines, run) if "train/loss" in line} for run in ("run", "never")
    }
    assert all(steps["run"][n]["train/loss"] == steps["never"][n]["train/loss"] for n in range(1, 5))
    assert steps["run"][5]["data/loss_tokens"] > steps["never"][5]["data/loss_tokens"]
    result = run_here("diff", "never", f"run-without-{document}")
    assert result.returncode == 0, result.stdout
    verified = run_here("verify", f"run-without-{document}", "--json")
    assert as_json(verified)["equal"], verified.stdout
    found = as_json(run_here("data", "find", f"run-without-{document}", LINES[document], "--json"))["found"][0]
    assert (found["document"], found["counts"], found["trained_at"]) == (document, False, [])
    # Documents that a run left out stay left out.
    other = next(number for number, step in firsts.items() if step == 6)
    again = as_json(run_here("without", f"run-without-{document}", str(other), "--dry-run", "--json"))
    assert (again["without"]["documents"], again["first_step"], again["start"]) == ([document, other], 6, 4)

    # The step without the document is the one that `lmt bisect spike` computes.
    spike = as_json(run_here("bisect", "spike", "run", "--step", "5", "--top-k", "60", "--json"))
    left_out = next(entry for entry in spike["documents"] if entry["document"] == document)
    assert left_out["without"]["loss"] == pytest.approx(steps["never"][5]["train/loss"], rel=1e-6)
    assert left_out["without"]["grad_norm"] == pytest.approx(steps["never"][5]["optim/grad_norm"], rel=1e-6)
    assert spike["size"]["grad_norm"] == steps["run"][5]["optim/grad_norm"]

    # A branch holds what its parent learnt before it began.
    first = next(number for number, step in firsts.items() if step == 1)
    refused(
        run_here("without", f"run-without-{document}", str(first)), "as a branch of run: make `lmt without run` first"
    )
    assert run_here("branch", "run", "--at", "5", "late", "optimizer.weight_decay=0.2", "--prepare").returncode == 0
    assert "branch of run at step 5: late, with its checkpoints" in plan(str(document))["holds"]


@pytest.mark.slow
def test_a_document_of_the_first_step_and_an_end_before_the_end(lines: Path) -> None:
    firsts = first_steps(lines)
    document = next(number for number, step in firsts.items() if step == 1)
    hashes = lines / "hashes.txt"
    hashes.write_text(f"{hashlib.sha256(LINES[document].encode()).hexdigest()}  old.txt\n{'0' * 64}\n")
    report = plan("--hashes", str(hashes))
    assert (report["without"]["documents"], report["first_step"], report["start"]) == ([document], 1, 0)
    result = run_here("without", "run", "--hashes", str(hashes), "--name", "short", "--at", "2")
    assert result.returncode == 0, result.stderr
    assert "short begins at the start" in result.stdout
    assert [line["step"] for line in metrics(lines, "short") if "train/loss" in line] == [1, 2]
    assert (lines / "checkpoints/short/2").is_dir()
    # The same command, without an end, goes on to the end of the run.
    assert run_here("without", "run", "--hashes", str(hashes), "--name", "short").returncode == 0
    assert [line["step"] for line in metrics(lines, "short") if "train/loss" in line] == [*range(1, 7)]


@pytest.mark.slow
def test_what_cannot_be_done_is_said(lines: Path) -> None:
    def without(*args: str) -> Outcome:
        return run_here("without", "run", *args)

    refused(without(), "name documents")
    refused(without("60"), "there is no document 60", "which has 60, counted from 0")
    refused(without("wiki"), "DOCUMENT wiki: give a number")
    refused(without("3", "--json"), "--json needs --dry-run or --prepare")
    refused(without("3", "--at", "7"), "the run has 6 steps")
    (lines / "hashes.txt").write_text("abc\n")
    refused(without("--hashes", "hashes.txt"), "abc is no SHA-256 hash")
    (lines / "hashes.txt").write_text("0" * 64)
    refused(without("--hashes", "hashes.txt"), "no document of the training text has one of these hashes")
    never = next(number for number in range(60) if number not in first_steps(lines))
    refused(without(str(never)), "no step of the run counts a token of", "nothing to do")
    text = (lines / "lines.jsonl").read_text()
    try:
        (lines / "lines.jsonl").write_text(text.replace("squared", "Squared"))
        refused(without("3"), "the data of run have changed")
    finally:
        (lines / "lines.jsonl").write_text(text)
