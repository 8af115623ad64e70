"""Finds the first operand whose bits differ between two runs, by computing both again on this machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lm_trainer.core.errors import UserError
from lm_trainer.reproduce.compare import Comparison, Divergence, compare_runs
from lm_trainer.reproduce.record import RunRecord, is_bitwise_equal
from lm_trainer.reproduce.rerun import configure_as_recorded, open_rerun
from lm_trainer.reproduce.step_trace import Location, StepTrace, find_first_difference, trace_step
from lm_trainer.trackers import Progress

_MAX_TRACED = 64
"""Maximum number of steps that are computed in detail, between the last equal and the first different record."""


@dataclass(frozen=True)
class RunBisection:
    """The first difference of two runs."""

    a: str
    b: str
    comparison: Comparison
    """Difference of the records."""
    location: Location | None
    """First operand that differs if both runs are computed here; None if all are equal here, or if the records are."""
    step: int | None
    """First step whose records differ; None if all are equal."""
    reproduced: Mapping[str, bool]
    """Maps each run to True if the values computed here are equal to its record of the first different step."""

    def sentence(self) -> str:
        """Returns the result in a sentence."""
        if self.step is None:
            return f"{self.a} and {self.b} are equal, bit for bit, in all {self.comparison.common} steps that both have"
        if self.location is not None:
            causes = [line for lines in self.comparison.causes.values() for line in lines]
            because = f" ({'; '.join(causes[:3])})" if causes else ""
            return f"{self.a} and {self.b} first differ in {self.location.describe()}{because}"
        wrong = [run for run, equal in self.reproduced.items() if not equal]
        if len(wrong) == 1:
            right = next(run for run in self.reproduced if run not in wrong)
            return (
                f"{self.a} and {self.b} have the same bits when both are computed here, and these are the recorded "
                f"bits of {right}: step {self.step} of {wrong[0]} was computed wrong, or by other code or another kind "
                "of device"
            )
        return (
            f"{self.a} and {self.b} have the same bits when both are computed here, but neither recorded these bits at "
            f"step {self.step}: other code, packages or another kind of device computed the runs"
        )

    def as_dict(self) -> dict[str, Any]:
        """Returns everything as JSON values."""
        return {
            "a": self.a,
            "b": self.b,
            "equal": self.step is None,
            "step": self.step,
            "location": None if self.location is None else self.location._asdict(),
            "reproduced": dict(self.reproduced),
            "causes": self.comparison.causes,
            "sentence": self.sentence(),
        }


def bisect_runs(a: RunRecord, b: RunRecord, progress: Progress) -> RunBisection:
    """Finds the first step whose records differ, computes it in both runs, and compares all operands.

    Raises:
        UserError: if the runs have no step in common, if the step cannot be reached, or as for `open_rerun`.
    """
    if a.location == b.location:
        raise UserError(f"{a.id} is given twice; name two runs, such as a run and its repetition")
    # Before a checkpoint is read, which starts the backends.
    configure_as_recorded(a, a.load_config(a.last).trainer, a.last)
    comparison = compare_runs(a, b)
    divergence = comparison.divergence
    if divergence is None:
        return RunBisection(a.id, b.id, comparison, None, None, {})
    # The steps that a branch shares were computed by its parent.
    runs = [run.owner(divergence.step) for run in (a, b)]
    last_equal = _last_equal_step(divergence, runs)
    traces = [_trace_steps(run, last_equal, divergence.step, progress) for run in runs]
    differences = (find_first_difference(x, y) for x, y in zip(*traces, strict=True))
    location = next((location for location in differences if location is not None), None)
    reproduced = {
        name: _is_reproduced(run, of_run[-1]) for name, run, of_run in zip((a.id, b.id), runs, traces, strict=True)
    }
    return RunBisection(a.id, b.id, comparison, location, divergence.step, reproduced)


def _last_equal_step(divergence: Divergence, runs: list[RunRecord]) -> int:
    """Returns the number of completed steps up to which the records are equal, as far as both runs computed them."""
    last_equal = max(divergence.after or 0, *(run.start for run in runs))
    if divergence.step - last_equal > _MAX_TRACED:
        raise UserError(
            f"the records are equal up to step {last_equal} and differ at step {divergence.step}, with no record in "
            f"between; computing {divergence.step - last_equal} steps in detail takes too long, so record more steps "
            "(trainer.steps_per_log)"
        )
    return last_equal


def _trace_steps(record: RunRecord, completed: int, last: int, progress: Progress) -> list[StepTrace]:
    """Returns the traces of the steps after `completed` steps, up to step `last`."""
    start = record.find_start(completed, last)
    with open_rerun(record, start, progress=progress) as rerun:
        rerun.run_until(completed)
        traces = []
        while rerun.state.step < last:
            progress.phase(f"step {rerun.state.step + 1} of {record.id}, in detail")
            traces.append(trace_step(rerun))
        return traces


def _is_reproduced(record: RunRecord, trace: StepTrace) -> bool:
    recorded = record.computed.get(trace.step, {})
    return all(is_bitwise_equal(recorded[name], value) for name, value in trace.metrics.items() if name in recorded)
