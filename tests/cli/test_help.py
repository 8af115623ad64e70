"""The help of `lmt`, its speed, and its exit codes."""

import errno
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

import lm_trainer
from cli import help_text, main, usage
from lm_trainer.core.errors import ConfigError, MachineError, NonFiniteError, Preempted, Stopped, UserError
from tests.conftest import ROOT, RunLmt, lmt_environment

COMMANDS = (
    *("train", "config", "export-hf", "import-hf", "generate", "bench", "data", "launch", "ladder"),
    *("verify", "replay", "diff", "branch", "without", "bisect", "prove", "golden", "plan", "runs"),
)
HEAVY = (
    "jax",
    "flax",
    "optax",
    "orbax",
    "grain",
    "numpy",
    "tensorstore",
    "transformers",
    "torch",
    "tokenizers",
    "yaml",
    "jinja2",
)


def test_help_imports_nothing_heavy(tmp_path: Path) -> None:
    """In one process: what a command imported would be seen at the next one's end, and is seen at its own."""
    command_lines = [["--help"], [], ["--version"], *([command, "--help"] for command in COMMANDS)]
    program = f"""
import sys
from cli.main import main
for arguments in {command_lines!r}:
    sys.argv = ["lmt", *arguments]
    code = None
    try:
        main()
    except SystemExit as end:
        code = end.code
    print("ended", arguments, code, sorted(set({HEAVY!r}) & set(sys.modules)))
"""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=lmt_environment(), capture_output=True, text=True, check=True
    )
    # Without a command, help is shown as for a mistake.
    expected = [f"ended {arguments} {0 if arguments else 2} []" for arguments in command_lines]
    assert [line for line in done.stdout.splitlines() if line.startswith("ended")] == expected


def test_help_shows_every_command_and_the_exit_codes() -> None:
    shown = CliRunner().invoke(main.app, ["--help"], env={"COLUMNS": "200"}).output
    for command in COMMANDS:
        assert f" {command} " in shown
    for code in ("0 done", "1 crash", "2 wrong", "3 stopped", "75 stopped", "130 interrupted"):
        assert code in " ".join(shown.split())


def test_version(run_lmt: RunLmt) -> None:
    done = run_lmt("--version")
    assert (done.returncode, done.stdout) == (0, f"lmt {lm_trainer.__version__}\n")


def test_a_misspelt_command_is_answered_with_the_near_one() -> None:
    done = CliRunner().invoke(main.app, ["confg"])
    assert done.exit_code == 2
    assert "config" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["fine-tune", "x.yaml"], "no command 'fine-tune': here it is lmt train CONFIG, with initialize_from_hf"),
        (["sft", "x.yaml"], "no command 'sft': here it is lmt train CONFIG, with data.format"),
        (["convert"], "no command 'convert': here it is lmt import-hf"),
        (["generate"], "missing argument 'MODEL'; `lmt generate --help` tells more"),
        (["plan", str(ROOT / "configs/gpt2_nano.yaml")], "missing option '--devices'; `lmt plan --help` tells more"),
        (["config", "chek"], "no such command 'chek'; did you mean 'check'"),
        (["runs", "--jsno"], "--jsno: no such option; did you mean '--json'?"),
        (["generate", "x", "--max-tokens", "many"], "--max-tokens"),
        (["replay", "x", "--step", "3", "--dump-grads", "trainer.seed=3"], "--dump-grads has no value: trainer.seed=3"),
        (["eval", "x", "--data", "trainer.seed=3"], "--data has no value: trainer.seed=3 behind it is a setting"),
    ],
)
def test_a_mistake_in_the_command_line_is_one_line_as_all_other_errors(arguments: list[str], message: str) -> None:
    done = CliRunner().invoke(main.app, arguments)
    assert done.exit_code == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ")
    assert message in line


