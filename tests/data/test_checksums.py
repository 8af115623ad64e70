"""Checksums of a cache: what was read is what was written, or the run stops and says which file is another."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lm_trainer.core.errors import MachineError, UserError
from lm_trainer.data import DataConfig, open_data
from lm_trainer.data.cache import checksums
from lm_trainer.data.cache.checksums import BlockSums
from lm_trainer.data.cache.format import token_dtype
from lm_trainer.data.cache.kvstore import KvStore
from lm_trainer.data.cache.ledger import Ledger
from lm_trainer.data.cache.loss_mask import LossMaskStream
from lm_trainer.data.cache.token_stream import TokenStream
from lm_trainer.data.inspect import cache_statuses, find_damaged_parts, remove_parts, verify_cache
from lm_trainer.data.tokenize.build import BuildOptions
from tests.data.conftest import contents

BLOCK = 256
"""Bytes of a block, fewer than in a run."""
PART = 3000
"""Bytes of text in a part, fewer than in a run."""


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DataConfig:
    """Questions and answers in a cache of several parts of several blocks."""
    monkeypatch.setattr(checksums, "BLOCK_BYTES", BLOCK)
    monkeypatch.setattr("lm_trainer.data.tokenize.plan.BuildOptions", partial(BuildOptions, part_bytes=(PART, PART)))
    rows = [
        {"prompt": f"how much is {i} and {i}? ", "response": f"it is {2 * i}, {i % 7 * 'of course '}"}
        for i in range(200)
    ]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    keys = {"train_urls": str(tmp_path / "a.jsonl"), "tokenizer": "bytes", "num_workers": 0, "shuffle": False}
    keys |= {"format": {"type": "supervised"}, "packing": "concat", "cache_dir": str(tmp_path / "cache")}
    config = DataConfig.model_validate(keys)
    open_data(config, seq_len=64, seed=0)
    return config


@pytest.fixture
def parts(config: DataConfig, tmp_path: Path) -> Path:
    directory = tmp_path / "cache/train/parts"
    assert len(list(directory.glob("*.bin"))) > 3
    return directory


def read_without_checksum(file: Path) -> dict[str, Any]:
    """A JSON file of a cache as earlier versions wrote it, without a checksum."""
    record = json.loads(file.read_text())
    del record["checksum"]
    return record


def rewrite_as_earlier_version(parts: Path) -> None:
    """Takes the checksums of blocks, and of the record, out of all records."""
    for file in parts.glob("*.json"):
        record = read_without_checksum(file)
        for blob in record["blobs"].values():
            del blob["blocks"], blob["block_bytes"]
        file.write_text(json.dumps(record))


def read_all(parts: Path, *, remote: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """All tokens and mask values."""
    store = KvStore(str(parts.parent))
    if remote:
        store.local = None
    ledger = Ledger.read(store)
    streams = (TokenStream(store, ledger, token_dtype(257)), LossMaskStream(store, ledger, np.dtype(np.uint8)))
    tokens, mask = (stream.read(np.array([0]), len(stream))[0] for stream in streams)
    return tokens, mask


def flip(file: Path, byte: int, bits: int = 1) -> None:
    content = bytearray(file.read_bytes())
    content[byte] ^= bits
    file.write_bytes(content)


@pytest.mark.parametrize("earlier", [False, True])
@pytest.mark.parametrize("remote", [False, True])
@pytest.mark.parametrize("kind", ["bin", "msk"])
def test_a_flipped_bit_is_named_with_its_part(parts: Path, kind: str, remote: bool, earlier: bool) -> None:
    original = read_all(parts)
    if earlier:
        rewrite_as_earlier_version(parts)
    for one, other in zip(read_all(parts, remote=remote), original, strict=True):
        np.testing.assert_array_equal(one, other)
    for file in sorted(parts.glob(f"*.{kind}"))[1:3]:
        for byte in (0, file.stat().st_size // 2, file.stat().st_size - 1):
            flip(file, byte)
            with pytest.raises(
                MachineError, match=rf"{file.name} has changed .* remove .*/cache/train to build it again"
            ):
                read_all(parts, remote=remote)
            flip(file, byte)
    read_all(parts, remote=remote)


@pytest.mark.parametrize("packing", ["concat", "best_fit"])
def test_zeros_in_place_of_tokens_end_a_run(config: DataConfig, parts: Path, packing: str) -> None:
    file = parts / "00000-00001.bin"
    file.write_bytes(bytes(file.stat().st_size))
    data = open_data(config.model_copy(update={"packing": packing}), seq_len=64, seed=0)
    iterator = data.train(8, rows=range(8), num_steps=40)
    with pytest.raises(MachineError, match=r"00000-00001\.bin has changed since it was written"):
        for _ in iterator:
            pass
    data.close()


def test_lengths_whose_sum_is_right_are_compared_too(config: DataConfig, parts: Path) -> None:
    file = parts / "00000-00001.len"
    lengths = np.frombuffer(file.read_bytes(), "<u4")
    file.write_bytes(lengths[::-1].tobytes())
    with pytest.raises(MachineError, match=r"00000-00001\.len is damaged; remove"):
        open_data(config.model_copy(update={"packing": "best_fit"}), seq_len=64, seed=0)


def test_parts_that_were_exchanged_do_not_fit_the_ledger(config: DataConfig, parts: Path) -> None:
    one, other = parts / "00000-00001", parts / "00000-00002"
    for kind in ("bin", "msk", "len", "row", "json"):
        first, second = one.with_suffix(f".{kind}"), other.with_suffix(f".{kind}")
        content = first.read_bytes()
        first.write_bytes(second.read_bytes())
        second.write_bytes(content)
    with pytest.raises(UserError, match=r"0000[12]\.json does not fit ledger\.json; remove"):
        read_all(parts)
    wrong = verify_cache(KvStore(str(parts.parent)), Ledger.read(KvStore(str(parts.parent))))
    assert [line.rpartition("/")[2] for line in wrong] == [
        "00000-00001.json does not fit ledger.json",
        "00000-00002.json does not fit ledger.json",
    ]


def test_what_is_damaged_is_made_again_and_no_more(parts: Path, config: DataConfig) -> None:
    original = contents(parts.parent)
    flip(parts / "00000-00001.bin", 7)
    (parts / "00000-00003.msk").unlink()
    store = KvStore(str(parts.parent))
    for removed in (2, 0):
        ledger = Ledger.read(store)
        assert remove_parts(store, ledger, find_damaged_parts(store, ledger)) == removed
    data = open_data(config, seq_len=64, seed=0)
    assert data.complete
    assert contents(parts.parent) == original
    assert verify_cache(store, Ledger.read(store)) == []


def test_checksums_that_are_damaged_themselves_are_named(parts: Path) -> None:
    file = parts / "00000-00001.json"
    record = read_without_checksum(file)
    for broken in ("zz", record["blobs"]["bin"]["blocks"][:8], None, 7):
        record["blobs"]["bin"]["blocks"] = broken
        file.write_text(json.dumps(record))
        if broken is not None:
            with pytest.raises(MachineError, match=r"00000-00001\.json is damaged; remove"):
                read_all(parts)
    del record["blobs"]["len"]
    file.write_text(json.dumps(record))
    with pytest.raises(MachineError, match=r"00000-00001\.json does not fit"):
        read_all(parts)


@pytest.mark.parametrize("remote", [False, True])
def test_a_read_compares_the_blocks_that_it_needs_once(
    parts: Path, remote: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared: list[int] = []
    compare = BlockSums.verify_block
    monkeypatch.setattr(
        BlockSums, "verify_block", lambda self, block, x: compared.append(block) or compare(self, block, x)
    )
    store = KvStore(str(parts.parent))
    if remote:
        store.local = None
    stream = TokenStream(store, Ledger.read(store), token_dtype(257))
    flip(parts / "00000-00000.bin", 3 * BLOCK)
    # Two bytes for each token.
    read_at = partial(stream.read, length=100)
    read_at(np.array([10]))
    assert compared == [0]
    read_at(np.array([20, 90]))
    # From object storage each fetch is compared.
    assert compared == [0, 0, 1] if remote else [0, 1]
    read_at(np.array([20, 90]))
    assert compared == [0, 0, 1, 0, 1] if remote else [0, 1]
    with pytest.raises(MachineError, match=rf"near byte {3 * BLOCK}; remove"):
        read_at(np.array([380]))


def test_a_packing_plan_that_has_changed_is_made_again(config: DataConfig, parts: Path) -> None:
    config = config.model_copy(update={"packing": "best_fit"})

    def first() -> np.ndarray:
        data = open_data(config, seq_len=64, seed=0)
        return np.asarray(next(data.train(8, rows=range(8), num_steps=1)).tokens)

    expected = first()
    (plan,) = (parts.parent / "packing").glob("*.bin")
    plan.write_bytes(bytes(plan.stat().st_size))
    np.testing.assert_array_equal(first(), expected)
    assert any(plan.read_bytes()), "and kept"


@pytest.mark.parametrize("key", ["ledger.json", "manifest.json", "shards/00000.json", "parts/00000-00001.json"])
def test_a_flipped_bit_in_any_json_file_is_named(config: DataConfig, parts: Path, key: str) -> None:
    file = parts.parent / key
    if not key.startswith("ledger"):
        (parts.parent / "ledger.json").unlink()  # else the files that it was made of are not needed
    original = file.read_bytes()
    # Without its name the checksum is that of no version, and all else is whole.
    name = original.index(b"checksum")
    for byte in {*range(0, len(original), len(original) // 20)} - {*range(name, name + 8)}:
        flip(file, byte)
        with pytest.raises(UserError, match=rf"{key} is damaged"):
            open_data(config, seq_len=64, seed=0).close()
        file.write_bytes(original)
    open_data(config, seq_len=64, seed=0).close()


@pytest.mark.parametrize("content", [b"", bytes(100), b"{}", b'{"host": "', b'"x"', b"[" * 100_000])
def test_a_damaged_claim_of_a_builder_holds_nobody(config: DataConfig, parts: Path, content: bytes) -> None:
    cache = parts.parent
    (cache / "ledger.json").unlink()
    (cache / "shards/00000.json").unlink()
    (cache / "builder.json").write_bytes(content)
    assert cache_statuses(config)[0].builder is None
    assert open_data(config, seq_len=64, seed=0).complete
    assert not (cache / "builder.json").exists()


def test_a_shard_that_lost_a_part_is_named(config: DataConfig, parts: Path) -> None:
    (parts.parent / "ledger.json").unlink()
    sorted(parts.glob("*.json"))[-1].unlink()
    with pytest.raises(MachineError, match=r"shards/00000\.json says \d+ parts, and there are \d+"):
        open_data(config, seq_len=64, seed=0)


def test_a_damaged_packing_plan_is_made_again(config: DataConfig, parts: Path) -> None:
    packed = config.model_copy(update={"packing": "best_fit"})
    open_data(packed, seq_len=64, seed=0).close()
    (plan,) = parts.parent.glob("packing/*.json")
    original = plan.read_bytes()
    for content in (bytes(len(original)), original[:9], b"[]"):
        plan.write_bytes(content)
        open_data(packed, seq_len=64, seed=0).close()
        assert plan.read_bytes() == original


@pytest.mark.parametrize("kind", ["bin", "msk"])
def test_what_comes_damaged_from_object_storage_at_any_time_is_asked_for_once_more_and_named(
    parts: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = read_all(parts)
    store = KvStore(str(parts.parent))
    store.local = None
    ledger = Ledger.read(store)
    streams = {
        "bin": TokenStream(store, ledger, token_dtype(257)),
        "msk": LossMaskStream(store, ledger, np.dtype(np.uint8)),
    }
    lies, read_ranges = [0], KvStore.read_ranges

    def read_changed(self: KvStore, ranges: Sequence[tuple[str, int, int]]) -> Iterator[bytes]:
        for (key, start, _), content in zip(ranges, read_ranges(self, ranges), strict=True):
            lie = key.endswith(f"00000-00001.{kind}") and not start and lies[0] > 0
            lies[0] -= lie
            yield bytes([content[0] ^ 4]) + content[1:] if lie else content

    monkeypatch.setattr(KvStore, "read_ranges", read_changed)
    for count in (0, 1):
        lies[0] = count
        np.testing.assert_array_equal(
            streams[kind].read(np.array([0]), len(original[0]))[0], original[0] if kind == "bin" else original[1]
        )
    lies[0] = 2
    with pytest.raises(MachineError, match=rf"00000-00001\.{kind} has changed since it was written"):
        streams[kind].read(np.array([0]), len(original[0]))
