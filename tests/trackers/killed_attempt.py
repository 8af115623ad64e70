"""Attempts at a run without a model, in this process, or killed after their last step in a process of their own."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import TypeAdapter

from lm_trainer.trackers import AnyTracker, open_trackers

STEPS = 6
"""Steps that are done when a run is resumed."""


def attempt(run_dir: Path, config: Any, first: int, last: int, finish: Callable[[], Any] = lambda: None) -> list[str]:
    """Logs the steps of one attempt at a run; returns what it told about trackers at its start."""
    run_dir.mkdir(exist_ok=True)
    configs = [] if config is None else [config]
    with contextlib.closing(
        open_trackers(configs, run_dir=run_dir, run_id="my-run", resume_step=first - 1)
    ) as trackers:
        for step in range(first, last + 1):
            trackers.log({"train/loss": math.nan if step == 2 else 1 / step, "optim/grad_norm": 1.0}, step=step)
            if step % 2 == 0:
                trackers.log({"eval/loss": 2 / step}, step=step)
                trackers.log_histogram("grads/w", np.array([3, step]), np.array([0.0, 1.0, 2.0]), step=step)
                trackers.log_record({"fingerprint": f"f{step}"}, step=step)
        trackers.log_text("sample", f"text {last}", step=last)
        finish()
    return trackers.notes


if __name__ == "__main__":
    config_given = TypeAdapter(AnyTracker).validate_python(json.loads(sys.argv[2]))
    attempt(Path(sys.argv[1]), config_given, 1, STEPS, lambda: os.killpg(0, signal.SIGKILL))
