"""Files of tokens, trained on where they lie: the rows are those of the same ids as records."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import tensorstore as ts

from lm_trainer.core.batch import Batch
from lm_trainer.core.errors import MachineError, UserError
from lm_trainer.core.piecewise import BatchSchedule
from lm_trainer.data import DataConfig, open_data
from lm_trainer.data.cache.exclusion import write_exclusions
from lm_trainer.data.cache.kvstore import KvStore
from lm_trainer.data.cache.token_stream import TokenStream
from lm_trainer.data.dataset import Data
from lm_trainer.data.inspect import cache_stats, cache_statuses, inspect_documents, verify_cache
from lm_trainer.data.provenance import documents_of_step, find_source
from lm_trainer.data.rows.eval_set import EvalSet
from lm_trainer.data.tokenizer.bytes import EOS_ID

RNG = np.random.default_rng(0)
BODIES = [RNG.integers(0, 256, n).tolist() for n in RNG.integers(1, 60, 50)]
DOCUMENTS = [[*body, EOS_ID] for body in BODIES]
SEQ = 16

Writer = Callable[[Path, Sequence[Sequence[int]], bool], dict[str, Any]]


def concatenate_documents(documents: Sequence[Sequence[int]], dtype: Any) -> np.ndarray:
    return np.concatenate([np.asarray(document, dtype) for document in documents])


def nanogpt(path: Path, documents: Sequence[Sequence[int]], _: bool = False) -> dict[str, Any]:
    half = len(documents) // 2
    concatenate_documents(documents[:half], np.uint16).tofile(path / "train_0.bin")
    concatenate_documents(documents[half:], np.uint16).tofile(path / "train_1.bin")
    return {"train_urls": [str(path / "train_*.bin")]}


def llmc(path: Path, documents: Sequence[Sequence[int]], _: bool = False) -> dict[str, Any]:
    """Files of a fixed number of tokens, which end inside of documents."""
    ids = concatenate_documents(documents, np.uint16)
    for number, part in enumerate(np.array_split(ids, 3)):
        header = np.zeros(256, np.int32)
        header[:3] = 20240520, 1, len(part)
        (path / f"fineweb_{number}.bin").write_bytes(header.tobytes() + part.tobytes())
    return {"train_urls": [str(path / "fineweb_{0..2}.bin")]}


def olmo(path: Path, documents: Sequence[Sequence[int]], _: bool = False) -> dict[str, Any]:
    """As OLMo's tools do it: no header, in spite of the name."""
    ids = concatenate_documents(documents, np.uint32)
    array = np.memmap(path / "part-0.npy", np.uint32, "w+", shape=ids.shape)
    array[:] = ids
    array.flush()
    return {"train_urls": [str(path / "part-0.npy")], "source": {"type": "tokens", "dtype": "uint32"}}


def numpy_file(path: Path, documents: Sequence[Sequence[int]], _: bool = False) -> dict[str, Any]:
    np.save(path / "ids.npy", concatenate_documents(documents, np.int64))
    return {"train_urls": [str(path / "ids.npy")]}


def megatron(path: Path, documents: Sequence[Sequence[int]], by_index: bool = False) -> dict[str, Any]:
    """By the description of the format: every document is two sequences where it can be cut."""
    sequences, firsts = [], [0]
    for document in documents:
        half = len(document) // 2
        sequences += [document[:half], document[half:]] if half else [document]
        firsts.append(len(sequences))
    lengths = [len(sequence) for sequence in sequences]
    ids = concatenate_documents(sequences, np.int32)
    (path / "text_document.bin").write_bytes(ids.tobytes())
    with (path / "text_document.idx").open("wb") as file:
        file.write(b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 4, len(lengths), len(firsts)))
        file.write(struct.pack(f"<{len(lengths)}i", *lengths))
        pointers = [4 * sum(lengths[:i]) for i in range(len(lengths))]
        file.write(struct.pack(f"<{len(lengths)}q", *pointers) + struct.pack(f"<{len(firsts)}q", *firsts))
    source = {"type": "megatron", "document_ends": "index" if by_index else "eos"}
    return {"train_urls": [str(path / "text_document.bin")], "source": source}


