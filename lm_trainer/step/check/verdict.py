"""Decides which device was wrong, from the digests of one microbatch that several devices have computed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Vote(NamedTuple):
    """The digest that a group of devices computed for a microbatch."""

    group: int
    """Index of the group among all batch shards of the mesh."""
    digest: str


@dataclass(frozen=True)
class Verdict:
    """The result of a comparison of votes."""

    microbatch: int
    """Index of the microbatch in the global batch."""
    votes: Sequence[Vote]
    """All votes. The first one is the value that the step used."""
    right: str | None
    """The digest that most votes have; None if no digest has more votes than all others."""
    wrong: Sequence[int]
    """Groups that gave another digest than `right`; if that is unknown, all groups that voted."""

    @property
    def step_was_right(self) -> bool:
        """True if the step used the right value."""
        return self.votes[0].digest == self.right


def judge(microbatch: int, votes: Sequence[Vote]) -> Verdict:
    """Compares the votes on a microbatch.

    The program is deterministic, so equal digests of two computations are right unless both went wrong in the same way.
    A digest needs two votes, and more than any other digest.
    """
    (commonest, count), *others = Counter(vote.digest for vote in votes).most_common()
    decided = count > 1 and (not others or others[0][1] < count)
    right = commonest if decided else None
    wrong = [*dict.fromkeys(vote.group for vote in votes if vote.digest != right)]
    return Verdict(microbatch, votes, right, wrong)
