"""Random stretches of a run, computed again and compared bit for bit."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from lm_trainer.core.errors import UserError
from lm_trainer.reproduce.record import RunRecord, same
from lm_trainer.reproduce.rerun import Rerun, configure_again, rerun
from lm_trainer.run.environment import environment, environment_differences
from lm_trainer.trackers import Progress


class Difference(NamedTuple):
    """Where a run and its recomputation part."""

    step: int
    what: str
    """The metric, or the parameters or other arrays of the checkpoint by name."""
    recorded: Any
    now: Any


@dataclass
class Stretch:
    """Steps from one checkpoint (or the start) to the next, computed again."""

    start: int
    """Steps done at its beginning."""
    end: int
    steps: int = 0
    """How many had recorded numbers to compare with."""
    fingerprints: int = 0
    """How many fingerprints were compared."""
    difference: Difference | None = None
    notes: list[str] = field(default_factory=list)


def stretches(record: RunRecord, max_steps: int | None = None) -> list[Stretch]:
    """All that can be computed again: between checkpoints, from the start, and after the newest.

    Args:
        record: the run.
        max_steps: leave out what comes later in a stretch.

    Raises:
        UserError: when there is none.
    """
    saved = record.saved()
    found = []
    for start in sorted({record.start, *saved}):
        end = min((step for step in saved if step > start), default=record.last)
        end = min(end, start + max_steps if max_steps else end, record.reach(start))
        if any(start < step <= end for step in record.computed):
            found.append(Stretch(start, end))
    if not found:
        raise UserError(
            f"{record.path}: no step after a checkpoint (there are: {saved or 'none'}) has recorded numbers"
        )
    return found


def choose(found: Sequence[Stretch], count: int, seed: int) -> list[Stretch]:
    """`count` of them at random, in their order; all where there are fewer."""
    chosen = random.Random(seed).sample(range(len(found)), min(count, len(found)))
    return [found[index] for index in sorted(chosen)]


def changed_since(record: RunRecord, chosen: Sequence[Stretch], overrides: Sequence[str] = ()) -> list[str]:
    """How what runs here differs from what computed these stretches, as far as that may give other bits."""
    configure_again(record, record.config(record.last, overrides).trainer, record.last)
    now = environment()
    changes = [change for part in chosen for change in environment_differences(record.attempt(part.end), now)]
    return list(dict.fromkeys(changes))


def verify(record: RunRecord, part: Stretch, *, overrides: Sequence[str] = (), progress: Progress) -> Stretch:
    """Computes a stretch again and fills in what came out, up to the first difference.

    Raises:
        UserError: as `rerun`.
    """
    with rerun(record, part.start, overrides=overrides, progress=progress) as again:
        while part.difference is None and again.state.step < part.end:
            progress.phase(f"step {again.state.step + 1} of {part.start + 1} to {part.end}")
            part.difference = _compared_step(record, part, again)
        if part.difference is None and part.end in record.saved():
            part.difference = _compared_arrays(record, again)
        part.notes += _other_program(record, part, again)
    return part


def _other_program(record: RunRecord, part: Stretch, again: Rerun) -> list[str]:
    recorded = record.attempt(part.end)
    rows = again.run.program.step.plans.at(part.start).rows
    if recorded.get("rows") != rows or recorded.get("program") in (None, again.program):
        return []
    return [f"the program of the step was {recorded['program']}, and is {again.program} here"]


def _compared_step(record: RunRecord, part: Stretch, again: Rerun) -> Difference | None:
    now = again.step()
    step = again.state.step
    recorded = record.computed.get(step, {})
    part.steps += "train/loss" in recorded
    for name, value in now.items():
        if name in recorded and not same(recorded[name], value):
            return Difference(step, name, recorded[name], value)
    proof = again.fingerprint() if "fingerprint" in recorded else None
    if proof is None:
        return None
    part.fingerprints += 1
    if proof == recorded["fingerprint"]:
        return None
    other = differing(record.checkpoint(step).get("hashes", {}), again.hashes())
    return Difference(step, ", ".join(["fingerprint", *other]), recorded["fingerprint"], proof)


def _compared_arrays(record: RunRecord, again: Rerun) -> Difference | None:
    """The rest of the checkpoint: the optimizer's state."""
    saved, now = record.checkpoint(again.state.step).get("digests", {}), again.digests()
    other = differing(saved, now)
    return Difference(again.state.step, other[0], saved[other[0]], now[other[0]]) if other else None


def differing(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
    """The names that both have with another value, in the order of `b`."""
    return [name for name in b if name in a and a[name] != b[name]]


def results(
    record: RunRecord, chosen: Sequence[Stretch], *, overrides: Sequence[str] = (), progress: Progress
) -> Iterator[Stretch]:
    """Verifies one stretch after the other, until one differs."""
    for part in chosen:
        yield verify(record, part, overrides=overrides, progress=progress)
        if part.difference:
            return
