"""Interrupts a run repeatedly, and compares the result with an undisturbed run.

    python benchmarks/soak.py --tier ci --out DIR
    python benchmarks/soak.py --tier release --out DIR --table benchmarks/results/soak.md

The moments of interruptions are defined by lines of metrics.jsonl or entries of the checkpoint directory, and never by
times, so a slow machine is interrupted at the same points. An interrupted soak resumes with the same command. Exit code
0 means that every lap ended with the same losses and weights, bit for bit, and that every fault gave the promised exit
code and message.

The faults are in `soak_faults.py`.
"""

from __future__ import annotations

import argparse
import json
import platform
import pydoc_data.topics
import random
import shutil
import sys
import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from soak_faults import CI, FATAL, MILD, SAVE_EVERY, Lap, WarmLmt, process_environment

TIERS: dict[str, dict[str, Any]] = {
    "ci": {"steps": 120, "interruptions": len(CI), "devices": (1, 2), "rows": 4},
    "release": {"steps": 200, "interruptions": 100, "devices": (1, 1, 1, 2, 1, 4, 8, 1), "rows": 1},
}


def tiny_config(directory: Path, steps: int, rows: int) -> dict[str, Any]:
    """Returns a configuration of a tiny model with dropout, on the language reference included with Python.

    It is written to a .yaml file as JSON, which is valid YAML.
    """
    topics = [pydoc_data.topics.topics[name] for name in sorted(pydoc_data.topics.topics)]
    files = directory / "train.txt", directory / "validation.txt"
    for file, part in zip(files, (topics[:-8], topics[-8:]), strict=True):
        file.write_text("\n".join(part), encoding="utf-8")
    return {
        "model": {
            "type": "gpt2",
            "seq_len": 32,
            "hidden_dim": 64,
            "num_layers": 2,
            "num_heads": 2,
            "resid_pdrop": 0.1,
            "gradient_checkpointing": False,
            "scan_layers": True,
        },
        "data": {
            "tokenizer": "bytes",
            "num_workers": 0,
            "train_urls": [str(files[0])],
            "validation_urls": [str(files[1])],
        },
        "trainer": {
            "id": "run",
            "train_batch_size": 8,
            "elastic_shards": 8,
            "per_device_parallelism": rows,
            "num_train_steps": steps,
            "steps_per_eval": 50,
            "max_eval_batches": 2,
            "sample_tokens": 0,
            "tracker": [],
            "log_jaxprs": False,
            "log_xla_hlo": False,
            "checkpointer": {"save_interval": "500ms", "keep": [{"every": SAVE_EVERY}]},
        },
        "optimizer": {"learning_rate": 3e-3, "warmup": 0.1},
    }


class Soak:
    """The state of a soak, saved after every interruption."""

    def __init__(self, out: Path, tier: str, seed: int, interruptions: int | None):
        self.out = out.absolute()
        self.file = self.out / "soak.json"
        self.out.mkdir(parents=True, exist_ok=True)
        settings = TIERS[tier]
        self.devices, self.tier, self.seed = settings["devices"], tier, seed
        self.target = settings["interruptions"] if interruptions is None else interruptions
        self.config = self.out / "run.yaml"
        self.server = WarmLmt(process_environment(1, self.out / "compiled"))
        if not self.config.exists():
            self.config.write_text(json.dumps(tiny_config(self.out, settings["steps"], settings["rows"]), indent=1))
        self.state: dict[str, Any] = {"tier": tier, "seed": seed, "lap": 1, "interruptions": [], "laps": []}
        if self.file.exists():
            self.state = json.loads(self.file.read_text())

    def save(self) -> None:
        draft = self.file.with_suffix(".tmp")
        draft.write_text(json.dumps(self.state, indent=1))
        draft.replace(self.file)

    def current_lap(self) -> Lap:
        return Lap(self.out / f"lap-{self.state['lap']}", self.config, self.server)

    def reference_result(self) -> dict[str, Any]:
        """Returns the result and the time of an undisturbed run."""
        if "reference" not in self.state:
            lap = Lap(self.out / "reference", self.config, self.server)
            shutil.rmtree(lap.directory, ignore_errors=True)
            attempt = lap.start(devices=1)
            code = attempt.wait()
            assert code == 0, attempt.read_output()
            self.state["reference"] = {**attempt.measure(), **lap.read_result(), "disk": lap.disk_bytes()}
            self.state["reference"]["seconds_per_step"] = lap.seconds_per_step()
            self.save()
        return self.state["reference"]

    def name_next_fault(self) -> str:
        done = len(self.state["interruptions"])
        if self.tier == "ci":
            return CI[done % len(CI)]
        # Each round has every fault once, in a new random order.
        deck = sorted({**FATAL, **MILD})
        turn = random.Random(f"{self.seed}/{done // len(deck)}")
        return turn.sample(deck, len(deck))[done % len(deck)]

    def interrupt(self) -> None:
        number = len(self.state["interruptions"])
        name = self.name_next_fault()
        rng = random.Random(f"{self.seed}/{name}/{number}")
        devices = rng.choice(self.devices)
        lap = self.current_lap()
        started, problems = time.monotonic(), []
        attempt = lap.start(devices=devices, fault=name, rng=rng)
        try:
            code = {**FATAL, **MILD}[name](lap, attempt, rng)
        except AssertionError as error:
            problems, code = [str(error)], attempt.kill_and_wait()
        ended = code == 0
        entry = {
            "fault": "none: the lap was over before" if ended else name,
            "lap": self.state["lap"],
            "devices": devices,
            "code": code,
            "step": lap.last_step(),
            "seconds": round(time.monotonic() - started, 1),
            "problems": problems,
            **attempt.measure(),
            "disk": lap.disk_bytes(),
        }
        if ended:
            self.finish_lap(devices)
        else:
            self.state["interruptions"].append(entry)
        self.save()
        print(json.dumps(entry), flush=True)

    def finish_lap(self, devices: int) -> None:
        """Runs undisturbed to the end, starts the finished run once more, and compares the result."""
        lap, reference = self.current_lap(), self.reference_result()
        problems, computed = [], 0
        for expected in ("done: step", "was complete already"):
            attempt = lap.start(devices=devices)
            code = attempt.wait()
            computed += attempt.measure()["computed"]
            if code != 0 or (expected not in attempt.read_output() and "complete already" not in attempt.read_output()):
                problems.append(f"the last attempt failed:\n{attempt.read_output()[-2000:]}")
        lap_result, disk = lap.read_result(), lap.disk_bytes()
        problems += [
            f"{key} differs from the undisturbed run" for key in lap_result if lap_result[key] != reference[key]
        ]
        problems += lap.find_unexpected_files()
        measured = {"devices": devices, "disk": disk, "computed": computed}
        self.state["laps"].append({"lap": self.state["lap"], "problems": problems, **measured, **lap_result})
        self.state["lap"] += 1
        if not problems:
            shutil.rmtree(lap.directory)
        self.save()

    def run(self) -> list[str]:
        """Runs the soak. Returns all broken promises."""
        self.reference_result()
        began = time.monotonic()
        while len(self.state["interruptions"]) < self.target:
            self.interrupt()
            self.state["wall"] = self.state.get("wall", 0.0) + time.monotonic() - began
            began = time.monotonic()
        if self.current_lap().directory.exists():
            self.finish_lap(self.devices[-1])
        self.state["wall"] = self.state.get("wall", 0.0) + time.monotonic() - began
        self.save()
        return [
            f"{entry.get('fault', 'lap ' + str(entry['lap']))}: {problem}"
            for entry in (*self.state["interruptions"], *self.state["laps"])
            for problem in entry["problems"]
        ]


