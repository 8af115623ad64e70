"""`lmt data` as a user types it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.conftest import Lmt, refused


@pytest.fixture
def config(in_tmp_path: Path) -> Path:
    lines = [json.dumps({"text": f"document {i} " * (i + 1)}) + "\n" for i in range(40)]
    Path("train.jsonl").write_text("".join(lines))
    Path("held.jsonl").write_text('{"text": "held out"}\n')
    text = (
        "model: {seq_len: 64}\n"
        "data: {train_urls: [train.jsonl], validation_urls: [held.jsonl], tokenizer: bytes, cache_dir: mine}\n"
    )
    Path("run.yaml").write_text(text)
    return Path("run.yaml")


def test_status_and_stats_as_json(lmt: Lmt, config: Path) -> None:
    (train, _) = json.loads(lmt("data", "status", config, "--json").stdout)["caches"]
    assert (train["finished"], train["fingerprint"], train["documents"]) == (False, None, 0)
    assert lmt("data", "build", config).returncode == 0
    (train, _) = json.loads(lmt("data", "status", config, "--json").stdout)["caches"]
    assert (train["name"], train["finished"], train["shards_done"], train["documents"]) == ("train", True, 1, 40)
    assert (train["misfit"], train["builder"], train["bad_rows"]) == (None, None, 0)
    (counted, _) = json.loads(lmt("data", "stats", config, "--json").stdout)["caches"]
    assert (counted["documents"], counted["tokens"], counted["quantiles"]["least"]) == (40, train["tokens"], 12)
    assert 0 < counted["packing"]["concat"]["used"] <= 1
    shown = json.loads(lmt("data", "inspect", config, "--first", "2", "--count", "1", "--chars", "8", "--json").stdout)
    (document,) = shown["documents"]
    assert (document["number"], document["where"], document["text"]) == (2, "train.jsonl:3", "document")


def test_verify_as_json(lmt: Lmt, config: Path) -> None:
    assert lmt("data", "build", config).returncode == 0
    whole = {"name": "train", "finished": True, "parts": 1, "problems": [], "removed_parts": 0}
    assert json.loads(lmt("data", "verify", config, "--json").stdout)["caches"][0] == whole
    Path("mine/train/parts/00000-00000.bin").unlink()
    damaged = lmt("data", "verify", config, "--json")
    assert damaged.returncode == 1
    (problem,) = json.loads(damaged.stdout)["caches"][0]["problems"]
    assert problem.endswith("00000-00000.bin is missing")
    repaired = lmt("data", "verify", config, "--repair", "--json")
    assert json.loads(repaired.stdout)["caches"][0]["removed_parts"] == 1


def test_build_status_verify_inspect_and_stats(lmt: Lmt, config: Path) -> None:
    assert "train: not begun" in lmt("data", "status", config).stdout
    refused(lmt("data", "inspect", config), "mine/train is not built yet; run: lmt data build")
    unbuilt = lmt("data", "verify", config)
    assert unbuilt.stdout == "train: not built\nvalidation: not built\n"
    refused(unbuilt, "not finished: train, validation; run: lmt data build")
    assert not Path("mine").exists()
    refused(lmt("data", "stats", config), "holds no documents yet; run: lmt data build")
    built = lmt("data", "build", config)
    assert built.returncode == 0, built.stderr
    assert "train: 40 documents" in built.stdout
    assert "validation: 1 documents, 9 tokens" in built.stdout
    assert "tokenising the train text" in built.stderr

    status = lmt("data", "status", config).stdout
    assert "train: finished; 1 parts, 40 documents" in status
    shown = lmt("data", "inspect", config, "--first", "2", "--count", "2", "--chars", "20").stdout.splitlines()
    assert shown[0].startswith("[2] train.jsonl:3: 34 tokens, 34 of them learnt")
    assert shown[1] == "document 2 document  ..."
    assert shown[2].startswith("[3] train.jsonl:4:")
    assert "held out" in lmt("data", "inspect", config, "--cache", "validation").stdout
    refused(lmt("data", "inspect", config, "--cache", "test"), "there is no cache test", "with --cache: train/train")

    stats = lmt("data", "stats", config).stdout
    assert "least 12" in stats
    assert "packing concat" in stats
    assert "packing best_fit" in stats

    assert "train: 1 parts, all whole" in lmt("data", "verify", config).stdout
    part = Path("mine/train/parts/00000-00000.bin")
    content = bytearray(part.read_bytes())
    content[7] ^= 1
    part.write_bytes(content)
    damaged = lmt("data", "verify", config)
    assert damaged.returncode == 1
    assert "00000-00000.bin has changed since it was written" in damaged.stderr
    part.unlink()
    assert "00000-00000.bin is missing" in lmt("data", "verify", config).stderr
    assert (
        "train: 1 damaged parts removed; lmt data build makes them again"
        in lmt("data", "verify", config, "--repair").stdout
    )
    assert "train: 40 documents" in lmt("data", "build", config).stdout
    content[7] ^= 1
    assert part.read_bytes() == content


def test_what_does_not_fit_any_more_is_said(lmt: Lmt, config: Path) -> None:
    commands = ("status", "verify", "stats", "inspect")
    lmt("data", "build", config)
    other = ("data.tokenizer.type=trained_bpe", "data.tokenizer.vocab_size=300")
    for command in commands:
        refused(lmt("data", command, config, *other), "no tokenizer was trained in", "mine/tokenizer")
    assert not Path("mine/tokenizer/recipe.json").exists()
    lmt("data", "train-tokenizer", config, "--output", "words", *other)
    for command in commands:
        refused(
            lmt("data", command, config, "data.tokenizer=words"), "was built from something else", "tokenizer.sha256"
        )
    Path("train.jsonl").write_text('{"text": "another"}\n')
    for command in commands:
        refused(lmt("data", command, config), "train.jsonl has changed since: it had")
    assert "train: finished; 1 parts, 40 documents" in lmt("data", "status", config).stdout
    assert "train: 1 parts, all whole" in lmt("data", "verify", config).stdout


def test_a_cache_without_its_ledger_or_manifest_is_not_whole(lmt: Lmt, config: Path) -> None:
    lmt("data", "build", config)
    ledger, manifest = Path("mine/train/ledger.json"), Path("mine/train/manifest.json")
    content = ledger.read_text()
    ledger.unlink()
    verified = lmt("data", "verify", config)
    assert verified.stdout == "train: no parts, not finished\nvalidation: 1 parts, all whole\n"
    refused(verified, "not finished: train; run: lmt data build")
    refused(lmt("data", "inspect", config), "there is no document 0", "holds 0 so far; lmt data build goes on with it")
    ledger.write_text(content)
    manifest.unlink()
    for command in ("status", "verify", "stats", "inspect"):
        failed = lmt("data", command, config)
        assert failed.returncode in (1, 2)
        assert "mine/train/manifest.json is missing" in failed.stderr


def test_a_second_build_changes_nothing_and_another_tokenizer_is_refused(lmt: Lmt, config: Path) -> None:
    lmt("data", "build", config)
    first_times = {path: path.stat().st_mtime_ns for path in Path("mine").rglob("*") if path.is_file()}
    assert lmt("data", "build", config).returncode == 0
    assert {path: path.stat().st_mtime_ns for path in Path("mine").rglob("*") if path.is_file()} == first_times
    refused(
        lmt("data", "build", config, "data.tokenizer.type=trained_bpe", "data.tokenizer.vocab_size=300"),
        "was built from something else: it is the cache",
        "this configuration makes",
    )


def test_train_tokenizer_writes_one_that_can_be_named(lmt: Lmt, config: Path) -> None:
    trained = ("data.tokenizer.type=trained_bpe", "data.tokenizer.vocab_size=300")
    result = lmt("data", "train-tokenizer", config, "--output", "words", *trained)
    assert result.returncode == 0, result.stderr
    assert "tokens in words" in result.stdout
    refused(lmt("data", "train-tokenizer", config, "--output", "words", *trained), "words exists")
    refused(lmt("data", "train-tokenizer", config, "--output", "x"), "data.tokenizer is bytes, which is not trained")
    # A configuration that names what is to be written.
    small = ("--output", "more", "--vocab-size", "280")
    refused(
        lmt("data", "train-tokenizer", config, *small, "data.tokenizer=words"), "is hf (words), which is not trained"
    )
    assert "280 tokens in more" in lmt("data", "train-tokenizer", config, *small, "data.tokenizer=more").stdout
    built = lmt("data", "build", config, "data.tokenizer=words", "data.cache_dir=other")
    assert built.returncode == 0, built.stderr
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert Path("other/tokenizer", name).read_bytes() == Path("words", name).read_bytes()


def test_a_cache_is_opened_with_the_tokenizer_beside_it(lmt: Lmt, config: Path) -> None:
    assert lmt("data", "build", config).stdout.endswith("in mine\n")
    Path("mine").rename("moved")
    Path("pre.yaml").write_text("model: {seq_len: 64}\ndata: {source: {type: cache, path: moved}}\n")
    opened = lmt("data", "build", "pre.yaml")
    assert opened.returncode == 0, opened.stderr
    assert opened.stdout.endswith(f"in {Path.cwd()}/moved\n")
    shown = lmt("data", "inspect", "pre.yaml", "--first", "2", "--count", "1", "--chars", "20").stdout
    assert shown.splitlines()[1] == "document 2 document  ..."
    Path("moved/tokenizer/tokenizer.json").unlink()
    refused(lmt("data", "build", "pre.yaml"), "data.tokenizer: none lies beside the cache", "name the one that it was")


def test_a_refused_tokenizer_does_not_replace_the_one_beside_the_cache(lmt: Lmt, config: Path) -> None:
    lmt("data", "build", config)
    first_files = {path: path.read_bytes() for path in Path("mine/tokenizer").iterdir()}
    other = ("data.tokenizer.type=trained_bpe", "data.tokenizer.vocab_size=300")
    refused(lmt("data", "build", config, *other), "was built from something else")
    assert {path: path.read_bytes() for path in Path("mine/tokenizer").iterdir()} == first_files


def test_bad_rows_are_named_and_counted(lmt: Lmt, config: Path) -> None:
    with Path("train.jsonl").open("a") as file:
        file.write("{broken\n")
    refused(lmt("data", "build", config), "train.jsonl:41: not JSON", "data.on_bad_row: skip")
    built = lmt("data", "build", config, "data.on_bad_row=skip", "data.max_bad_rows=0.1")
    assert "train: 40 documents" in built.stdout
    assert "1 bad rows left out" in built.stdout
