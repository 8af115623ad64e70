"""Laps of `soak_world` with one system fault: a file system call fails, a directory vanishes or the clock jumps."""

from __future__ import annotations

import random
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from benchmarks.soak_shim import ERRORS, LASTING, READS, Fault
from benchmarks.soak_world_runs import World, committed_steps, draft_paths, find_differences, hash_results

COMMANDS = {
    "train": (None, ("train", "CONFIG")),
    "resume": ("half", ("train", "CONFIG")),
    "data build": (None, ("data", "build", "CONFIG")),
    "export-hf": ("whole", ("export-hf", "run", "exported")),
}
"""Template that each command starts from, and the arguments of the command, by name."""
_ANY = (*4 * ("train",), *4 * ("resume",), "data build", "export-hf")
_SHORT = ("data build", "data build", "export-hf")
KINDS = {
    "killed at a call": ("kill", _ANY),
    "torn write, then killed": ("tear", _ANY),
    "short write": ("shorten", _ANY),
    "call fails once": ("fail", _ANY),
    "all calls fail from there on": ("fail-on", _ANY),
    "directory vanishes": ("vanish", ("train", "resume")),
    "clock jumps": ("clock", ("train", "resume")),
    "build or export, killed at a call": ("kill", _SHORT),
    "build or export, call fails once": ("fail", _SHORT),
}
"""Action of each kind of fault, and the commands into which it is injected."""
_GOES_ON = "the same command again comes to the same bits; nothing that was saved is lost"
_IS_TOLD = "exit code 0 with the same bits, or 1 or 2 with the file and the reason, without a traceback; then as above"
PROMISES = {
    "killed at a call": _GOES_ON,
    "torn write, then killed": "as above",
    "short write": "nothing happens: the same bits at once",
    "call fails once": _IS_TOLD,
    "all calls fail from there on": "as above",
    "directory vanishes": "as above, once it is put back",
    "clock jumps": "exit code 0 and the same bits at once",
    "build or export, killed at a call": _GOES_ON,
    "build or export, call fails once": _IS_TOLD,
}


class Lap(NamedTuple):
    """A command with a fault."""

    kind: str
    command: str
    fault: Fault

    def __str__(self) -> str:
        return f"{self.command}: {self.fault}"


def draw_lap(kind: str, number: int, seed: int, calls: dict[str, dict[tuple[str, str], int]]) -> Lap:
    """Draws the lap `number` of a kind. `calls` contains the calls of undisturbed commands."""
    rng = random.Random(f"{seed}/{kind}/{number}")
    action, commands = KINDS[kind]
    command = rng.choice(commands)
    counts = calls[command]
    if action in ("tear", "shorten"):
        counts = {key: count for key, count in counts.items() if key[0] == "write"}
    (call, path), count = rng.choice(list(counts.items()))
    index = rng.randint(1, count)
    if action == "fail":
        return Lap(kind, command, Fault(action, call, path, index, rng.choice(ERRORS[call])))
    if action == "fail-on":
        errors = LASTING[3:] if call in READS else LASTING
        return Lap(kind, command, Fault(action, call, path, index, rng.choice(errors)))
    if action == "vanish":
        victim = rng.choice(("logs/run", "logs", "checkpoints/run", "checkpoints", "cache", "cache/train", "exports"))
        return Lap(kind, command, Fault(action, call, path, index, victim=victim, to=f"gone/{Path(victim).name}"))
    if action == "clock":
        days = rng.choice((-3650, -400, -1, 1, 400, 3650))
        return Lap(kind, command, Fault(action, call, path, index, seconds=86400 * days))
    return Lap(kind, command, Fault(action, call, path, index))


