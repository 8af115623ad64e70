"""Traces: which steps they hold, that they can be read, and that they never stop a run."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from lm_trainer.profile.trace import Profiler


def run(profiler: Profiler, first: int, last: int, fails_at: int | None = None) -> None:
    """The steps after which first + 1, ..., last are done."""
    work = jax.jit(lambda x: x @ x)
    with profiler:
        profiler.on_step(first)
        for step in range(first + 1, last + 1):
            with profiler.annotate(step):
                result = work(jnp.ones((8, 8)))
            if step == fails_at:
                raise RuntimeError("the step failed")
            profiler.on_step(step, result)


def traced_steps(directory: Path) -> list[int]:
    """The steps that a trace marks, by its file for TensorBoard."""
    (file,) = directory.glob("*.xplane.pb")
    data = jax.profiler.ProfileData.from_file(str(file))
    events = [event for plane in data.planes for line in plane.lines for event in line.events if event.name == "train"]
    return sorted({dict(event.stats)["step_num"] for event in events})


def traces(directory: Path) -> list[Path]:
    return sorted((directory / "plugins" / "profile").glob("*"))


def test_the_steps_that_are_asked_for_are_traced(tmp_path):
    trace_files: list[Path] = []
    run(Profiler(tmp_path, start_step=2, num_steps=3, on_trace=trace_files.append), 0, 8)
    assert trace_files == traces(tmp_path)
    assert traced_steps(trace_files[0]) == [3, 4, 5]


@pytest.mark.parametrize(
    ("first", "last", "steps"), [(0, 3, [3]), (3, 8, [4, 5])], ids=["the run ends in it", "the run is resumed in it"]
)
def test_a_trace_may_be_cut_short(tmp_path, first, last, steps):
    run(Profiler(tmp_path, start_step=2, num_steps=3), first, last)
    (trace,) = traces(tmp_path)
    assert traced_steps(trace) == steps


def test_a_run_that_is_past_the_steps_is_not_traced_and_says_so(tmp_path, caplog):
    run(Profiler(tmp_path, start_step=2, num_steps=3), 5, 8)
    assert traces(tmp_path) == []
    assert caplog.text.count("the steps from 2 to 5 to be profiled are done already") == 1


def test_a_step_that_fails_leaves_a_trace_and_the_next_one_can_begin(tmp_path):
    with pytest.raises(RuntimeError, match="the step failed"):
        run(Profiler(tmp_path / "a", start_step=0, num_steps=3), 0, 3, fails_at=2)
    assert traced_steps(traces(tmp_path / "a")[0]) == [1, 2]
    run(Profiler(tmp_path / "b", start_step=0, num_steps=1), 0, 2)
    assert traced_steps(traces(tmp_path / "b")[0]) == [1]


def test_a_trace_that_cannot_be_taken_is_said_once(tmp_path, caplog):
    with Profiler(tmp_path / "a", start_step=0, num_steps=2) as other:
        other.on_step(0)
        run(Profiler(tmp_path / "b", start_step=0, num_steps=3), 0, 3)
    warnings = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert len(warnings) == 1
    assert "no trace of the steps from 0 on" in warnings[0]


@pytest.mark.parametrize("link", [False, True])
def test_a_link_is_made_when_it_is_asked_for(tmp_path, monkeypatch, link):
    trace_options: dict[str, Any] = {}
    monkeypatch.setattr(jax.profiler, "start_trace", lambda _, **options: trace_options.update(options))
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: None)
    run(Profiler(tmp_path, start_step=0, num_steps=1, perfetto_link=link), 0, 2)
    assert trace_options["create_perfetto_link"] is link
