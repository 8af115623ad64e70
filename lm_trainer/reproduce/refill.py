"""Metrics of a run that were lost, computed again from its checkpoints and put back into its files."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from lm_trainer.core.errors import UserError
from lm_trainer.core.files import write_atomically
from lm_trainer.reproduce.lost_metrics import Missing, lost_lines
from lm_trainer.reproduce.record import RunRecord
from lm_trainer.reproduce.rerun import Rerun, rerun
from lm_trainer.run.files.directory import locked
from lm_trainer.run.training.batches import DataWait
from lm_trainer.run.training.evaluations import Evaluations, named_sets
from lm_trainer.run.training.metrics import evaluation_metrics
from lm_trainer.step.updates.norms import Watcher
from lm_trainer.step.updates.watch import Target
from lm_trainer.trackers import Progress
from lm_trainer.trackers.json_lines import HISTOGRAMS, METRICS, parse
from lm_trainer.trackers.jsonl import encode
from lm_trainer.trackers.series import line_name

_LOSS, _WATCHED, _EVALUATION, _FINGERPRINT = range(4)
"""Kinds of lines that can be computed again, in the order in which a step logs them."""
_BEGINNINGS = {"train/loss": _LOSS, **{f"{target}/": _WATCHED for target in get_args(Target)}, "eval/": _EVALUATION}


@dataclass
class Refilled:
    """The outcome of a refill."""

    lines: Missing
    """Lines that were put back."""
    left: Missing
    """Lines that are still missing: texts and values of the user's own, which nothing here computes, and all lines
    where the configuration changed between two checkpoints."""
    proved: list[int]
    """Checkpoints whose fingerprints came out again on the way."""


class _Lines:
    """Lines as a run logs them, kept until all are computed: the part of a `MetricLogger` that evaluations need."""

    def __init__(self) -> None:
        self.of_files: dict[str, list[dict[str, Any]]] = {METRICS: [], HISTOGRAMS: []}

    def add(self, step: int, values: Mapping[str, Any], file: str = METRICS) -> None:
        record = {"step": step, "time": round(time.time(), 3)}
        self.of_files[file].append({**record, **{name: encode(value) for name, value in values.items()}})

    def evaluated(self, step: int, name: str, means: Mapping[str, float]) -> None:
        self.add(step, evaluation_metrics(name, means))

    def evaluated_group(self, step: int, name: str, found: Mapping[str, float]) -> None:
        self.add(step, evaluation_metrics(name, found))

    def flush(self) -> None: ...

    def pause(self) -> None: ...


def missing_lines(record: RunRecord) -> Missing:
    """The lines that the newest checkpoint remembers and the run directory lacks.

    Raises:
        UserError: when the checkpoints remember none.
    """
    lost = lost_lines(record.path, record.checkpoints)
    if lost is None:
        raise UserError(f"{record.checkpoints}: no checkpoint there remembers which metrics were logged")
    return lost.lines


def refill(record: RunRecord, *, overrides: Sequence[str] = (), progress: Progress) -> Refilled:
    """Computes lines that the run directory lacks, and puts them back; the others stay as they are.

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
        lines, proved = _Lines(), []
        for start, end in itertools.pairwise(sorted({record.start, *record.saved()})):
            wanted = _by_kind(missing, start, end)
            # Past a change of the configuration other numbers would come.
            if wanted and end <= record.reach(start):
                with rerun(record, start, overrides=overrides, progress=progress) as again:
                    _compute(record, again, end, wanted, lines, progress)
                proved.append(end)
        found = {}
        for file, computed in lines.of_files.items():
            lost = missing.get(file, {})
            if kept := [line for line in computed if line["step"] in lost.get(line_name(line), ())]:
                _write(record, file, kept)
                found[file] = _steps_by_name(kept)
    return Refilled(found, missing_lines(record), proved)


def _kind(name: str, file: str = METRICS) -> int | None:
    """The kind of a line; None of one that is not computed again."""
    if name == "fingerprint":
        return _FINGERPRINT
    kind = next((kind for beginning, kind in _BEGINNINGS.items() if name.startswith(beginning)), None)
    return kind if file == METRICS or (file == HISTOGRAMS and kind == _WATCHED) else None


def _by_kind(missing: Missing, start: int, end: int) -> dict[int, set[int]]:
    """The steps after `start` and up to `end` of which something can be computed again, by kind."""
    wanted: dict[int, set[int]] = {}
    for file, names in missing.items():
        for name, steps in names.items():
            within = {step for step in steps if start < step <= end}
            if within and (kind := _kind(name, file)) is not None:
                wanted.setdefault(kind, set()).update(within)
    return wanted


def _compute(
    record: RunRecord, again: Rerun, end: int, wanted: Mapping[int, set[int]], lines: _Lines, progress: Progress
) -> None:
    """Computes the steps up to a checkpoint, and what is wanted of them."""
    program, config = again.run.setup, again.run.config
    watcher = Watcher(record.config(end).trainer.watch, program.sharding, program.model.axes)
    evaluations = _evaluations(again, lines)
    while again.state.step < end:
        step = again.state.step + 1
        progress.phase(f"step {step} of up to {end}")
        total = program.plan.batch_schedule.rows_before(step) * config.model.seq_len
        metrics = again.step(watcher if step in wanted.get(_WATCHED, ()) else None)
        lines.add(step, {**metrics, "throughput/total_tokens": total})
        for watched in watcher.report():
            lines.add(step, watched.scalars)
            for name, (counts, edges) in watched.histograms.items():
                lines.add(step, {"name": name, "counts": counts.tolist(), "edges": edges.tolist()}, HISTOGRAMS)
        if step in wanted.get(_EVALUATION, ()):
            evaluations.run(again.state)
        if step in wanted.get(_FINGERPRINT, ()):
            lines.add(step, {"fingerprint": again.fingerprint()})
    proof, known = again.fingerprint(), record.checkpoint(end).get("fingerprint")
    if proof != known:
        raise UserError(
            f"{record.path}: the steps up to {end} come out otherwise here than in the run (fingerprint {known}, now "
            f"{proof}), so nothing was written; `lmt verify {record.path}` looks for the reason"
        )


def _evaluations(again: Rerun, lines: _Lines) -> Evaluations:
    run, attempt = again.run, again.run.attempt
    wait = DataWait(attempt.stop, attempt.progress, attempt.watchdog, keep=lambda _: None)
    sets = named_sets(run.data.validation())
    return Evaluations(sets, run.config.trainer, run.setup, lines, wait, attempt.watchdog, attempt.progress)


def _write(record: RunRecord, file: str, found: Iterable[Mapping[str, Any]]) -> None:
    """Puts lines into a file, among the other lines of their steps as a run logs them."""
    by_step: dict[int, list[tuple[int, bytes]]] = {}
    for line, content in _parsed(record, file):
        by_step.setdefault(line["step"], []).append((_kind(line_name(line)) or 0, content))
    for line in found:
        there, kind = by_step.setdefault(line["step"], []), _kind(line_name(line)) or 0
        place = next((i for i, (other, _) in enumerate(there) if other > kind), len(there))
        there.insert(place, (kind, json.dumps(line).encode() + b"\n"))
    write_atomically(record.path / file, b"".join(content for step in sorted(by_step) for _, content in by_step[step]))


def _parsed(record: RunRecord, name: str) -> list[tuple[dict[str, Any], bytes]]:
    file = record.path / name
    return parse(file.read_bytes())[0] if file.is_file() else []


def _steps_by_name(lines: Iterable[Mapping[str, Any]]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for line in lines:
        found.setdefault(line_name(line), []).append(line["step"])
    return found
