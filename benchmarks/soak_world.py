"""Disturbs runs with faults of their environment, and compares their results with an undisturbed run.

    python -m benchmarks.soak_world --out DIR --table benchmarks/results/2-core-epyc/soak_world.md

Each lap has one fault, drawn from a seed: a preloaded library kills, tears or fails the n-th file system call, a
directory vanishes, the clock jumps, a file is damaged, processes collide, stop or die, or object storage returns wrong
answers. An interrupted soak resumes with the same command. Needs Linux and a C compiler. Exit code 0 means that all
promises were kept.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks import soak_world_calls, soak_world_damage, soak_world_processes, soak_world_storage
from benchmarks.setting import describe_load, describe_setting, markdown_table
from benchmarks.soak_shim import Fault, NoCompiler, count_calls
from benchmarks.soak_world_runs import World, committed_steps, hash_results

MODULES = (soak_world_calls, soak_world_damage, soak_world_processes, soak_world_storage)
LAPS = {
    "killed at a call": 30,
    "torn write, then killed": 16,
    "short write": 8,
    "call fails once": 42,
    "all calls fail from there on": 20,
    "build or export, killed at a call": 30,
    "build or export, call fails once": 44,
    "directory vanishes": 14,
    "clock jumps": 12,
    "damaged file": 72,
    "second process in the run": 6,
    "second run on the cache": 8,
    "one of two processes killed": 8,
    "SIGSTOP for a minute": 6,
    "object storage lies": 16,
}
"""Number of laps by kind of fault."""
FEW = {"killed at a call": 1, "call fails once": 1, "clock jumps": 1, "damaged file": 2}
"""A small number of laps, for a test."""


class Soak:
    """State of a soak, which is saved after every lap. Workers take laps in turn, and each has a separate world."""

    def __init__(self, out: Path, seed: int, workers: int):
        self.seed = seed
        self._file = out.absolute() / "soak.json"
        self._worlds = [World(out / f"world-{number}") for number in range(workers)]
        self._lock = threading.Lock()
        self.state: dict[str, Any] = {"worlds": {}, "laps": {}}
        if self._file.exists():
            self.state = json.loads(self._file.read_text())

    def close(self) -> None:
        for world in self._worlds:
            world.close()

    def save(self) -> None:
        draft = self._file.with_suffix(".tmp")
        draft.write_text(json.dumps(self.state, indent=1))
        draft.replace(self._file)

    def run(self, kinds: dict[str, int]) -> None:
        """Runs the remaining laps."""
        # Interleaved, so that an interrupted soak has laps of every kind.
        keys = [(kind, number) for number in range(max(kinds.values())) for kind in kinds if number < kinds[kind]]
        left = [key for key in keys if f"{key[0]}/{key[1]}" not in self.state["laps"]]
        with ThreadPoolExecutor(len(self._worlds)) as pool:
            working = [pool.submit(self._run_laps, world, left) for world in self._worlds]
            try:
                for work in working:
                    work.result()
            finally:
                left.clear()  # after an error or Ctrl-C: workers start no more laps

    def _run_laps(self, world: World, left: list[tuple[str, int]]) -> None:
        name = world.out.name
        if name not in self.state["worlds"]:
            prepared = prepare_world(world)
            with self._lock:
                self.state["worlds"][name] = prepared
                self.save()
        modules = {kind: module for module in MODULES for kind in module.PROMISES}
        calls: dict[str, dict[tuple[str, str], int]] = {}
        for command, call, path, count in self.state["worlds"][name]["calls"]:
            calls.setdefault(command, {})[call, path] = count
        while True:
            with self._lock:
                if not left:
                    return
                kind, number = left.pop(0)
            lap = modules[kind].draw_lap(kind, number, self.seed, calls)
            entry = run_lap(world, lap, modules[kind], self.state["worlds"][name]["wanted"])
            with self._lock:
                print(json.dumps({"key": f"{kind}/{number}", **entry}), flush=True)
                self.state["laps"][f"{kind}/{number}"] = entry
                self.save()

    def collect_problems(self) -> list[str]:
        return [f"{key}, {lap['lap']}: {lap['problem']}" for key, lap in self.state["laps"].items() if lap["problem"]]


def prepare_world(world: World) -> dict[str, Any]:
    """Runs undisturbed commands as references and starting points. Returns their results and calls."""
    calls = {}
    for name in ("data build", "train"):
        world.reset_lap(None)
        calls[name] = count_calls(world.run_and_log_calls(*soak_world_calls.COMMANDS[name][1]))
    expected = hash_results(world.lap)
    world.save_template("whole")
    calls["export-hf"] = count_calls(world.run_and_log_calls(*soak_world_calls.COMMANDS["export-hf"][1]))
    world.reset_lap(None)
    code, text = world.run("train", "CONFIG", fault=Fault("kill", "rename", "checkpoints/run/9"))
    assert code == -9, text
    assert committed_steps(world.lap) == [3, 6], committed_steps(world.lap)
    world.save_template("half")
    calls["resume"] = count_calls(world.run_and_log_calls("train", "CONFIG"))
    assert hash_results(world.lap) == expected, "an undisturbed resume differs"
    return {
        "wanted": expected,
        "calls": [[name, *key, n] for name, counts in calls.items() for key, n in counts.items()],
    }


def run_lap(world: World, lap: Any, module: Any, expected: dict[str, str]) -> dict[str, Any]:
    """Runs a lap. Returns its entry in the state."""
    began, problem, happened = time.monotonic(), None, ""
    try:
        happened = module.run(world, lap, expected)
    except AssertionError as error:
        problem = str(error)
    except (OSError, ValueError, KeyError, IndexError) as error:
        problem = f"the results cannot be read: {type(error).__name__}: {error}"
    seconds = round(time.monotonic() - began, 1)
    return {"kind": lap.kind, "lap": str(lap), "happened": happened, "problem": problem, "seconds": seconds}


def report(soak: Soak) -> str:
    """Formats the results as Markdown."""
    promises = {kind: promise for module in MODULES for kind, promise in module.PROMISES.items()}
    laps, rows = soak.state["laps"].values(), []
    seconds = sum(lap["seconds"] for lap in laps)
    for kind in LAPS:
        entries = [lap for lap in laps if lap["kind"] == kind]
        if entries:
            failed = sum(bool(lap["problem"]) for lap in entries)
            endings = Counter(name_ending(lap) for lap in entries)
            happened = ", ".join(f"{count} {name}" for name, count in sorted(endings.items()))
            rows.append([kind, str(len(entries)), promises[kind], happened, str(failed)])
    lines = [
        "# Faults of the world around a run",
        describe_setting("jax", "tensorstore", "orbax-checkpoint"),
        f"`python -m benchmarks.soak_world --seed {soak.seed}`: {len(laps)} faults, {seconds / 60:.0f} minutes of laps "
        f"together, {len(soak.collect_problems())} of them not as promised.",
        markdown_table(["fault", "laps", "promise", "what happened", "not as promised"], rows).replace("---:", "---"),
        describe_load(),
    ]
    if problems := soak.collect_problems():
        lines += ["## Not as promised", "\n".join(f"- {' '.join(problem.split())[:600]}" for problem in problems)]
    lines += [
        "## All faults",
        markdown_table(["fault", "what happened"], [[lap["lap"], lap["happened"] or "see above"] for lap in laps]),
    ]
    return "\n\n".join(line.replace("---:", "---") for line in lines) + "\n"


def name_ending(lap: dict[str, Any]) -> str:
    """Describes how a lap ended in one or two words."""
    if lap["problem"]:
        return "not as promised"
    happened = lap["happened"].replace("\n", " ")
    if happened.startswith((";", "the call did not come")):
        return "did not come to it"
    if lap["kind"] == "damaged file":
        return happened.partition(":")[0]
    return happened[happened.find("exit code") :].partition(";")[0]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the directory of the soak")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2, help="simultaneous laps; 2")
    parser.add_argument("--few", action="store_true", help="a few laps, as in the tests")
    parser.add_argument("--only", choices=sorted(LAPS), action="append", help="only laps of these kinds")
    parser.add_argument("--most", type=int, default=1000, help="maximum laps of each kind")
    parser.add_argument("--again", action="store_true", help="rerun the laps that were not as promised")
    parser.add_argument("--table", type=Path, help="the Markdown file to write")
    chosen = parser.parse_args(arguments)
    try:
        soak = Soak(chosen.out, chosen.seed, chosen.workers)
    except NoCompiler as error:
        print(error, file=sys.stderr)
        return 2
    if chosen.again:
        soak.state["laps"] = {key: lap for key, lap in soak.state["laps"].items() if not lap["problem"]}
    laps = FEW if chosen.few else LAPS
    with contextlib.closing(soak):
        soak.run({kind: min(n, chosen.most) for kind, n in laps.items() if not chosen.only or kind in chosen.only})
    text = report(soak)
    print(text)
    if chosen.table:
        chosen.table.write_text(text)
    return 1 if soak.collect_problems() else 0


if __name__ == "__main__":
    sys.exit(main())
