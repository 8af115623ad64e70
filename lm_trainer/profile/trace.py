"""Traces of some steps of a run, for TensorBoard's profiler and Perfetto."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import jax

logger = logging.getLogger(__name__)


class Profiler:
    """Traces the steps from `start_step` to `start_step + num_steps` (exclusive), counted from 0 at the first of the
    run.

    Use it as a context manager: a trace in progress is then written when the run ends, even after an error. If tracing
    fails, this is reported but never stops a run.

    Args:
        directory: traces are written to `directory`/plugins/profile/TIMESTAMP, where `tensorboard --logdir` finds them.
        start_step: number of steps before the trace begins; a few steps, to exclude compilation.
        num_steps: number of steps to trace. A run that is resumed within this range traces the remaining steps.
        perfetto_link: after the trace, print a link to Perfetto and wait until it is opened.
        on_trace: called with the directory of a complete trace.
    """

    def __init__(
        self,
        directory: Path,
        *,
        start_step: int = 5,
        num_steps: int = 100,
        perfetto_link: bool = False,
        on_trace: Callable[[Path], None] | None = None,
    ):
        self._directory = directory
        self._start, self._end = start_step, start_step + num_steps
        self._perfetto_link, self._on_trace = perfetto_link, on_trace
        self._existing: set[Path] | None = None
        self._settled = False
        """True once a trace has been written or has failed."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    @property
    def tracing(self) -> bool:
        """True while a trace is being recorded."""
        return self._existing is not None

    def on_step(self, step: int, result: Any = None) -> None:
        """Starts and stops the trace. Must be called before the first step of an attempt and after every step.

        Args:
            step: number of completed steps of the run.
            result: arrays of the step; the trace ends once they are computed.
        """
        if self.tracing and step >= self._end:
            jax.block_until_ready(result)
            self._stop()
        elif self._settled or step < self._start:
            return
        elif step < self._end:
            self._settled = True
            self._begin()
        else:
            self._settled = True
            logger.warning("no trace: the steps from %d to %d to be profiled are done already", self._start, self._end)

    def annotate(self, step: int) -> contextlib.AbstractContextManager[Any]:
        """Annotates the enclosed work as the step after which `step` steps are completed."""
        if not self.tracing:
            return contextlib.nullcontext()
        return jax.profiler.StepTraceAnnotation("train", step_num=step)

    def _find_traces(self) -> set[Path]:
        return {path for path in (self._directory / "plugins" / "profile").glob("*") if path.is_dir()}

    def _begin(self) -> None:
        existing = self._find_traces()
        try:
            jax.profiler.start_trace(str(self._directory), create_perfetto_link=self._perfetto_link)
        except (RuntimeError, OSError, ValueError) as error:
            self._fail(error)
        else:
            self._existing = existing

    def _stop(self) -> None:
        if self._existing is None:
            return
        existing, self._existing = self._existing, None
        try:
            jax.profiler.stop_trace()
        except (RuntimeError, OSError, ValueError) as error:
            self._fail(error)
            return
        for path in sorted(self._find_traces() - existing):
            logger.info("wrote a trace of the steps from %d on to %s", self._start, path)
            if self._on_trace is not None:
                self._on_trace(path)

    def _fail(self, error: Exception) -> None:
        logger.warning(
            "%s: no trace of the steps from %d on (%s); training goes on", self._directory, self._start, error
        )


class ProfilerOff:
    """A profiler that is disabled."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def on_step(self, step: int, result: Any = None) -> None:
        """Does nothing."""

    def annotate(self, step: int) -> contextlib.AbstractContextManager[Any]:
        """Does nothing."""
        del step
        return contextlib.nullcontext()
