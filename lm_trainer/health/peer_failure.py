"""Failure detector for the processes of a run: when one dies, the others report it and exit too.

Without it they would wait forever for the missing process in a collective operation. Every other process holds a TCP
connection to process 0, which the operating system closes when either process dies for any reason.

The heartbeat of `jax.distributed` is no replacement (measured with jax 0.10.2, three processes on a CPU,
`heartbeat_timeout_seconds=10`). If one process receives SIGKILL, the others end after 10.3 s instead of 0.2 s, by
SIGABRT with a C++ stack trace that contains the process index but neither host nor PID. A failing process cannot report
the reason. A timeout of one or two seconds would be as quick, but would end a run whenever a process is suspended that
long (SIGSTOP, a sleeping laptop). A TCP connection survives such a suspension.
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
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any, Self

import jax
import numpy as np

from lm_trainer.core.errors import EXIT_CRASH, UserError
from lm_trainer.core.terminal import escape_for_terminal
from lm_trainer.parallel.distributed import DistributedConfig
from lm_trainer.parallel.processes import gather, gather_texts, is_lead
from lm_trainer.trackers import Progress

GRACE = 10.0
"""Number of seconds that a process has to fail by itself after another one failed, before it is forced to exit."""

# All processes connect right after a collective operation, so a longer wait means that a firewall blocks the
# connection.
_CONNECT_SECONDS = 10.0
_TOKEN_BYTES = 16
_MAX_LINE_BYTES = 1 << 16
_KEEPALIVE = {"TCP_KEEPIDLE": 20, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 4}
"""Socket options that detect after 20 + 4 * 10 seconds a machine that was lost without closing its connections, for
example by a power cut or a network failure."""


def join_processes(config: DistributedConfig, progress: Progress) -> FailureDetector:
    """Connects the processes of the run, notes their number, and closes the progress display except in process 0.

    Raises:
        UserError: see `DistributedConfig.start`.
    """
    description = config.start(progress.note)
    if description:
        progress.note(description)
    if not is_lead():
        progress.close()
    return FailureDetector(progress)


class FailureDetector:
    """Context manager, entered by all processes of a run, that ends all of them soon after one dies.

    A process that fails reports the reason itself. If a process was killed or its machine was lost, the other processes
    report it.
    """

    def __init__(self, progress: Progress):
        self._progress = progress
        # Connections by process index: process 0 is connected to all other processes, and each of them only to process
        # 0.
        self._connections: dict[int, _Connection] = {}
        self._names: list[str] = []
        self._reported, self._all_failed = False, threading.Event()
        self._failed: set[int] = set()
        # Process 0 has one listening thread per connection; they share `_failed`.
        self._lock = threading.Lock()
        # Cached, because threads may need it while the process exits, after JAX has shut down.
        self._leads = False

    def __enter__(self) -> Self:
        self._leads = is_lead()
        if jax.process_count() > 1:
            host = socket.gethostname()
            self._names = [
                f"process {index} of {jax.process_count()} ({name})"
                for index, name in enumerate(gather_texts(f"{host}, pid {os.getpid()}"))
            ]
            self._connect(gather_texts(host))
            for index, connection in self._connections.items():
                # Messages are read in a thread, because the main thread may hang in a collective operation when one
                # arrives. It is a daemon thread, because a blocking read must not prevent the process from exiting.
                threading.Thread(target=self._listen, args=(index, connection), daemon=True).start()
        return self

    @property
    def process_names(self) -> Sequence[str]:
        """Names of the processes with their hosts, in order; empty for a run of one process."""
        return self._names

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.report(kind, error, trace)
        for connection in self._connections.values():
            if error is None:
                # Goodbye message: a connection closed without it counts as a death.
                connection.send(end=None)
            connection.close()

    def report(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Reports a failure to the other processes before any cleanup waits for them.

        Takes the arguments of `__exit__`.

        If all processes fail, for example because of a non-finite loss, this method returns once all of them have
        reported. If only this process fails, it prints the error and exits the process, because later cleanup would
        wait for the others.
        """
        del kind, trace
        if error is None or self._reported or not self._connections:
            return
        self._reported = True
        code = error.exit_code if isinstance(error, UserError) else EXIT_CRASH
        reason = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
        if self._leads:
            self._record_failure(0)
        for connection in self._connections.values():
            connection.send(end=reason.splitlines()[0] if reason else type(error).__name__, code=code)
        if self._all_failed.wait(GRACE):
            return
        if isinstance(error, UserError):
            sys.stderr.write(escape_for_terminal(f"error: {error}\n"))
        else:
            traceback.print_exception(error)
        _exit(code)

    def _connect(self, hosts: list[str]) -> None:
        lead_host = hosts[0]
        local = len(set(hosts)) == 1
        server = None
        if is_lead():
            # Listens only on the loopback interface if all processes run on one machine, so that no other machine can
            # connect.
            server = socket.create_server(("127.0.0.1" if local else "", 0), backlog=len(hosts))
        port = "" if server is None else str(server.getsockname()[1])
        # The operating system chooses the port, and a token keeps strangers out. Both are distributed by a collective
        # operation, since these already work.
        port, token = gather_texts(f"{port} {secrets.token_hex(_TOKEN_BYTES)}")[0].split()
        if server is not None:
            with server:
                self._accept_connections(server, token, len(hosts) - 1)
        else:
            self._connect_to_lead("127.0.0.1" if local else lead_host, int(port), token)
        missing = [index for index, n in enumerate(gather(np.asarray(len(self._connections)))) if index and not n]
        if missing:
            self._progress.note(
                f"warning: processes {', '.join(map(str, missing))} cannot connect to {lead_host}, port {port}; "
                f"when one of them dies, the others end after JAX's own time limit of about 100 s"
            )

    def _accept_connections(self, server: socket.socket, token: str, count: int) -> None:
        end = time.monotonic() + _CONNECT_SECONDS
        while len(self._connections) < count and (left := end - time.monotonic()) > 0:
            server.settimeout(left)
            with contextlib.suppress(OSError, ValueError, KeyError):
                accepted = server.accept()[0]
                accepted.settimeout(_CONNECT_SECONDS)
                connection = _Connection(accepted)
                hello = next(connection.messages(), {})
                # Compares in constant time, so that the token cannot be guessed byte by byte.
                if secrets.compare_digest(str(hello["token"]), token):
                    # No timeout from here on, because messages are only sent at the end of the run.
                    accepted.settimeout(None)
                    self._connections[int(hello["process"])] = connection

    def _connect_to_lead(self, host: str, port: int, token: str) -> None:
        # A process that cannot connect still trains. `_connect` counts the connections and warns about the missing
        # ones.
        with contextlib.suppress(OSError):
            dialled = socket.create_connection((host, port), _CONNECT_SECONDS)
            dialled.settimeout(None)
            self._connections[0] = _Connection(dialled)
            self._connections[0].send(token=token, process=jax.process_index())

    def _listen(self, index: int, connection: _Connection) -> None:
        """Reads and handles the messages of process `index` until that process ends."""
        for message in connection.messages():
            if "lost" in message:
                _exit_with_reason(message["lost"], EXIT_CRASH)
            elif "all" in message:
                self._all_failed.set()
            elif message["end"] is None:
                return
            else:
                self._record_failure(index)
                # If this process has failed too, it exits anyway, and it may be too late to start threads.
                if not self._reported:
                    text = f"{self._names[index]} stopped: {message['end']}"
                    # Uses another thread, because this one must keep reading: a message that all have failed may
                    # follow.
                    threading.Thread(target=self._exit_with_peer, args=(text, message["code"]), daemon=True).start()
        # The connection was closed without a goodbye message, and not by this process.
        if index not in self._failed and not connection.closed:
            text = f"{self._names[index]} is gone: it was killed, or its machine was lost"
            self._forward(lost=text)
            _exit_with_reason(text, EXIT_CRASH)

    def _record_failure(self, index: int) -> None:
        with self._lock:
            self._failed.add(index)
            if self._leads and len(self._failed) == len(self._names):
                # Notify the others first: after the event is set, this process begins to exit.
                self._forward(all=True)
                self._all_failed.set()

    def _exit_with_peer(self, text: str, code: int) -> None:
        """Ends this process too, unless it fails by itself within `GRACE` seconds with a more specific error."""
        if not self._all_failed.wait(GRACE) and not self._reported:
            self._forward(lost=text)
            _exit_with_reason(text, code)

    def _forward(self, **message: Any) -> None:
        """Forwards a message from process 0 to the others, which are connected only to it."""
        if self._leads:
            for connection in self._connections.values():
                connection.send(**message)


