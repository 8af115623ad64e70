"""Verification of a run: recomputes random segments, and compares them bit for bit."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from typing import Any, NamedTuple

from lm_trainer.core.errors import UserError
from lm_trainer.core.files import append_line
from lm_trainer.core.safe_names import path_inside
from lm_trainer.reproduce.record import RunRecord, is_bitwise_equal
from lm_trainer.reproduce.rerun import Rerun, configure_as_recorded, open_rerun
from lm_trainer.run.files.environment import describe_environment, environment_differences
from lm_trainer.trackers import Progress
from lm_trainer.trackers.jsonl import encode_non_finite

VERIFIED = "verified.jsonl"
"""File in the run directory, with one line per verification."""


class Difference(NamedTuple):
    """The first divergence of a run and its recomputation."""

    step: int
    what: str
    """The metric, or the parameters or other arrays of the checkpoint by name."""
    recorded: Any
    now: Any


@dataclass
class Segment:
    """Recomputed steps, from one checkpoint (or the start) to the next."""

    start: int
    """Number of steps done at its beginning."""
    end: int
    steps: int = 0
    """The number of steps with recorded metrics to compare with."""
    fingerprints: int = 0
    """The number of compared fingerprints."""
    difference: Difference | None = None
    notes: list[str] = field(default_factory=list)


def find_segments(record: RunRecord, max_steps: int | None = None) -> list[Segment]:
    """Lists the segments that can be recomputed: between checkpoints, from the start, and after the newest.

    Args:
        record: the run.
        max_steps: maximum number of steps per segment.

    Raises:
        UserError: if no segment can be recomputed.
    """
    saved = record.checkpoint_steps()
    segments = []
    for start in sorted({record.start, *saved}):
        # Up to the next checkpoint, to compare its arrays too; never past a configuration change.
        end = min((step for step in saved if step > start), default=record.last)
        end = min(end, start + max_steps if max_steps else end, record.last_reachable_step(start))
        if any(start < step <= end for step in record.computed):
            segments.append(Segment(start, end))
    if not segments:
        raise UserError(
            f"{record.path}: no step after a checkpoint (there are: {saved or 'none'}) has recorded numbers"
        )
    return segments


def choose_segments(segments: Sequence[Segment], count: int, seed: int) -> list[Segment]:
    """Chooses `count` random segments, in order; or all of them."""
    chosen = random.Random(seed).sample(range(len(segments)), min(count, len(segments)))
    return [segments[index] for index in sorted(chosen)]


def environment_changes(record: RunRecord, chosen: Sequence[Segment], overrides: Sequence[str] = ()) -> list[str]:
    """Differences between this environment and the segments' environments that may change bits."""
    # First: sets the run's number of XLA threads, which is part of the environment.
    configure_as_recorded(record, record.load_config(record.last, overrides).trainer, record.last)
    current = describe_environment()
    changes = [
        change for segment in chosen for change in environment_differences(record.attempt_at(segment.end), current)
    ]
    return list(dict.fromkeys(changes))


def verify_segment(
    record: RunRecord, segment: Segment, *, overrides: Sequence[str] = (), progress: Progress
) -> Segment:
    """Recomputes a segment up to the first difference, and stores the result in it.

    Raises:
        UserError: as `open_rerun`.
    """
    with open_rerun(record, segment.start, overrides=overrides, progress=progress) as recomputed_run:
        while segment.difference is None and recomputed_run.state.step < segment.end:
            progress.phase(f"step {recomputed_run.state.step + 1} of {segment.start + 1} to {segment.end}")
            segment.difference = _compare_step(record, segment, recomputed_run)
        if segment.difference is None and segment.end in record.checkpoint_steps():
            segment.difference = _compare_arrays(record, recomputed_run)
        segment.notes += _note_other_program(record, segment, recomputed_run)
    return segment


def _note_other_program(record: RunRecord, segment: Segment, recomputed_run: Rerun) -> list[str]:
    """Notes a program that differs from the run's; with another microbatch size it differs by design."""
    recorded = record.attempt_at(segment.end)
    rows = recomputed_run.run.setup.step.plans.at(segment.start).rows
    if recorded.get("rows") != rows or recorded.get("program") in (None, recomputed_run.program):
        return []
    return [f"the program of the step was {recorded['program']}, and is {recomputed_run.program} here"]


def _compare_step(record: RunRecord, segment: Segment, recomputed_run: Rerun) -> Difference | None:
    metrics = recomputed_run.run_step()
    step = recomputed_run.state.step
    recorded = record.computed.get(step, {})
    segment.steps += "train/loss" in recorded
    for name, value in metrics.items():
        if name in recorded and not is_bitwise_equal(recorded[name], value):
            return Difference(step, name, recorded[name], value)
    fingerprint = recomputed_run.compute_fingerprint() if "fingerprint" in recorded else None
    if fingerprint is None:
        return None
    segment.fingerprints += 1
    if fingerprint == recorded["fingerprint"]:
        return None
    parameters = find_differing_names(record.read_checkpoint(step).get("hashes", {}), recomputed_run.compute_hashes())
    return Difference(step, ", ".join(["fingerprint", *parameters]), recorded["fingerprint"], fingerprint)


def _compare_arrays(record: RunRecord, recomputed_run: Rerun) -> Difference | None:
    """Compares the remaining arrays of the checkpoint: the optimizer state."""
    saved, digests = (
        record.read_checkpoint(recomputed_run.state.step).get("digests", {}),
        recomputed_run.compute_checksums(),
    )
    names = find_differing_names(saved, digests)
    return Difference(recomputed_run.state.step, names[0], saved[names[0]], digests[names[0]]) if names else None


def find_differing_names(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
    """The common names with different values, in the order of `b`."""
    return [name for name in b if name in a and a[name] != b[name]]


def verify_segments(
    record: RunRecord, chosen: Sequence[Segment], *, overrides: Sequence[str] = (), progress: Progress
) -> Iterator[Segment]:
    """Verifies segments in order until one differs, and yields each."""
    for segment in chosen:
        yield verify_segment(record, segment, overrides=overrides, progress=progress)
        if segment.difference:
            return


def append_result(record: RunRecord, segments: Sequence[Segment], seed: int) -> bool:
    """Appends the result as a line to `verified.jsonl` in the run directory; False if it cannot be written.

    Args:
        record: the run.
        segments: the recomputed segments, in order.
        seed: the seed of the random choice.
    """
    line = {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "seed": seed,
        "equal": not any(segment.difference for segment in segments),
        "segments": [asdict(segment) | {"difference": _to_dict(segment.difference)} for segment in segments],
        "devices": describe_environment()["devices"],
    }
    try:
        append_line(path_inside(record.path, VERIFIED, record.path), json.dumps(encode_non_finite(line)).encode())
    except OSError:
        return False
    return True


def _to_dict(difference: Difference | None) -> dict[str, Any] | None:
    return None if difference is None else difference._asdict()
