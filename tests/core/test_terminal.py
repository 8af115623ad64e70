"""Text of others on its way to a terminal, to a comment and to JSON."""

from __future__ import annotations

import json

import pytest
import yaml

from lm_trainer.core.terminal import escape_for_terminal, escape_line, json_line

COMMANDS = {
    "the title of the window": "\x1b]0;mine\x07",
    "colours": "\x1b[31m",
    "a cleared screen": "\x1b[2J",
    "of eight bits": "\x9b2J",
    "back to the start of the line": "\r",
    "backspace": "\b",
    "a bell": "\a",
    "delete": "\x7f",
    "a form feed": "\f",
    "text from right to left": "\u202e",
    "an isolate": "\u2066",
    "a separator of lines": "\u2028",
    "a separator of paragraphs": "\u2029",
    "the next line": "\x85",
}


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_what_a_terminal_obeys_is_replaced(command: str) -> None:
    shown = escape_for_terminal(f"a{command}b")
    assert command[0] not in shown
    assert shown == "a\ufffd" + command[1:].replace("\x07", "\ufffd") + "b"


def test_letters_of_all_languages_tabs_and_line_feeds_stay() -> None:
    text = "a\tb\nÄ 東京\u3000の \u05d0 क्\u200dष 👩\u200d🔬 \u00a0"
    assert escape_for_terminal(text) == text


@pytest.mark.parametrize("command", [*COMMANDS.values(), "\n", "\t", "\r\n"])
def test_a_comment_is_one_line_and_says_what_was_there(command: str) -> None:
    line = escape_line(f"zz{command}hf_upload: evil")
    assert yaml.safe_load(f"a: 1\n# {line}\nb: 2\n") == {"a": 1, "b": 2}
    assert line.encode().decode("unicode_escape") == f"zz{command}hf_upload: evil"


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_json_holds_the_same_text_and_nothing_that_a_terminal_obeys(command: str) -> None:
    line = json_line({"a": f"Ä{command}\n"})
    assert json.loads(line) == {"a": f"Ä{command}\n"}
    assert line == escape_for_terminal(line)
    assert "Ä" in line
