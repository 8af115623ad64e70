"""Expectations against published runs: the report on file, and how far off they are."""

from __future__ import annotations

import statistics
from pathlib import Path

from benchmarks import published_runs
from benchmarks.published_figures import RUNS
from benchmarks.published_runs import WITHIN, compare, report

RESULTS = Path(published_runs.__file__).parent / "results" / "published_runs.md"


def test_the_report_on_file_is_that_of_the_cost_model():
    text = report([compare(run) for run in RUNS])
    assert text == RESULTS.read_text(), "write it with python -m benchmarks.published_runs --results"


def test_most_runs_of_compiled_programs_are_within_15_percent():
    comparisons = [compare(run) for run in RUNS if run.fused]
    errors = [abs(comparison.error) for comparison in comparisons]
    assert len(errors) >= 30
    assert sum(error <= WITHIN for error in errors) >= 25
    assert statistics.median(errors) < 0.1
    assert max(errors) < 0.35
    frameworks = {comparison.run.framework for comparison in comparisons if abs(comparison.error) <= WITHIN}
    assert frameworks == {"MaxText", "AXLearn", "torchtitan", "fms-fsdp"}


def test_no_published_run_beats_its_bound():
    for run in RUNS:
        comparison = compare(run)
        assert comparison.published < comparison.bound
        assert comparison.expected < comparison.bound