class _Connection:
    """A connection that carries one JSON object per line."""

    def __init__(self, connection: socket.socket):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        # Not every system supports setting the keepalive times.
        for name, value in _KEEPALIVE.items():
            if hasattr(socket, name):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        self._connection, self.closed = connection, False

    def send(self, **message: Any) -> None:
        # The peer may already be dead; the listening thread reports that.
        with contextlib.suppress(OSError):
            self._connection.sendall(json.dumps(message).encode() + b"\n")

    def messages(self) -> Iterator[dict[str, Any]]:
        """Yields incoming messages until the connection closes."""
        with contextlib.suppress(OSError, ValueError), self._connection.makefile("rb") as lines:
            while line := lines.readline(_MAX_LINE_BYTES):
                yield json.loads(line)

    def close(self) -> None:
        # Set the flag first: without it, the listening thread treats a closed connection as a death.
        self.closed = True
        with contextlib.suppress(OSError):
            # `close` without `shutdown` would not wake a thread that is reading.
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()


def _exit_with_reason(text: str, code: int) -> None:
    message = f"\nerror: {text}. This process ends with it; the same command goes on from the newest checkpoint\n"
    sys.stderr.write(escape_for_terminal(message))
    _exit(code)


def _exit(code: int) -> None:
    """Exits immediately. The main thread may be blocked forever, and `sys.exit` would wait for it."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