def levanter(path: Path, documents: Sequence[Sequence[int]], by_index: bool = False) -> dict[str, Any]:
    def write(name: str, values: np.ndarray) -> None:
        spec = {
            "driver": "zarr3",
            "kvstore": {"driver": "file", "path": f"{path}/train/input_ids/{name}/"},
            "metadata": {
                "shape": [2**40],
                "data_type": str(values.dtype),
                "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [4096]}},
                "codecs": [
                    {
                        "name": "sharding_indexed",
                        "configuration": {
                            "chunk_shape": [256],
                            "codecs": [
                                {"name": "bytes", "configuration": {"endian": "little"}},
                                {"name": "zstd", "configuration": {"level": 3}},
                            ],
                        },
                    }
                ],
            },
        }
        ts.open(spec, create=True, delete_existing=True).result()[: len(values)].write(values).result()

    write("data", concatenate_documents(documents, np.int32))
    ends = np.cumsum([len(document) for document in documents])
    write("offsets", np.array([len(documents), *ends], np.int64))
    ledger = {"total_num_rows": len(documents), "is_finished": True, "finished_shards": ["a"], "layout": "consolidated"}
    (path / "train/shard_ledger.json").write_text(json.dumps(ledger))
    return {"source": {"type": "levanter", "path": str(path), "document_ends": "index" if by_index else "eos"}}


WRITERS: list[Writer] = [nanogpt, llmc, olmo, numpy_file, megatron, levanter]


def open_section(path: Path, section: dict[str, Any], **more: Any) -> Data:
    config = {"tokenizer": "bytes", "cache_dir": str(path / "cache"), **section, **more}
    return open_data(DataConfig.model_validate(config), seq_len=SEQ, seed=3)


def as_records(path: Path, documents: Sequence[Sequence[int]], **more: Any) -> Data:
    (path / "ids.jsonl").write_text("".join(json.dumps({"input_ids": document}) + "\n" for document in documents))
    section = {"train_urls": [str(path / "ids.jsonl")], "format": {"type": "ids"}}
    return open_section(path, {**section, "cache_dir": str(path / "records")}, **more)


def batches(data: Data, steps: int = 12) -> list[Batch]:
    return list(data.train(4, rows=range(4), num_steps=steps))


def assert_equal(actual: list[Batch], expected: list[Batch]) -> None:
    for one, other in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("write", WRITERS)
