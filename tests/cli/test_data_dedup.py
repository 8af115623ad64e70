"""The commands that compare documents, and training without those that they find."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.conftest import Lmt

WORDS = "der Hund frisst am Abend noch einen Knochen aus dem Garten und legt sich unter den alten Baum".split()  # noqa: SIM905


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """Ten documents, of which one stands there twice and one nearly so."""
    texts = [" ".join(f"{word}{number}" for word in WORDS * 4) for number in range(8)]
    texts += [texts[3], f"{texts[4]} Ende."]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    (tmp_path / "eval.jsonl").write_text(json.dumps({"q": texts[4], "a": "nein"}) + "\n" + '{"q": "kurz", "a": "x"}\n')
    (tmp_path / "my.yaml").write_text(
        f"data: {{train_urls: {tmp_path}/a.jsonl, tokenizer: bytes, cache_dir: {tmp_path}/cache}}\n"
        "model: {seq_len: 64}\n"
    )
    return tmp_path / "my.yaml"


def test_duplicates_are_listed_and_left_out(config: Path, tmp_path: Path, lmt: Lmt) -> None:
    exclusion_list, lines = tmp_path / "list.jsonl", (tmp_path / "a.jsonl").read_text().splitlines()
    tokens = len(json.loads(lines[8])["text"]) + 1
    shown = lmt("data", "dedup", config, "--report", "-o", exclusion_list).stdout
    assert f"{tmp_path}/a.jsonl:4: 1 more, of 'der3 Hund3" in shown
    assert f"  {tmp_path}/a.jsonl:9: the same, {tokens} tokens" in shown
    assert f"  {tmp_path}/a.jsonl:10: similarity 0.9" in shown
    exact = json.loads(lmt("data", "dedup", config, "--exact", "--json").stdout)
    assert (exact["documents"], exact["exact"]["documents"], exact["near"]["documents"]) == (10, 1, 0)
    left_out = f"data.exclude={exclusion_list}"
    assert "train: 8 documents" in lmt("data", "stats", config, left_out).stdout
    # Made again with the list in use, it holds the same documents, and nothing is left to find.
    second_report = json.loads(lmt("data", "dedup", config, "--json", left_out, "-o", tmp_path / "again.jsonl").stdout)
    assert (second_report["documents"], second_report["exact"]["documents"], second_report["near"]["documents"]) == (
        8,
        0,
        0,
    )
    for name in ("list.jsonl", "again.jsonl"):
        assert [json.loads(line)["document"] for line in (tmp_path / name).read_text().splitlines()[1:]] == [8, 9]


def test_an_evaluation_set_is_compared(config: Path, tmp_path: Path, lmt: Lmt) -> None:
    exclusion_list = tmp_path / "list.jsonl"
    command = ["data", "overlap", config, tmp_path / "eval.jsonl", "--text-key", "q", "--text-key", "a"]
    report = json.loads(lmt(*command, "--json", "-o", exclusion_list).stdout)
    assert (report["documents"], report["too_short"], report["with_any"], report["with_80%"]) == (2, 1, 1, 1)
    assert report["found"][0]["train"] == [f"{tmp_path}/a.jsonl:5"]
    assert report["train_documents"] == {"train": 2}
    shown, n = lmt(*command).stdout, 4 * len(WORDS)
    assert f"{tmp_path}/eval.jsonl:1: {n} of {n + 1} words, {n} in a row" in shown
    assert "with any run in the training text: 1 (50.0%)" in shown
    assert "with any run in the training text: 0 (0.0%)" in lmt(*command, f"data.exclude={exclusion_list}").stdout
    refused = lmt("data", "overlap", config, tmp_path / "eval.jsonl")
    assert refused.returncode == 2
    assert "eval.jsonl:1: no field 'text' (fields: a, q); --text-key names the field to read" in refused.stderr
