"""Laps of `soak_world` in which a file of a run is damaged on the disk before a command reads it."""

from __future__ import annotations

import os
import random
import re
import shutil
from pathlib import Path
from typing import NamedTuple

from benchmarks.soak_shim import pattern
from benchmarks.soak_world_calls import names_of
from benchmarks.soak_world_runs import World, differences, result

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
"""Beginning of a path -> commands that read such files of a finished run."""


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


def draw(kind: str, number: int, seed: int, calls: object) -> Lap:
    """The lap `number`; the file is drawn when the template is there."""
    del calls
    rng = random.Random(f"{seed}/{kind}/{number}")
    template = "half" if number % 2 else "whole"
    return Lap(kind, template, f"file {number // 2}", rng.choice(WAYS), (), f"{seed}/{number}")


def _drawn(world: World, lap: Lap) -> tuple[Path, tuple[str, ...]]:
    """The file, of which kinds take turns, and the command."""
    rng = random.Random(lap.seed)
    groups: dict[str, list[Path]] = {}
    for file in sorted(world.lap.rglob("*")):
        path = file.relative_to(world.lap)
        if file.is_file() and file.name not in (".lock", "commit_success.txt", "README.md"):
            groups.setdefault(pattern(str(path)), []).append(path)
    names = sorted(groups)
    random.Random(0).shuffle(names)
    chosen = rng.choice(groups[names[int(lap.group.split()[1]) % len(names)]])
    if lap.template == "half":
        return chosen, ("train", "CONFIG")
    beginning = next(beginning for beginning in READ_BY if str(chosen).startswith(beginning))
    return chosen, rng.choice(READ_BY[beginning])


def _undisturbed(world: World, command: tuple[str, ...]) -> tuple[str, dict[str, bytes]]:
    """The output of a command on the finished run, and the files that it makes."""
    if command not in world.known:
        world.place("whole")
        code, text = world.run(*_words(world, command))
        assert code == 0, text
        world.known[command] = _without_times(text), _made(world)
    return world.known[command]


def _words(world: World, command: tuple[str, ...]) -> list[str]:
    return [str(world.out / "data" / "validation.jsonl") if word == "TEXT" else word for word in command]


def _made(world: World) -> dict[str, bytes]:
    files = [world.lap / "exported" / name for name in ("model.safetensors", "config.json", "tokenizer.json")]
    return {file.name: file.read_bytes() for file in files if file.exists()}


def _without_times(text: str) -> str:
    lines = [line for line in text.splitlines() if not line.endswith("...")]
    return re.sub(r"\d{4}-\d\d-\d\d \d\d:\d\d|\d+\.\d [KM]i?B|in [\d.]+ s|\(\d+\.\d MB\)", "", "\n".join(lines))


def run(world: World, lap: Lap, wanted: dict[str, str]) -> str:
    """Runs a lap; returns what happened.

    Raises:
        AssertionError: something was not as promised.
    """
    world.place(lap.template)
    path, command = _drawn(world, lap)
    if lap.template == "whole":
        expected = _undisturbed(world, command)
        world.place(lap.template)
    else:
        expected = None
    where = damage(world.lap / path, lap.way, random.Random(f"{lap.seed}/place"))
    what = f"`lmt {' '.join(command)}` after {where} of {path}"
    code, text = world.run(*_words(world, command))
    assert "Traceback" not in text, f"a traceback: {what}\n{text[-3500:]}"
    assert code in (0, 1, 2), f"exit code {code}: {what}\n{text[-2000:]}"
    # What an undisturbed command prints too names nothing.
    usual = expected[0].splitlines() if expected else ()
    said = [line for line in _without_times(text).splitlines() if line not in usual and not line.startswith(_USUAL)]
    named = any(name in line for line in said for name in (*names_of(str(path)), *_step_names(path), path.name))
    assert code == 0 or named, f"exit code {code} and no name: {what}\n{text[-2000:]}"
    if expected is not None:
        same = code == 0 and (_without_times(text), _made(world)) == expected
        assert named or same, f"silently different: {what}\n{text[-2000:]}\nwas:\n{expected[0][-1500:]}"
        return f"{'harmless' if same else 'named'}: {what}; exit code {code}"
    remedy = ""
    if code:
        remedy = _remedy(world, path)
        code, text = world.run(*command)
        assert code == 0, f"after the remedy ({remedy}) exit code {code}: {what}\n{text[-2500:]}"
    # What training does not read stays as it is; the laps of other commands are for that.
    own = str(path).replace("/run/", "/", 1)
    parted = [name for name in differences(result(world.lap), wanted) if name != own]
    assert not parted, f"other than undisturbed: {', '.join(parted)}: {what}\n{text[-1500:]}"
    return f"{'refused' if remedy else 'named' if named else 'harmless'}: {what}{remedy and '; ' + remedy}"


def damage(file: Path, way: str, rng: random.Random) -> str:
    """Damages a file; returns a description."""
    content = bytearray(file.read_bytes())
    size = len(content)
    if not size:
        return "nothing"
    if way == "zeros":
        length = min(size, rng.choice((16, 512, 4096)))
        at = rng.randrange(size - length + 1)
        content[at : at + length] = bytes(length)
        described = f"{length} zeros at byte {at}"
    elif way == "flipped bit":
        at, bit = rng.randrange(size), rng.randrange(8)
        content[at] ^= 1 << bit
        described = f"bit {bit} flipped in byte {at}"
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


def _remedy(world: World, path: Path) -> str:
    """Does what messages about such a file say."""
    if path.parts[0] == "cache" and path.parts[1] in ("train", "validation"):
        world.run("data", "verify", "CONFIG", "--repair")
        if world.run("data", "build", "CONFIG")[0] == 0:
            return "lmt data verify --repair, lmt data build"
        shutil.rmtree(world.lap / path.parts[0] / path.parts[1])
        return f"removed {path.parts[0]}/{path.parts[1]}"
    (world.lap / path).unlink()
    return f"removed {path}"
