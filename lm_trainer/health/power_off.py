"""Shuts the machine down when a command ends, however it ends: for machines that cost while they are idle."""

from __future__ import annotations

import atexit
import subprocess
import sys
import time

_DEFAULT_SECONDS = 5.0


def shut_down_at_exit(setting: bool | float) -> None:
    """Arranges it for the end of this process.

    Args:
        setting: as `trainer.shutdown_at_exit`: False: not; True: after five seconds; a number: after so many.
    """
    if setting is not False:
        atexit.register(_shut_down, _DEFAULT_SECONDS if setting is True else float(setting))


def _shut_down(seconds: float) -> None:
    sys.stderr.write(f"trainer.shutdown_at_exit: this machine shuts down in {seconds:g} s\n")
    sys.stderr.flush()
    time.sleep(seconds)
    for command in (["shutdown", "-h", "now"], ["sudo", "-n", "shutdown", "-h", "now"]):
        try:
            if subprocess.run(command, check=False).returncode == 0:
                return
        except OSError:
            continue
    sys.stderr.write("trainer.shutdown_at_exit: `shutdown -h now` did not succeed\n")
