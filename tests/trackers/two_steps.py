"""Two steps of a run that W&B records, in a process of their own: `python -m tests.trackers.two_steps DIRECTORY 2`."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

from lm_trainer.trackers import WandbConfig, open_trackers


def train_two_steps(run_dir: Path, first: int) -> None:
    opened = open_trackers([WandbConfig(save_code=False)], run_dir=run_dir, run_id="my-run", resume_step=first - 1)
    with contextlib.closing(opened) as trackers:
        for step in range(first, first + 2):
            trackers.log({"train/loss": 1 / step}, step=step)


if __name__ == "__main__":
    train_two_steps(Path(sys.argv[1]), int(sys.argv[2]))
