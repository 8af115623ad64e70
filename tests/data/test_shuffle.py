"""Orders: permutations, without end, by seed and epoch."""

from __future__ import annotations

import numpy as np
import pytest

from lm_trainer.data.shuffle import EraShuffle, FullShuffle, NoShuffle, ShuffleConfig, permute

ERAS = EraShuffle(first=4, growth=2, largest=16)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 7, 16, 17, 100, 1000, 4096, 65_537])
def test_permute_is_a_permutation(size: int) -> None:
    np.testing.assert_array_equal(np.sort(permute(np.arange(size), size, 12345)), np.arange(size))


@pytest.mark.parametrize("size", [2**31 + 11, 2**40, 2**52 - 1])
def test_permute_reaches_far_and_repeats_nothing(size: int) -> None:
    rng = np.random.default_rng(0)
    indices = np.unique(np.concatenate([rng.integers(0, size, 20_000), [0, size - 1]]))
    values = permute(indices, size, 7)
    assert len(np.unique(values)) == len(indices)
    assert values.min() >= 0
    assert size * 0.99 < values.max() < size


def permute_in_plain_python(index: int, size: int, key: int) -> int:
    """The construction as its documentation states it, on Python's own integers."""
    word = 2**64 - 1

    def mix(x: int) -> int:
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & word
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB & word
        return x ^ (x >> 31)

    half = max(((size - 1).bit_length() + 1) // 2, 1)
    mask = (1 << half) - 1
    while True:
        left, right = index >> half, index & mask
        for number in range(1, 5):
            round_key = mix((key + 0x9E3779B97F4A7C15 * number) & word)
            left, right = right, left ^ (mix(right ^ round_key) & mask)
        index = left << half | right
        if index < size:
            return index


@pytest.mark.parametrize("size", [1, 2, 5, 1000, 2**33 + 5])
def test_permute_is_what_its_documentation_says(size: int) -> None:
    """Runs must give the same order for ever, so the numbers themselves are part of the interface."""
    for key in (0, 1, 2**64 - 1, 0x123456789ABCDEF):
        indices = np.unique(np.linspace(0, size - 1, 50).astype(np.int64))
        expected = [permute_in_plain_python(int(index), size, key) for index in indices]
        assert permute(indices, size, key).tolist() == expected


def test_permute_looks_random() -> None:
    size = 100_003
    values = permute(np.arange(size), size, 99).astype(np.float64)
    assert abs(np.corrcoef(np.arange(size), values)[0, 1]) < 0.02
    assert abs(np.corrcoef(np.arange(size) & 1, values.astype(np.int64) & 1)[0, 1]) < 0.02
    _, counts = np.unique(np.diff(values), return_counts=True)
    assert counts.max() < 20, "an affine permutation repeats its differences hundreds of times"
    others = permute(np.arange(size), size, 100)
    assert (others == values).sum() < 10


@pytest.mark.parametrize("shuffle", [FullShuffle(), NoShuffle(), ERAS], ids=lambda shuffle: shuffle.type)
@pytest.mark.parametrize("windows", [1, 3, 4, 29, 100])
def test_every_epoch_holds_each_window_once(shuffle: ShuffleConfig, windows: int) -> None:
    order = shuffle.locate(np.arange(3 * windows), windows, seed=5)
    for epoch in np.split(order, 3):
        np.testing.assert_array_equal(np.sort(epoch), np.arange(windows))


@pytest.mark.parametrize("shuffle", [FullShuffle(), ERAS], ids=lambda shuffle: shuffle.type)
def test_epochs_and_seeds_differ(shuffle: ShuffleConfig) -> None:
    draws = np.arange(200)
    orders = [shuffle.locate(draws + epoch * 200, 200, seed) for seed in range(3) for epoch in range(3)]
    assert len({tuple(order) for order in orders}) == 9, "no epoch of a seed is an epoch of another"


def test_no_shuffle_is_in_order() -> None:
    assert NoShuffle().locate(np.arange(7), 3, seed=1).tolist() == [0, 1, 2, 0, 1, 2, 0]


def test_eras_keep_early_windows_early() -> None:
    order = ERAS.locate(np.arange(60), 60, seed=1)
    for start, stop in ((0, 4), (4, 12), (12, 28), (28, 44), (44, 60)):
        assert sorted(order[start:stop]) == list(range(start, stop))
    assert order.tolist() != sorted(order)


def test_eras_do_not_depend_on_what_comes_later() -> None:
    few, many = ERAS.locate(np.arange(28), 28, seed=1), ERAS.locate(np.arange(28), 1000, seed=1)
    np.testing.assert_array_equal(few, many)


def test_any_part_of_the_order_is_the_same_alone() -> None:
    draws = np.arange(10**12, 10**12 + 64)
    whole = FullShuffle().locate(draws, 1001, seed=3)
    np.testing.assert_array_equal(whole[20:30], FullShuffle().locate(draws[20:30], 1001, seed=3))
