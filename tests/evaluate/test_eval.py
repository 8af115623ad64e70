"""`lmt eval` beside independent computations, beside training, and on other devices."""

from __future__ import annotations

import functools
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lm_trainer.evaluate.losses import ratio_of_sums
from lm_trainer.run.training.eval_groups import group_by_tag
from lm_trainer.trackers import read_metrics
from tests.conftest import Lmt, refused, run_here
from tests.evaluate.conftest import TEXTS


def evaluated(lmt: Lmt, *args: str | Path) -> dict[str, Any]:
    result = lmt("eval", *args, "--json")
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


SMALL_BATCH = ("trainer.max_devices=1", "trainer.train_batch_size=8")
"""A few short documents do not fill the batches that eight devices compute by default."""


def by_name(result: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {entry["name"]: entry for entry in result["sets"]}


@functools.cache
def torch_model(directory: Path) -> Any:
    return pytest.importorskip("transformers").AutoModelForCausalLM.from_pretrained(directory)


def torch_nats(directory: Path, ids: list[int], start: int = 1) -> float:
    """Nats of the ids from `start` on, by transformers; nothing predicts the first."""
    torch = pytest.importorskip("torch")
    with torch.no_grad():
        logits = torch_model(directory)(torch.tensor([ids])).logits[0, start - 1 : -1].double()
    return float(torch.nn.functional.cross_entropy(logits, torch.tensor(ids[start:]), reduction="sum"))


def test_bits_per_byte_are_those_of_transformers_and_of_the_text(
    lmt: Lmt, hf_model: Path, texts: dict[str, Path]
) -> None:
    files = [part for name in texts for part in ("--data", texts[name])]
    sets = by_name(evaluated(lmt, hf_model, *files, "--context", "128", *SMALL_BATCH))
    for name, documents in TEXTS.items():
        # The first byte of a document is predicted from nothing, and the end of the document is predicted.
        nats = [torch_nats(hf_model, [*text.encode(), 256]) for text in documents]
        size = sum(len(text.encode()) - 1 for text in documents)
        assert sets[name]["bytes"] == size
        assert sets[name]["bits_per_byte"] == pytest.approx(sum(nats) / math.log(2) / size, rel=1e-5)
        assert sets[name]["loss"] == pytest.approx(sum(nats) / (size + len(documents)), rel=1e-5)
        assert sets[name]["perplexity"] == pytest.approx(math.exp(sets[name]["loss"]))
        assert sets[name]["documents"] == len(documents)


def test_answers_are_predicted_from_their_whole_prompts(lmt: Lmt, hf_model: Path, tmp_path: Path) -> None:
    """Each example is asked alone, by transformers; rows of 64 that went on through examples would cut most of them."""
    records = [{"prompt": f"{n} squared is ", "response": f"{n * n}, as {'so ' * (n % 9)}said."} for n in range(9, 29)]
    (tmp_path / "held-out.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (tmp_path / "data.yaml").write_text(
        "data: {tokenizer: bytes, train_urls: [held-out.jsonl], validation_urls: [held-out.jsonl], cache_dir: cache, "
        "format: {type: supervised}}\n"
    )
    result = evaluated(lmt, hf_model, "--data", "data.yaml", "--context", "64", *SMALL_BATCH)
    nats = [
        torch_nats(hf_model, [*(record["prompt"] + record["response"]).encode(), 256], len(record["prompt"]))
        for record in records
    ]
    (entry,) = result["sets"]
    tokens = sum(len(record["response"]) + 1 for record in records)
    assert (entry["documents"], entry["tokens"]) == (len(records), tokens)
    assert entry["loss"] == pytest.approx(sum(nats) / tokens, rel=1e-5)
    assert not result["notes"]


def test_figures_are_those_of_training(lmt: Lmt, trained: Path) -> None:
    last = list(read_metrics(trained / "logs" / "run"))
    of_training = {key: value for line in last if line["step"] == 6 for key, value in line.items()}
    for weights, prefix in (("raw", "eval"), ("averaged", "eval/ema")):
        result = evaluated(lmt, trained / "logs" / "run", "--weights", weights)
        assert result["step"] == 6
        for name, entry in by_name(result).items():
            assert entry["loss"] == pytest.approx(of_training[f"{prefix}/{name}/loss"], rel=1e-6)
            assert entry["bits_per_byte"] == pytest.approx(of_training[f"{prefix}/{name}/bpb"], rel=1e-6)
        groups = {group["name"]: group for group in result["groups"]}
        assert {name: group["sets"] for name, group in groups.items()} == {
            "": ["code", "prose"],
            "web": ["code", "prose"],
            "web/code": ["code"],
            "odd": ["code"],
        }
        for name, group in groups.items():
            key = f"{prefix}/{name}".rstrip("/")
            assert group["micro_loss"] == pytest.approx(of_training[f"{key}/micro_loss"], rel=1e-6)
            assert group["macro_loss"] == pytest.approx(of_training[f"{key}/macro_loss"], rel=1e-6)
            assert group["micro_bits_per_byte"] == pytest.approx(of_training[f"{key}/micro_bpb"], rel=1e-6)
            assert group["macro_bits_per_byte"] == pytest.approx(of_training[f"{key}/macro_bpb"], rel=1e-6)
    code, prose = by_name(result)["code"], by_name(result)["prose"]
    assert groups[""]["macro_loss"] == pytest.approx((code["loss"] + prose["loss"]) / 2)
    tokens = code["tokens"] + prose["tokens"]
    micro = (code["loss"] * code["tokens"] + prose["loss"] * prose["tokens"]) / tokens
    assert groups["web"]["micro_loss"] == pytest.approx(micro)


@functools.cache
def on_one_device(run: Path) -> dict[str, Any]:
    """The evaluation of a run on the device that trained it."""
    return evaluated(run_here, run)


@pytest.mark.slow
@pytest.mark.parametrize("devices", [4, pytest.param(8, marks=pytest.mark.slow)])
def test_devices_change_no_bit(lmt: Lmt, trained: Path, devices: int) -> None:
    run = trained / "logs" / "run"
    assert evaluated(lmt, run, f"trainer.max_devices={devices}") == on_one_device(run)


@pytest.mark.slow
@pytest.mark.parametrize(
    "setting", ["trainer.context_axis_size=2", pytest.param("trainer.determinism=layerwise", marks=pytest.mark.slow)]
)
def test_axes_of_the_mesh_change_no_figure(lmt: Lmt, trained: Path, setting: str) -> None:
    run = trained / "logs" / "run"
    result = evaluated(lmt, run, setting, "trainer.max_devices=4")
    assert evaluated(lmt, run, setting, "trainer.max_devices=2")["sets"] == result["sets"]
    for a, b in zip(result["sets"], on_one_device(run)["sets"], strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-6)
        assert a["tokens"] == b["tokens"]


@pytest.mark.slow
def test_rows_that_overlap_predict_each_token_once_from_what_the_row_has(
    lmt: Lmt, hf_model: Path, tmp_path: Path
) -> None:
    text, context, stride = "a stream of words that is longer than a row; " * 2, 48, 20
    (tmp_path / "long.txt").write_text(text)
    options = ("--data", "long.txt", "--context", str(context), *SMALL_BATCH)
    entry = by_name(evaluated(lmt, hf_model, *options, "--stride", str(stride)))["long"]
    ids = [*text.encode(), 256]
    rows, nats, done = range(0, len(ids), stride), 0.0, 1
    for start in rows:
        end = min(start + context + 1, len(ids))
        if end > done:
            # Of a window, only what no earlier one has predicted.
            nats += torch_nats(hf_model, ids[start:end], done - start)
            done = end
    assert entry["tokens"] == len(ids) - 1
    assert entry["loss"] == pytest.approx(nats / (len(ids) - 1), rel=1e-5)
    plain = lmt("eval", hf_model, *options)
    assert "1 of 1 documents do not stand in one row of 48 tokens" in plain.stderr


def test_standard_errors_are_those_of_resampled_documents() -> None:
    rng = np.random.default_rng(0)
    tokens_D = rng.integers(20, 400, 300).astype(float)
    nats_D = tokens_D * rng.normal(3.0, 0.4, 300)
    drawn = rng.integers(0, 300, (4000, 300))
    resampled = nats_D[drawn].sum(1) / tokens_D[drawn].sum(1)
    mean = ratio_of_sums(nats_D, tokens_D)
    assert mean.value == pytest.approx(nats_D.sum() / tokens_D.sum())
    assert mean.error == pytest.approx(resampled.std(), rel=0.05)


def test_groups_follow_the_slashes_of_tags() -> None:
    groups = group_by_tag({"a/b": ["x"], "a/c": [], "d": ["x", "y/z"]})
    assert groups == {
        "": ["a/b", "a/c", "d"],
        "a": ["a/b", "a/c"],
        "x": ["a/b", "d"],
        "y": ["d"],
        "y/z": ["d"],
    }
    assert group_by_tag({"only": []}) == {}


@pytest.mark.slow
def test_a_model_does_not_differ_from_itself_and_is_told_from_another(
    lmt: Lmt, trained: Path, texts: dict[str, Path]
) -> None:
    run, data = trained / "logs" / "run", ("--data", trained / "code.jsonl", "--data", texts["greek"])
    differences = evaluated(lmt, run, "--compare", run, *data)["differences"]
    assert [(row["difference"], row["interval"]) for row in differences] == [(0, [0, 0])] * 2
    result = evaluated(lmt, run, "--step", "6", "--weights", "raw", "--compare", run, *data)
    code, greek = result["differences"]
    assert code["unit"] == greek["unit"] == "bits per byte"
    other = by_name(result["compared_with"])["code"]
    assert code["second"] == pytest.approx(code["first"] - code["difference"]) != code["first"]
    assert other["documents"] == code["num_documents"] == 6
    low, high = code["interval"]
    assert low < code["difference"] < high
    # The documents named are those whose parts of the difference are the largest.
    assert len(code["worst"]) == 5
    assert code["worst"][0]["where"].startswith(str(trained / "code.jsonl"))
    table = lmt("eval", run, "--weights", "raw", "--compare", run, *data)
    assert "paired by document" in table.stdout


def test_documents_are_written_with_their_place(lmt: Lmt, trained: Path, tmp_path: Path) -> None:
    result = evaluated(lmt, trained / "logs" / "run", "--documents", tmp_path / "documents.jsonl")
    lines = [json.loads(line) for line in (tmp_path / "documents.jsonl").read_text().splitlines()]
    for entry in result["sets"]:
        rows = [line for line in lines if line["set"] == entry["name"]]
        assert len(rows) == entry["documents"]
        assert sum(line["nats"] for line in rows) / sum(line["tokens"] for line in rows) == pytest.approx(entry["loss"])
    assert lines[0]["where"].endswith("code.jsonl:1")


def test_mistakes_are_told_in_a_line(lmt: Lmt, hf_model: Path, trained: Path, tmp_path: Path) -> None:
    run = trained / "logs" / "run"
    refused(lmt("eval", hf_model), "--data FILE")
    refused(lmt("eval", hf_model, "--data", "nowhere.txt"), "nowhere.txt")
    refused(lmt("eval", hf_model, "--step", "3", "--data", "x.txt"), "has no steps")
    refused(lmt("eval", run, "--stride", "65"), "--stride 65", "64 tokens")
    refused(lmt("eval", run, "--context", "4096"), "--context 4096", "64")
    refused(lmt("eval", run, "--step", "5"), "no checkpoint of step 5")
    (tmp_path / "empty.txt").write_text("")
    refused(lmt("eval", run, "--data", "empty.txt"), "empty")
    (tmp_path / "plain.yaml").write_text("data: {train_urls: [x.txt]}\n")
    (tmp_path / "x.txt").write_text("text")
    refused(lmt("eval", run, "--data", "plain.yaml"), "data.validation_urls")


@pytest.mark.slow
def test_token_ids_have_no_bytes(lmt: Lmt, trained: Path, tmp_path: Path) -> None:
    (tmp_path / "ids.jsonl").write_text(json.dumps({"input_ids": [*b"some text"]}) + "\n")
    (tmp_path / "ids.yaml").write_text(
        "data: {tokenizer: bytes, format: {type: ids}, train_urls: [ids.jsonl], validation_urls: [ids.jsonl]}\n"
    )
    result = lmt("eval", trained / "logs" / "run", "--data", "ids.yaml", "--json")
    assert result.returncode == 0, result.stderr
    (only,) = json.loads(result.stdout)["sets"]
    assert only["bits_per_byte"] is None
    assert only["loss"] > 0
    assert "no bits per byte" in lmt("eval", trained / "logs" / "run", "--data", "ids.yaml").stderr
