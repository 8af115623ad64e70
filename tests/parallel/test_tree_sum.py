"""A sum in the order of the fixed tree, compared bit for bit with a brute-force tree in NumPy."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lm_trainer.parallel.tree_sum import Shares, TreeSum, tree_sum

pytestmark = pytest.mark.optimised


def brute_force_tree(items: list[np.ndarray]) -> np.ndarray:
    if len(items) % 2 or len(items) == 1:
        total = items[0]
        for item in items[1:]:
            total = total + item
        return total
    half = len(items) // 2
    return brute_force_tree(items[:half]) + brute_force_tree(items[half:])


def random(shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    # Of very different sizes, so that another order of additions rounds to other bits.
    return (rng.standard_normal(shape) * 10.0 ** rng.integers(-4, 4, shape)).astype(np.float32)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 6, 7, 8, 12, 24])
def test_tree_sum_is_the_recursive_tree(count: int) -> None:
    items = list(random((count, 33)))
    expected = brute_force_tree(items)
    streaming: TreeSum[np.ndarray] = TreeSum(count, np.add)
    for item in items:
        streaming.push(item)
    np.testing.assert_array_equal(streaming.result(), expected)
    np.testing.assert_array_equal(np.asarray(jax.jit(tree_sum)(np.stack(items))), expected)


def test_the_order_matters_on_this_data() -> None:
    items = random((8, 33))
    assert not np.array_equal(brute_force_tree(list(items)), np.add.reduce(items, axis=0))


def test_an_unfinished_sum_has_no_result() -> None:
    streaming: TreeSum[np.ndarray] = TreeSum(2, np.add)
    streaming.push(np.ones(1))
    with pytest.raises(ValueError, match="1 of 2"):
        streaming.result()


def test_a_streaming_sum_holds_few_partial_sums() -> None:
    alive = 0
    most_alive = 0

    class Item:
        def __init__(self) -> None:
            nonlocal alive, most_alive
            alive += 1
            most_alive = max(most_alive, alive)

        def __add__(self, other: Item) -> Item:
            nonlocal alive
            alive -= 2
            return Item()

    streaming: TreeSum[Item] = TreeSum(64, lambda a, b: a + b)
    for _ in range(64):
        streaming.push(Item())
    # One partial sum for each of the log2(64) levels, and the items of the addition at hand.
    assert most_alive <= 8


@pytest.mark.parametrize("count", [1, 2, 3, 5, 6, 7, 8, 12, 16, 24, 40])
def test_shares_of_any_number_of_shards_add_up_to_the_tree(count: int) -> None:
    items = list(random((count, 5), seed=count))
    expected = brute_force_tree(items)
    for shards in range(1, count + 1):
        shares = Shares(count, shards)
        sums = []
        for shard in range(shards):
            tree: TreeSum[np.ndarray] = TreeSum(count, np.add, shares.terms(shard).start)
            for term in shares.terms(shard):
                tree.push(items[term])
            assert [terms for terms, _ in tree.partial_sums()] == shares.parts[shard]
            sums.append([part for _, part in tree.partial_sums()])
        np.testing.assert_array_equal(shares.add_partial_sums(sums, np.add), expected, err_msg=str(shares))
        assert [n for shard in range(shards) for n in shares.terms(shard)] == [*range(count)]
        assert shares.max_terms == -(-count // shards)
        if shares.is_even:
            np.testing.assert_array_equal(np.asarray(tree_sum(jnp.stack([one for (one,) in sums]))), expected)


def test_a_shard_comes_to_few_partial_sums() -> None:
    # Each height of the tree occurs at most twice among the nodes of an interval.
    assert max(Shares(64, shards).max_parts for shards in range(1, 65)) <= 6
