"""Orders: permutations, without end, by seed and epoch."""

from __future__ import annotations

import numpy as np
import pytest

from lm_trainer.data import DataConfig
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
        for number in range(1, 9 if half < 4 else 5):
            round_key = mix((key + 0x9E3779B97F4A7C15 * number) & word)
            left, right = right, left ^ (mix(right ^ round_key) & mask)
        index = left << half | right
        if index < size:
            return index


@pytest.mark.parametrize("size", [1, 2, 5, 64, 65, 1000, 2**33 + 5])
def test_permute_is_what_its_documentation_says(size: int) -> None:
    """Runs must give the same order for ever, so the numbers themselves are part of the interface."""
    for key in (0, 1, 2**64 - 1, 0x123456789ABCDEF):
        indices = np.unique(np.linspace(0, size - 1, 50).astype(np.int64))
        expected = [permute_in_plain_python(int(index), size, key) for index in indices]
        assert permute(indices, size, key).tolist() == expected


def test_sizes_may_differ_from_index_to_index() -> None:
    sizes, keys = np.array([5, 70, 5, 300, 64]), np.array([1, 2, 3, 4, 5])
    expected = [permute_in_plain_python(3, size, key) for size, key in zip(sizes.tolist(), keys.tolist(), strict=True)]
    assert permute(np.full(5, 3), sizes, keys).tolist() == expected


def test_permute_looks_random() -> None:
    size = 100_003
    values = permute(np.arange(size), size, 99).astype(np.float64)
    assert abs(np.corrcoef(np.arange(size), values)[0, 1]) < 0.02
    assert abs(np.corrcoef(np.arange(size) & 1, values.astype(np.int64) & 1)[0, 1]) < 0.02
    _, counts = np.unique(np.diff(values), return_counts=True)
    assert counts.max() < 20, "an affine permutation repeats its differences hundreds of times"
    other_orders = permute(np.arange(size), size, 100)
    assert (other_orders == values).sum() < 10


def chi_square(counts: np.ndarray) -> float:
    """Computes the distance from equal counts, in standard deviations of the distance that chance alone makes."""
    counts = counts.reshape(-1)
    expected, freedom = counts.mean(), counts.size - 1
    return float((((counts - expected) ** 2 / expected).sum() - freedom) / np.sqrt(2 * freedom))


def pair_counts(values: np.ndarray, size: int, bins: int = 24) -> np.ndarray:
    """Counts the pairs of neighbours that fall into each pair of bins."""
    cells = values * bins // size
    return np.bincount(cells[:-1] * bins + cells[1:], minlength=bins * bins)


@pytest.mark.parametrize("size", [100_003, 1 << 17, 300_000])
def test_pairs_are_as_evenly_spread_as_those_of_numpy(size: int) -> None:
    """Neighbours in the order, and the lowest bits of an index, say nothing about a value."""
    orders = [permute(np.arange(size), size, key) for key in range(4)]
    twins = [np.random.default_rng(key).permutation(size) for key in range(4)]
    for sample in (orders, twins):
        assert max(abs(chi_square(pair_counts(values, size))) for values in sample) < 4.5
        by_low_bits = [np.bincount(np.arange(size) % 16 * 16 + values % 16, minlength=256) for values in sample]
        assert max(abs(chi_square(counts)) for counts in by_low_bits) < 4.5
    affine = (np.arange(size) * 48_271 + 12_345) % size
    assert abs(chi_square(pair_counts(affine, size))) > 100, "the measure must be able to fail"


def test_each_value_of_a_small_permutation_is_as_likely_anywhere() -> None:
    """Over many keys, every index of 12 takes every value, and every pair of indices every pair of values."""
    size, keys = 12, 40_000
    values = permute(np.tile(np.arange(size), keys), size, np.repeat(np.arange(keys), size)).reshape(keys, size)
    places = np.stack([np.bincount(values[:, index], minlength=size) for index in range(size)])
    assert abs(chi_square(places)) < 4.5
    pairs = np.bincount(values[:, 3] * size + values[:, 4], minlength=size * size).reshape(size, size)
    assert abs(chi_square(pairs[~np.eye(size, dtype=bool)])) < 4.5
    assert not np.diag(pairs).any()


