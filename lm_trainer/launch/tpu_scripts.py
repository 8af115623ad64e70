"""Writes the files for a TPU worker: the lm_trainer source, and scripts to install, start, follow and stop a run."""

from __future__ import annotations

import shlex
import tarfile
from collections.abc import Mapping
from pathlib import Path

from lm_trainer.core.errors import UserError

EXIT_MARK = "lmt-exit-code="
"""Prefix of the line that follows the output of a finished training and contains the exit code of the training."""
FAILURE_MARK = "lmt-failed="
"""Prefix of the line that a worker prints if a script fails, followed by the exit code of the script. gcloud's own exit
code does not tell which worker failed.
"""
LOST = 137
"""Exit code reported for a training that left none, because it was killed or its machine restarted."""

_ROOT = Path(__file__).resolve().parents[2]
_SOURCE, _CONSTRAINTS = "source.tar.gz", "constraints.txt"
_PACKAGED = ("lm_trainer", "cli", "configs", "pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md")


def remote_directory(name: str) -> str:
    """Returns the directory of a run, relative to the home directory of each worker."""
    return name


def script_command(name: str, step: str) -> str:
    """Builds the command that runs one of the scripts on a worker."""
    return f"bash {remote_directory(name)}/{step}.sh || echo {FAILURE_MARK}$?"


def follow_command(name: str, line: int) -> str:
    """Builds the command that shows the output of a worker from line `line` (from 1) on, until the training ends."""
    return f"bash {remote_directory(name)}/follow.sh {line}"


def write_files(directory: Path, texts: Mapping[str, str], *, source: bool) -> None:
    """Writes the files for a worker.

    Args:
        directory: directory for the files.
        texts: contents of the scripts and of the configuration, by file name.
        source: True to include the source of lm_trainer and its constraints file.

    Raises:
        UserError: if `source` is set and this lm_trainer was not installed from a source tree.
    """
    if source:
        _pack_source(_ROOT, directory / _SOURCE)
        if (_ROOT / _CONSTRAINTS).is_file():
            (directory / _CONSTRAINTS).write_text((_ROOT / _CONSTRAINTS).read_text())
    for name, text in texts.items():
        (directory / name).write_text(text)


def build_scripts(config_name: str, env: Mapping[str, str], install: str | None, setup: str | None) -> dict[str, str]:
    """Builds the scripts of a run, by file name.

    Args:
        config_name: name of the configuration file in the same directory.
        env: environment variables of the training process.
        install: pip requirement for lm_trainer; None installs the source packed by `write_files`.
        setup: bash command to run after the installation, or None.
    """
    constraints = f"--constraint {_CONSTRAINTS} " if install is None and (_ROOT / _CONSTRAINTS).is_file() else ""
    requirement = f'"lm_trainer[tpu] @ file://$PWD/{_SOURCE}"' if install is None else shlex.quote(install)
    exports = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in env.items())
    train = f"trap : TERM; venv/bin/lmt train {shlex.quote(config_name)}; echo $? > exit"
    bodies = {
        # The images have an older Python than lm_trainer requires, so uv installs a newer one.
        "install": f"""\
set -euo pipefail
python3 -m pip install --quiet --user uv
export PATH="$HOME/.local/bin:$PATH"
[ -x venv/bin/python ] || uv venv --quiet --python 3.12 venv
uv pip install --quiet --python venv/bin/python {constraints}{requirement}
{setup or ":"}
""",
        "running": """\
[ -f pid ] && [ ! -f exit ] && kill -0 "$(cat pid)" 2> /dev/null
""",
        # The training is detached so that it outlives the connection that started it. `trap` is needed because SIGTERM
        # goes to the entire process group, and the shell has to survive it to write the exit code.
        "start": f"""\
if bash running.sh; then exit 0; fi
rm -f exit
[ ! -f log ] || mv -f log log.before
{exports}setsid nohup bash -c {shlex.quote(train)} > log 2>&1 < /dev/null &
echo $! > pid
""",
        # `follow` also watches for the file `exit`: a process that no parent waits for stays in the process table.
        "follow": f"""\
while [ ! -f exit ] && kill -0 "$(cat pid)" 2> /dev/null; do sleep 0.2; done &
tail -s 0.2 -n "+$1" --pid=$! -F log 2> /dev/null
echo "{EXIT_MARK}$(cat exit 2> /dev/null || echo {LOST})"
""",
        "stop": """\
kill -TERM -- "-$(cat pid)"
""",
    }
    return {f"{name}.sh": 'cd "$(dirname "$0")"\n' + text for name, text in bodies.items()}


def _pack_source(root: Path, archive: Path) -> None:
    if not (root / "pyproject.toml").is_file():
        raise UserError(
            "this lm_trainer was not installed from a source tree, so there is nothing to copy to the TPU; say what "
            "pip is to install there by --install, for example --install 'lm_trainer[tpu] @ git+https://...'"
        )
    with tarfile.open(archive, "w:gz") as tar:
        for name in _PACKAGED:
            if (root / name).exists():
                tar.add(root / name, f"lm_trainer/{name}", filter=_without_caches)


def _without_caches(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
    return None if entry.name.endswith((".pyc", "__pycache__")) else entry
