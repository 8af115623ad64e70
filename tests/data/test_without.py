"""Documents that do not count, against batches made from the bytes of the text alone."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
from pydantic import ValidationError

from lm_trainer.core.batch import Batch
from lm_trainer.core.errors import UserError
from lm_trainer.data.cache.exclusion import write_exclusions
from lm_trainer.data.config import DataConfig
from lm_trainer.data.dataset import Data
from lm_trainer.data.pipeline import open_data
from lm_trainer.data.tokenizer.bytes import EOS_ID

SEQ = 16
LINES = {
    name: [f"Zeile {n} von {name}: " + "für Größe; " * (n % 5) + f"Nummer {n * n}." for n in range(40)]
    for name in ("a", "b")
}
GONE = {"a": [0, 1, 5, 20, 21, 39], "b": [3]}


def config(directory: Path, **settings: object) -> DataConfig:
    sets = {name: {"train_urls": [str(directory / f"{name}.jsonl")]} for name in LINES}
    weights = {"train_weights": {"a": 0.7, "b": 0.3}}
    return DataConfig.model_validate(
        {"configs": sets, "cache_dir": str(directory / "cache"), "tokenizer": "bytes", **weights, **settings}
    )


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("without")
    for name, lines in LINES.items():
        (directory / f"{name}.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    data = open_data(config(directory), seq_len=SEQ, seed=3)
    write_exclusions(
        directory / "a.list",
        {"a": data.caches["a/train"].ledger},
        [{"set": "a", "document": number} for number in GONE["a"]],
    )
    data.close()
    return directory


def listed(directory: Path) -> dict[str, object]:
    return {"files": [str(directory / "a.list")], "documents": ["b:3"]}


def read(data: Data, rows: int = 6, steps: int = 20) -> list[Batch]:
    return [*data.train(rows, rows=range(rows), num_steps=steps)]


def document_tokens(name: str) -> tuple[np.ndarray, np.ndarray]:
    """The tokens of a set's text, and the number of the document of each."""
    texts = [[*line.encode(), EOS_ID] for line in LINES[name]]
    tokens = np.array([token for text in texts for token in text])
    return tokens, np.repeat(np.arange(len(texts)), [len(text) for text in texts])


@pytest.mark.parametrize("packing", ["concat", "best_fit"])
def test_tokens_become_padding_where_they_are(directory: Path, packing: str) -> None:
    plain = open_data(config(directory, packing=packing), seq_len=SEQ, seed=3)
    without = open_data(config(directory, packing=packing, without=listed(directory)), seq_len=SEQ, seed=3)
    order, position, masked, changed = plain.train_order(6), 0, 0, 0
    for old, new in zip(read(plain), read(without), strict=True):
        assert [x.dtype for x in old[:5]] == [x.dtype for x in new[:5]]
        for row, origin in enumerate(order.row_origins(position + np.arange(6))):
            tokens, documents = document_tokens(origin.set.name)
            gone = np.isin(documents, GONE[origin.set.name])
            column = 0
            for start, count in origin.set.rows.token_runs(origin.row):
                for index in range(start, start + count):
                    target_gone = index + 1 < len(tokens) and gone[index + 1]
                    assert new.tokens[row, column] == (EOS_ID if gone[index] else tokens[index])
                    if index + 1 < len(tokens):
                        assert new.targets[row, column] == (EOS_ID if target_gone else tokens[index + 1])
                    counts = tokens[index] != EOS_ID and not gone[index]
                    assert new.weights[row, column] == counts
                    assert (new.segments[row, column] == -1) == gone[index]
                    if not gone[index]:
                        assert new.segments[row, column] == old.segments[row, column]
                    masked += int(gone[index])
                    column += 1
            np.testing.assert_array_equal(new.positions[row], old.positions[row])
            np.testing.assert_array_equal(new.tokens[row, column:], old.tokens[row, column:])
        changed += int((old.weights != new.weights).any())
        position += 6
    assert masked > 100
    assert 0 < changed < 20


def test_identity_changes_and_a_set_can_be_left_out_as_a_whole(directory: Path) -> None:
    plain = open_data(config(directory), seq_len=SEQ, seed=3)
    without = open_data(config(directory, without=listed(directory)), seq_len=SEQ, seed=3)
    assert plain.fingerprints().keys() == {"tokens", "sources"}
    for key, value in plain.fingerprints().items():
        assert without.fingerprints()[key] != value
    assert (without.counts("a/train", 5), without.counts("a/train", 6)) == (False, True)
    whole = open_data(config(directory, without={"sets": "b"}), seq_len=SEQ, seed=3)
    origins = whole.train_order(6).row_origins(np.arange(120))
    weights = np.concatenate([batch.weights for batch in read(whole)])
    assert [bool(row.any()) for row in weights] == [origin.set.name == "a" for origin in origins]


def test_numbers_count_the_documents_that_are_excluded_too(directory: Path, tmp_path: Path) -> None:
    files = {"train_urls": [str(directory / "a.jsonl")], "cache_dir": str(tmp_path), "tokenizer": "bytes"}
    data = open_data(DataConfig.model_validate(files), seq_len=SEQ, seed=3)
    write_exclusions(tmp_path / "list", {"train": data.caches["train/train"].ledger}, [{"set": "train", "document": 1}])
    settings = {"exclude": [str(tmp_path / "list")], "without": {"documents": [2, 3, 6]}, "shuffle": False}
    both = open_data(DataConfig.model_validate({**files, **settings}), seq_len=SEQ, seed=3)
    (batch,) = read(both, rows=20, steps=1)
    text = bytes(np.where(batch.tokens < EOS_ID, batch.tokens, ord("|")).reshape(-1).tolist()).decode(errors="ignore")
    documents = [LINES["a"][n] if n not in (2, 3, 6) else "|" * len(LINES["a"][n].encode()) for n in (0, *range(2, 40))]
    assert len(text) > 250
    assert "|".join(documents).startswith(text[:250])


def test_what_cannot_be_left_out_is_refused(directory: Path, tmp_path: Path) -> None:
    def invalid(word: str, **settings: object) -> None:
        with pytest.raises(ValidationError, match=word):
            config(directory, **settings)

    invalid("names no document", without={})
    invalid("in which set.*SET:3", without={"documents": 3})
    invalid("there is no such set; there are a, b", without={"documents": ["c:3"]})
    invalid("c is no set of a mixture", without={"sets": ["c"]})
    invalid("pattern", without={"documents": ["a:x"]})
    with pytest.raises(UserError, match=r"data.without: there is no document 40 in the set a, which has 40"):
        open_data(config(directory, without={"documents": ["a:40"]}), seq_len=SEQ, seed=3)
    other = directory / "a.list"
    content = other.read_text().splitlines()
    header = json.loads(content[0])
    header["sets"]["a"]["tokens"] = hashlib.sha256(b"").hexdigest()[:16]
    (tmp_path / "a.list").write_text("\n".join([json.dumps(header), *content[1:]]))
    with pytest.raises(UserError, match=r"data\.without: .* was made for other data than the set a"):
        open_data(config(directory, without={"files": [str(tmp_path / "a.list")]}), seq_len=SEQ, seed=3)
    pairs = {"type": "preference"}
    with pytest.raises(ValidationError, match=r"without: .* leave the documents out of its files"):
        DataConfig.model_validate({"train_urls": ["x.jsonl"], "format": pairs, "without": {"documents": [1]}})
