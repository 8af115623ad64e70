"""Files of tokens without a header: ids of another type than they would be read in are never trained on."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from lm_trainer.core.errors import UserError
from lm_trainer.data.sources.token_files import TokenFileShard
from lm_trainer.data.sources.token_types import find_written_dtype
from lm_trainer.data.tokenizer.bytes import EOS_ID
from tests.data.test_token_files import RNG, as_records, assert_equal, batches, concatenate_documents, open_section

MANY = [[*RNG.integers(1, 256, n).tolist(), EOS_ID] for n in RNG.integers(1, 60, 50)]
# As many as make whole numbers of any width.
MANY += [[EOS_ID]] * (-sum(map(len, MANY)) % 4)


@pytest.mark.parametrize("named", [None, "uint16", "uint32", "int32", "int64"])
@pytest.mark.parametrize("written", ["uint16", "uint32", "int32", "int64"])
def test_ids_of_another_type_are_refused_with_theirs(tmp_path: Path, written: str, named: str | None) -> None:
    concatenate_documents(MANY, written).tofile(tmp_path / "ids.bin")
    section = {"train_urls": [str(tmp_path / "ids.bin")], "source": {"type": "tokens", "dtype": named}}
    # By the vocabulary, uint16 is what they are read as where nothing says otherwise.
    if np.dtype(named or "uint16").itemsize == np.dtype(written).itemsize:
        assert open_section(tmp_path, section).num_train_tokens == sum(map(len, MANY))
        return
    right = {"int32": "uint32"}.get(written, written)
    with pytest.raises(UserError, match=rf"ids\.bin: its ids were written as {right}.*dtype: {right}\}}"):
        open_section(tmp_path, section)
    other = {**section, "source": {"type": "tokens", "dtype": right}, "cache_dir": str(tmp_path / "other")}
    assert_equal(batches(open_section(tmp_path, other)), batches(as_records(tmp_path, [ids[:-1] for ids in MANY])))


@pytest.mark.parametrize("written", [">u2", ">u4", ">i8"])
def test_ids_in_the_other_byte_order_are_refused(tmp_path: Path, written: str) -> None:
    concatenate_documents(MANY, np.int64).astype(written).tofile(tmp_path / "ids.bin")
    with pytest.raises(UserError, match=rf"in the other order; write the file again: .*'{written}'"):
        open_section(tmp_path, {"train_urls": [str(tmp_path / "ids.bin")]})


def test_the_type_of_ids_beyond_16_bits_is_told_too() -> None:
    ids = RNG.integers(0, 128_256, 5000)
    for read in ("<u2", "<u4", "<i8"):
        for written in ("<u2", "<u4", "<i8", ">u4", ">i8"):
            content = (ids % (1 << 16) if written == "<u2" else ids).astype(written).view(read)
            expected = None if read == written else np.dtype(written)
            assert find_written_dtype(content, 128_256) == expected, (read, written)


def test_zeros_that_are_tokens_are_read(tmp_path: Path) -> None:
    # Ids with padding after them, and few enough to be chance.
    for number, ids in enumerate(([*range(1, 40), *[0] * 200, EOS_ID], [7, 0] * 10 + [EOS_ID])):
        concatenate_documents([ids], np.uint16).tofile(tmp_path / f"{number}.bin")
        section = {"train_urls": [str(tmp_path / f"{number}.bin")], "cache_dir": str(tmp_path / f"cache{number}")}
        assert open_section(tmp_path, section).num_train_tokens == len(ids)
    # Documents of one token, which 0 ends: who names the type is believed.
    ids = np.array([5, 0] * 100, np.uint16)
    assert find_written_dtype(ids, 257) == np.dtype("<u4")
    for named, refused in ((None, True), ("uint16", False)):
        shard = TokenFileShard((), named)
        assert (shard.dtype_problem(ids, 0, 257, 0) is not None) == refused
        assert shard.dtype_problem(ids, 0, 257, EOS_ID) is not None
        assert shard.dtype_problem(ids, 80, 257, EOS_ID) is None, "a header says the type"


@pytest.mark.parametrize(
    ("begin", "message"),
    [
        (b"MMIDIDX\x00\x00", "an index of Megatron; name its .bin file"),
        (b"PAR1", "a Parquet file"),
        (b"PK\x03\x04", "a zip archive"),
        (b"\x1f\x8b\x08\x00", "packed by gzip"),
        (np.array([20240520, 1], np.int32).tobytes(), "ends inside of its header"),
    ],
)
def test_files_of_other_formats_are_no_tokens(tmp_path: Path, begin: bytes, message: str) -> None:
    (tmp_path / "x.bin").write_bytes(begin + bytes(200))
    with pytest.raises(UserError, match=message):
        open_section(tmp_path, {"train_urls": [str(tmp_path / "x.bin")], "source": {"type": "tokens"}})
