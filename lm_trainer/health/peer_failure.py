"""The processes of a run watch one another: when one of them ends before its time, the others name it and end too.

Without it they would wait for the missing one inside a collective operation. Every process holds a connection to the
first one, which the operating system closes when a process dies, whatever it died of.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from typing import Any, Self

import jax
import numpy as np

from lm_trainer.core.errors import EXIT_CRASH, UserError
from lm_trainer.parallel.distributed import DistributedConfig
from lm_trainer.parallel.processes import gather, is_lead
from lm_trainer.trackers import Progress

GRACE = 10.0
"""Seconds in which a process is expected to fail by itself after another has failed, before it is made to end."""

_CONNECT_SECONDS = 10.0
_NAME_BYTES, _TOKEN_BYTES = 256, 16
_KEEPALIVE = {"TCP_KEEPIDLE": 20, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 4}
"""A machine that is gone without closing its connections is noticed after a minute."""


def join_processes(config: DistributedConfig, progress: Progress) -> FailureDetector:
    """Connects the processes of the run, says what was found, and leaves the progress to the first of them.

    Raises:
        UserError: as `DistributedConfig.start`.
    """
    found = config.start()
    if found:
        progress.note(found)
    if not is_lead():
        progress.close()
    return FailureDetector(progress)


class FailureDetector:
    """While active in all processes of a run, none outlives another for long; use it as a context manager.

    A process that fails says why. One that is killed or loses its machine cannot, and is named by the others.
    """

    def __init__(self, progress: Progress):
        self._progress = progress
        self._links: dict[int, _Link] = {}
        self._names: list[str] = []
        self._reported, self._all_failed = False, threading.Event()
        self._failed: set[int] = set()
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        if jax.process_count() > 1:
            host = socket.gethostname()
            self._names = [
                f"process {index} of {jax.process_count()} ({name})"
                for index, name in enumerate(_gather_texts(f"{host}, pid {os.getpid()}"))
            ]
            self._connect(_gather_texts(host))
            for index, link in self._links.items():
                threading.Thread(target=self._listen, args=(index, link), daemon=True).start()
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self.report(kind, error, trace)
        for link in self._links.values():
            if error is None:
                link.send(end=None)
            link.close()

    def report(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        """Tells the others of a failure, before anything waits for them; has the form of `__exit__`.

        Where they fail alike, as on a loss that is not finite, returns when all have said so. Where only this process
        fails, prints the error and ends it: whatever closes after this would wait for the others.
        """
        del kind, trace
        if error is None or self._reported or not self._links:
            return
        self._reported = True
        code = error.exit_code if isinstance(error, UserError) else EXIT_CRASH
        reason = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
        if is_lead():
            self._note_failure(0)
        for link in self._links.values():
            link.send(end=reason.splitlines()[0] if reason else type(error).__name__, code=code)
        if self._all_failed.wait(GRACE):
            return
        if isinstance(error, UserError):
            sys.stderr.write(f"error: {error}\n")
        else:
            traceback.print_exception(error)
        _exit(code)

    def _connect(self, hosts: list[str]) -> None:
        lead_host = hosts[0]
        local = len(set(hosts)) == 1
        server = None
        if is_lead():
            server = socket.create_server(("127.0.0.1" if local else "", 0), backlog=len(hosts))
        port = "" if server is None else str(server.getsockname()[1])
        address, token = _gather_texts(f"{port} {secrets.token_hex(_TOKEN_BYTES)}")[0].split()
        if server is not None:
            with server:
                self._accept(server, token, len(hosts) - 1)
        else:
            self._dial("127.0.0.1" if local else lead_host, int(address), token)
        missing = [index for index, n in enumerate(gather(np.asarray(len(self._links)))) if index and not n]
        if missing:
            self._progress.note(
                f"warning: processes {', '.join(map(str, missing))} cannot connect to {lead_host}, port {address}; "
                f"when one of them dies, the others end after JAX's own time limit of about 100 s"
            )

    def _accept(self, server: socket.socket, token: str, count: int) -> None:
        end = time.monotonic() + _CONNECT_SECONDS
        while len(self._links) < count and (left := end - time.monotonic()) > 0:
            server.settimeout(left)
            with contextlib.suppress(OSError, ValueError, KeyError):
                connection = server.accept()[0]
                connection.settimeout(_CONNECT_SECONDS)
                link = _Link(connection)
                hello = next(link.messages(), {})
                if secrets.compare_digest(str(hello["token"]), token):
                    connection.settimeout(None)
                    self._links[int(hello["process"])] = link

    def _dial(self, host: str, port: int, token: str) -> None:
        with contextlib.suppress(OSError):
            connection = socket.create_connection((host, port), _CONNECT_SECONDS)
            connection.settimeout(None)
            self._links[0] = _Link(connection)
            self._links[0].send(token=token, process=jax.process_index())

    def _listen(self, index: int, link: _Link) -> None:
        """Reads what process `index` says, until it has ended, and acts on it."""
        for message in link.messages():
            if "lost" in message:
                _exit_with_reason(message["lost"], EXIT_CRASH)
            elif "all" in message:
                self._all_failed.set()
            elif message["end"] is None:
                return
            else:
                self._note_failure(index)
                text = f"{self._names[index]} stopped: {message['end']}"
                threading.Thread(target=self._follow, args=(text, message["code"]), daemon=True).start()
        if index not in self._failed and not link.closed:
            text = f"{self._names[index]} is gone: it was killed, or its machine was lost"
            self._relay(lost=text)
            _exit_with_reason(text, EXIT_CRASH)

    def _note_failure(self, index: int) -> None:
        with self._lock:
            self._failed.add(index)
            if is_lead() and len(self._failed) == len(self._names):
                self._all_failed.set()
                self._relay(all=True)

    def _follow(self, text: str, code: int) -> None:
        """Ends this process as well, unless it fails by itself."""
        if not self._all_failed.wait(GRACE) and not self._reported:
            self._relay(lost=text)
            _exit_with_reason(text, code)

    def _relay(self, **message: Any) -> None:
        """From the first process to the others, which are connected to it alone."""
        if is_lead():
            for link in self._links.values():
                link.send(**message)


class _Link:
    """A connection that carries one JSON object in each line."""

    def __init__(self, connection: socket.socket):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEPALIVE.items():
            if hasattr(socket, name):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        self._connection, self.closed = connection, False

    def send(self, **message: Any) -> None:
        with contextlib.suppress(OSError):
            self._connection.sendall(json.dumps(message).encode() + b"\n")

    def messages(self) -> Iterator[dict[str, Any]]:
        """What arrives, until the other side is gone."""
        with contextlib.suppress(OSError, ValueError), self._connection.makefile("rb") as lines:
            while line := lines.readline(1 << 16):
                yield json.loads(line)

    def close(self) -> None:
        self.closed = True
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()


def _gather_texts(text: str) -> list[str]:
    """This text of every process."""
    encoded = text.encode()[:_NAME_BYTES]
    padded = np.frombuffer(encoded.ljust(_NAME_BYTES, b"\0"), np.uint8)
    return [row.tobytes().rstrip(b"\0").decode(errors="replace") for row in gather(padded)]


def _exit_with_reason(text: str, code: int) -> None:
    sys.stderr.write(
        f"\nerror: {text}. This process ends with it; the same command goes on from the newest checkpoint\n"
    )
    _exit(code)


def _exit(code: int) -> None:
    """Ends the process at once: its main thread may wait for ever, and so would everything that runs at an end."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
