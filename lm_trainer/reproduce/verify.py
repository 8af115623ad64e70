"""Verification of a run: random segments of it, computed again and compared bit for bit."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from typing import Any, NamedTuple

from lm_trainer.core.errors import UserError
from lm_trainer.core.files import append_line
from lm_trainer.core.inside import path_inside
from lm_trainer.reproduce.record import RunRecord, equal_bits
from lm_trainer.reproduce.rerun import Rerun, configure_again, rerun
from lm_trainer.run.files.environment import environment, environment_differences
from lm_trainer.trackers import Progress
from lm_trainer.trackers.jsonl import encode

VERIFIED = "verified.jsonl"
"""File of a run directory: a line for each verification."""


class Difference(NamedTuple):
    """The first divergence of a run and its recomputation."""

    step: int
    what: str
    """The metric, or the parameters or other arrays of the checkpoint by name."""
    recorded: Any
    now: Any


@dataclass
class Segment:
    """Steps from one checkpoint (or the start) to the next, computed again."""

    start: int
    """Steps done at its beginning."""
    end: int
    steps: int = 0
    """The number of steps with recorded numbers to compare with."""
    fingerprints: int = 0
    """The number of fingerprints that were compared."""
    difference: Difference | None = None
    notes: list[str] = field(default_factory=list)


def find_segments(record: RunRecord, max_steps: int | None = None) -> list[Segment]:
    """Lists the segments that can be computed again: between checkpoints, from the start, and after the newest.

    Args:
        record: the run.
        max_steps: leave out later steps of a segment.

    Raises:
        UserError: when there is none.
    """
    saved = record.saved()
    found = []
    for start in sorted({record.start, *saved}):
        # To the next checkpoint, whose arrays are then compared as well; never past a change of the configuration.
        end = min((step for step in saved if step > start), default=record.last)
        end = min(end, start + max_steps if max_steps else end, record.reach(start))
        if any(start < step <= end for step in record.computed):
            found.append(Segment(start, end))
    if not found:
        raise UserError(
            f"{record.path}: no step after a checkpoint (there are: {saved or 'none'}) has recorded numbers"
        )
    return found


def choose_segments(found: Sequence[Segment], count: int, seed: int) -> list[Segment]:
    """Draws `count` segments at random, in their order; all if there are fewer."""
    chosen = random.Random(seed).sample(range(len(found)), min(count, len(found)))
    return [found[index] for index in sorted(chosen)]


def environment_changes(record: RunRecord, chosen: Sequence[Segment], overrides: Sequence[str] = ()) -> list[str]:
    """Differences between this environment and those that computed the segments, as far as they may change bits."""
    # First of all: the environment has the number of XLA's threads, which is that of the run from here on.
    configure_again(record, record.config(record.last, overrides).trainer, record.last)
    now = environment()
    changes = [change for segment in chosen for change in environment_differences(record.attempt(segment.end), now)]
    return list(dict.fromkeys(changes))


def verify_segment(
    record: RunRecord, segment: Segment, *, overrides: Sequence[str] = (), progress: Progress
) -> Segment:
    """Computes a segment again and fills in the outcome, up to the first difference.

    Raises:
        UserError: as `rerun`.
    """
    with rerun(record, segment.start, overrides=overrides, progress=progress) as again:
        while segment.difference is None and again.state.step < segment.end:
            progress.phase(f"step {again.state.step + 1} of {segment.start + 1} to {segment.end}")
            segment.difference = _compare_step(record, segment, again)
        if segment.difference is None and segment.end in record.saved():
            segment.difference = _compare_arrays(record, again)
        segment.notes += _other_program(record, segment, again)
    return segment


def _other_program(record: RunRecord, segment: Segment, again: Rerun) -> list[str]:
    """Notes another program than the run's; with microbatches of another size it is another one by design."""
    recorded = record.attempt(segment.end)
    rows = again.run.setup.step.plans.at(segment.start).rows
    if recorded.get("rows") != rows or recorded.get("program") in (None, again.program):
        return []
    return [f"the program of the step was {recorded['program']}, and is {again.program} here"]


def _compare_step(record: RunRecord, segment: Segment, again: Rerun) -> Difference | None:
    now = again.step()
    step = again.state.step
    recorded = record.computed.get(step, {})
    segment.steps += "train/loss" in recorded
    for name, value in now.items():
        if name in recorded and not equal_bits(recorded[name], value):
            return Difference(step, name, recorded[name], value)
    now_fingerprint = again.fingerprint() if "fingerprint" in recorded else None
    if now_fingerprint is None:
        return None
    segment.fingerprints += 1
    if now_fingerprint == recorded["fingerprint"]:
        return None
    other = differing(record.checkpoint(step).get("hashes", {}), again.hashes())
    return Difference(step, ", ".join(["fingerprint", *other]), recorded["fingerprint"], now_fingerprint)


def _compare_arrays(record: RunRecord, again: Rerun) -> Difference | None:
    """Compares the rest of the checkpoint: the state of the optimizer."""
    saved, now = record.checkpoint(again.state.step).get("digests", {}), again.digests()
    other = differing(saved, now)
    return Difference(again.state.step, other[0], saved[other[0]], now[other[0]]) if other else None


def differing(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
    """The names whose values differ, of those that both have, in the order of `b`."""
    return [name for name in b if name in a and a[name] != b[name]]


def verify_segments(
    record: RunRecord, chosen: Sequence[Segment], *, overrides: Sequence[str] = (), progress: Progress
) -> Iterator[Segment]:
    """Verifies one segment after the other, until one differs, and yields each."""
    for segment in chosen:
        yield verify_segment(record, segment, overrides=overrides, progress=progress)
        if segment.difference:
            return


def write_down(record: RunRecord, segments: Sequence[Segment], seed: int) -> bool:
    """Adds the outcome as a line to `verified.jsonl` in the run directory; False where that cannot be written.

    Args:
        record: the run.
        segments: those that were computed again, in order.
        seed: that they were drawn with.
    """
    line = {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "seed": seed,
        "equal": not any(segment.difference for segment in segments),
        "segments": [asdict(segment) | {"difference": _plain(segment.difference)} for segment in segments],
        "devices": environment()["devices"],
    }
    try:
        append_line(path_inside(record.path, VERIFIED, record.path), json.dumps(encode(line)).encode())
    except OSError:
        return False
    return True


def _plain(difference: Difference | None) -> dict[str, Any] | None:
    return None if difference is None else difference._asdict()
