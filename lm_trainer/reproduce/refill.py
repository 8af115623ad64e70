"""Recovers lost metrics of a run: recomputes them from its checkpoints, and restores them in its files."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from lm_trainer.core.errors import UserError
from lm_trainer.core.files import write_atomically
from lm_trainer.reproduce.lost_metrics import Missing, find_lost_metrics
from lm_trainer.reproduce.record import RunRecord
from lm_trainer.reproduce.rerun import Rerun, open_rerun
from lm_trainer.run.files.directory import lock_directory
from lm_trainer.run.training.batches import DataWait
from lm_trainer.run.training.evaluations import Evaluations, name_eval_sets
from lm_trainer.run.training.metrics import evaluation_metrics
from lm_trainer.step.updates.norms import Watcher
from lm_trainer.step.updates.watch import Target
from lm_trainer.trackers import Progress
from lm_trainer.trackers.json_lines import HISTOGRAMS, METRICS, parse_records
from lm_trainer.trackers.jsonl import encode_non_finite
from lm_trainer.trackers.series import line_name

_LOSS, _WATCHED, _EVALUATION, _FINGERPRINT = range(4)
"""Kinds of lines that can be recomputed, in the order in which a step logs them."""
_BEGINNINGS = {"train/loss": _LOSS, **{f"{target}/": _WATCHED for target in get_args(Target)}, "eval/": _EVALUATION}


@dataclass
class RefillResult:
    """The result of `refill_metrics`."""

    lines: Missing
    """The lines that were restored."""
    left: Missing
    """The lines that are still missing: texts and values logged by user code, which cannot be recomputed, and all lines
    between two checkpoints if the configuration changed in between."""
    proved: list[int]
    """Steps of the checkpoints whose fingerprints were reproduced."""


class _LineCollector:
    """Collects lines as a run would log them. Implements the part of `MetricLogger` that evaluations need."""

    def __init__(self) -> None:
        self.of_files: dict[str, list[dict[str, Any]]] = {METRICS: [], HISTOGRAMS: []}

    def add(self, step: int, values: Mapping[str, Any], file: str = METRICS) -> None:
        record = {"step": step, "time": round(time.time(), 3)}
        self.of_files[file].append({**record, **{name: encode_non_finite(value) for name, value in values.items()}})

    def log_evaluation(self, step: int, name: str, means: Mapping[str, float]) -> None:
        self.add(step, evaluation_metrics(name, means))

    def log_group_evaluation(self, step: int, name: str, means: Mapping[str, float]) -> None:
        self.add(step, evaluation_metrics(name, means))

    def flush(self) -> None: ...

    def pause(self) -> None: ...


def find_missing_lines(record: RunRecord) -> Missing:
    """Returns the lines that the newest checkpoint records, but that are missing from the run directory.

    Raises:
        UserError: if the newest checkpoint is not readable, or does not record lines.
    """
    lost = find_lost_metrics(record.path, record.checkpoints)
    if lost is None:
        raise UserError(f"{record.checkpoints}: no checkpoint there remembers which metrics were logged")
    return lost.lines


def refill_metrics(record: RunRecord, *, overrides: Sequence[str] = (), progress: Progress) -> RefillResult:
    """Recomputes the lines that are missing in the run directory, and inserts them. Other lines remain unchanged.

    Steps are computed from one checkpoint to the next. The fingerprint of the next checkpoint proves that the steps are
    the same as in the run.

    Args:
        record: a run that is not in progress.
        overrides: settings `KEY=VALUE` that override the configuration and do not affect the numbers.
        progress: shows the current phase.

    Raises:
        UserError: if the run is in progress, if its steps cannot be reproduced here (no file is written in this case),
            or as for `open_rerun`.
    """
    with lock_directory(record.path):
        missing = find_missing_lines(record)
        lines, proved = _LineCollector(), []
        for start, end in itertools.pairwise(sorted({record.start, *record.checkpoint_steps()})):
            steps_by_kind = _group_steps_by_kind(missing, start, end)
            # Skips ranges with a configuration change, because the numbers would differ.
            if steps_by_kind and end <= record.last_reachable_step(start):
                with open_rerun(record, start, overrides=overrides, progress=progress) as recomputed_run:
                    _compute_lines(record, recomputed_run, end, steps_by_kind, lines, progress)
                proved.append(end)
        restored_lines = {}
        for file, computed in lines.of_files.items():
            lost = missing.get(file, {})
            if restored := [line for line in computed if line["step"] in lost.get(line_name(line), ())]:
                _insert_lines(record, file, restored)
                restored_lines[file] = _steps_by_name(restored)
    return RefillResult(restored_lines, find_missing_lines(record), proved)


def _line_kind(name: str, file: str = METRICS) -> int | None:
    """Returns the kind of a line, or None if the line cannot be recomputed."""
    if name == "fingerprint":
        return _FINGERPRINT
    kind = next((kind for beginning, kind in _BEGINNINGS.items() if name.startswith(beginning)), None)
    return kind if file == METRICS or (file == HISTOGRAMS and kind == _WATCHED) else None


def _group_steps_by_kind(missing: Missing, start: int, end: int) -> dict[int, set[int]]:
    """Returns the steps with missing lines that can be recomputed, after `start` and up to `end`, by kind of line."""
    steps_by_kind: dict[int, set[int]] = {}
    for file, names in missing.items():
        for name, steps in names.items():
            within = {step for step in steps if start < step <= end}
            if within and (kind := _line_kind(name, file)) is not None:
                steps_by_kind.setdefault(kind, set()).update(within)
    return steps_by_kind


def _compute_lines(
    record: RunRecord,
    recomputed_run: Rerun,
    end: int,
    steps_by_kind: Mapping[int, set[int]],
    lines: _LineCollector,
    progress: Progress,
) -> None:
    """Computes the steps up to the checkpoint of step `end`, and adds the missing lines of these steps to `lines`."""
    program, config = recomputed_run.run.setup, recomputed_run.run.config
    watcher = Watcher(record.load_config(end).trainer.watch, program.sharding, program.model.axes)
    evaluations = _build_evaluations(recomputed_run, lines)
    while recomputed_run.state.step < end:
        step = recomputed_run.state.step + 1
        progress.phase(f"step {step} of up to {end}")
        total = program.plan.batch_schedule.rows_before(step) * config.model.seq_len
        metrics = recomputed_run.run_step(watcher if step in steps_by_kind.get(_WATCHED, ()) else None)
        lines.add(step, {**metrics, "throughput/total_tokens": total})
        for watched in watcher.report():
            lines.add(step, watched.scalars)
            for name, (counts, edges) in watched.histograms.items():
                lines.add(step, {"name": name, "counts": counts.tolist(), "edges": edges.tolist()}, HISTOGRAMS)
        if step in steps_by_kind.get(_EVALUATION, ()):
            evaluations.run(recomputed_run.state)
        if step in steps_by_kind.get(_FINGERPRINT, ()):
            lines.add(step, {"fingerprint": recomputed_run.compute_fingerprint()})
    proof, recorded = recomputed_run.compute_fingerprint(), record.read_checkpoint(end).get("fingerprint")
    if proof != recorded:
        raise UserError(
            f"{record.path}: the steps up to {end} come out otherwise here than in the run (fingerprint {recorded}, "
            f"now {proof}), so nothing was written; `lmt verify {record.path}` looks for the reason"
        )


def _build_evaluations(recomputed_run: Rerun, lines: _LineCollector) -> Evaluations:
    run, attempt = recomputed_run.run, recomputed_run.run.attempt
    wait = DataWait(attempt.stop, attempt.progress, attempt.watchdog, keep=lambda _: None)
    sets = name_eval_sets(run.data.validation())
    return Evaluations(sets, run.config.trainer, run.setup, lines, wait, attempt.watchdog, attempt.progress)


def _insert_lines(record: RunRecord, file: str, new_lines: Iterable[Mapping[str, Any]]) -> None:
    """Inserts lines into a file, such that the lines of each step have the order in which a run logs them."""
    by_step: dict[int, list[tuple[int, bytes]]] = {}
    for line, content in _parse_file(record, file):
        by_step.setdefault(line["step"], []).append((_line_kind(line_name(line)) or 0, content))
    for line in new_lines:
        step_lines, kind = by_step.setdefault(line["step"], []), _line_kind(line_name(line)) or 0
        position = next((i for i, (other, _) in enumerate(step_lines) if other > kind), len(step_lines))
        step_lines.insert(position, (kind, json.dumps(line).encode() + b"\n"))
    write_atomically(record.path / file, b"".join(content for step in sorted(by_step) for _, content in by_step[step]))


def _parse_file(record: RunRecord, name: str) -> list[tuple[dict[str, Any], bytes]]:
    file = record.path / name
    return parse_records(file.read_bytes())[0] if file.is_file() else []


def _steps_by_name(lines: Iterable[Mapping[str, Any]]) -> dict[str, list[int]]:
    steps_by_name: dict[str, list[int]] = {}
    for line in lines:
        steps_by_name.setdefault(line_name(line), []).append(line["step"])
    return steps_by_name
