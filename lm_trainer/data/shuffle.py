"""The order in which windows are drawn: a keyed permutation, with O(1) memory and seek.

Shape letters: N indices.
"""

from __future__ import annotations

import hashlib
from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from lm_trainer.core.config import Config

_U = np.uint64
_ROUNDS = 4


class ShuffleConfig(Config):
    """The base of every member of the union of shuffles."""

    def locate(self, draws_N: np.ndarray, num_windows: int, seed: int) -> np.ndarray:
        """Which window each draw is. Draw d is in epoch d // num_windows; every epoch holds each window once.

        Args:
            draws_N: int64 [N], numbers of draws from 0, without end.
            num_windows: how many windows there are.
            seed: of the run.

        Returns:
            int64 [N] in [0, num_windows).
        """
        raise NotImplementedError


class NoShuffle(ShuffleConfig):
    """In order, the same in every epoch."""

    type: Literal["none"] = "none"

    def locate(self, draws_N: np.ndarray, num_windows: int, seed: int) -> np.ndarray:
        del seed
        return np.asarray(draws_N, np.int64) % num_windows


class FullShuffle(ShuffleConfig):
    """All windows at once, anew in every epoch."""

    type: Literal["full"] = "full"

    def locate(self, draws_N: np.ndarray, num_windows: int, seed: int) -> np.ndarray:
        epochs_N, indices_N = np.divmod(np.asarray(draws_N, np.int64), num_windows)
        return permute(indices_N, num_windows, _keys(seed, epochs_N))


class EraShuffle(ShuffleConfig):
    """Within eras of growing size, anew in every epoch: early windows come early, as they do from a growing corpus."""

    type: Literal["era"] = "era"
    first: int = Field(default=1024, ge=1)
    """Windows in the first era."""
    growth: int = Field(default=2, ge=1)
    """How much larger each era is than the one before."""
    largest: int = Field(default=1 << 22, ge=1)
    """Windows in an era at most."""

    def locate(self, draws_N: np.ndarray, num_windows: int, seed: int) -> np.ndarray:
        epochs_N, indices_N = np.divmod(np.asarray(draws_N, np.int64), num_windows)
        bounds = self._bounds(num_windows)
        eras_N = np.searchsorted(bounds, indices_N, side="right") - 1
        starts_N = bounds[eras_N]
        sizes_N = np.minimum(bounds[eras_N + 1], num_windows) - starts_N
        return starts_N + permute(indices_N - starts_N, sizes_N, _keys(seed, epochs_N, eras_N))

    def _bounds(self, num_windows: int) -> np.ndarray:
        bounds, size = [0], min(self.first, self.largest)
        while bounds[-1] < num_windows:
            bounds.append(bounds[-1] + size)
            size = min(size * self.growth, self.largest)
        return np.asarray(bounds, np.int64)


AnyShuffle = Annotated[
    FullShuffle | EraShuffle | NoShuffle,
    Field(discriminator="type"),
]


def permute(indices_N: np.ndarray, size: int | np.ndarray, key: int | np.ndarray) -> np.ndarray:
    """A permutation of [0, size) chosen by a key, one index at a time.

    A Feistel network over the smallest even number of bits that holds `size`, its rounds the finaliser of splitmix64
    (Steele, Lea and Flood, 2014), walked on until the value is below `size`.

    Args:
        indices_N: int [N], each in [0, size).
        size: one for all, or int [N].
        key: 64 bits; one for all, or uint64 [N].

    Returns:
        int64 [N].
    """
    values_N = np.array(indices_N, dtype=_U)
    sizes_N = np.broadcast_to(np.asarray(size, _U), values_N.shape)
    keys_N = np.broadcast_to(np.asarray(key, _U), values_N.shape)
    half_N = np.maximum((_bit_length(sizes_N - _U(1)) + _U(1)) // _U(2), _U(1))
    mask_N = (_U(1) << half_N) - _U(1)
    walking = np.arange(len(values_N))
    while len(walking):
        half, mask, keys = half_N[walking], mask_N[walking], keys_N[walking]
        left, right = values_N[walking] >> half, values_N[walking] & mask
        for number in range(1, _ROUNDS + 1):
            round_key = _mix(keys + _U(0x9E3779B97F4A7C15 * number & 0xFFFFFFFFFFFFFFFF))
            left, right = right, left ^ (_mix(right ^ round_key) & mask)
        values_N[walking] = (left << half) | right
        walking = walking[values_N[walking] >= sizes_N[walking]]
    return values_N.astype(np.int64)


def _mix(x: np.ndarray) -> np.ndarray:
    x = (x ^ (x >> _U(30))) * _U(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> _U(27))) * _U(0x94D049BB133111EB)
    return x ^ (x >> _U(31))


def _bit_length(x: np.ndarray) -> np.ndarray:
    """Bits of each number below 2**53; frexp is exact there."""
    return np.frexp(x.astype(np.float64))[1].astype(_U)


def seed_of(seed: int, name: str) -> int:
    """A seed for one set of a mixture: sets of the same length have different orders."""
    return _hash(seed, name)


def _keys(seed: int, *numbers_N: np.ndarray) -> np.ndarray:
    """uint64 [N]: one key for each combination of numbers; a hash, so that no two seeds share an epoch's order."""
    rows, inverse_N = np.unique(np.stack(numbers_N), axis=1, return_inverse=True)
    keys = [_hash(seed, *column) for column in rows.T.tolist()]
    return np.asarray(keys, _U)[inverse_N.reshape(-1)]


def _hash(*values: int | str) -> int:
    return int.from_bytes(hashlib.sha256(repr(values).encode()).digest()[:8], "little")
