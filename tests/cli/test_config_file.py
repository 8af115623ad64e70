"""The files that commands find by the name of a configuration."""

from pathlib import Path

import pytest

from tests.conftest import ROOT, Lmt, refused

SHIPPED = ROOT / "configs" / "gpt2_nano.yaml"


def write(path: str, seed: int) -> None:
    Path(path).parent.mkdir(exist_ok=True)
    Path(path).write_text(f"trainer: {{seed: {seed}}}\n", encoding="utf-8")


def test_the_nearest_file_of_a_name_is_taken(lmt: Lmt) -> None:
    shipped = lmt("config", "show", "gpt2_nano")
    assert shipped.stdout == lmt("config", "show", SHIPPED).stdout
    assert shipped.stderr == f"note: gpt2_nano is {SHIPPED}\n"
    assert lmt("config", "show", "gpt2_nano.yaml").stdout == shipped.stdout
    # From the farthest place to the nearest, each hides the one before.
    for seed, path in enumerate(["configs/gpt2_nano.yaml", "gpt2_nano.yaml", "gpt2_nano"], start=5):
        write(path, seed)
        done = lmt("config", "show", "gpt2_nano")
        assert f"seed: {seed}\n" in done.stdout
        assert done.stderr == ("" if path == "gpt2_nano" else f"note: gpt2_nano is {path}\n")


@pytest.mark.parametrize(
    "command",
    [
        ("config", "check", "gpt2_nano"),
        ("data", "status", "gpt2_nano"),
        ("launch", "slurm", "gpt2_nano", "-n", "2"),
        ("config", "diff", "gpt2_nano", "llama_nano"),
        ("ladder", "plan", "ladder_nano"),
    ],
)
def test_every_command_finds_them(command: tuple[str, ...], lmt: Lmt) -> None:
    done = lmt(*command)
    assert done.returncode == 0, done.stderr
    assert f"_nano is {ROOT / 'configs'}" in done.stderr
    if command[0] == "launch":
        assert str(SHIPPED) in done.stdout


def test_a_name_that_is_nowhere_says_where_was_looked(lmt: Lmt) -> None:
    write("mine.yaml", 1)
    write("configs/special.yaml", 1)
    looked = f"no such file here, in configs or in {ROOT / 'configs'}"
    refused(lmt("train", "gpt2nano"), f"gpt2nano: {looked}; did you mean gpt2_nano?")
    refused(lmt("config", "diff", "mine.yaml", "spcial"), f"spcial: {looked}; did you mean special?")
    refused(lmt("config", "check", "mne"), f"mne: {looked}; did you mean mine.yaml?")
    refused(lmt("config", "check", "configs/gpt2_nan.yaml"), "configs/gpt2_nan.yaml: no such file\n")


def test_a_directory_of_a_name_does_not_hide_the_file(lmt: Lmt) -> None:
    Path("gpt2_nano").mkdir()
    assert lmt("config", "check", "gpt2_nano").returncode == 0