@pytest.mark.parametrize("shuffle", [FullShuffle(), NoShuffle(), ERAS], ids=lambda shuffle: shuffle.type)
@pytest.mark.parametrize("num_rows", [1, 3, 4, 29, 100])
def test_every_epoch_holds_each_row_once(shuffle: ShuffleConfig, num_rows: int) -> None:
    order = shuffle.rows_of_draws(np.arange(3 * num_rows), num_rows, seed=5)
    for epoch in np.split(order, 3):
        np.testing.assert_array_equal(np.sort(epoch), np.arange(num_rows))


@pytest.mark.parametrize("shuffle", [FullShuffle(), ERAS], ids=lambda shuffle: shuffle.type)
def test_epochs_and_seeds_differ(shuffle: ShuffleConfig) -> None:
    draws = np.arange(200)
    orders = [shuffle.rows_of_draws(draws + epoch * 200, 200, seed) for seed in range(3) for epoch in range(3)]
    assert len({tuple(order) for order in orders}) == 9, "no epoch of a seed is an epoch of another"


def test_no_shuffle_is_in_order() -> None:
    assert NoShuffle().rows_of_draws(np.arange(7), 3, seed=1).tolist() == [0, 1, 2, 0, 1, 2, 0]


def test_eras_keep_early_windows_early() -> None:
    order = ERAS.rows_of_draws(np.arange(60), 60, seed=1)
    for start, stop in ((0, 4), (4, 12), (12, 28), (28, 44), (44, 60)):
        assert sorted(order[start:stop]) == list(range(start, stop))
    assert order.tolist() != sorted(order)


def test_eras_do_not_depend_on_what_comes_later() -> None:
    few, many = ERAS.rows_of_draws(np.arange(28), 28, seed=1), ERAS.rows_of_draws(np.arange(28), 1000, seed=1)
    np.testing.assert_array_equal(few, many)


def test_any_part_of_the_order_is_the_same_alone() -> None:
    draws = np.arange(10**12, 10**12 + 64)
    full = FullShuffle().rows_of_draws(draws, 1001, seed=3)
    np.testing.assert_array_equal(full[20:30], FullShuffle().rows_of_draws(draws[20:30], 1001, seed=3))


def test_a_number_is_a_length_of_eras() -> None:
    shuffle = DataConfig(shuffle=10).shuffle_config
    order = shuffle.rows_of_draws(np.arange(50), 25, seed=1)
    for start, stop in ((0, 10), (10, 20), (20, 25), (25, 35), (35, 45), (45, 50)):
        assert sorted(order[start:stop]) == list(range(start % 25, start % 25 + stop - start))
    assert isinstance(DataConfig(shuffle=True).shuffle_config, FullShuffle)
    assert isinstance(DataConfig(shuffle=False).shuffle_config, NoShuffle)
    assert DataConfig.model_validate({"shuffle": 1}).shuffle_config == EraShuffle(first=1, growth=1, largest=1)


@pytest.mark.parametrize("rows", [1, 2, 3, 17, 255, 1000, 5000])
@pytest.mark.parametrize("shuffle", [NoShuffle(), FullShuffle(), EraShuffle(first=3), EraShuffle(first=64, growth=3)])
def test_a_row_is_drawn_where_it_was_located(shuffle: ShuffleConfig, rows: int) -> None:
    for epoch in (0, 1, 7):
        draws = epoch * rows + np.arange(rows)
        located = shuffle.rows_of_draws(draws, rows, seed=5)
        np.testing.assert_array_equal(shuffle.draws_of_rows(located, epoch, rows, seed=5), draws)