def test_every_pointer_for_a_foreign_name_leads_to_a_command_that_there_is() -> None:
    known_commands = set(_commands(typer.main.get_command(main.app), ()))
    for name, equivalent in usage.OTHER_NAMES.items():
        assert name not in {command[0] for command in known_commands}
        for words in re.findall(r"lmt ([a-z -]+)", equivalent):
            command = tuple(words.split())
            assert command[0].startswith("--") or any(
                command[: len(c)] == c or c[: len(command)] == command for c in known_commands
            )
    for words in (line for line in usage.OTHER_NAMES.values() if "lmt" not in line):
        assert "configs/gpt2_nano.yaml" in words


def _commands(group: Any, prefix: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    for name, command in getattr(group, "commands", {}).items():
        yield (*prefix, name)
        yield from _commands(command, (*prefix, name))


def test_paragraphs_of_help_fill_the_width_of_the_terminal() -> None:
    shown = CliRunner().invoke(main.app, ["verify", "--help"], env={"COLUMNS": "200"}).output.splitlines()
    (line,) = (line for line in shown if "Compares losses, gradient norms" in line)
    # In the source the line ends before.
    assert "Does not modify the run, which" in line
    assert any(line.startswith("     lmt verify my-run") for line in shown)


@pytest.mark.parametrize(
    ("text", "flown"),
    [
        ("One\nline.\n\nTwo\nlines.", "One line.\n\nTwo lines."),
        ("Do.\n\nExamples:\n    lmt a\n\n    lmt b", "Do.\n\nExamples:\n\n    lmt a\n\n    lmt b"),
    ],
)
def test_flow(text: str, flown: str) -> None:
    assert help_text.reflow(text) == flown


class TestEnds:
    """Each way in which a command can end, through the group that `lmt` is made of."""

    @pytest.fixture
    def run(self):
        def invoke(error: BaseException | None):
            app = typer.Typer(cls=main._Commands, pretty_exceptions_enable=False)

            @app.callback()
            def _root() -> None: ...

            @app.command()
            def go() -> None:
                if error is not None:
                    raise error

            return CliRunner().invoke(app, ["go"])

        return invoke

    @pytest.mark.parametrize(
        ("error", "code", "stderr"),
        [
            (None, 0, ""),
            (UserError("no run 'x'"), 2, "error: no run 'x'\n"),
            (MachineError("the disk is full"), 1, "error: the disk is full\n"),
            (NonFiniteError("step 3: the loss is NaN"), 3, "error: step 3: the loss is NaN\n"),
            (Preempted("stopped at step 7, all saved"), 75, "stopped at step 7, all saved\n"),
            (Stopped("stopped at step 7, all saved"), 76, "stopped at step 7, all saved\n"),
            (ConfigError(["a: x", "b: y"]), 2, "error: a: x\nerror: b: y\n2 problems; nothing was started.\n"),
            (ConfigError(["a: x"]), 2, "error: a: x\n1 problem; nothing was started.\n"),
            (KeyboardInterrupt(), 130, "interrupted\n"),
            (
                OSError(errno.ENOSPC, "No space left on device", "logs/run/env.json"),
                1,
                "error: logs/run/env.json: No space left on device; make room or mend the disk, then start the same "
                "command again\n",
            ),
        ],
    )
    def test_message_and_exit_code(self, run, error: BaseException | None, code: int, stderr: str) -> None:
        done = run(error)
        assert (done.exit_code, done.stderr, done.stdout) == (code, stderr, "")

    def test_any_other_error_is_a_crash(self, run) -> None:
        for error in (RuntimeError("a defect"), FileNotFoundError(errno.ENOENT, "not there")):
            done = run(error)
            assert done.exit_code == 1
            assert done.exception is error


def test_a_crash_shows_a_traceback_but_no_values(tmp_path: Path) -> None:
    program = """
import typer
from cli import help_text, main, usage

@main.app.command()
def crash() -> None:
    secret = "CANARY" + str(1 + 1)
    raise RuntimeError("a defect")

import sys
sys.argv = ["lmt", "crash"]
main.main()
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env=lmt_environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "Traceback" in done.stderr
    assert "RuntimeError: a defect" in done.stderr
    assert "CANARY2" not in done.stderr
