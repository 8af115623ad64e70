"""Injects faults into simulated devices, and counts how many the check of the hardware finds and names rightly.

    python -m benchmarks.hardware_soak --trials 200 > benchmarks/results/2-core-epyc/hardware_soak.md

Each trial trains a tiny model for some steps on 3 or 4 simulated devices, each of which computes one microbatch of a
step, and checks every step. One device flips one random bit of one gradient: once, now and then, or always from some
time on. A trial counts as found if the check reports the step in which the first wrong gradient was computed, and as
named if it names this device alone. Every fourth trial is followed by one without a fault.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import sys
from collections import Counter
from dataclasses import dataclass
from typing import Any

STEPS, SEQ_LEN, VOCABULARY = 3, 16, 64
MODEL = {"type": "gpt2", "seq_len": SEQ_LEN, "hidden_dim": 16, "num_layers": 2, "num_heads": 2, "attn_pdrop": 0.1}
DEVICES = (3, 4)
KINDS = ("once", "now and then", "always")


@dataclass(frozen=True)
class Trial:
    """The outcome of a trial."""

    kind: str
    devices: int
    gather: str
    reported: bool
    """True if the first wrong gradient was reported in its step; for a trial without a fault, if nothing was reported.
    """
    named: bool
    """True if the wrong device alone was named."""


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=200)
    trials = parser.parse_args().trials
    os.environ.setdefault("XLA_FLAGS", f"--xla_force_host_platform_device_count={max(DEVICES)}")
    soak, outcomes = Soak(), list[Trial]()
    # An interrupted soak prints the trials so far.
    with contextlib.suppress(KeyboardInterrupt):
        for number in range(trials):
            kinds = (KINDS[number % len(KINDS)], *(["none"] if number % 4 == 0 else []))
            outcomes += [soak.run_trial(number, kind) for kind in kinds]
            print(f"{number + 1} of {trials}", file=sys.stderr)
    print("\n".join(describe(outcomes)))


def describe(outcomes: list[Trial]) -> list[str]:
    """Returns the lines of the table in Markdown."""
    lines = ["| fault | trials | found in its step | device named rightly |", "|---|---|---|---|"]
    for kind in KINDS:
        of_kind = [trial for trial in outcomes if trial.kind == kind]
        reported, named = (sum(getattr(trial, name) for trial in of_kind) for name in ("reported", "named"))
        lines.append(f"| one bit, {kind} | {len(of_kind)} | {reported} | {named} |")
    sound = [trial for trial in outcomes if trial.kind == "none"]
    false_alarms = sum(not trial.reported for trial in sound)
    lines += [f"| none | {len(sound)} | {false_alarms} false alarms | |", ""]
    counts = Counter((trial.devices, trial.gather) for trial in outcomes if trial.kind != "none")
    shares = ", ".join(
        f"{count} on {devices} devices with `gather: {g}`" for (devices, g), count in sorted(counts.items())
    )
    return [*lines, f"Faults: {shares}. Each trial has {STEPS} steps, all of which are checked."]


class Soak:
    """Runs trials on steps that are compiled once."""

    def __init__(self) -> None:
        self._setups: dict[tuple[int, str], Any] = {}

    def run_trial(self, number: int, kind: str) -> Trial:
        """Runs a trial, which its number determines."""
        from benchmarks.lying_devices import LyingDevice, always, lying, now_and_then, once
        from lm_trainer.core.errors import HardwareError
        from lm_trainer.step.check.cross_check import CrossCheck, Mismatch
        from lm_trainer.step.check.settings import CrossCheckConfig

        draw = random.Random(f"{number} {kind}")
        devices, gather = draw.choice(DEVICES), draw.choice(["model", "layer"])
        setup, batch, initial = self._prepare(devices, gather)
        # Sound steps compute each stage of the model twice on each device: for the step, and for the check.
        gradients = 2 * (1 if gather == "model" else MODEL["num_layers"] + 2)
        first = draw.randrange(gradients * STEPS)
        lies = {
            "once": once(first),
            "now and then": now_and_then(0.5 / gradients, number),
            "always": always(first),
            "none": once(-1),
        }[kind]
        liar = LyingDevice(draw.randrange(devices), lies, seed=number)
        reports: list[Mismatch] = []
        check = CrossCheck(CrossCheckConfig(every=1), number, reports.append)
        state = _copy_state(initial)
        with lying(liar):
            for _ in range(STEPS if kind != "now and then" else 20 * STEPS):
                try:
                    state, _ = setup.take_step(state, batch, None, check)
                except HardwareError:
                    break
        if kind == "none" or not liar.lied:
            return Trial(kind, devices, gather, not reports, named=True)
        step = liar.lied[0] // gradients + 1
        reported = [mismatch.step for mismatch in reports] == [step]
        return Trial(
            kind, devices, gather, reported, reported and reports[0].decided and reports[0].wrong == [liar.shard]
        )

    def _prepare(self, devices: int, gather: str) -> Any:
        if (devices, gather) not in self._setups:
            import jax

            from lm_trainer.profile.workload import random_batch
            from lm_trainer.run.build.setup import build_setup
            from lm_trainer.run.config.run_config import RunConfig

            trainer = {
                "train_batch_size": devices,
                "elastic_shards": devices,
                "gather": gather,
                "num_train_steps": 1000,
            }
            config = RunConfig.model_validate({"model": MODEL, "trainer": trainer})
            setup = build_setup(config, VOCABULARY, jax.devices()[:devices])
            batch = random_batch(len(setup.step.local_rows()), SEQ_LEN, VOCABULARY)
            setup.step.compile(batch)
            self._setups[devices, gather] = setup, batch, setup.init()
        return self._setups[devices, gather]


def _copy_state(state: Any) -> Any:
    """Returns a copy, because a step consumes its state."""
    import jax

    copies = {name: jax.tree.map(lambda x: x.copy(), getattr(state, name)) for name in ("params", "opt_state")}
    return state._replace(**copies)


if __name__ == "__main__":
    main()