def table(state: dict[str, Any]) -> str:
    """Formats the results as Markdown."""
    done, laps, reference = state["interruptions"], state["laps"], state["reference"]
    names = sorted({entry["fault"] for entry in done})
    rows = []
    for name in names:
        entries = [entry for entry in done if entry["fault"] == name]
        codes = ", ".join(map(str, sorted({entry["code"] for entry in entries})))
        devices = ", ".join(map(str, sorted({entry["devices"] for entry in entries})))
        good = sum(not entry["problems"] for entry in entries)
        rows.append(f"| {name} | {len(entries)} | {codes} | {devices} | {good} |")
    equal = sum(not lap["problems"] for lap in laps)
    saved = sum(lap["steps"] for lap in laps)
    computed = sum(entry["computed"] for entry in done) + sum(lap.get("computed", 0) for lap in laps)
    memory, files = (reference.get(key, (0, 0)) for key in ("memory", "open_files"))
    productive = saved * reference["seconds_per_step"] / state["wall"]
    size = max(entry["disk"] for entry in done)
    packages = ", ".join(f"{name} {metadata.version(name)}" for name in ("jax", "flax", "orbax-checkpoint"))
    return "\n".join(
        [
            "# Soak",
            "",
            f"`python benchmarks/soak.py --tier {state['tier']} --seed {state['seed']}`, {platform.python_version()}, "
            f"{packages}, {platform.machine()}, emulated devices on a CPU that other work shared.",
            "",
            f"{len(done)} interruptions in {len(laps)} laps of {reference['steps']} steps: {equal} of {len(laps)} laps "
            f"ended with the losses, gradient norms and evaluations of the undisturbed run (`{reference['series']}`) "
            f"and with its weights and optimizer state (`{reference['weights']}`), bit for bit.",
            "",
            "| fault | times | exit codes (negative: signal) | devices | as promised |",
            "|---|---|---|---|---|",
            *rows,
            "",
            f"- Of {computed} steps that were computed, {saved} were kept ({saved / computed:.0%}); at the pace of the "
            f"undisturbed run they are {productive:.0%} of the wall time of {state['wall'] / 60:.0f} minutes: the rest "
            f"is starting, compiling and saving.",
            f"- An undisturbed run in its second and in its last quarter: {memory[0] / 1e6:.0f} and "
            f"{memory[1] / 1e6:.0f} MB of memory, at most {files[0]} and {files[1]} open files.",
            f"- The most disk that a lap took: {size / 1e6:.1f} MB, beside {reference['disk'] / 1e6:.1f} MB of the "
            f"undisturbed run.",
            "",
        ]
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tier", choices=sorted(TIERS), default="ci")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--interruptions", type=int, default=None, help="instead of the tier's number")
    parser.add_argument("--table", type=Path, default=None, help="Markdown file for the results")
    chosen = parser.parse_args(arguments)
    soak = Soak(chosen.out, chosen.tier, chosen.seed, chosen.interruptions)
    problems = soak.run()
    soak.server.close()
    text = table(soak.state)
    print(text)
    for problem in problems:
        print(f"NOT AS PROMISED: {problem}")
    if chosen.table:
        chosen.table.parent.mkdir(parents=True, exist_ok=True)
        chosen.table.write_text(text)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
