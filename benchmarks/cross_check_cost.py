"""Measures the cost of a check of the hardware: CPU time of steps with and without it, alternating.

python -m benchmarks.cross_check_cost --devices 1
"""

from __future__ import annotations

import argparse
import os
import statistics
import time


def main() -> None:
    """Prints the CPU time of both kinds of steps, and the share of a check in every 200th step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--steps", type=int, default=10, help="steps of each kind")
    options = parser.parse_args()
    os.environ.setdefault("XLA_FLAGS", f"--xla_force_host_platform_device_count={options.devices}")
    from pathlib import Path

    import jax

    from lm_trainer.config.loader import load
    from lm_trainer.profile.workload import random_batch
    from lm_trainer.run.config.run_config import RunConfig
    from lm_trainer.run.dry_run import configure_and_build_setup
    from lm_trainer.step.check.cross_check import CrossCheck
    from lm_trainer.step.check.settings import CrossCheckConfig

    config = load(Path("configs/gpt2_nano.yaml"), [], RunConfig).config
    setup, vocabulary = configure_and_build_setup(config)
    batch = random_batch(len(setup.step.local_rows()), config.model.seq_len, vocabulary)
    setup.step.compile(batch)
    check = CrossCheck(CrossCheckConfig(every=1), 0, print)
    state = setup.init()
    seconds: dict[bool, list[float]] = {False: [], True: []}
    for number in range(2 * options.steps + 4):
        checked = number % 2 == 1
        started = time.process_time()
        state, metrics = setup.take_step(state, batch, None, check if checked else None)
        jax.block_until_ready((state.params, metrics))
        if number >= 4:
            seconds[checked].append(time.process_time() - started)
    plain, with_check = (statistics.median(seconds[checked]) for checked in (False, True))
    share = (with_check - plain) / plain / 200
    times = f"{plain:.3f} s without, {with_check:.3f} s with a check"
    print(f"{options.devices} devices: {times}; every: 200 costs {share:.2%}")


if __name__ == "__main__":
    main()
