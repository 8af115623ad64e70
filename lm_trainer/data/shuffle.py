"""The order in which windows are drawn: a keyed permutation, with O(1) memory and seek.

Shape letters: N indices.
"""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from lm_trainer.core.config import Config

_U = np.uint64
_ROUNDS = 4
_WORD = 0xFFFFFFFFFFFFFFFF


class ShuffleConfig(Config):
    """The base of every member of the union of shuffles."""

    @abstractmethod
    def locate(self, draws_N: np.ndarray, num_windows: int, seed: int) -> np.ndarray:
        """Which window each draw is. Draw d is in epoch d // num_windows; every epoch holds each window once.

        Args:
            draws_N: int64 [N], numbers of draws from 0, without end.
            num_windows: how many windows there are.
            seed: of the run.

        Returns:
            int64 [N] in [0, num_windows).
        """

    @abstractmethod
    def rows_needed(self, draw: int) -> int | None:
        """How many windows there must be for this draw, and all before it, to be the same however many more come.

        None = all that there will be. With so many, `locate` may be called with any larger number of windows.
        """


class NoShuffle(ShuffleConfig):
    """In order, the same in every epoch."""

    type: Literal["none"] = "none"

    def locate(self, draws_N: np.ndarray, num_windows: int, seed: int) -> np.ndarray:
        del seed
        return np.asarray(draws_N, np.int64) % num_windows

    def rows_needed(self, draw: int) -> int | None:
        return draw + 1


class FullShuffle(ShuffleConfig):
    """All windows at once, anew in every epoch."""

    type: Literal["full"] = "full"

    def locate(self, draws_N: np.ndarray, num_windows: int, seed: int) -> np.ndarray:
        epochs_N, indices_N = np.divmod(np.asarray(draws_N, np.int64), num_windows)
        return permute(indices_N, num_windows, _keys(seed, epochs_N))

    def rows_needed(self, draw: int) -> int | None:
        del draw


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

    def rows_needed(self, draw: int) -> int | None:
        return int(self._bounds(draw + 1)[-1])

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
    (Steele, Lea and Flood, 2014), walked on until the value is below `size`. Below 8 bits, 4 rounds can be told from
    chance, so there are 8.

    Args:
        indices_N: int [N], each in [0, size).
        size: one for all, or int [N].
        key: 64 bits; one for all, or uint64 [N].

    Returns:
        int64 [N].
    """
    values_N = np.array(indices_N, dtype=_U)
    sizes, keys = np.asarray(size, _U), np.asarray(key, _U)
    half = np.maximum((_bit_length(sizes - _U(1)) + _U(1)) // _U(2), _U(1))
    small = half < 4
    if small.any() and not small.all():
        result = np.empty(len(values_N), np.int64)
        keys_N = np.broadcast_to(keys, small.shape)
        for part in (small, ~small):
            result[part] = permute(values_N[part], sizes[part], keys_N[part])
        return result
    mask = (_U(1) << half) - _U(1)
    rounds = 2 * _ROUNDS if small.any() else _ROUNDS
    round_keys = [_mix(keys + _U(0x9E3779B97F4A7C15 * number & _WORD)) for number in range(1, rounds + 1)]
    walking = np.arange(len(values_N))
    while len(walking):
        # All at once as long as none has left, and one number for all where there is one: most calls end so.
        of = [x if x.ndim == 0 or len(walking) == len(values_N) else x[walking] for x in (half, mask, sizes)]
        left, right = values_N[walking] >> of[0], values_N[walking] & of[1]
        for round_key in round_keys:
            here = round_key if round_key.ndim == 0 or len(walking) == len(values_N) else round_key[walking]
            left, right = right, left ^ (_mix(right ^ here) & of[1])
        values = (left << of[0]) | right
        values_N[walking] = values
        walking = walking[values >= of[2]]
    return values_N.astype(np.int64)


def _mix(x: np.ndarray) -> np.ndarray:
    x = np.multiply(x ^ (x >> _U(30)), _U(0xBF58476D1CE4E5B9))
    x = np.multiply(x ^ (x >> _U(27)), _U(0x94D049BB133111EB))
    return x ^ (x >> _U(31))


def _bit_length(x: np.ndarray) -> np.ndarray:
    """Bits of each number below 2**53; frexp is exact there."""
    return np.frexp(x.astype(np.float64))[1].astype(_U)


def seed_of(seed: int, name: str) -> int:
    """A seed for one set of a mixture: sets of the same length have different orders."""
    return _hash(seed, name)


def _keys(seed: int, *numbers_N: np.ndarray) -> np.ndarray:
    """uint64 [N], or [] where it is one for all: a key for each combination of numbers.

    A hash, so that no two seeds share an epoch's order.
    """
    if all(len(numbers) and numbers[0] == numbers[-1] and (numbers == numbers[0]).all() for numbers in numbers_N):
        return np.asarray(_hash(seed, *(int(numbers[0]) for numbers in numbers_N)), _U)
    rows, inverse_N = np.unique(np.stack(numbers_N), axis=1, return_inverse=True)
    keys = [_hash(seed, *column) for column in rows.T.tolist()]
    return np.asarray(keys, _U)[inverse_N.reshape(-1)]


def _hash(*values: int | str) -> int:
    return int.from_bytes(hashlib.sha256(repr(values).encode()).digest()[:8], "little")
