"""Safetensors on disk: exact, complete, and suspicious of what others wrote."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from lm_trainer.core.errors import MachineError, UserError
from lm_trainer.export.tensor_file import StoredTensor
from lm_trainer.export.weights import INDEX_FILE, SINGLE_FILE, Weights, parse_size, read_json, write_json, write_weights

F32, BF16 = np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16)


def tensors() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    square = rng.normal(size=(6, 4)).astype(np.float32)
    return {
        "transposed": square.T,
        "strided": square[::2],
        "fortran": np.asfortranarray(square),
        "broadcast": np.broadcast_to(square[:1], (5, 4)),
        "plain": square,
        "scalar": np.full((), 3.5, np.float32),
    }


def bits(array: np.ndarray) -> bytes:
    return np.ascontiguousarray(array).tobytes()


def test_any_memory_layout_is_written_as_the_values_it_shows(tmp_path: Path) -> None:
    write_weights(tmp_path, tensors(), dtype=F32, max_shard_size=10**9)
    assert [path.name for path in tmp_path.iterdir()] == [SINGLE_FILE]
    read = load_file(tmp_path / SINGLE_FILE)
    assert read.keys() == tensors().keys()
    for name, tensor in tensors().items():
        np.testing.assert_array_equal(read[name], tensor, err_msg=name)


def test_shards_and_index_hold_every_tensor_once_and_read_back_the_same(tmp_path: Path) -> None:
    write_weights(tmp_path, tensors(), dtype=F32, max_shard_size=100)
    index = json.loads((tmp_path / INDEX_FILE).read_text())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors().values())
    files = {path.name for path in tmp_path.glob("*.safetensors")}
    assert files == set(index["weight_map"].values())
    assert len(files) > 2
    assert SINGLE_FILE not in files
    held = {name: file for file in files for name in load_file(tmp_path / file)}
    assert held == index["weight_map"]
    weights = Weights(tmp_path)
    assert set(weights) == set(tensors())
    for name, tensor in tensors().items():
        assert bits(weights[name]) == bits(tensor)
        assert weights.shape(name) == tensor.shape


def test_bfloat16_is_rounded_to_nearest_even_and_widened_exactly(tmp_path: Path) -> None:
    x = np.array([1.0, 1.00390625, 1.01171875, -3.1415927, 1e-40, 3.3e38], np.float32)
    write_weights(tmp_path, {"x": x}, dtype=BF16, max_shard_size=10**9)
    expected = np.array([1.0, 1.0, 1.015625, -3.140625], np.float32)
    weights = Weights(tmp_path)
    assert weights.dtypes == {"BF16"}
    assert weights["x"].dtype == F32
    np.testing.assert_array_equal(weights["x"][:4], expected)
    np.testing.assert_array_equal(weights["x"], load_file(tmp_path / SINGLE_FILE)["x"].astype(np.float32))


def test_float16_widens_exactly(tmp_path: Path) -> None:
    x = np.arange(0, 2**16, dtype=np.uint16).view(np.float16)
    x = x[np.isfinite(x)]
    save_file({"x": x}, tmp_path / SINGLE_FILE)
    np.testing.assert_array_equal(Weights(tmp_path)["x"], x.astype(np.float32))


@pytest.mark.parametrize("umask", [0o022, 0o027])
def test_file_modes_follow_the_umask(tmp_path: Path, umask: int) -> None:
    previous_umask = os.umask(umask)
    try:
        write_weights(tmp_path, tensors(), dtype=F32, max_shard_size=100)
    finally:
        os.umask(previous_umask)
    modes = {stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}
    assert modes == {0o666 & ~umask}


def test_the_metadata_is_what_transformers_asks_for(tmp_path: Path) -> None:
    write_weights(tmp_path, tensors(), dtype=F32, max_shard_size=10**9)
    header = (tmp_path / SINGLE_FILE).read_bytes()[8:]
    assert json.loads(header[: header.index(b"}}") + 2])["__metadata__"]["format"] == "pt"


def test_a_flipped_bit_of_any_tensor_is_named(tmp_path: Path) -> None:
    expected = tensors()
    write_weights(tmp_path, expected, dtype=BF16, max_shard_size=10**9)
    file = tmp_path / SINGLE_FILE
    content, weights = file.read_bytes(), Weights(tmp_path)
    assert {name: x.tobytes() for name, x in weights.items()} == {
        name: x.astype(BF16).astype(F32).tobytes() for name, x in expected.items()
    }
    for name, stored in weights.stored.items():
        assert isinstance(stored, StoredTensor)
        size = 2 * int(np.prod(stored.shape))
        for position in {stored.offset, stored.offset + size - 1} if size else ():
            # The last bit of a mantissa, which no other check can find.
            file.write_bytes(content[:position] + bytes([content[position] ^ 1]) + content[position + 1 :])
            damaged = Weights(tmp_path)
            with pytest.raises(MachineError, match=rf"{SINGLE_FILE}: {name} has changed since it was written"):
                _ = damaged[name]
            with pytest.raises(MachineError, match="has changed since it was written"):
                damaged.stored[name].read(tuple(slice(0, 0) for _ in stored.shape))
            others = [other for other in damaged if other != name]
            assert all(damaged[other].size == weights[other].size for other in others)


def test_a_file_that_another_program_has_written_has_no_checksums(tmp_path: Path) -> None:
    write_weights(tmp_path, tensors(), dtype=F32, max_shard_size=10**9)
    changed = {name: np.asarray(x + 1) for name, x in load_file(tmp_path / SINGLE_FILE).items()}
    save_file(changed, tmp_path / SINGLE_FILE, metadata={"format": "pt"})
    assert {name: x.tobytes() for name, x in Weights(tmp_path).items()} == {n: x.tobytes() for n, x in changed.items()}


def test_a_directory_that_cannot_be_written_is_a_machine_error(tmp_path: Path) -> None:
    with pytest.raises(MachineError, match="cannot be written"):
        write_weights(tmp_path / "missing", tensors(), dtype=F32, max_shard_size=10**9)


@pytest.mark.parametrize(
    ("text", "size"), [("5GB", 5 * 10**9), ("500MB", 500 * 10**6), ("1.5gb", 1_500_000_000), ("100", 100), ("2K", 2000)]
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "big", "-5GB", "0", "5 apples", "nan", "5GB GB"])
def test_sizes_that_are_none(text: str) -> None:
    with pytest.raises(UserError, match="not a size"):
        parse_size(text)


# What others wrote.


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    write_weights(tmp_path, tensors(), dtype=F32, max_shard_size=100)
    return tmp_path


def edit_index(directory: Path, tensor: str, file: str) -> None:
    index = read_json(directory / INDEX_FILE)
    index["weight_map"][tensor] = file
    write_json(directory / INDEX_FILE, index)


@pytest.mark.parametrize(
    "name",
    ["../x.safetensors", "/etc/x.safetensors", "a/b.safetensors", "x.bin", "..", "x.safetensors\n", "a\\b.safetensors"],
)
def test_shard_names_that_could_lead_outside_are_refused(sharded: Path, name: str) -> None:
    (sharded.parent / "x.safetensors").write_bytes((sharded / "model-00001-of-00005.safetensors").read_bytes())
    edit_index(sharded, "plain", name)
    with pytest.raises(UserError, match="plain is placed in"):
        Weights(sharded)


def test_a_link_out_of_the_directory_is_refused(tmp_path: Path) -> None:
    outside, home = tmp_path / "outside.safetensors", tmp_path / "home"
    home.mkdir()
    save_file({"x": np.ones(2, np.float32)}, outside)
    (home / SINGLE_FILE).symlink_to(outside)
    with pytest.raises(UserError, match=r"is a link to .*outside"):
        Weights(home)


def test_the_hub_cache_keeps_its_files_behind_links_and_is_read(tmp_path: Path) -> None:
    repo = tmp_path / "models--org--nano"
    snapshot = repo / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (repo / "blobs").mkdir()
    save_file({"x": np.ones(2, np.float32)}, repo / "blobs" / "123")
    (snapshot / SINGLE_FILE).symlink_to("../../blobs/123")
    assert list(Weights(snapshot)) == ["x"]


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth", "model.pkl"])
def test_pickles_are_refused_by_name(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"\x80\x04.")
    with pytest.raises(UserError, match=f"{name} is a pickle"):
        Weights(tmp_path)


def test_a_directory_without_weights(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no model\.safetensors"):
        Weights(tmp_path)


def test_a_missing_shard_is_named(sharded: Path) -> None:
    (sharded / "model-00002-of-00005.safetensors").unlink()
    with pytest.raises(UserError, match=r"model-00002-of-00005\.safetensors is missing"):
        Weights(sharded)


def test_an_index_that_disagrees_with_its_files(sharded: Path) -> None:
    edit_index(sharded, "ghost", "model-00001-of-00005.safetensors")
    with pytest.raises(UserError, match=r"ghost should be in model-00001"):
        Weights(sharded)


def test_a_tensor_that_the_index_does_not_list(sharded: Path) -> None:
    index = read_json(sharded / INDEX_FILE)
    file = index["weight_map"].pop("plain")
    index["weight_map"]["scalar"] = file
    write_json(sharded / INDEX_FILE, index)
    with pytest.raises(UserError, match="does not"):
        Weights(sharded)


def test_every_truncation_and_header_byte_flip_is_refused_or_reads_the_same_header(tmp_path: Path) -> None:
    path = tmp_path / SINGLE_FILE
    save_file({"a": np.arange(3, dtype=np.float32), "b": np.ones((2, 2), np.float32)}, path)
    file_bytes = path.read_bytes()
    for length in range(len(file_bytes)):
        path.write_bytes(file_bytes[:length])
        with pytest.raises(UserError, match=rf"{SINGLE_FILE}: damaged"):
            Weights(tmp_path)
    header_length = int.from_bytes(file_bytes[:8], "little")
    for position in range(8 + header_length):
        path.write_bytes(file_bytes[:position] + bytes([file_bytes[position] ^ 0xFF]) + file_bytes[position + 1 :])
        with pytest.raises(UserError, match=rf"{SINGLE_FILE}: damaged"):
            Weights(tmp_path)


def test_a_header_that_claims_to_be_huge_is_refused_before_it_is_read(tmp_path: Path) -> None:
    with (tmp_path / SINGLE_FILE).open("wb") as file:
        file.write((200 * 2**20).to_bytes(8, "little"))
        file.truncate(300 * 2**20)
    with pytest.raises(UserError, match="damaged"):
        Weights(tmp_path)


@pytest.mark.parametrize("dtype", [np.float64, ml_dtypes.float8_e4m3fn])
def test_dtypes_that_float32_cannot_take_over_exactly_are_refused(tmp_path: Path, dtype: type) -> None:
    save_file({"x": np.ones(2, dtype)}, tmp_path / SINGLE_FILE)
    weights = Weights(tmp_path)
    with pytest.raises(UserError, match=r"x is (float64|quantized)"):
        weights["x"]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"{", r":1:2: not valid JSON"),
        (b"[1]", "expected a JSON object"),
        (b'{"a": "\xff"}', "UTF-8"),
        (b'{"a": ' + b"[" * 100_000, "JSON"),
    ],
    ids=["cut", "list", "latin", "deep"],
)
def test_json_that_is_none(tmp_path: Path, content: bytes, words: str) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(UserError, match=words):
        read_json(tmp_path / "config.json")


def test_json_that_is_too_large_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "config.json").open("wb") as file:
        file.truncate(2**30)
    with pytest.raises(UserError, match="too many"):
        read_json(tmp_path / "config.json")


def header(path: Path, text: str, size: int) -> None:
    """Writes a file with a header of one's own and so many bytes of data."""
    content = text.encode()
    content += b" " * (-len(content) % 8)
    path.write_bytes(len(content).to_bytes(8, "little") + content + bytes(size))


