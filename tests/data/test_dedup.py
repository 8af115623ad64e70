"""Duplicates beside a comparison of all pairs of documents, and overlaps beside a search for every run of words."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lm_trainer.core.errors import UserError
from lm_trainer.data.config import DataConfig
from lm_trainer.data.dataset import Data
from lm_trainer.data.dedup import find_duplicates, minhash_signatures, rows_per_band
from lm_trainer.data.ngrams import hash_ngrams, hash_words
from lm_trainer.data.overlap import EvalDocument, find_overlap
from lm_trainer.data.pipeline import open_data
from lm_trainer.data.tokenizer.token_bytes import token_texts

ALPHABET = [f"{a}{b}" for a in "bdfgklmnprt" for b in ("a", "e", "u", "ö", "ß", "Ю")]


def random_words(rng: np.random.Generator, count: int) -> list[str]:
    return ["".join(rng.choice(ALPHABET, rng.integers(1, 4))) for _ in range(count)]


def replace_words(rng: np.random.Generator, words: list[str], places: int) -> list[str]:
    words = list(words)
    for position in rng.choice(len(words), places, replace=False):
        words[position] = "".join(rng.choice(ALPHABET, 3))
    return words


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rng, directory = np.random.default_rng(0), tmp_path_factory.mktemp("dedup")
    originals = [random_words(rng, int(rng.integers(60, 300))) for _ in range(60)]
    a = [" ".join(words) for words in originals]
    # Another case and other punctuation, a few words changed, many changed, and twice the same.
    b = [", ".join(words).upper().replace("SS", "ß") for words in originals[:5]]
    b += [" ".join(replace_words(rng, words, 1)) for words in originals[5:15]]
    b += [" ".join(replace_words(rng, words, len(words) // 5)) for words in originals[15:25]]
    b += [a[30], a[31], a[30], "kurz", "kurz", "Kurz!", "..."]
    for name, documents in (("a", a), ("b", b)):
        lines = "".join(json.dumps({"text": document}) + "\n" for document in documents)
        (directory / f"{name}.jsonl").write_text(lines)
    return directory


@pytest.fixture(scope="module")
def data(directory: Path) -> Data:
    sets = {name: {"train_urls": [str(directory / f"{name}.jsonl")]} for name in ("a", "b")}
    weights = {"train_weights": {"a": 1, "b": 1}}
    config = {"configs": sets, "cache_dir": str(directory / "cache"), "tokenizer": "bytes", **weights}
    return open_data(DataConfig.model_validate(config), seq_len=16, seed=0)


def documents(directory: Path) -> list[tuple[str, int, str]]:
    rows = []
    for name in ("a", "b"):
        lines = (directory / f"{name}.jsonl").read_text().splitlines()
        rows += [(name, number, json.loads(line)["text"]) for number, line in enumerate(lines)]
    return rows


def shingles(text: str, length: int = 5) -> set[tuple[str, ...]]:
    words = re.findall(r"\w+", text.lower())
    count = max(len(words) - length + 1, min(len(words), 1))
    return {tuple(words[start : start + length]) for start in range(count)}


def test_exact_duplicates_are_those_of_equal_text(data: Data, directory: Path) -> None:
    report = find_duplicates(data, threshold=None)
    first: dict[str, tuple[str, int]] = {}
    expected = []
    for name, number, content in documents(directory):
        like = first.setdefault(content, (name, number))
        if like != (name, number):
            expected.append((name, number, *like, len(content.encode()) + 1))
    duplicates = [
        (duplicate.set, duplicate.document, duplicate.like_set, duplicate.like, duplicate.tokens)
        for duplicate in report.duplicates
    ]
    assert duplicates == expected
    assert report.documents == len(documents(directory))


def test_near_duplicates_are_those_of_a_comparison_of_all_pairs(data: Data, directory: Path) -> None:
    threshold = 0.6
    report = find_duplicates(data, threshold=threshold, texts_V=token_texts(data.tokenizer))
    sets = {(name, number): shingles(content) for name, number, content in documents(directory)}
    near = {}
    for one, other in itertools.combinations(sets, 2):
        if sets[one] and sets[other]:
            near[one, other] = len(sets[one] & sets[other]) / len(sets[one] | sets[other])
    # Away from the threshold, so that the error of the estimate decides nothing.
    assert not [entry for entry in near.values() if threshold - 0.15 < entry < threshold + 0.15]
    pairs = {((entry.like_set, entry.like), (entry.set, entry.document)) for entry in report.duplicates}
    firsts: dict[Any, Any] = {}
    for (one, other), similarity in near.items():
        if similarity >= threshold and other not in firsts:
            firsts[other] = firsts.get(one, one)
    assert pairs == {(one, other) for other, one in firsts.items()}
    for entry in report.duplicates:
        exactly = near[(entry.like_set, entry.like), (entry.set, entry.document)]
        assert entry.similarity == pytest.approx(exactly, abs=0.12)
        assert entry.exact == (exactly == 1 and documents_equal(directory, entry.set, entry.document))


def documents_equal(directory: Path, name: str, number: int) -> bool:
    every = documents(directory)
    index = next(position for position, document in enumerate(every) if document[:2] == (name, number))
    return every[index][2] in [content for _, _, content in every[:index]]


def test_signatures_estimate_the_similarity() -> None:
    rng = np.random.default_rng(1)
    words = random_words(rng, 2000)
    texts = [" ".join(words), " ".join(words[300:]), " ".join(words[1200:])]
    signed = minhash_signatures(texts, 5)
    for one, other in ((0, 1), (0, 2), (1, 2)):
        a, b = shingles(texts[one]), shingles(texts[other])
        assert (signed[one] == signed[other]).mean() == pytest.approx(len(a & b) / len(a | b), abs=0.12)
    assert [rows_per_band(threshold) for threshold in (0.5, 0.7, 0.9)] == [3, 4, 10]


def test_words_are_those_of_a_regular_expression() -> None:
    texts = ["Die Straße, die STRASSE; x_1!", "", "今天 ok", "İstanbul a" + "b" * 400, "…", "die straße"]
    words = hash_words(texts)
    spans: dict[str, int] = {}
    for number, content in enumerate(texts):
        expected = re.findall(r"[\u3400-\u9fff]|[^\W_\u3400-\u9fff]+", content.lower().replace("\u0307", " "))
        hashes = words.hashes_W[words.documents_W == number].tolist()
        assert len(hashes) == len(expected)
        for word, value in zip(expected, hashes, strict=True):
            assert spans.setdefault(word, value) == value
    assert len(set(spans.values())) == len(spans)
    assert len(hash_ngrams(words, 3)[0]) == sum(max(0, count - 2) for count in np.bincount(words.documents_W).tolist())


@pytest.mark.parametrize("length", [3, 13])
def test_overlaps_are_those_of_every_run_of_words(data: Data, directory: Path, length: int) -> None:
    rng, every = np.random.default_rng(2), documents(directory)
    train = {run: (name, number) for name, number, content in reversed(every) for run in runs(content, length)}
    expected = []
    for number in range(20):
        words = re.findall(r"\w+", every[number][2])
        start = int(rng.integers(0, len(words) - 30))
        borrowed = words[start : start + int(rng.integers(5, 30))]
        middle = [*random_words(rng, 12), *borrowed, *random_words(rng, 12)] if number % 4 else random_words(rng, 30)
        expected.append(EvalDocument(f"eval:{number}", "; ".join(middle).upper().replace("SS", "ß")))
    expected.append(EvalDocument("short", "zu kurz"))
    report = find_overlap(data, expected, ngram=length, texts_V=token_texts(data.tokenizer))
    holders = set()
    for document, overlap in zip(expected, report.documents, strict=True):
        words = re.findall(r"\w+", document.text.lower())
        matches = [
            tuple(words[position : position + length]) in train for position in range(max(len(words) - length + 1, 0))
        ]
        covered = [any(matches[max(position - length + 1, 0) : position + 1]) for position in range(len(words))]
        longest = max((len(list(run)) for matched, run in itertools.groupby(matches) if matched), default=1 - length)
        assert (overlap.words, overlap.covered, overlap.longest) == (len(words), sum(covered), longest + length - 1)
        span = re.findall(r"\w+", overlap.span.lower())
        assert len(span) == overlap.longest
        if span:
            assert overlap.found_in == (train[tuple(span[:length])],)
        holders |= {item[:2] for item in every if set(runs(document.text, length)) & set(runs(item[2], length))}
    assert {(name, n) for name, numbers in report.train_documents.items() for n in numbers.tolist()} == holders
    assert report.too_short == (1 if length == 3 else sum(item.words < 13 for item in report.documents))
    assert 0 < report.count_at_least(0) < len(expected)


def runs(content: str, length: int) -> list[tuple[str, ...]]:
    words = re.findall(r"\w+", content.lower())
    return [tuple(words[start : start + length]) for start in range(len(words) - length + 1)]


def test_an_evaluation_set_of_short_texts_is_refused(data: Data) -> None:
    with pytest.raises(UserError, match="no document of the evaluation set has 13 words"):
        find_overlap(data, [EvalDocument("x", "drei kurze worte")], texts_V=token_texts(data.tokenizer))
