"""`lmt` in processes that have imported JAX already: forks of a server, which has started no thread and no backend.

A start of Python with JAX, Flax and Orbax takes seconds, most of a test that looks at what a command does.

    server = WarmLmt(environment)
    server.start(["train", "run.yaml"], cwd=..., env=..., stdout=..., stderr=...)
    server.run(["train", "run.yaml"], cwd=..., env=..., timeout=300)
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

READ_LATE = ("COLUMNS", "PATH", "PYTEST_CURRENT_TEST", "XLA_FLAGS")
READ_BY_THE_HUB = ("HF_ENDPOINT", "HF_HOME", "HF_HUB_OFFLINE", "HF_TOKEN", "HF_HUB_DISABLE_PROGRESS_BARS")
READ_WITH_A_BUCKET = ("AWS_ENDPOINT_URL", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_REGION")
READ_BY_RAY = (
    *("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "RAY_USAGE_STATS_ENABLED"),
    *("RAY_AUTH_MODE", "RAY_AUTH_TOKEN"),
)
SET_BY_IMPORTS = (
    *("TF_CPP_MIN_LOG_LEVEL", "TPU_SKIP_MDS_QUERY"),  # jax
    *("TORCHINDUCTOR_CACHE_DIR", "KMP_DUPLICATE_LIB_OK"),  # torch
    *("TQDM_DISABLE", "RAY_CLIENT_MODE"),  # lm_eval, ray
)
IGNORED = (*READ_LATE, *READ_BY_THE_HUB, *READ_WITH_A_BUCKET, *READ_BY_RAY, *SET_BY_IMPORTS)
"""Variables that may differ between the server and its forks: nothing reads them while it is imported, or libraries set
them then."""


class WarmProcess:
    """A fork that runs a command, with the methods of `subprocess.Popen` that tests use.

    Attributes:
        pid: process number; the parent is the server.
        returncode: None until `poll` or `wait` has seen the end; negative for a signal.
    """

    def __init__(self, args: list[str], connection: socket.socket) -> None:
        self.args, self.returncode = args, None
        self._connection = connection
        self.pid = int.from_bytes(_read(connection, 8), "little")

    returncode: int | None

    def poll(self) -> int | None:
        """Returns the exit code, or None while the command runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(timeout=0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Returns the exit code.

        Raises:
            subprocess.TimeoutExpired: the command still runs after `timeout` seconds.
        """
        if self.returncode is None:
            if not select.select([self._connection], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(["lmt", *self.args], timeout or 0)
            self.returncode = int.from_bytes(_read(self._connection, 8), "little", signed=True)
            self._connection.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Sends a signal to the command, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Kills the command, unless it has ended."""
        self.send_signal(signal.SIGKILL)


class WarmLmt:
    """The server of one process, which starts with the first command and ends with that process."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._whole_environment = dict(environment)
        self._environment = {name: value for name, value in environment.items() if name not in IGNORED}
        self._server: tuple[socket.socket, subprocess.Popen[bytes]] | None = None

    def close(self) -> None:
        """Ends the server."""
        if self._server is not None:
            connection, process = self._server
            connection.close()
            process.wait()

    def _connection(self) -> socket.socket:
        if self._server is None:
            server_end, child_end = socket.socketpair()
            command = [sys.executable, "-m", "tests.warm_lmt", str(child_end.fileno())]
            process = subprocess.Popen(command, env=self._whole_environment, pass_fds=[child_end.fileno()])
            child_end.close()
            self._server = server_end, process
        return self._server[0]

    def takes(self, env: Mapping[str, str]) -> bool:
        """Tells whether a fork does as a new process with that environment would."""
        return {name: value for name, value in env.items() if name not in IGNORED} == self._environment

    def start(
        self, args: list[str], *, cwd: Path, env: Mapping[str, str], stdout: IO[Any], stderr: IO[Any]
    ) -> WarmProcess:
        """Starts a command with no input, as `subprocess.Popen` does."""
        content = json.dumps({"args": args, "cwd": str(cwd), "env": dict(env)}).encode()
        connection, (reply_end, child_end) = self._connection(), socket.socketpair()
        with child_end, open(os.devnull) as stdin:
            files = [stdin.fileno(), stdout.fileno(), stderr.fileno(), child_end.fileno()]
            socket.send_fds(connection, [len(content).to_bytes(8, "little")], files)
            connection.sendall(content)
        return WarmProcess(args, reply_end)

    def run(
        self, args: list[str], *, cwd: Path, env: Mapping[str, str], timeout: float
    ) -> subprocess.CompletedProcess[str]:
        """Does as `subprocess.run` with no input, captured text and `check=False`.

        Raises:
            subprocess.TimeoutExpired: the command, which is killed, has not ended in time.
        """
        with tempfile.TemporaryFile() as stdout, tempfile.TemporaryFile() as stderr:
            process = self.start(args, cwd=cwd, env=env, stdout=stdout, stderr=stderr)
            try:
                code = process.wait(timeout)
            finally:
                process.kill()
                process.wait()
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


class _Server:
    """Forks for each request that comes, and tells the exit code of each fork over a connection of its own."""

    def __init__(self, requests: socket.socket) -> None:
        self._requests = requests
        self._running: dict[int, socket.socket] = {}
        self._wakeup, written = socket.socketpair()
        self._written = written
        for end in (self._wakeup, written):
            end.setblocking(False)
        signal.set_wakeup_fd(written.fileno())
        signal.signal(signal.SIGCHLD, lambda *_: None)  # only handled signals are written

    def serve(self) -> dict[str, Any] | None:
        """Returns a request in the fork that is to do it, and None in the server at the end."""
        while True:
            ready, _, _ = select.select([self._requests, self._wakeup], [], [])
            if self._wakeup in ready:
                self._wakeup.recv(4096)
                self._tell_exit_codes()
            if self._requests in ready:
                length, files, _, _ = socket.recv_fds(self._requests, 8, 4)
                if not length:
                    return None
                request = json.loads(_read(self._requests, int.from_bytes(length, "little")))
                if not (pid := os.fork()):
                    self._become_process(files)
                    return request
                connection = self._running[pid] = socket.socket(fileno=files.pop())
                for file in files:
                    os.close(file)
                connection.sendall(pid.to_bytes(8, "little"))

    def _tell_exit_codes(self) -> None:
        for pid, connection in list(self._running.items()):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                code = os.waitstatus_to_exitcode(status)
                with connection, contextlib.suppress(OSError):  # the test has gone
                    connection.sendall(code.to_bytes(8, "little", signed=True))
                del self._running[pid]

    def _become_process(self, files: list[int]) -> None:
        """Makes a fork a process like any other, with these files and nothing of the server's."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for end in (self._wakeup, self._written, self._requests, *self._running.values()):
            end.close()
        *standard, connection = files
        for file, number in zip(standard, (0, 1, 2), strict=True):
            os.dup2(file, number)
            os.close(file)
        os.close(connection)


def main() -> None:
    # Imported for what they bring along. Nothing here may start a thread, which a fork would be without.
    import grain  # noqa: F401
    import orbax.checkpoint  # noqa: F401

    import lm_trainer.run.train  # noqa: F401
    from cli.main import main as lmt
    from tests.compiling import keep_all_programs

    keep_all_programs()
    early = sys.modules.keys() & {"huggingface_hub", "ray"}
    assert not early, f"{', '.join(early)} read the environment while they are imported"
    gc.freeze()  # or a collection in a fork would copy all pages
    gc.set_threshold(100_000, 20, 100)
    request = _Server(socket.socket(fileno=int(sys.argv[1]))).serve()
    if request is not None:
        os.chdir(request["cwd"])
        os.environ.clear()
        os.environ.update(request["env"])
        sys.argv, sys.path[0] = ["-c", *request["args"]], ""
        lmt()


if __name__ == "__main__":
    main()
