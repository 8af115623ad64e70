"""Laps of `soak_world` with several processes: two run at once, one of two is killed, or one stops for a minute."""

from __future__ import annotations

import random
import signal
import time
from typing import NamedTuple

from benchmarks.soak_shim import Fault
from benchmarks.soak_world_calls import COMMANDS
from benchmarks.soak_world_runs import World, draft_paths, find_differences, hash_results, process_settings

STOPPED = 60.0
"""Duration of a SIGSTOP in seconds."""
PROMISES = {
    "second process in the run": "the second is refused, exit code 2, with the number of the first; the same bits",
    "second run on the cache": "both come to the same bits, also when the one that tokenises is stopped or killed",
    "one of two processes killed": "the other ends with exit code 1 and names it; one process alone goes on to the "
    "same bits",
    "SIGSTOP for a minute": "exit code 0 and the same bits",
}


class Lap(NamedTuple):
    kind: str
    command: str
    fault: Fault
    victim: int
    """Index of the process with the fault. With two runs, 1 means that the first run is killed after it has stopped."""

    def __str__(self) -> str:
        if self.kind == "second run on the cache":
            return f"{self.command}, first run: {self.fault}{', then kill' if self.victim else ''}"
        return f"{self.command}, process {self.victim}: {self.fault}"


def draw_lap(kind: str, number: int, seed: int, calls: dict[str, dict[tuple[str, str], int]]) -> Lap:
    """Draws the lap `number` of a kind."""
    rng = random.Random(f"{seed}/{kind}/{number}")
    command = "train" if kind == "second run on the cache" else rng.choice(("train", "resume"))
    counts = calls[command]
    if kind == "second run on the cache":
        counts = {key: count for key, count in counts.items() if key[1].startswith("cache/")}
    if kind == "one of two processes killed" and number % 2:
        # The calls of a single process were counted. Process 1 of two makes fewer calls.
        return Lap(kind, command, Fault("kill", index=rng.randint(1, 60)), victim=1)
    (call, path), count = rng.choice(list(counts.items()))
    action = "kill" if kind == "one of two processes killed" else "stop"
    return Lap(kind, command, Fault(action, call, path, rng.randint(1, count)), number % 2)


def run(world: World, lap: Lap, expected: dict[str, str]) -> str:
    """Runs a lap. Returns a description of the outcome.

    Raises:
        AssertionError: if a promise is broken.
    """
    world.reset_lap(COMMANDS[lap.command][0])
    happened = {
        "second process in the run": _start_second_process,
        "second run on the cache": _start_second_run,
        "one of two processes killed": _kill_one_of_two,
        "SIGSTOP for a minute": _stop_for_a_minute,
    }[lap.kind](world, lap)
    for name in ("run", "other") if lap.kind == "second run on the cache" else ("run",):
        differing = find_differences(hash_results(world.lap, name), expected)
        assert not differing, f"{name} is other than undisturbed: {', '.join(differing)}; {happened}"
    drafts = draft_paths(world.lap)
    assert not drafts, f"left over: {', '.join(drafts)}; {happened}"
    return f"{world.read_hits()}; {happened}"


def _start_second_process(world: World, lap: Lap) -> str:
    first = world.start("train", "CONFIG", fault=lap.fault)
    stopped = first.wait_until_stopped()
    code, text = world.run("train", "CONFIG")
    assert "Traceback" not in text, text[-3000:]
    if stopped and code:
        assert code == 2, f"the second: exit code {code}\n{text[-2000:]}"
        assert f"in use by process {first.pid}" in text, text[-2000:]
    first.send(signal.SIGCONT)
    of_first = first.wait()
    assert "Traceback" not in first.text, first.text[-3000:]
    # If the first process has not taken the lock yet, it becomes the second process.
    assert of_first == 0 or (of_first == 2 and code == 0), f"the first: exit code {of_first}\n{first.text[-2000:]}"
    return f"exit codes {of_first} and {code}"


def _start_second_run(world: World, lap: Lap) -> str:
    first = world.start("train", "CONFIG", fault=lap.fault)
    first.wait_until_stopped()
    other = world.start("train", "CONFIG", "trainer.id=other")
    time.sleep(4)
    first.send(signal.SIGKILL if lap.victim else signal.SIGCONT)
    codes = [first.wait(), other.wait()]
    for command in (first, other):
        assert "Traceback" not in command.text, command.text[-3000:]
    assert codes[1] == 0, f"the other run: exit code {codes[1]}\n{other.text[-2000:]}"
    if codes[0] == -9:
        code, text = world.run("train", "CONFIG")
        assert code == 0, f"the same command again: exit code {code}\n{text[-2000:]}"
    else:
        assert codes[0] == 0, f"the first run: exit code {codes[0]}\n{first.text[-2000:]}"
    return f"exit codes {codes[0]} and {codes[1]}"


def _kill_one_of_two(world: World, lap: Lap) -> str:
    settings = process_settings(2)
    commands = [
        world.start("train", "CONFIG", *settings[index], fault=lap.fault if index == lap.victim else None)
        for index in (1 - lap.victim, lap.victim)
    ]
    other, victim = commands
    codes = [victim.wait(), other.wait()]
    for command in commands:
        assert "Traceback" not in command.text, command.text[-3500:]
    if codes[0] == -9:
        assert codes[1] in (0, 1), f"the other: exit code {codes[1]}\n{other.text[-2500:]}"
        if codes[1] == 1:
            named = f"pid {victim.pid}" in other.text or f"process {lap.victim}" in other.text
            assert named, f"the other does not name process {lap.victim}:\n{other.text[-2500:]}"
        code, text = world.run("train", "CONFIG")
        assert code == 0, f"one process goes on: exit code {code}\n{text[-2500:]}"
    else:
        assert codes == [0, 0], f"exit codes {codes}\n{victim.text[-1500:]}\n{other.text[-1500:]}"
    return f"exit codes {codes[0]} of process {lap.victim}, {codes[1]} of the other"


def _stop_for_a_minute(world: World, lap: Lap) -> str:
    command = world.start("train", "CONFIG", fault=lap.fault)
    if not command.wait_until_stopped():
        assert command.wait() == 0, command.text[-2500:]
        return "the call did not come"
    time.sleep(STOPPED)
    command.send(signal.SIGCONT)
    code = command.wait()
    assert code == 0, f"exit code {code}\n{command.text[-2500:]}"
    assert "Traceback" not in command.text, command.text[-3000:]
    return "exit code 0"
