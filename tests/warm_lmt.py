"""`lmt` in processes that have imported JAX already: forks of a server, which has started no thread and no backend.

A start of Python with JAX, Flax and Orbax takes seconds, most of a test that looks at what a command does.

    server = WarmLmt(environment)
    server.run(["train", "run.yaml"], cwd=..., env=..., timeout=300)
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

READ_LATE = ("COLUMNS", "PATH", "PYTEST_CURRENT_TEST", "XLA_FLAGS")
SET_BY_IMPORTS = ("TF_CPP_MIN_LOG_LEVEL", "TORCHINDUCTOR_CACHE_DIR", "TPU_SKIP_MDS_QUERY")
IGNORED = (*READ_LATE, *SET_BY_IMPORTS)
"""Variables that may differ between the server and its forks: nothing reads them while it is imported, or JAX and torch
set them then."""


class WarmLmt:
    """The server of one process, which starts with the first command and ends with that process."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._environment = {name: value for name, value in environment.items() if name not in IGNORED}
        self._socket, theirs = socket.socketpair()
        command = [sys.executable, "-m", "tests.warm_lmt", str(theirs.fileno())]
        self._process = subprocess.Popen(command, env=dict(environment), pass_fds=[theirs.fileno()])
        theirs.close()

    def close(self) -> None:
        """Ends the server."""
        self._socket.close()
        self._process.wait()

    def takes(self, env: Mapping[str, str]) -> bool:
        """Tells whether a fork does as a new process with that environment would."""
        return {name: value for name, value in env.items() if name not in IGNORED} == self._environment

    def run(
        self, args: list[str], *, cwd: Path, env: Mapping[str, str], timeout: float
    ) -> subprocess.CompletedProcess[str]:
        """Does as `subprocess.run` with no input, captured text and `check=False`.

        Raises:
            subprocess.TimeoutExpired: the command, which is killed, has not ended in time.
        """
        request = {"args": args, "cwd": str(cwd), "env": dict(env)}
        with open(os.devnull) as stdin, tempfile.TemporaryFile() as stdout, tempfile.TemporaryFile() as stderr:
            files = [stdin.fileno(), stdout.fileno(), stderr.fileno()]
            content = json.dumps(request).encode()
            socket.send_fds(self._socket, [len(content).to_bytes(8, "little")], files)
            self._socket.sendall(content)
            pid = int.from_bytes(_read(self._socket, 8), "little")
            self._socket.settimeout(timeout)
            try:
                code = int.from_bytes(_read(self._socket, 8), "little", signed=True)
            except TimeoutError:
                os.kill(pid, signal.SIGKILL)
                self._socket.settimeout(None)
                _read(self._socket, 8)
                raise subprocess.TimeoutExpired(["lmt", *args], timeout) from None
            finally:
                self._socket.settimeout(None)
            texts = []
            for file in (stdout, stderr):
                file.seek(0)
                texts.append(file.read().decode())
        return subprocess.CompletedProcess(["lmt", *args], code, *texts)


def _read(connection: socket.socket, count: int) -> bytes:
    """Returns that many bytes; fewer mean that the other side has ended."""
    content = b""
    while len(content) < count and (more := connection.recv(count - len(content))):
        content += more
    assert len(content) == count, "the server of `lmt` has ended"
    return content


def _serve(connection: socket.socket) -> dict[str, Any] | None:
    """Forks for each command: returns it in the fork, and None in the server at the end."""
    while True:
        length, files, _, _ = socket.recv_fds(connection, 8, 3)
        if not length:
            return None
        request = json.loads(_read(connection, int.from_bytes(length, "little")))
        if not (pid := os.fork()):
            for file, number in zip(files, (0, 1, 2), strict=True):
                os.dup2(file, number)
            return request
        for file in files:
            os.close(file)
        connection.sendall(pid.to_bytes(8, "little"))
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        connection.sendall(code.to_bytes(8, "little", signed=True))


def main() -> None:
    # Imported for what they bring along. Nothing here may start a thread, which a fork would be without.
    import grain  # noqa: F401
    import orbax.checkpoint  # noqa: F401

    import lm_trainer.run.train  # noqa: F401
    from cli.main import main as lmt

    with contextlib.closing(socket.socket(fileno=int(sys.argv[1]))) as connection:
        request = _serve(connection)
    if request is not None:
        os.chdir(request["cwd"])
        os.environ.clear()
        os.environ.update(request["env"])
        sys.argv, sys.path[0] = ["-c", *request["args"]], ""
        lmt()


if __name__ == "__main__":
    main()