ENTRY = '"{}": {{"dtype": "F32", "shape": [2], "data_offsets": [{}, {}]}}'


@pytest.mark.parametrize(
    ("entries", "size"),
    [
        (("a", 0, 8, "b", 0, 8), 8),
        (("a", 0, 8, "b", 4, 12), 12),
        (("a", 0, 8, "b", 12, 20), 20),
        (("a", 0, 8, "b", 8, 16), 20),
        (("a", 0, 8, "a", 0, 8), 8),
        (("a", 0, 8, "a", 8, 16), 16),
        (("a", 0, 8, "b", 8, 12), 12),
    ],
    ids=["same place", "overlap", "gap", "data left over", "twice the same", "twice", "too short for its shape"],
)
def test_tensors_that_share_a_place_or_a_name(tmp_path: Path, entries: tuple, size: int) -> None:
    text = "{" + ", ".join([ENTRY.format(*entries[:3]), ENTRY.format(*entries[3:])]) + "}"
    header(tmp_path / SINGLE_FILE, text, size)
    with pytest.raises(UserError, match=rf"{SINGLE_FILE}: damaged, or not a safetensors file"):
        Weights(tmp_path)


def test_a_tensor_in_two_shards(sharded: Path) -> None:
    index = read_json(sharded / INDEX_FILE)
    first, second = index["weight_map"]["plain"], index["weight_map"]["strided"]
    assert first != second
    save_file({**load_file(sharded / second), "plain": np.ones((6, 4), np.float32)}, sharded / second)
    with pytest.raises(UserError, match="tensor 'plain' is both in"):
        Weights(sharded)