def run(world: World, lap: Lap, expected: dict[str, str]) -> str:
    """Runs a lap. Returns a description of the outcome.

    Raises:
        AssertionError: if a promise is broken.
    """
    template, command = COMMANDS[lap.command]
    world.reset_lap(template)
    steps_before, fault = committed_steps(world.lap), lap.fault
    if fault.action == "vanish":
        (world.lap.parent / "gone").mkdir(exist_ok=True)
        shutil.rmtree(world.lap.parent / "gone")
        (world.lap.parent / "gone").mkdir()
        fault = Fault(
            **{**vars(fault), "victim": f"{world.lap}/{fault.victim}", "to": f"{world.lap.parent}/{fault.to}"}
        )
    code, text = world.run(*command, fault=fault)
    hit = world.read_hits()
    _check_exit(world, lap, code, text, hit)
    if not hit:
        happened = "the call did not come"
    elif lap.fault.action == "vanish":
        happened = f"{hit}; exit code {code}; {_restore_directory(world, lap.fault)}"
    else:
        happened = f"{hit}; exit code {code}"
    lost = set(steps_before) - set(committed_steps(world.lap))
    corrupt = {int(path.name.partition(".")[0]) for path in world.lap.glob("checkpoints/run/*.corrupt*")}
    assert not lost - corrupt, f"checkpoints {sorted(lost)} are lost"
    happened += f"; set aside: {sorted(corrupt)}" if corrupt else ""
    if code == 0:
        differing = _find_differences(world, lap, expected)
        assert not differing, f"after exit code 0, other than undisturbed: {', '.join(differing)}"
    if code or lap.fault.action == "vanish":
        _rerun(world, lap, command)
        differing = _find_differences(world, lap, expected)
        assert not differing, f"after the same command again, other than undisturbed: {', '.join(differing)}"
    # Drafts in a directory that vanished are cleaned up only at the next start.
    drafts = draft_paths(world.lap)
    assert not drafts, f"left over: {', '.join(drafts)}"
    return happened


def _check_exit(world: World, lap: Lap, code: int, text: str, hit: str) -> None:
    action = lap.fault.action
    assert "Traceback" not in text, f"a traceback, exit code {code}, at {hit}:\n{text[-3500:]}"
    if not hit or action in ("shorten", "clock"):
        assert code == 0, f"exit code {code} at {hit}:\n{text[-2000:]}"
    elif action in ("kill", "tear"):
        assert code == -9, f"exit code {code} at {hit}"
    elif code:
        assert code in (1, 2, 75), f"exit code {code} at {hit}:\n{text[-2000:]}"
        names = [lap.fault.victim] if action == "vanish" else list(path_names(hit.partition(" ")[2].split("\n")[0]))
        assert any(name in text for name in names), f"exit code {code} names no file of {hit}:\n{text[-2000:]}"
        reasons = {lap.fault.reason, lap.fault.error} if action != "vanish" else {"o such file", "removed", "not"}
        assert any(reason in text for reason in reasons), f"no reason for {hit}:\n{text[-2000:]}"


def path_names(path: str) -> Iterator[str]:
    """Yields a path and its parent directories as messages name them. A draft is named by its final name."""
    path = re.sub(r"(^|/)\.([^/]+)\.(incomplete|tmp)(?=/|$)", r"\1\2", path)
    yield path
    for parent in Path(path).parents:
        if len(parent.parts) >= 2 or parent.name in ("cache", "exported"):
            yield str(parent)


def _restore_directory(world: World, fault: Fault) -> str:
    """Restores a directory that vanished, merged with files that the run has since written into a new directory."""
    moved, directory = world.lap.parent / fault.to, world.lap / fault.victim
    if not moved.exists():
        return "there was nothing to vanish"
    recreated = directory.exists()
    if recreated:
        shutil.copytree(directory, moved, dirs_exist_ok=True)
        shutil.rmtree(directory)
    directory.parent.mkdir(parents=True, exist_ok=True)
    moved.rename(directory)
    return "it was made again" if recreated else "it was put back"


def _rerun(world: World, lap: Lap, command: tuple[str, ...]) -> None:
    code, text = world.run(*command)
    if lap.command == "export-hf" and code == 2 and "is not empty" in text:
        return  # it was already complete before the fault
    assert code == 0, f"the same command again: exit code {code}\n{text[-2500:]}"
    assert "Traceback" not in text, text[-2500:]


def _find_differences(world: World, lap: Lap, expected: dict[str, str]) -> list[str]:
    if lap.command == "data build":
        files = {name: digest for name, digest in hash_files(world.lap).items() if name.startswith("cache")}
        differing = find_differences(
            files, {name: digest for name, digest in expected.items() if name.startswith("cache")}
        )
    else:
        differing = find_differences(hash_results(world.lap), expected)
    if lap.command == "export-hf":
        for name in ("model.safetensors", "config.json", "tokenizer.json"):
            equal = (world.lap / "exported" / name).read_bytes() == (
                world.lap / "exports/run/step-12" / name
            ).read_bytes()
            differing += [] if equal else [f"exported/{name}"]
    return differing


def hash_files(directory: Path) -> dict[str, str]:
    """Hashes the files of a directory without a training run; otherwise like `hash_results`."""
    logs, checkpoints = directory / "logs/run", directory / "checkpoints/run"
    logs.mkdir(parents=True, exist_ok=True)
    checkpoints.mkdir(parents=True, exist_ok=True)
    (logs / "metrics.jsonl").touch()
    return hash_results(directory)
