"""Time of a refusal: it grows with the number of problems, and not with its square."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from lm_trainer.config import document, explain
from lm_trainer.config.loader import load
from lm_trainer.core.errors import ConfigError
from lm_trainer.run.config.run_config import RunConfig


def _keys(count: int) -> str:
    return "".join(f"  some_key_{number}: 1\n" for number in range(count))


FILES: dict[str, Callable[[int], str]] = {
    "of a section": lambda count: f"trainer:\n{_keys(count)}",
    "at the top": lambda count: _keys(count).replace("  ", ""),
    "of an unknown type": lambda count: f"model:\n  type: foo\n{_keys(count)}",
    "of blocks in a list": lambda count: "trainer:\n  checkpointer:\n    keep:\n" + count * "      - {often: 1}\n",
}


def _problems(file: Path, overrides: Sequence[str] = ()) -> tuple[tuple[str, ...], float]:
    begun = time.process_time()
    with pytest.raises(ConfigError) as raised:
        load(file, overrides, RunConfig)
    return raised.value.problems, time.process_time() - begun


@pytest.fixture
def looked_for(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The words for which similar ones were looked for, which takes most of the time."""
    words = list[str]()
    find_similar = document.find_similar

    def counted(word: str, options: Sequence[str], *, strict: bool = False) -> list[str]:
        words.append(word)
        return find_similar(word, options, strict=strict)

    for module in (document, explain):
        monkeypatch.setattr(module, "find_similar", counted)
    return words


@pytest.mark.parametrize("text", FILES.values(), ids=FILES)
def test_many_unknown_keys_of_a_file(text: Callable[[int], str], in_tmp_path: Path, looked_for: list[str]) -> None:
    file = in_tmp_path / "c.yaml"
    file.write_text(text(150))
    _, few = _problems(file)
    file.write_text(text(600))
    looked_for.clear()
    problems, many = _problems(file)
    assert len(problems) >= 600
    assert len(looked_for) < 70, "a suggestion for each would take twenty times as long"
    assert many < 9 * few, "four times the problems take four times as long, and sixteen times by their square"


def test_many_unknown_keys_of_a_command_line(in_tmp_path: Path, looked_for: list[str]) -> None:
    file = in_tmp_path / "c.yaml"
    file.write_text("{}")

    def overrides(count: int) -> list[str]:
        return [f"trainer.seeds_{n}=1" for n in range(count)] + [f"--sede{n}=1" for n in range(count)]

    _, few = _problems(file, overrides(75))
    looked_for.clear()
    problems, many = _problems(file, overrides(300))
    assert len(looked_for) < 70
    assert len(problems) == 600
    assert many < 9 * few


def test_the_first_ones_are_answered_with_the_key_that_was_meant(in_tmp_path: Path, looked_for: list[str]) -> None:
    file = in_tmp_path / "c.yaml"
    file.write_text("trainer:\n" + "".join(f"  sede{number}: 1\n" for number in range(100)))
    problems, _ = _problems(file)
    assert all("did you mean 'seed'" in problem for problem in problems[:20])
    assert all(problem.endswith("unknown key") for problem in problems[20:])
    assert len({*looked_for}) == 20
