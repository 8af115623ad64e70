"""Verifies a run: recomputes random segments of it, and compares them bit for bit."""

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
from lm_trainer.run.files.environment import (
    GRAPH,
    PROGRAM,
    describe_environment,
    environment_differences,
    is_same_program,
)
from lm_trainer.trackers import Progress
from lm_trainer.trackers.jsonl import encode_non_finite

VERIFIED = "verified.jsonl"
"""Name of the file in the run directory that contains one line per verification."""


class Difference(NamedTuple):
    """The first difference between a run and its recomputation."""

    step: int
    what: str
    """Name of the metric, of the parameters, or of another array in the checkpoint."""
    recorded: Any
    now: Any


@dataclass
class Segment:
    """A range of steps to recompute, from one checkpoint (or the start of the run) up to the next one."""

    start: int
    """Number of completed steps at the beginning of the segment."""
    end: int
    steps: int = 0
    """Number of recomputed steps that could be compared with recorded metrics."""
    fingerprints: int = 0
    """Number of fingerprints that were compared."""
    difference: Difference | None = None
    notes: list[str] = field(default_factory=list)


def find_segments(record: RunRecord, max_steps: int | None = None) -> list[Segment]:
    """Lists the segments that can be recomputed: from the start, between checkpoints, and after the newest checkpoint.

    Args:
        record: the run.
        max_steps: maximum number of steps per segment.

    Raises:
        UserError: if no segment can be recomputed.
    """
    saved = record.checkpoint_steps()
    segments = []
    for start in sorted({record.start, *saved}):
        # A segment extends to the next checkpoint, to compare its arrays as well, but never past a configuration
        # change.
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
    """Chooses `count` random segments, or all of them if there are fewer, and returns them in order."""
    chosen = random.Random(seed).sample(range(len(segments)), min(count, len(segments)))
    return [segments[index] for index in sorted(chosen)]


def environment_changes(record: RunRecord, chosen: Sequence[Segment], overrides: Sequence[str] = ()) -> list[str]:
    """Lists how this environment differs from the environments of the segments, if this may affect the results."""
    # This comes first, because it sets the number of XLA threads, which is a part of the environment.
    configure_as_recorded(record, record.load_config(record.last, overrides).trainer, record.last)
    current = describe_environment()
    changes = [
        change for segment in chosen for change in environment_differences(record.attempt_at(segment.end), current)
    ]
    return list(dict.fromkeys(changes))


def verify_segment(
    record: RunRecord, segment: Segment, *, overrides: Sequence[str] = (), progress: Progress
) -> Segment:
    """Recomputes a segment up to the first difference, stores the result in the segment, and returns it.

    Raises:
        UserError: as for `open_rerun`.
    """
    with open_rerun(record, segment.start, overrides=overrides, progress=progress) as recomputed_run:
        while segment.difference is None and recomputed_run.state.step < segment.end:
            progress.phase(f"step {recomputed_run.state.step + 1} of {segment.start + 1} to {segment.end}")
            segment.difference = compare_step(record, segment, recomputed_run)
            if segment.difference is None and recomputed_run.state.step in record.checkpoint_steps():
                segment.difference = _compare_arrays(record, recomputed_run)
        segment.notes += _note_other_program(record, segment, recomputed_run)
    return segment


def _note_other_program(record: RunRecord, segment: Segment, recomputed_run: Rerun) -> list[str]:
    """Returns a note if the compiled program differs from the one in the run.

    With a different microbatch size the program always differs, so there is no note in this case.
    """
    recorded = record.attempt_at(segment.end)
    rows = recomputed_run.run.setup.step.plans.at(segment.start).rows
    recomputed = {PROGRAM: recomputed_run.program, GRAPH: recomputed_run.graph}
    if recorded.get("rows") != rows or recorded.get(PROGRAM) is None or is_same_program(recorded, recomputed):
        return []
    return [f"the program of the step was {recorded[PROGRAM]}, and is {recomputed_run.program} here"]


def compare_step(record: RunRecord, segment: Segment, recomputed_run: Rerun) -> Difference | None:
    """Computes the next step, and compares it with the recorded one. Counts the comparison in the segment."""
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
    """Compares all arrays of the checkpoint, which include the optimizer state."""
    saved, digests = (
        record.read_checkpoint(recomputed_run.state.step).get("digests", {}),
        recomputed_run.compute_checksums(),
    )
    names = find_differing_names(saved, digests)
    return Difference(recomputed_run.state.step, names[0], saved[names[0]], digests[names[0]]) if names else None


def find_differing_names(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
    """Returns the names that are in both mappings with different values, in the order of `b`."""
    return [name for name in b if name in a and a[name] != b[name]]


def verify_segments(
    record: RunRecord, chosen: Sequence[Segment], *, overrides: Sequence[str] = (), progress: Progress
) -> Iterator[Segment]:
    """Verifies segments in order until one of them differs, and yields each verified segment."""
    for segment in chosen:
        yield verify_segment(record, segment, overrides=overrides, progress=progress)
        if segment.difference:
            return


def append_result(record: RunRecord, segments: Sequence[Segment], seed: int) -> bool:
    """Appends the result as a line to `verified.jsonl` in the run directory.

    Returns False if the file cannot be written.

    Args:
        record: the run.
        segments: the recomputed segments, in order.
        seed: seed with which the segments were chosen.
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
