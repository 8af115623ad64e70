"""A sum as one fixed binary tree of additions, whoever computes its parts.

Eight terms on one device, on two, on four and on three add up in the same order:

    1 device     ((a + b) + (c + d)) + ((e + f) + (g + h))
    2 devices    [(a + b) + (c + d)] + [(e + f) + (g + h)]          [ ]: what one device adds up alone
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
    """Adds `count` items that arrive one by one, in the order of a fixed tree, holding only log2(count) partial sums.

    With count = odd * 2^k the leaves of the binary tree are runs of `odd` items, added from the left. The tree over
    any aligned 1/2^j of the items is a subtree of the tree over all, which is what lets devices share the work.

    Items may begin anywhere: what cannot be added without those before or after it is kept apart, and `push` takes
    such partial sums as well.

    Args:
        count: of all items.
        add: may consume its first argument.
        first: the position of the first item that will be pushed.
    """

    def __init__(self, count: int, add: Callable[[Item, Item], Item], first: int = 0):
        self._count, self._run = count, count // (count & -count)
        self._next = first
        self._add = add
        # Sums of neighbours that cannot be added yet, with the items of each. From item 0 on it is a binary counter of
        # subtrees and at most one unfinished run. A list, emptied by `pop`, so that nothing here still refers to an
        # array that `add` has consumed.
        self._parts: list[tuple[range, Item]] = []

    def push(self, item: Item, length: int = 1) -> None:
        """Takes the next item, or the sum of the next `length` items: one of the `parts` of another sum."""
        self._parts.append((range(self._next, self._next + length), item))
        self._next += length
        while len(self._parts) > 1 and self._adjoin(self._parts[-2][0], self._parts[-1][0]):
            both = range(self._parts[-2][0].start, self._next)
            right = self._parts.pop()[1]
            self._parts.append((both, self._add(self._parts.pop()[1], right)))

    def _adjoin(self, left: range, right: range) -> bool:
        """Returns true if the tree has a node whose operands are the sums of these neighbours."""
        if len(left) < self._run:
            return left.start % self._run == 0 and len(right) == 1
        # Runs that are whole: of subtrees of one height, the left one has an even position among them.
        return len(left) == len(right) and left.start // len(left) % 2 == 0

    def parts(self) -> list[tuple[range, Item]]:
        """The sums that cannot be added without further items, each with the items it is of, in order."""
        return self._parts

    def result(self) -> Item:
        """Returns the sum of all items, once all have been pushed."""
        if [terms for terms, _ in self._parts] != [range(self._count)]:
            raise ValueError(f"{self._next} of {self._count} items were pushed")
        return self._parts[0][1]


@dataclass(frozen=True)
class Shares:
    """The division of the terms of a sum among shards: neighbours to each, one more to the first ones if need be."""

    count: int
    """Terms, at least one for each shard."""
    shards: int

    def terms(self, shard: int) -> range:
        """The terms of a shard."""
        least, more = divmod(self.count, self.shards)
        first = shard * least + min(shard, more)
        return range(first, first + least + (shard < more))

    @property
    def most(self) -> int:
        """The most terms of a shard."""
        return len(self.terms(0))

    @property
    def even(self) -> bool:
        """True where each shard comes to one subtree of the same size: `tree_sum` over the shards is their sum."""
        return self.shards & (self.shards - 1) == 0 and self.count % self.shards == 0

    @property
    def parts(self) -> list[list[range]]:
        """For each shard the partial sums that it comes to: the terms of each."""
        return _parts(self)

    @property
    def most_parts(self) -> int:
        """The most partial sums that a shard comes to."""
        return max(map(len, self.parts))

    @property
    def most_held(self) -> int:
        """The most items that exist at once in a shard that adds up its terms: partial sums and the new item."""
        return _most_held(self)

    def trees(self, shard: int) -> Iterator[TreeSum[None]]:
        """Yields the `TreeSum` of a shard, which is always the same one, before each of its terms and at last."""
        terms = self.terms(shard)
        tree = TreeSum[None](self.count, lambda _, __: None, terms.start)
        yield tree
        for _ in terms:
            tree.push(None)
            yield tree

    def add(self, sums: Sequence[Sequence[Item]], add: Callable[[Item, Item], Item]) -> Item:
        """The sum of all terms.

        Args:
            sums: for each shard those of its `parts`; more than there are parts are not read.
            add: as for `TreeSum`.
        """
        tree = TreeSum(self.count, add)
        for parts, of_shard in zip(self.parts, sums, strict=True):
            for terms, item in zip(parts, of_shard, strict=False):
                tree.push(item, len(terms))
        return tree.result()


# Every step asks for it, with an object of its own.
@cache
def _parts(shares: Shares) -> list[list[range]]:
    ended = [deque(shares.trees(shard), maxlen=1).pop() for shard in range(shares.shards)]
    return [[terms for terms, _ in tree.parts()] for tree in ended]


# A plan asks for it again and again, and there may be a hundred thousand terms.
@cache
def _most_held(shares: Shares) -> int:
    before_terms = (zip(shares.terms(shard), shares.trees(shard), strict=False) for shard in range(shares.shards))
    return max(len(tree.parts()) + 1 for of_shard in before_terms for _, tree in of_shard)


def tree_sum(x: jax.Array) -> jax.Array:
    """Sums over axis 0, of any length of at least 1, in the order of `TreeSum`."""
    count = x.shape[0]
    run = count // (count & -count)
    # Additions are written out one by one: inside a `reduce` a compiler chooses the order.
    x = x.reshape(count // run, run, *x.shape[1:])
    total = x[:, 0]
    for i in range(1, run):
        total = total + x[:, i]
    while total.shape[0] > 1:
        total = total[0::2] + total[1::2]
    return total[0]


def sum_slices(x: jax.Array) -> jax.Array:
    """As `tree_sum`, for few large slices: one pass over memory reads them all.

    The halves that `tree_sum` adds are written and read again at each level of the tree.
    """
    import jax

    tree = TreeSum[jax.Array](len(x), operator.add)
    for i in range(len(x)):
        tree.push(x[i])
    return tree.result()