def test_a_region_is_read_alone_and_of_any_offset(tmp_path: Path) -> None:
    x = np.random.default_rng(0).normal(size=(6, 4)).astype(ml_dtypes.bfloat16)
    save_file({"bytes": np.zeros(3, np.uint8), "none": np.zeros((0, 4), np.float32), "x": x}, tmp_path / SINGLE_FILE)
    stored = Weights(tmp_path).stored
    assert stored["x"].read((slice(1, 3), slice(2, 4))).tobytes() == np.ascontiguousarray(x[1:3, 2:4]).tobytes()
    assert stored["none"].read().shape == (0, 4)
    part = stored["x"].read()
    assert part.flags.owndata
    assert part.tobytes() == x.tobytes()
    (tmp_path / SINGLE_FILE).unlink()
    with pytest.raises(MachineError, match=r"model\.safetensors: cannot be read any more"):
        stored["x"].read()


@pytest.mark.parametrize("dtype", [F32, np.dtype(np.float16), BF16], ids=str)
@pytest.mark.parametrize("value", [np.nan, -np.nan, np.inf, -np.inf])
def test_values_that_are_no_numbers_are_refused_by_name(tmp_path: Path, dtype: np.dtype, value: float) -> None:
    largest = float(ml_dtypes.finfo(dtype).max)
    tiny = float(ml_dtypes.finfo(dtype).smallest_subnormal)
    # The last value alone, behind what is checked at once.
    sound = np.resize(np.asarray([0.0, -1.0, largest, -largest, tiny], dtype), 200_001).reshape(3, -1)
    broken = sound.copy()
    broken[-1, -1] = value
    save_file({"sound": sound, "broken": broken}, tmp_path / SINGLE_FILE)
    weights = Weights(tmp_path)
    assert weights["sound"].shape == sound.shape
    with pytest.raises(UserError, match=r"/model\.safetensors: broken holds NaN or infinite values"):
        _ = weights["broken"]
    assert weights.stored["broken"].read((slice(0, 2), slice(1, 9))).tobytes() == sound[:2, 1:9].tobytes()