@pytest.mark.parametrize("packing", ["concat", "best_fit"])
def test_rows_are_those_of_the_same_ids_as_records(
    tmp_path: Path, write: Writer, packing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Several parts, whose ends lie inside of documents.
    monkeypatch.setattr("lm_trainer.data.tokenize.token_indexer.PART_TOKENS", 500)
    data = open_section(tmp_path, write(tmp_path, DOCUMENTS, False), packing=packing)
    assert_equal(batches(data), batches(as_records(tmp_path, BODIES, packing=packing)))
    # No token is copied into the cache.
    assert not list((tmp_path / "cache").rglob("parts/*.bin"))
    assert data.num_train_tokens == sum(map(len, DOCUMENTS))
    (state,) = cache_statuses(data.config)
    assert verify_cache(KvStore(state.url), state.ledger) == []
    assert state.ledger.num_documents == len(DOCUMENTS)
    shown = list(inspect_documents(data.config, "train", 7, 2))
    assert [one.tokens for one in shown] == [len(document) for document in DOCUMENTS[7:9]]
    assert ":token " in shown[0].where
    row = next(documents_of_step(data, BatchSchedule.constant(4), 2))
    assert sum(passage.tokens for passage in row.passages) >= SEQ // 2


@pytest.mark.parametrize("write", [megatron, levanter])
def test_documents_without_an_end_token_end_where_the_index_says(tmp_path: Path, write: Writer) -> None:
    bodies = [body for body in BODIES if len(body) > 1]
    with pytest.raises(UserError, match=r"document 0 of its index ends with the token .*document_ends: index"):
        open_section(tmp_path, write(tmp_path, bodies, False))
    data = open_section(tmp_path, write(tmp_path, bodies, True), cache_dir=str(tmp_path / "other"), shuffle=False)
    (batch,) = batches(data, 1)
    stream = concatenate_documents(bodies, np.int32)[: 4 * SEQ]
    segments = np.repeat(np.arange(len(bodies)), [len(body) for body in bodies])[: 4 * SEQ + 1]
    np.testing.assert_array_equal(batch.tokens.reshape(-1), stream)
    continued = segments[1:] == segments[:-1]
    np.testing.assert_array_equal(batch.weights.reshape(-1), continued)
    np.testing.assert_array_equal(np.diff(batch.segments)[0] == 0, continued[: SEQ - 1])


def test_the_bytes_of_ids_are_not_those_of_text(tmp_path: Path) -> None:
    section = nanogpt(tmp_path, DOCUMENTS)
    (tmp_path / "train_1.bin").rename(tmp_path / "val.bin")
    data = open_section(tmp_path, section, validation_urls=[str(tmp_path / "val.bin")])
    (held_out,) = data.validation().values()
    assert isinstance(held_out, EvalSet)
    assert held_out.token_bytes is not None
    # Bits per byte: a token of this vocabulary is a byte of text, and two in its file.
    assert held_out.token_bytes.tolist() == [1.0] * 256 + [0.0]
    state = cache_statuses(data.config)[0]
    assert cache_stats(KvStore(state.url), state.ledger, SEQ).bytes_per_token is None


def test_tokens_without_any_end_are_documents_by_their_files(tmp_path: Path) -> None:
    section = nanogpt(tmp_path, BODIES)
    with pytest.raises(UserError, match=r"no end-of-document token .*\{type: tokens, document_ends: file\}"):
        open_section(tmp_path, section)
    more = {"source": {"type": "tokens", "document_ends": "file"}, "cache_dir": str(tmp_path / "other")}
    data = open_section(tmp_path, {**section, **more}, shuffle=False)
    first = sum(map(len, BODIES[: len(BODIES) // 2]))
    actual = batches(data, -(-first // (4 * SEQ)))
    tokens = np.concatenate([batch.tokens.reshape(-1) for batch in actual])
    np.testing.assert_array_equal(tokens, concatenate_documents(BODIES, np.int32)[: len(tokens)])
    # One target is left out: the first token of the second file.
    weights = np.concatenate([batch.weights.reshape(-1) for batch in actual])
    assert np.flatnonzero(weights == 0).tolist() == [first - 1]
    assert cache_statuses(data.config)[0].ledger.num_documents == 2


@pytest.mark.parametrize("ends", ["eos", "file"])
def test_documents_of_token_files_are_left_out(tmp_path: Path, ends: str) -> None:
    if ends == "eos":
        # The last document has no end: its file was cut short.
        documents = [*DOCUMENTS[:-1], BODIES[-1]]
        section = {**nanogpt(tmp_path, documents), "source": {"type": "tokens"}}
    else:
        documents = BODIES[:6]
        for number, body in enumerate(documents):
            concatenate_documents([body], np.uint16).tofile(tmp_path / f"{number}.bin")
        section = {
            "train_urls": [str(tmp_path / "[0-9].bin")],
            "source": {"type": "tokens", "document_ends": "file"},
        }
    # As with all documents, the same from URLs.
    section["train_urls"] = [f"file://{url}" for url in section["train_urls"]]
    data = open_section(tmp_path, section, shuffle=False)
    left_out = [0, len(documents) - 2, len(documents) - 1]
    write_exclusions(
        tmp_path / "list.jsonl",
        {"train": data.caches["train/train"].ledger},
        [{"set": "train", "document": number} for number in left_out],
    )
    expected = concatenate_documents(
        [item for number, item in enumerate(documents) if number not in left_out], np.int32
    )
    actual = batches(open_section(tmp_path, section, shuffle=False, exclude=str(tmp_path / "list.jsonl")), 1)
    np.testing.assert_array_equal(np.concatenate([item.tokens.reshape(-1) for item in actual]), expected[: 4 * SEQ])
    full = concatenate_documents(documents, np.int32)
    assert data.num_train_tokens == len(full)


def test_held_out_documents_are_counted_as_the_files_end_them(tmp_path: Path) -> None:
    # The token that ends text stands inside of every file, twice.
    sizes = [30, 40, 26, 33, 20]
    for number, size in enumerate(sizes):
        concatenate_documents([[*range(2, size), EOS_ID, EOS_ID, number]], np.uint16).tofile(tmp_path / f"{number}.bin")
    source = {"type": "tokens", "document_ends": "file"}
    section = {"train_urls": [str(tmp_path / "[0-9].bin")], "source": source, "num_validation_sequences": 4}
    (held_out,) = open_section(tmp_path, section).validation().values()
    assert isinstance(held_out, EvalSet)
    first = (sum(sizes) + len(sizes) - 1) // SEQ * SEQ - 4 * SEQ
    assert held_out.num_documents == sum(end > first for end in np.cumsum(sizes) + np.arange(1, 6))


def test_tokens_and_text_do_not_go_into_one_set(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    nanogpt(tmp_path, DOCUMENTS)
    for urls in (["a.txt", "train_0.bin"], ["train_0.bin", "a.txt"]):
        with pytest.raises(UserError, match=r"train_0\.bin is a file of tokens, .* make a set of each"):
            open_section(tmp_path, {"train_urls": [str(tmp_path / url) for url in urls]})


def test_a_token_of_32_bits_is_found_in_its_file(tmp_path: Path) -> None:
    for number in range(2):
        concatenate_documents(DOCUMENTS, np.uint32).tofile(tmp_path / f"{number}.npy")
    section = {"train_urls": [str(tmp_path / "{0,1}.npy")], "source": {"type": "tokens", "dtype": "uint32"}}
    data = open_section(tmp_path, section)
    ledger = cache_statuses(data.config)[0].ledger
    # Of this vocabulary, files without a header would be read as 16 bits where nothing says otherwise.
    (shard,) = DataConfig.model_validate({**section, "source": {"type": "tokens"}, "tokenizer": "bytes"}).shards(
        "train"
    )
    (document,) = inspect_documents(data.config, "train", len(DOCUMENTS) + 3, 1)
    assert document.where == f"{tmp_path}/1.npy:token {sum(map(len, DOCUMENTS[:3]))}"
    assert find_source(KvStore(cache_statuses(data.config)[0].url), ledger, [shard], 1, 3) == document.where


def test_what_does_not_fit_is_named(tmp_path: Path) -> None:
    section = megatron(tmp_path, DOCUMENTS)
    bin_file, idx_file = tmp_path / "text_document.bin", tmp_path / "text_document.idx"
    content, index = bin_file.read_bytes(), idx_file.read_bytes()

    def check_refused(match: str, more: dict[str, Any] | None = None, **keys: Any) -> None:
        # What was written before an error, which depends on the time, makes a cache one of other data for the next.
        directory = str(tmp_path / f"cache-{len(list(tmp_path.iterdir()))}")
        with pytest.raises(UserError, match=match):
            open_section(tmp_path, {**section, **(more or {}), "cache_dir": directory}, **keys)

    bin_file.write_bytes(content[:-40])
    check_refused(r"text_document\.bin holds \d+ tokens, but .*\.idx lists \d+: sequence \d+ ends beyond the file")
    bin_file.write_bytes(content[:-3])
    check_refused("no whole number of int32 tokens")
    bin_file.write_bytes(content)
    sequences = struct.unpack_from("<Q", index, 18)[0]
    broken = bytearray(index)
    struct.pack_into("<q", broken, 34 + 4 * sequences + 8 * 3, 7)
    idx_file.write_bytes(broken)
    check_refused(r"text_document\.idx: sequence 3 begins at byte 7 of .*bin by its pointer, but at \d+ by the lengths")
    idx_file.write_bytes(index[:-8])
    check_refused(r"has \d+ bytes, but \d+ sequences in 50 documents need \d+")
    idx_file.write_bytes(b"nothing")
    check_refused("is no index of Megatron")
    idx_file.write_bytes(index)
    check_refused("beside .* lies its index", {"source": None})
    check_refused("data.tokenizer: name the tokenizer that the tokens were made with", tokenizer=None)
    concatenate_documents([[5, 999]], np.int32).tofile(tmp_path / "wrong.bin")
    wrong = {"train_urls": [str(tmp_path / "wrong.bin")], "source": {"type": "tokens", "dtype": "int32"}}
    check_refused(r"wrong\.bin: token 1 is 999, but data\.tokenizer has 257 tokens", wrong)
    concatenate_documents(BODIES, np.int32).tofile(tmp_path / "wrong.bin")
    check_refused(r"hold no end-of-document token \(id 256\)", wrong)
    (tmp_path / "wrong.bin.gz").write_bytes(b"")
    check_refused("is compressed; tokens are memory-mapped", {**wrong, "train_urls": [str(tmp_path / "wrong.bin.gz")]})
    with pytest.raises(UserError, match="text without fields"):
        open_section(tmp_path, {**section, "format": {"type": "ids"}})
    llmc(tmp_path, DOCUMENTS)
    (tmp_path / "fineweb_1.bin").write_bytes((tmp_path / "fineweb_1.bin").read_bytes()[:-2])
    check_refused(
        r"fineweb_1\.bin holds \d+ tokens, but its header says \d+",
        {"train_urls": [str(tmp_path / "fineweb_1.bin")], "source": None},
    )


def test_caches_of_levanter_that_cannot_be_trained_on(tmp_path: Path) -> None:
    section = levanter(tmp_path, DOCUMENTS)
    (tmp_path / "train/loss_weights/data").mkdir(parents=True)
    with pytest.raises(UserError, match="has loss_weights beside input_ids, which would not be heeded"):
        open_section(tmp_path, section)
    (tmp_path / "train/shard_ledger.json").write_text('{"is_finished": false}')
    with pytest.raises(UserError, match="is not finished"):
        open_section(tmp_path, section)
    with pytest.raises(UserError, match="holds no cache of Levanter"):
        open_section(tmp_path, {"source": {"type": "levanter", "path": str(tmp_path / "none")}})


def test_a_file_that_changes_is_noticed(tmp_path: Path) -> None:
    section = olmo(tmp_path, DOCUMENTS)
    data = open_section(tmp_path, section)
    state = cache_statuses(data.config)[0]
    path = tmp_path / "part-0.npy"
    content = bytearray(path.read_bytes())
    content[0] ^= 1
    path.write_bytes(content)
    assert verify_cache(KvStore(state.url), state.ledger) == [f"{path} has changed since it was indexed"]
    with pytest.raises(UserError, match=r"part-0\.npy has changed since"):
        open_section(tmp_path, section)
    with pytest.raises(MachineError, match=r"part-0\.npy has changed since it was indexed; put it back"):
        TokenStream(KvStore(state.url), state.ledger, np.dtype("<u2")).read_from(0)
    path.write_bytes(content[:100])
    with pytest.raises(MachineError, match="was cut short since it was indexed"):
        TokenStream(KvStore(state.url), state.ledger, np.dtype("<u2")).read_from(0)
