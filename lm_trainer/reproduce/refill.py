"""Metrics of a run that were lost, computed again from its checkpoints and put back into metrics.jsonl."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lm_trainer.core.errors import UserError
from lm_trainer.core.files import write_atomically
from lm_trainer.reproduce.record import RunRecord
from lm_trainer.reproduce.rerun import Rerun, rerun
from lm_trainer.run.batches import DataWait
from lm_trainer.run.checkpoints import SERIES
from lm_trainer.run.directory import locked
from lm_trainer.run.evaluations import Evaluations, named_sets
from lm_trainer.run.metrics import evaluation_metrics
from lm_trainer.trackers import Progress
from lm_trainer.trackers.json_lines import METRICS, parse
from lm_trainer.trackers.jsonl import encode
from lm_trainer.trackers.series import Series, line_name

FINGERPRINT, EVALUATION = "fingerprint", "eval/"
_COMPUTED = ("train/loss", FINGERPRINT, EVALUATION)
"""Beginnings of the names of lines that can be computed again."""


@dataclass
class Refilled:
    """The outcome of a refill."""

    lines: dict[str, list[int]]
    """Lines that were put back: steps by name."""
    left: dict[str, list[int]]
    """Lines that are still missing: of alerts, watched norms and values of the user's own, which nothing here computes,
    and where the configuration changed between two checkpoints."""
    proved: list[int]
    """Checkpoints whose fingerprints came out again on the way."""


class _Lines:
    """Lines as a run logs them, kept until all are computed: the part of a `MetricLogger` that evaluations need."""

    def __init__(self) -> None:
        self.records: list[dict[str, Any]] = []

    def add(self, step: int, values: Mapping[str, Any]) -> None:
        self.records.append({"step": step, "time": round(time.time(), 3), **{k: encode(v) for k, v in values.items()}})

    def evaluated(self, step: int, name: str, means: Mapping[str, float]) -> None:
        self.add(step, evaluation_metrics(name, means))

    def evaluated_group(self, step: int, name: str, found: Mapping[str, float]) -> None:
        self.add(step, evaluation_metrics(name, found))

    def flush(self) -> None: ...

    def pause(self) -> None: ...


def missing_lines(record: RunRecord) -> dict[str, list[int]]:
    """The lines that the newest checkpoint remembers and metrics.jsonl lacks: steps by name.

    Raises:
        UserError: when the checkpoints remember none.
    """
    saved = record.saved()
    series = record.checkpoint(saved[-1]).get(SERIES) if saved else None
    if series is None:
        raise UserError(f"{record.checkpoints}: no checkpoint there remembers which metrics were logged")
    there = Series()
    for line, _ in _parsed(record):
        if line["step"] <= saved[-1]:
            there.add(line_name(line), line["step"])
    return Series(series.get(METRICS)).without(there)


def refill(record: RunRecord, *, overrides: Sequence[str] = (), progress: Progress) -> Refilled:
    """Computes lines that metrics.jsonl lacks, and puts them back; the others stay as they are.

    Steps are computed from a checkpoint to the next one, whose fingerprint says that they are the run's.

    Args:
        record: a run that no process works on.
        overrides: settings that change no number.
        progress: shows the phases.

    Raises:
        UserError: when the run goes on, or its steps come out otherwise here; nothing is written then. And as `rerun`.
    """
    with locked(record.path):
        missing = missing_lines(record)
        wanted = {name: {*steps} for name, steps in missing.items() if name.startswith(_COMPUTED)}
        lines, proved = _Lines(), []
        saved = record.saved()
        for start, end in itertools.pairwise(sorted({record.start, *saved})):
            within = {name: {step for step in steps if start < step <= end} for name, steps in wanted.items()}
            # Past a change of the configuration other numbers would come.
            if any(within.values()) and end <= record.reach(start):
                with rerun(record, start, overrides=overrides, progress=progress) as again:
                    _compute(record, again, end, within, lines, progress)
                proved.append(end)
        found = [line for line in lines.records if line["step"] in wanted.get(line_name(line), ())]
        if found:
            _write(record, found)
    return Refilled(steps_by_name(found), missing_lines(record), proved)


def _compute(
    record: RunRecord, again: Rerun, end: int, wanted: Mapping[str, set[int]], lines: _Lines, progress: Progress
) -> None:
    """Computes the steps up to a checkpoint, and what is wanted of them."""
    evaluated = {step for name, steps in wanted.items() if name.startswith(EVALUATION) for step in steps}
    proven = {*wanted.get(FINGERPRINT, ()), end}
    evaluations = _evaluations(again, lines)
    rows, seq_len = again.run.program.plan.batch_schedule, again.run.config.model.seq_len
    while again.state.step < end:
        step = again.state.step + 1
        progress.phase(f"step {step} of up to {end}")
        lines.add(step, {**again.step(), "throughput/total_tokens": rows.rows_before(step) * seq_len})
        if step in evaluated:
            evaluations.run(again.state)
        if step in proven:
            lines.add(step, {FINGERPRINT: again.fingerprint()})
    proof, known = lines.records[-1][FINGERPRINT], record.checkpoint(end)[FINGERPRINT]
    if proof != known:
        raise UserError(
            f"{record.path}: the steps up to {end} come out otherwise here than in the run (fingerprint {known}, now "
            f"{proof}), so nothing was written; `lmt verify {record.path}` looks for the reason"
        )


def _evaluations(again: Rerun, lines: _Lines) -> Evaluations:
    run, attempt = again.run, again.run.attempt
    wait = DataWait(attempt.stop, attempt.progress, attempt.watchdog, keep=lambda _: None)
    sets = named_sets(run.data.validation())
    return Evaluations(sets, run.config.trainer, run.program, lines, wait, attempt.watchdog, attempt.progress)


def _write(record: RunRecord, found: Sequence[Mapping[str, Any]]) -> None:
    """Puts lines into metrics.jsonl: those of a step before what else there is of it, its fingerprint behind it."""
    new = [(line["step"], 2 if FINGERPRINT in line else 0, json.dumps(line).encode() + b"\n") for line in found]
    old = [(line["step"], 1, content) for line, content in _parsed(record)]
    ordered = sorted([*new, *old], key=lambda entry: entry[:2])
    write_atomically(record.path / METRICS, b"".join(content for *_, content in ordered))


def _parsed(record: RunRecord) -> list[tuple[dict[str, Any], bytes]]:
    file = record.path / METRICS
    return parse(file.read_bytes())[0] if file.is_file() else []


def steps_by_name(lines: Iterable[Mapping[str, Any]]) -> dict[str, list[int]]:
    """The steps of lines, by the name of the line."""
    found: dict[str, list[int]] = {}
    for line in lines:
        found.setdefault(line_name(line), []).append(line["step"])
    return found
