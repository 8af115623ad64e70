"""Measures the cost of logging every step: a run that logs all steps alternates with a run that logs none.

    python -m benchmarks.logging_cost

Both are complete runs of `Trainer` with the default trackers, in one process, on the same random batches. They
alternate every few steps. A turn ends when its last step is finished.
"""

from __future__ import annotations

import argparse
import io
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.setting import describe_load, describe_setting, markdown_table
from lm_trainer.core.runtime import prepare_process

NEVER = 10**9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--shape", default="nano", help="a shape of benchmarks.peers")
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--steps", type=int, default=10, help="steps of each run per turn")
    options = parser.parse_args()
    prepare_process()
    seconds: dict[str, list[float]] = {"every step": [], "never": []}
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        steps = (options.turns + 1) * options.steps
        runs = {
            name: start_run(options.shape, directory / name, every, steps, stack)
            for name, every in (("every step", 1), ("never", NEVER))
        }
        for turn in range(options.turns + 1):
            for name, run in runs.items() if turn % 2 else reversed(runs.items()):
                took = run(options.steps)
                if turn:  # the first turn compiles
                    seconds[name].append(took / options.steps)
    ratios = sorted(a / b - 1 for a, b in zip(seconds["every step"], seconds["never"], strict=True))
    rows = [[name, f"{1e3 * statistics.median(of):.1f}"] for name, of in seconds.items()]
    print("# The cost of recording every step\n")
    print(describe_setting("jax", "flax", "tensorboardX"), f"{options.shape}, {options.turns} turns of", end=" ")
    print(f"{options.steps} steps.", describe_load())
    print(f"\n{markdown_table(['recorded', 'ms a step'], rows)}\n")
    low, _, high = statistics.quantiles(ratios, n=4)
    print(f"Recording every step: {statistics.median(ratios):+.2%} (quartiles {low:+.2%} to {high:+.2%}).")


def start_run(shape: str, directory: Path, every: int, steps: int, stack: ExitStack) -> Callable[[int], float]:
    """Returns a function that continues a run for a number of steps, and returns their duration in seconds."""
    import jax

    from benchmarks.peers.lmt_step import run_config
    from benchmarks.peers.shapes import SHAPES
    from lm_trainer.profile.workload import random_batch
    from lm_trainer.run.build.model import loss_function, trace_model
    from lm_trainer.run.config.trainer_config import TrainerConfig
    from lm_trainer.run.trainer import Trainer
    from lm_trainer.trackers import Progress

    workload = SHAPES[shape]
    config = run_config(workload, "elastic")
    changes: dict[str, Any] = {
        "num_train_steps": steps + 1,  # the last step saves a checkpoint, and is never reached
        "steps_per_log": every,
        "log_dir": str(directory / "logs"),
        "checkpointer": {"base_path": str(directory / "checkpoints"), "save_interval": "1000h"},
        "load_checkpoint": False,
        "id": f"every-{every}",
    }
    trainer_config = TrainerConfig.model_validate({**config.trainer.model_dump(exclude_unset=True), **changes})
    progress = Progress(steps, stream=io.StringIO(), live=False, line_steps=every)
    trainer = stack.enter_context(Trainer(trainer_config, config.optimizer, loss_function(config), progress=progress))
    state = trainer.initial_state(model_init=trace_model(config, workload.vocab))
    batch = random_batch(workload.rows, workload.seq_len, workload.vocab)
    running = trainer.training_steps(state, [batch] * steps)

    def continue_run(count: int) -> float:
        started = time.perf_counter()
        for _ in range(count):
            info = next(running)
        jax.block_until_ready(info.metrics)
        return time.perf_counter() - started

    return continue_run


if __name__ == "__main__":
    main()
