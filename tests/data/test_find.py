"""A text in the tokens of a run beside a search by brute force, and the steps that train on it."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cli.scan_progress import ScanProgress
from cli.trace import DataTrace
from lm_trainer.core.piecewise import BatchSchedule, Piecewise
from lm_trainer.data.config import DataConfig
from lm_trainer.data.dataset import Data
from lm_trainer.data.find import Match, Needle, Tracer, find_text, search_stream
from lm_trainer.data.pipeline import open_data
from lm_trainer.data.tokenizer.token_bytes import token_texts
from lm_trainer.data.verbatim import longest_spans
from tests.conftest import Lmt

SCHEDULE, STEPS = BatchSchedule(Piecewise.from_phases([(0, 3), (4, 6)])), 150


class Tokens:
    """A stream of tokens in memory."""

    def __init__(self, tokens: np.ndarray):
        self.tokens = tokens.astype(np.int32)

    def __len__(self) -> int:
        return len(self.tokens)

    def read(self, starts: np.ndarray, length: int) -> np.ndarray:
        return self.tokens[None, int(starts[0]) : int(starts[0]) + length]

    def copy(self, starts: np.ndarray, counts: np.ndarray, out: np.ndarray, places: np.ndarray) -> None:
        assert places.tolist() == [0]
        out[:] = self.tokens[int(starts[0]) : int(starts[0] + counts[0])]


def brute_force(tokens: np.ndarray, texts: list[bytes | None], text: bytes) -> list[Match]:
    """The occurrences in the bytes of all tokens; what ends a text is a byte that no text holds."""
    pieces = [texts[token] or b"\xff" for token in tokens]
    ends = np.cumsum([len(piece) for piece in pieces])
    content, matches, offset = b"".join(pieces), [], -1
    while (offset := content.find(text, offset + 1)) >= 0:
        first = int(np.searchsorted(ends, offset, side="right"))
        stop = int(np.searchsorted(ends, offset + len(text) - 1, side="right")) + 1
        matches.append(Match(first, offset - (int(ends[first]) - len(pieces[first])), stop))
    return matches


@pytest.mark.parametrize("seed", range(30))
def test_every_occurrence_is_found_and_no_other(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(seed)
    # Few letters and many tokens that begin and end alike, so that a text can be cut in many ways.
    texts: list[bytes | None] = [bytes(rng.choice(list(b"abc"), rng.integers(1, 6)).tolist()) for _ in range(40)]
    texts[7] = None
    tokens = rng.integers(0, len(texts), 3000)
    monkeypatch.setattr("lm_trainer.data.find.PIECE", 97)
    monkeypatch.setattr("lm_trainer.data.find._MAX_ANCHORS", int(rng.integers(1, 12)))
    for length in (1, 2, 5, 9, 14):
        text = bytes(rng.choice(list(b"abc"), length).tolist())
        counts = np.bincount(tokens[:100], minlength=len(texts))
        matches = list(search_stream(Tokens(tokens), Needle(text, texts, counts)))  # pyright: ignore[reportArgumentType]
        assert sorted(matches) == sorted(brute_force(tokens, texts, text))


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("find")
    lines = [f"Zeile {n}: " + "für Größe und Maß; " * (n % 7 + 1) + f"Nummer {n * n}." for n in range(120)]
    lines[41] += " Der Kanarienvogel singt überall."
    lines[90] = "Erst anderes. Der Kanarienvogel singt"
    for name, part in {"a": lines[:60], "b": lines[60:]}.items():
        (directory / f"{name}.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in part))
    (directory / "held.jsonl").write_text(json.dumps({"text": "Und hier: Der Kanarienvogel singt."}) + "\n")
    return directory


def mixture(corpus: Path, **settings: object) -> DataConfig:
    sets = {name: {"train_urls": [str(corpus / f"{name}.jsonl")]} for name in ("a", "b")}
    sets["b"]["validation_urls"] = [str(corpus / "held.jsonl")]
    tokenizer = {"type": "trained_bpe", "vocab_size": 400}
    weights = {"train_weights": {"a": 0.7, "b": 0.3}}
    return DataConfig.model_validate(
        {"configs": sets, "cache_dir": str(corpus / "cache"), "tokenizer": tokenizer, **weights, **settings}
    )


def open_mixture(corpus: Path, **settings: object) -> Data:
    return open_data(mixture(corpus, **settings), seq_len=16, seed=3)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"packing": "best_fit"},
        {"shuffle": {"type": "era", "first": 8}},
        {"shuffle": False},
    ],
)
def test_the_steps_are_those_whose_rows_hold_the_text(corpus: Path, settings: dict[str, object]) -> None:
    data = open_mixture(corpus, **settings)
    texts = token_texts(data.tokenizer)
    tracer = Tracer(data, SCHEDULE, STEPS, texts)
    matches = [tracer.trace(name, match) for name, match in find_text(data, "Der Kanarienvogel singt", texts)]
    # The record, 1-based, and the characters before the text.
    lines = {name: (corpus / f"{name}.jsonl").read_text().splitlines() for name in ("a", "b", "held")}
    expected = [
        (cache, f"{corpus}/{name}.jsonl:{line}", json.loads(lines[name][line - 1])["text"].index("Der Kan"))
        for cache, name, line in (("a/train", "a", 42), ("b/train", "b", 31), ("b/validation", "held", 1))
    ]
    assert [(occurrence.cache, occurrence.where, occurrence.character) for occurrence in matches] == expected
    assert matches[2].trained_at == ()
    # By brute force: every row of every step, by the runs of tokens that it was made of.
    order = data.train_order(SCHEDULE)
    for occurrence in matches[:2]:
        expected_at = []
        for step in range(STEPS):
            rows = np.arange(SCHEDULE.at(step))
            for row, origin in enumerate(order.row_origins(SCHEDULE.rows_before(step) + rows)):
                spans = origin.set.rows.token_runs(origin.row) if f"{origin.set.name}/train" == occurrence.cache else []
                if any(
                    start < occurrence.match.stop and start + count > occurrence.match.first for start, count in spans
                ):
                    expected_at.append((step + 1, row, origin.epoch))
        assert [tuple(trained_row) for trained_row in occurrence.trained_at] == expected_at
        assert len(expected_at) > 1
    data.close()


def test_a_text_that_is_not_there_and_one_across_documents(corpus: Path) -> None:
    data = open_mixture(corpus)
    texts = token_texts(data.tokenizer)
    assert list(find_text(data, "Papagei", texts)) == []
    assert list(find_text(data, "Nummer 0.Zeile 1", texts)) == []
    assert len(list(find_text(data, "Größe", texts))) == sum(n % 7 + 1 for n in range(120) if n != 90)
    data.close()


def test_a_terminal_shows_how_far_the_search_is(
    corpus: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setattr("cli.scan_progress._SECONDS", 0)
    monkeypatch.setattr("lm_trainer.data.find.PIECE", 1000)
    data = open_mixture(corpus)
    progress = ScanProgress("tokens")
    for _ in find_text(data, "Der Kanarienvogel singt", token_texts(data.tokenizer), progress):
        progress.clear()
    progress.clear()
    *shown, left = capsys.readouterr().err.split("\r")[1:]
    assert left == "\033[K"
    for name, cache in data.caches.items():
        total = len(cache.whole)
        shown_counts = [line.partition(": ")[2] for line in shown if line.startswith(f"{name}: ")]
        done = [min(count + 1000, total) for count in range(0, total, 1000)]
        assert shown_counts == [f"{count:,} of {total:,} tokens ({count * 100 // total}%)\033[K" for count in done]
    # Where an occurrence is printed, the line is empty.
    assert shown.count("\033[K") == 2
    data.close()


@pytest.mark.parametrize("seed", range(8))
def test_spans_are_the_longest_there_are(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(seed)
    monkeypatch.setattr("lm_trainer.data.verbatim._PIECE", 61)
    stream, least = rng.integers(0, 4, 400), 4
    # Parts of the stream between tokens of their own.
    parts = [stream[a : a + n] for a, n in zip(rng.integers(0, 380, 4), rng.integers(2, 30, 4), strict=True)]
    text = np.concatenate([np.concatenate([part, rng.integers(0, 4, 1)]) for part in parts])
    data: Any = SimpleNamespace(caches={"train": SimpleNamespace(whole=Tokens(stream))})
    spans = longest_spans(data, text.tolist(), min_tokens=least)
    # Each token fits in a byte, so Python can search for a part.
    content, longest = bytes(stream.tolist()), list[tuple[int, int]]()
    for start in range(len(text)):
        stops = [stop for stop in range(start + least, len(text) + 1) if bytes(text[start:stop].tolist()) in content]
        if stops and (not longest or stops[-1] > longest[-1][1]):
            longest.append((start, stops[-1]))
    assert [(span.start, span.stop) for span in spans] == longest
    for span in spans:
        np.testing.assert_array_equal(
            stream[span.first : span.first + span.stop - span.start], text[span.start : span.stop]
        )


@pytest.mark.slow
def test_the_command_finds_what_replay_shows(
    lmt: Lmt, tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = {
        "model": {"type": "gpt2", "seq_len": 16, "hidden_dim": 16, "num_layers": 1, "num_heads": 2},
        "data": mixture(corpus).model_dump(mode="json", exclude_unset=True),
        "trainer": {"id": "run", "num_train_steps": 40, "train_batch_size": 4, "max_devices": 1, "sample_tokens": 0,
                    "tracker": []},
    }  # fmt: skip
    (tmp_path / "run.yaml").write_text(json.dumps(config))
    done = lmt("train", "run.yaml", "trainer.num_train_steps=20")
    assert done.returncode == 0, done.stderr
    done = lmt("data", "find", "run", "Kanarienvogel", "--json")
    assert done.returncode == 0, done.stderr
    output = json.loads(done.stdout)
    assert (output["occurrences"], output["last_step"]) == (3, 20)
    first = next(occurrence for occurrence in output["found"] if occurrence["trained_at"])
    trained_row = first["trained_at"][0]
    shown = lmt("replay", "run", "--step", str(trained_row["step"]), "--show-batch", "--chars", "0")
    assert shown.returncode == 0, shown.stderr
    row = shown.stdout.partition(f"row {trained_row['row']}: ")[2].partition(f"row {trained_row['row'] + 1}: ")[0]
    assert "vogel" in row or "Kanar" in row
    assert first["where"] in row
    done = lmt("generate", "run", "--prompt", "Zeile 3: ", "--temperature", "0", "--trace", "--json")
    assert done.returncode == 0, done.stderr
    assert "trace" in json.loads(done.stdout)
    monkeypatch.chdir(tmp_path)
    trace = DataTrace("run")
    text = "Erst anderes. Der Kanarienvogel singt"
    (span,) = trace.find_spans(trace.tokenizer.encode(text))
    assert (span["text"], span["where"], span["character"]) == (text, f"{corpus}/b.jsonl:31", 0)
    assert span["trained_at"] == next(
        occurrence["trained_at"] for occurrence in output["found"] if occurrence["where"] == span["where"]
    )
    assert trace.find_spans(trace.tokenizer.encode("anders ist es hier")) == []
    done = lmt("data", "find", "run.yaml", "Kanarienvogel", "--limit", "1")
    assert "3 occurrences, of which 1 are listed" in done.stdout
    (tmp_path / "empty.txt").write_text("\n")
    for arguments in (("run",), ("run", "--file", "nowhere.txt"), ("run", "--file", "empty.txt"), ("nothing", "x")):
        done = lmt("data", "find", *arguments)
        assert done.returncode == 2, done.stderr
        assert "Traceback" not in done.stderr
