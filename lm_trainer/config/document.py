"""Documents, which are plain data with the position of each value and the problems found so far."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

_MAX_SUGGESTED = 20
"""Maximum number of unknown keys for which suggestions are searched, each time among all keys."""

KeyPath = tuple[str | int, ...]
"""The keys and list indices from the root to a value."""


@dataclass(frozen=True, order=True)
class Origin:
    """The origin of a value or key. Origins sort in the reading order of the sources."""

    order: tuple[int, int, int]
    """Number of the source, line and column."""
    text: str
    """`file:line:column`, or the override as the user typed it."""
    is_override: bool = False


@dataclass(frozen=True)
class Problem:
    origin: Origin | None
    text: str

    def __str__(self) -> str:
        return f"{self.origin.text}: {self.text}" if self.origin else self.text


@dataclass
class Document:
    """Plain data with the position of every value and key."""

    data: Any = None
    values: dict[KeyPath, Origin] = field(default_factory=dict)
    keys: dict[KeyPath, Origin] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    unreadable: set[KeyPath] = field(default_factory=set)
    """Paths with a recorded problem. Further problems at these paths are consequences of it."""
    notes: list[str] = field(default_factory=list)
    """Effects of keys and overrides that the user may not expect."""
    suggested: int = 0
    """Number of unknown keys for which suggestions have been searched."""

    def origin(self, path: KeyPath) -> Origin | None:
        """Returns the origin of the value at `path`, or else of the first value inside it or the nearest ancestor."""
        if path not in self.values:
            inside = [origin for value_path, origin in self.values.items() if value_path[: len(path)] == path]
            if inside:
                return min(inside)
        return next((self.values[path[:n]] for n in range(len(path), -1, -1) if path[:n] in self.values), None)

    def key_origin(self, path: KeyPath) -> Origin | None:
        """Returns the origin of the last key of `path`, or else of the nearest ancestor's value."""
        return self.keys.get(path) or self.origin(path)

    def add_problem(self, path: KeyPath, text: str, *, at_key: bool = False) -> None:
        """Records a problem with the value, or the key, at `path`."""
        origin = self.key_origin(path) if at_key else self.origin(path)
        self.problems.append(Problem(origin, f"{dotted_key(path)}: {text}" if path else text))

    def may_suggest(self) -> bool:
        """Returns True for the first unknown keys only, since a search for all keys of an unrelated file takes long."""
        self.suggested += 1
        return self.suggested <= _MAX_SUGGESTED

    def drop_positions(self, path: KeyPath) -> None:
        """Removes the positions at and below `path`."""
        for table in (self.values, self.keys):
            for key_path in [p for p in table if p[: len(path)] == path]:
                del table[key_path]
        self.unreadable -= {p for p in self.unreadable if p[: len(path)] == path}

    def move_positions(self, path: KeyPath, to: KeyPath) -> None:
        """Moves the positions at and below `path`."""
        for table in (self.values, self.keys):
            for key_path in [p for p in table if p[: len(path)] == path]:
                table[*to, *key_path[len(path) :]] = table.pop(key_path)
        for key_path in [p for p in self.unreadable if p[: len(path)] == path]:
            self.unreadable.remove(key_path)
            self.unreadable.add((*to, *key_path[len(path) :]))

    def is_unreadable(self, path: KeyPath) -> bool:
        """Returns True if a problem with `path` or one of its ancestors has been recorded."""
        return any(path[:n] in self.unreadable for n in range(len(path) + 1))

    def problem_lines(self) -> list[str]:
        """Returns all problems in the order of the sources, each of them once."""
        # Problems without a position sort last.
        last = (1 << 30, 0, 0)
        ordered = sorted(self.problems, key=lambda p: p.origin.order if p.origin else last)
        return list(dict.fromkeys(map(str, ordered)))


def dotted_key(path: KeyPath) -> str:
    """Returns a path as a dotted key, such as `trainer.tracker.0.project`."""
    return ".".join(map(str, path))


def did_you_mean(word: str, options: Iterable[str], *, prefix: str = "", strict: bool = False) -> str:
    """Returns `; did you mean 'a' or 'b'?`, with `prefix` before each option, or "" if no option is similar.

    Similar options are names that `word` may misspell, names that contain all parts of `word` (train_batch_size
    for `batch_size`), and names with these initials (learning_rate for `lr`). If `strict`, `word` may only have one or
    two wrong letters.
    """
    return format_suggestions(
        [prefix + option for option in find_similar(word, list(dict.fromkeys(options)), strict=strict)]
    )


def format_suggestions(names: Sequence[str]) -> str:
    """Returns `; did you mean 'a' or 'b'?`, or "" if there are no names."""
    return f"; did you mean {' or '.join(map(repr, names))}?" if names else ""


def find_similar(word: str, options: Sequence[str], *, strict: bool = False) -> list[str]:
    """Returns the options that are similar to `word`, with the best first. See `did_you_mean`."""
    if not word:
        return []
    # Methods from the most to the least certain. The first method with a result wins.
    if equal := [option for option in options if option.lower().replace("-", "_") == word.lower().replace("-", "_")]:
        return equal[:1]
    if misspelt := _find_misspelt(word, options, 0.75):
        return misspelt
    tails = [(option, option.rsplit(".", 1)[-1].split("_")) for option in options]
    spelt_by_initials = [option for option, names in tails if word.lower() == "".join(n[:1] for n in names)]
    if len(word) > 1 and spelt_by_initials:
        return spelt_by_initials[:3]
    parts = set(word.lower().replace("-", "_").split("_"))
    if containing := [option for option, names in tails if parts <= set(names)]:
        return containing[:3]
    return [] if strict else _find_misspelt(word, options, 0.6)


def _find_misspelt(word: str, options: Sequence[str], cutoff: float) -> list[str]:
    """Returns the closest option, and the second closest if it is about as close."""
    matches = difflib.get_close_matches(word, options, n=2, cutoff=cutoff)
    closeness = [difflib.SequenceMatcher(None, option, word).ratio() for option in matches]
    return [option for option, ratio in zip(matches, closeness, strict=True) if ratio > closeness[0] - 0.05]


def format_value(value: object) -> str:
    """Formats a value for an error message, on one short line."""
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        return "a block of keys" if value else "an empty block"
    if isinstance(value, list | tuple):
        return f"a list of {len(value)}" if value else "an empty list"
    text = repr(value)
    return text if len(text) <= 70 else f"{text[:60]}... ({len(text)} characters)"
