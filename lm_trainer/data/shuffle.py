"""Shuffles: the order in which rows are drawn, as a keyed permutation with O(1) memory and seek.

There is no stored list of indices. The row of a draw is computed from the draw's number, so a run can resume at any
step instantly.

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
    """Base class of all shuffles."""

    @abstractmethod
    def rows_of_draws(self, draws_N: np.ndarray, num_rows: int, seed: int) -> np.ndarray:
        """Returns the row of each draw. Draw d is in epoch d // num_rows, and every epoch has each row once.

        Args:
            draws_N: int64 [N], numbers of the draws from 0, without an upper bound.
            num_rows: number of rows of the set.
            seed: seed of the run.

        Returns:
            int64 [N] in [0, num_rows).
        """

    @abstractmethod
    def draws_of_rows(self, rows_N: np.ndarray, epoch: int, num_rows: int, seed: int) -> np.ndarray:
        """Returns the draw of each row in an epoch, which is the inverse of `rows_of_draws`: int64 [N].

        Args:
            rows_N: int64 [N] in [0, num_rows).
            epoch: number of the epoch, from 0.
            num_rows: number of rows of the set.
            seed: seed of the run.
        """

    @abstractmethod
    def num_rows_needed(self, draw: int) -> int | None:
        """Returns the number of rows that must exist before this draw and all earlier ones are final.

        None means all rows. For any number of rows that is at least as large, `rows_of_draws` gives the same result.
        """


class NoShuffle(ShuffleConfig):
    """Keeps the rows in order, which is the same in every epoch."""

    type: Literal["none"] = "none"

    def rows_of_draws(self, draws_N: np.ndarray, num_rows: int, seed: int) -> np.ndarray:
        del seed
        return np.asarray(draws_N, np.int64) % num_rows

    def draws_of_rows(self, rows_N: np.ndarray, epoch: int, num_rows: int, seed: int) -> np.ndarray:
        del seed
        return epoch * num_rows + np.asarray(rows_N, np.int64)

    def num_rows_needed(self, draw: int) -> int | None:
        return draw + 1


class FullShuffle(ShuffleConfig):
    """Shuffles all rows, in a different order every epoch."""

    type: Literal["full"] = "full"

    def rows_of_draws(self, draws_N: np.ndarray, num_rows: int, seed: int) -> np.ndarray:
        epochs_N, indices_N = np.divmod(np.asarray(draws_N, np.int64), num_rows)
        return permute(indices_N, num_rows, _permutation_keys(seed, epochs_N))

    def draws_of_rows(self, rows_N: np.ndarray, epoch: int, num_rows: int, seed: int) -> np.ndarray:
        return epoch * num_rows + permute(rows_N, num_rows, _permutation_keys(seed, np.array([epoch])), inverse=True)

    def num_rows_needed(self, draw: int) -> int | None:
        del draw


class EraShuffle(ShuffleConfig):
    """Shuffles within eras of growing size, in a different order every epoch.

    Early rows come early, which suits a growing corpus.
    """

    type: Literal["era"] = "era"
    first: int = Field(default=1024, ge=1)
    """Number of rows in the first era."""
    growth: int = Field(default=2, ge=1)
    """Size of each era relative to the previous one."""
    largest: int = Field(default=1 << 22, ge=1)
    """Maximum number of rows in an era."""

    def rows_of_draws(self, draws_N: np.ndarray, num_rows: int, seed: int) -> np.ndarray:
        epochs_N, indices_N = np.divmod(np.asarray(draws_N, np.int64), num_rows)
        bounds = self._era_bounds(num_rows)
        eras_N = np.searchsorted(bounds, indices_N, side="right") - 1
        starts_N = bounds[eras_N]
        # The last era of an epoch may be truncated by the end of the rows.
        sizes_N = np.minimum(bounds[eras_N + 1], num_rows) - starts_N
        return starts_N + permute(indices_N - starts_N, sizes_N, _permutation_keys(seed, epochs_N, eras_N))

    def draws_of_rows(self, rows_N: np.ndarray, epoch: int, num_rows: int, seed: int) -> np.ndarray:
        rows_N, bounds = np.asarray(rows_N, np.int64), self._era_bounds(num_rows)
        # A row stays in its era, since rows are only permuted within an era.
        eras_N = np.searchsorted(bounds, rows_N, side="right") - 1
        starts_N = bounds[eras_N]
        sizes_N = np.minimum(bounds[eras_N + 1], num_rows) - starts_N
        keys = _permutation_keys(seed, np.full_like(eras_N, epoch), eras_N)
        return epoch * num_rows + starts_N + permute(rows_N - starts_N, sizes_N, keys, inverse=True)

    def num_rows_needed(self, draw: int) -> int | None:
        # The full era of the draw is needed, because a truncated era would have another permutation.
        return int(self._era_bounds(draw + 1)[-1])

    def _era_bounds(self, num_rows: int) -> np.ndarray:
        bounds, size = [0], min(self.first, self.largest)
        while bounds[-1] < num_rows:
            bounds.append(bounds[-1] + size)
            size = min(size * self.growth, self.largest)
        return np.asarray(bounds, np.int64)


AnyShuffle = Annotated[
    FullShuffle | EraShuffle | NoShuffle,
    Field(discriminator="type"),
]


def permute(
    indices_N: np.ndarray, size: int | np.ndarray, key: int | np.ndarray, *, inverse: bool = False
) -> np.ndarray:
    """Permutes [0, size) by a key, independently for each index.

    A Feistel network over the smallest even number of bits that holds `size`, with the finaliser of splitmix64 (Steele,
    Lea and Flood, 2014) as round function, and cycle walking until the value is below `size`. Below 8 bits, 4 rounds
    are distinguishable from random, so 8 rounds are used.

    Args:
        indices_N: int [N], each in [0, size).
        size: a single size for all indices, or int [N].
        key: a single 64-bit key for all indices, or uint64 [N].
        inverse: True to return the index that maps to each value.

    Returns:
        int64 [N].
    """
    values_N = np.array(indices_N, dtype=_U)
    sizes, keys = np.asarray(size, _U), np.asarray(key, _U)
    half = np.maximum((_bit_length(sizes - _U(1)) + _U(1)) // _U(2), _U(1))
    # Eras with a different number of rounds are permuted separately, since rounds run over a full array.
    small = half < 4
    if small.any() and not small.all():
        result = np.empty(len(values_N), np.int64)
        keys_N = np.broadcast_to(keys, small.shape)
        for part in (small, ~small):
            result[part] = permute(values_N[part], sizes[part], keys_N[part], inverse=inverse)
        return result
    mask = (_U(1) << half) - _U(1)
    rounds = 2 * _ROUNDS if small.any() else _ROUNDS
    numbers = range(rounds, 0, -1) if inverse else range(1, rounds + 1)
    round_keys = [_mix_bits(keys + _U(0x9E3779B97F4A7C15 * number & _WORD)) for number in numbers]
    # Cycle walking: the network permutes a range up to four times as large as `size`, and values outside are fed back
    # until they are inside. As every value is on a cycle of the permutation, this ends and gives each result once.
    walking = np.arange(len(values_N))
    while len(walking):
        # Uses full arrays until the first index is done, and scalars without indexing. Most calls need no more.
        active = [x if x.ndim == 0 or len(walking) == len(values_N) else x[walking] for x in (half, mask, sizes)]
        left, right = values_N[walking] >> active[0], values_N[walking] & active[1]
        for round_key in round_keys:
            walking_key = round_key if round_key.ndim == 0 or len(walking) == len(values_N) else round_key[walking]
            if inverse:
                left, right = right ^ (_mix_bits(left ^ walking_key) & active[1]), left
            else:
                left, right = right, left ^ (_mix_bits(right ^ walking_key) & active[1])
        values = (left << active[0]) | right
        values_N[walking] = values
        walking = walking[values >= active[2]]
    return values_N.astype(np.int64)


def _mix_bits(x: np.ndarray) -> np.ndarray:
    """Computes the finaliser of splitmix64: uint64, with wrapping products."""
    x = np.multiply(x ^ (x >> _U(30)), _U(0xBF58476D1CE4E5B9))
    x = np.multiply(x ^ (x >> _U(27)), _U(0x94D049BB133111EB))
    return x ^ (x >> _U(31))


def _bit_length(x: np.ndarray) -> np.ndarray:
    """Returns the bit length of each number. frexp is exact for the range of the numbers, below 2**53."""
    return np.frexp(x.astype(np.float64))[1].astype(_U)


def derive_seed(seed: int, name: str) -> int:
    """Returns a seed for one set of a mixture, so that sets of equal length have different orders."""
    return _hash_values(seed, name)


def _permutation_keys(seed: int, *numbers_N: np.ndarray) -> np.ndarray:
    """Returns a key for each combination of numbers: uint64 [N], or [] if a single key is for all.

    The keys are hashes, so that no two seeds share the order of an epoch.
    """
    # The draws of a batch are nearly always in one epoch, and a single key needs only one hash.
    if all(len(numbers) and numbers[0] == numbers[-1] and (numbers == numbers[0]).all() for numbers in numbers_N):
        return np.asarray(_hash_values(seed, *(int(numbers[0]) for numbers in numbers_N)), _U)
    rows, inverse_N = np.unique(np.stack(numbers_N), axis=1, return_inverse=True)
    keys = [_hash_values(seed, *column) for column in rows.T.tolist()]
    return np.asarray(keys, _U)[inverse_N.reshape(-1)]


def _hash_values(*values: int | str) -> int:
    return int.from_bytes(hashlib.sha256(repr(values).encode()).digest()[:8], "little")
