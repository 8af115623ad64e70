"""Laps of `soak_world` in which a file of a run is damaged and then read by a command."""

from __future__ import annotations

import os
import random
import re
import shutil
from pathlib import Path
from typing import NamedTuple

from benchmarks.soak_shim import path_pattern
from benchmarks.soak_world_calls import path_names
from benchmarks.soak_world_runs import World, find_differences, hash_results

PROMISES = {
    "damaged file": "refused or named with exit code 0, 1 or 2, without a traceback, or harmless: the same output and "
    "the same bits. What the message says to do leads to these",
}
WAYS = ("zeros", "flipped bit", "flipped bit", "cut off", "empty")
READ_BY = {
    "cache/": (
        ("data", "verify", "CONFIG"),
        ("eval", "run"),
        ("verify", "run", "--seed", "0"),
        ("data", "build", "CONFIG"),
    ),
    "logs/run/metrics.jsonl": (("runs",), ("report", "run"), ("verify", "run", "--seed", "0"), ("diff", "run", "run")),
    "logs/": (
        ("runs",),
        ("report", "run"),
        ("export-hf", "run", "exported"),
        ("eval", "run"),
        ("verify", "run", "--seed", "0"),
    ),
    "checkpoints/": (("eval", "run"), ("export-hf", "run", "exported"), ("verify", "run", "--seed", "0"), ("runs",)),
    "exports/": (("eval", "exports/run/step-12", "--data", "TEXT", "--context", "32"),),
}
"""Commands that read files of a finished run, by the prefix of the files' paths."""


_USUAL = ("run run, in ", "step ", "resumed at ", "  metrics ", "  checkpoints ", "  lmt ", "exported to ")


class Lap(NamedTuple):
    kind: str
    template: str
    group: str
    way: str
    command: tuple[str, ...]
    seed: str

    def __str__(self) -> str:
        return f"{' '.join(self.command)}: {self.way} in {self.group}"


def draw_lap(kind: str, number: int, seed: int, calls: object) -> Lap:
    """Draws the lap `number`. The file is drawn later, from the template."""
    del calls
    rng = random.Random(f"{seed}/{kind}/{number}")
    template = "half" if number % 2 else "whole"
    return Lap(kind, template, f"file {number // 2}", rng.choice(WAYS), (), f"{seed}/{number}")


def _draw_file_and_command(world: World, lap: Lap) -> tuple[Path, tuple[str, ...]]:
    """Draws the file to damage, with kinds of files in turn, and the command."""
    rng = random.Random(lap.seed)
    groups: dict[str, list[Path]] = {}
    for file in sorted(world.lap.rglob("*")):
        path = file.relative_to(world.lap)
        if file.is_file() and file.name not in (".lock", "commit_success.txt", "README.md"):
            groups.setdefault(path_pattern(str(path)), []).append(path)
    names = sorted(groups)
    random.Random(0).shuffle(names)
    chosen = rng.choice(groups[names[int(lap.group.split()[1]) % len(names)]])
    if lap.template == "half":
        return chosen, ("train", "CONFIG")
    beginning = next(beginning for beginning in READ_BY if str(chosen).startswith(beginning))
    return chosen, rng.choice(READ_BY[beginning])


def _run_undisturbed(world: World, command: tuple[str, ...]) -> tuple[str, dict[str, bytes]]:
    """Runs a command on the finished run. Returns its output and the files that it writes."""
    if command not in world.cache:
        world.reset_lap("whole")
        code, text = world.run(*_command_arguments(world, command))
        assert code == 0, text
        world.cache[command] = _strip_times(text), _read_exported_files(world)
    return world.cache[command]


def _command_arguments(world: World, command: tuple[str, ...]) -> list[str]:
    return [str(world.out / "data" / "validation.jsonl") if word == "TEXT" else word for word in command]


def _read_exported_files(world: World) -> dict[str, bytes]:
    files = [world.lap / "exported" / name for name in ("model.safetensors", "config.json", "tokenizer.json")]
    return {file.name: file.read_bytes() for file in files if file.exists()}


