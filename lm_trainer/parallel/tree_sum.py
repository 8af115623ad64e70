"""A sum as one fixed binary tree of additions, which does not depend on the devices that compute its parts.

Eight terms on one, two, four or three devices are added in the same order:

    1 device     ((a + b) + (c + d)) + ((e + f) + (g + h))
    2 devices    [(a + b) + (c + d)] + [(e + f) + (g + h)]          [ ]: partial sum of one device
    4 devices    ([a + b] + [c + d]) + ([e + f] + [g + h])
    3 devices    ([a + b] + ([c] + [d])) + ([e + f] + [g + h])      a b c | d e f | g h
"""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    import jax

Item = TypeVar("Item")


class TreeSum(Generic[Item]):
    """Adds `count` items that arrive one by one, in the order of a fixed tree. Holds only log2(count) partial sums.

    With count = odd * 2^k, the leaves of the binary tree are runs of `odd` items, which are added from left to right.
    The tree over any aligned 1/2^j of the items is a subtree of the tree over all items, so devices can share the work.

    Items may start at any position. Partial sums that cannot be added yet, because earlier or later items are missing,
    are kept separately, and `push` accepts such partial sums too.

    Args:
        count: total number of items.
        add: adds two items; may consume its first argument.
        first: position of the first item that will be pushed.
    """

    def __init__(self, count: int, add: Callable[[Item, Item], Item], first: int = 0):
        self._count, self._run = count, count // (count & -count)
        self._next = first
        self._add = add
        # Sums of neighbouring items that cannot be added yet, with the range of items of each. If they start from item
        # 0, this is a binary counter of subtrees and at most one unfinished run. `pop` removes entries, so that the
        # list has no reference to an array that `add` has consumed.
        self._parts: list[tuple[range, Item]] = []

    def push(self, item: Item, length: int = 1) -> None:
        """Adds the next item, or the sum of the next `length` items (one of the `partial_sums` of another sum)."""
        self._parts.append((range(self._next, self._next + length), item))
        self._next += length
        while len(self._parts) > 1 and self._can_add(self._parts[-2][0], self._parts[-1][0]):
            joined = range(self._parts[-2][0].start, self._next)
            right = self._parts.pop()[1]
            self._parts.append((joined, self._add(self._parts.pop()[1], right)))

    def _can_add(self, left: range, right: range) -> bool:
        """Returns true if the tree has a node whose operands are the sums of these neighbours."""
        if len(left) < self._run:
            return left.start % self._run == 0 and len(right) == 1
        # For complete runs, the left one of two subtrees of the same height must have an even index.
        return len(left) == len(right) and left.start // len(left) % 2 == 0

    def partial_sums(self) -> list[tuple[range, Item]]:
        """Returns the sums that cannot be added without further items, in order, each with the range of its items."""
        return self._parts

    def result(self) -> Item:
        """Returns the sum of all items. All items must have been pushed."""
        if [terms for terms, _ in self._parts] != [range(self._count)]:
            raise ValueError(f"{self._next} of {self._count} items were pushed")
        return self._parts[0][1]


@dataclass(frozen=True)
class Shares:
    """Division of the terms of a sum among shards: contiguous terms, where the first shards may have one term more."""

    count: int
    """Number of terms, at least one per shard."""
    shards: int

    def terms(self, shard: int) -> range:
        """Returns the range of terms of a shard."""
        least, more = divmod(self.count, self.shards)
        first = shard * least + min(shard, more)
        return range(first, first + least + (shard < more))

    @property
    def max_terms(self) -> int:
        """Maximum number of terms of a shard."""
        return len(self.terms(0))

    @property
    def is_even(self) -> bool:
        """True if each shard computes a subtree of the same size, so that `tree_sum` over the shards is the sum."""
        return self.shards & (self.shards - 1) == 0 and self.count % self.shards == 0

    @property
    def parts(self) -> list[list[range]]:
        """Ranges of terms of the partial sums of each shard."""
        return _partial_sums(self)

    @property
    def max_parts(self) -> int:
        """Maximum number of partial sums of a shard."""
        return max(map(len, self.parts))

    def iterate_tree_sums(self, shard: int) -> Iterator[TreeSum[None]]:
        """Yields the `TreeSum` of a shard (always the same object) before each of its terms and at the end."""
        terms = self.terms(shard)
        tree = TreeSum[None](self.count, lambda _, __: None, terms.start)
        yield tree
        for _ in terms:
            tree.push(None)
            yield tree

    def add_partial_sums(self, sums: Sequence[Sequence[Item]], add: Callable[[Item, Item], Item]) -> Item:
        """Returns the sum of all terms.

        Args:
            sums: for each shard, the sums of its `parts`; additional entries are ignored.
            add: as for `TreeSum`.
        """
        tree = TreeSum(self.count, add)
        for parts, of_shard in zip(self.parts, sums, strict=True):
            for terms, item in zip(parts, of_shard, strict=False):
                tree.push(item, len(terms))
        return tree.result()


# Cached: called in every step, with an equal object that is newly created each time.
@cache
def _partial_sums(shares: Shares) -> list[list[range]]:
    ended = [deque(shares.iterate_tree_sums(shard), maxlen=1).pop() for shard in range(shares.shards)]
    return [[terms for terms, _ in tree.partial_sums()] for tree in ended]


def tree_sum(x: jax.Array) -> jax.Array:
    """Returns the sum over axis 0, whose length is at least 1, in the order of `TreeSum`."""
    count = x.shape[0]
    run = count // (count & -count)
    # Additions are written out individually, because inside a `reduce` the compiler chooses the order.
    x = x.reshape(count // run, run, *x.shape[1:])
    total = x[:, 0]
    for i in range(1, run):
        total = total + x[:, i]
    while total.shape[0] > 1:
        total = total[0::2] + total[1::2]
    return total[0]


def sum_slices(x: jax.Array) -> jax.Array:
    """Same as `tree_sum`, for a few large slices: reads all of them in one pass over memory.

    `tree_sum` writes and reads the halves at each level of the tree.
    """
    import jax

    tree = TreeSum[jax.Array](len(x), operator.add)
    for i in range(len(x)):
        tree.push(x[i])
    return tree.result()
