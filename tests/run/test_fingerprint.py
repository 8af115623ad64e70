"""The hash of a parameter and the chain over steps, against NumPy and by what they must notice."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from lm_trainer.checkpoint import digest
from lm_trainer.checkpoint.digest import compute_checksums, compute_hashes
from lm_trainer.run.files.fingerprint import compute_fingerprint, extend_chain


def mix_bits(x: int) -> int:
    x = (x ^ x >> 16) * 0x85EBCA6B % 2**32
    x = (x ^ x >> 13) * 0xC2B2AE35 % 2**32
    return x ^ x >> 16


def bits_of(x: np.ndarray) -> list[int]:
    unsigned = {1: np.uint8, 2: np.uint16, 4: np.uint32}[x.dtype.itemsize]
    return np.ascontiguousarray(x).view(unsigned).ravel().tolist()


def numpy_checksum(x: np.ndarray) -> int:
    return sum(b * (2 * i + 1) * 0x9E3779B1 for i, b in enumerate(bits_of(x))) % 2**32


def numpy_hash(x: np.ndarray) -> str:
    bits = bits_of(x)
    sums = [
        sum(mix_bits(b ^ mix_bits((i + salt) % 2**32)) for i, b in enumerate(bits)) % 2**32
        for salt in (0x9E3779B9, 0x7F4A7C15)
    ]
    return "".join(f"{s:08x}" for s in sums)


@pytest.mark.parametrize("max_host_elements", [2**16, 0], ids=["on the host", "on devices"])
def test_hashes_are_those_of_numpy_however_arrays_lie(monkeypatch: pytest.MonkeyPatch, max_host_elements: int) -> None:
    monkeypatch.setattr(digest, "_SMALL", max_host_elements)
    rng = np.random.default_rng(0)
    arrays: dict[str, Any] = {
        "a": rng.normal(size=(8, 6)).astype(np.float32),
        "b": rng.normal(size=(16,)).astype(ml_dtypes.bfloat16),
        "c": rng.integers(-9, 9, (2, 8, 3)).astype(np.int8),
        "d": np.array(-0.0, np.float32),
        "e": np.array([True, False, True]),
    }
    mesh = jax.make_mesh((8,), ("data",))
    specs = {"a": PartitionSpec("data"), "b": PartitionSpec("data"), "c": PartitionSpec(None, "data")}
    sharded = {n: jax.device_put(x, NamedSharding(mesh, specs.get(n, PartitionSpec()))) for n, x in arrays.items()}
    expected = {name: numpy_hash(x) for name, x in arrays.items()}
    checksums = {name: numpy_checksum(x) for name, x in arrays.items()}
    assert compute_hashes({name: jnp.asarray(x) for name, x in arrays.items()}) == expected
    assert compute_hashes(sharded) == compute_hashes(arrays) == expected
    assert compute_checksums(sharded) == compute_checksums(arrays) == checksums

    # What one linear sum misses: the signs of two elements.
    x = arrays["a"]
    flipped = x.copy()
    flipped[1, 2], flipped[5, 3] = -x[1, 2], -x[5, 3]
    swapped = x.copy()
    swapped[0, 0], swapped[7, 5] = x[7, 5], x[0, 0]
    variants = {name: jnp.asarray(y) for name, y in {"x": x, "flipped": flipped, "swapped": swapped}.items()}
    assert compute_checksums(variants)["x"] == compute_checksums(variants)["flipped"]
    assert len({*compute_hashes(variants).values()}) == 3


def test_the_chain_knows_every_step_and_the_fingerprint_every_parameter() -> None:
    steps = [(1, 2.5, 1.0), (2, 2.25, math.inf), (3, math.nan, 0.5)]

    def chained(steps: list[tuple[int, float, float]]) -> str:
        chain = ""
        for step in steps:
            chain = extend_chain(chain, *step)
        return chain

    reference = chained(steps)
    assert reference == chained([(step, -loss if math.isnan(loss) else loss, norm) for step, loss, norm in steps])
    other = [
        chained(steps[:2]),
        chained([steps[0], (2, 2.25, 1e30), steps[2]]),
        chained([(1, float(np.nextafter(np.float32(2.5), np.float32(3))), 1.0), *steps[1:]]),
        chained([(step + 1, loss, norm) for step, loss, norm in steps]),
    ]
    assert len({reference, *other}) == 5

    param_hashes = {"a": "00", "b": "01"}
    assert compute_fingerprint(reference, param_hashes) == compute_fingerprint(
        reference, dict(reversed(param_hashes.items()))
    )
    prints = [
        compute_fingerprint(reference, h)
        for h in (param_hashes, {"a": "01", "b": "00"}, {"a": "00"}, {"a": "00", "c": "01"})
    ]
    assert len({*prints, compute_fingerprint(other[0], param_hashes)}) == 5