def _strip_times(text: str) -> str:
    lines = [line for line in text.splitlines() if not line.endswith("...")]
    return re.sub(r"\d{4}-\d\d-\d\d \d\d:\d\d|\d+\.\d [KM]i?B|in [\d.]+ s|\(\d+\.\d MB\)", "", "\n".join(lines))


def run(world: World, lap: Lap, expected_result: dict[str, str]) -> str:
    """Runs a lap. Returns a description of the outcome.

    Raises:
        AssertionError: if a promise is broken.
    """
    world.reset_lap(lap.template)
    path, command = _draw_file_and_command(world, lap)
    if lap.template == "whole":
        expected = _run_undisturbed(world, command)
        world.reset_lap(lap.template)
    else:
        expected = None
    damage_done = damage_file(world.lap / path, lap.way, random.Random(f"{lap.seed}/place"))
    description = f"`lmt {' '.join(command)}` after {damage_done} of {path}"
    code, text = world.run(*_command_arguments(world, command))
    assert "Traceback" not in text, f"a traceback: {description}\n{text[-3500:]}"
    assert code in (0, 1, 2), f"exit code {code}: {description}\n{text[-2000:]}"
    # Lines that an undisturbed command also prints do not report the damage.
    usual = expected[0].splitlines() if expected else ()
    messages = [line for line in _strip_times(text).splitlines() if line not in usual and not line.startswith(_USUAL)]
    named = any(name in line for line in messages for name in (*path_names(str(path)), *_step_names(path), path.name))
    assert code == 0 or named, f"exit code {code} and no name: {description}\n{text[-2000:]}"
    if expected is not None:
        equal = code == 0 and (_strip_times(text), _read_exported_files(world)) == expected
        assert named or equal, f"silently different: {description}\n{text[-2000:]}\nwas:\n{expected[0][-1500:]}"
        return f"{'harmless' if equal else 'named'}: {description}; exit code {code}"
    remedy = ""
    if code:
        remedy = _repair(world, path)
        code, text = world.run(*command)
        assert code == 0, f"after the remedy ({remedy}) exit code {code}: {description}\n{text[-2500:]}"
    # Files that training does not read stay damaged. Laps of other commands cover them.
    changed_name = str(path).replace("/run/", "/", 1)
    differing = [name for name in find_differences(hash_results(world.lap), expected_result) if name != changed_name]
    assert not differing, f"other than undisturbed: {', '.join(differing)}: {description}\n{text[-1500:]}"
    return f"{'refused' if remedy else 'named' if named else 'harmless'}: {description}{remedy and '; ' + remedy}"


def damage_file(file: Path, way: str, rng: random.Random) -> str:
    """Damages a file. Returns a description of the damage."""
    content = bytearray(file.read_bytes())
    size = len(content)
    if not size:
        return "nothing"
    if way == "zeros":
        length = min(size, rng.choice((16, 512, 4096)))
        offset = rng.randrange(size - length + 1)
        content[offset : offset + length] = bytes(length)
        described = f"{length} zeros at byte {offset}"
    elif way == "flipped bit":
        offset, bit = rng.randrange(size), rng.randrange(8)
        content[offset] ^= 1 << bit
        described = f"bit {bit} flipped in byte {offset}"
    else:
        length = 0 if way == "empty" else rng.randrange(1, size) if size > 1 else 0
        del content[length:]
        described = f"{length} of {size} bytes left"
    times = file.stat()
    file.write_bytes(content)
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    return described


def _step_names(path: Path) -> list[str]:
    steps = [part for part in path.parts if part.isdigit()]
    return [f"{word} {step}" for step in steps for word in ("step", "checkpoint", "of step")]


def _repair(world: World, path: Path) -> str:
    """Follows the advice in messages about a damaged file."""
    if path.parts[0] == "cache" and path.parts[1] in ("train", "validation"):
        world.run("data", "verify", "CONFIG", "--repair")
        if world.run("data", "build", "CONFIG")[0] == 0:
            return "lmt data verify --repair, lmt data build"
        shutil.rmtree(world.lap / path.parts[0] / path.parts[1])
        return f"removed {path.parts[0]}/{path.parts[1]}"
    (world.lap / path).unlink()
    return f"removed {path}"
