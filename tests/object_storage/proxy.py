"""Proxy in front of a server of object storage that loses, delays, cuts, refuses and denies requests."""

from __future__ import annotations

import contextlib
import http.client
import random
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

Fault = Callable[["Handler"], bool]
"""Treats a request before it is forwarded; True if that was all."""


class Proxy(ThreadingHTTPServer):
    """Forwards to `upstream`, after whatever `fault` does to a request.

    Attributes:
        fault: of the requests that come, from now on; None: none.
        requests: method and path of every request so far.
    """

    daemon_threads = True
    # A client connects for all arrays at once; one that finds no place in the queue tries again after a second.
    request_queue_size = 128

    def __init__(self, upstream: str):
        super().__init__(("127.0.0.1", 0), Handler)
        self.upstream = urlsplit(upstream).netloc
        self.fault: Fault | None = None
        self.requests: list[tuple[str, str]] = []

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, request: object, client_address: object) -> None:
        """Nothing: connections break here by design."""


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    # An answer is two writes, of which the second would wait some 40 ms for the client to confirm the first.
    disable_nagle_algorithm = True
    server: Proxy

    def handle_one(self) -> None:
        self.server.requests.append((self.command, self.path))
        self.body = self.rfile.read(int(self.headers.get("content-length") or 0))
        if self.server.fault is not None and self.server.fault(self):
            return
        status, headers, content = self.forward()
        self.answer(status, headers, content)

    do_GET = do_PUT = do_HEAD = do_POST = do_DELETE = do_PATCH = handle_one

    def forward(self) -> tuple[int, list[tuple[str, str]], bytes]:
        """Sends the request on and returns the answer."""
        upstream = http.client.HTTPConnection(self.server.upstream, timeout=60)
        try:
            upstream.request(self.command, self.path, self.body, dict(self.headers.items()))
            answer = upstream.getresponse()
            return answer.status, answer.getheaders(), answer.read()
        finally:
            upstream.close()

    def answer(self, status: int, headers: list[tuple[str, str]], content: bytes, *, length: int | None = None) -> None:
        self.send_response_only(status)
        for name, value in headers:
            if name.lower() not in ("connection", "transfer-encoding") and (
                name.lower() != "content-length" or self.command == "HEAD"
            ):
                self.send_header(name, value)
        if self.command != "HEAD":
            self.send_header("Content-Length", str(len(content) if length is None else length))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, *args: object) -> None:
        """Nothing."""


def drop(handler: Handler) -> bool:
    """Loses the request."""
    handler.close_connection = True
    return True


def lose_answer(handler: Handler) -> bool:
    """Carries the request out, and loses the answer."""
    handler.forward()
    handler.close_connection = True
    return True


def cut_connection(handler: Handler) -> bool:
    """Breaks the connection in the middle of the answer."""
    status, headers, content = handler.forward()
    handler.answer(status, headers, content[: len(content) // 2], length=len(content))
    handler.wfile.flush()
    handler.close_connection = True
    return True


def delay(seconds: float) -> Fault:
    """Lets the request wait."""

    def fault(handler: Handler) -> bool:
        time.sleep(seconds)
        return False

    return fault


def refuse(status: int, code: str = "") -> Fault:
    """Answers with a status, such as 429, 500 or 503, and S3's code of the error, by default the usual one."""
    code = code or {403: "AccessDenied", 301: "PermanentRedirect"}.get(status, "SlowDown")

    def fault(handler: Handler) -> bool:
        handler.answer(status, [], f"<Error><Code>{code}</Code><Message>{code}</Message></Error>".encode())
        return True

    return fault


def limit_to(fault: Fault, *methods: str, path: str = "") -> Fault:
    """Does so to requests of these methods alone, whose path holds a text."""
    return lambda handler: handler.command in methods and path in handler.path and fault(handler)


def inject_randomly(faults: list[Fault], share: float, seed: int = 0) -> Fault:
    """Does one of several to a share of all requests."""
    rng, lock = random.Random(seed), threading.Lock()

    def fault(handler: Handler) -> bool:
        with lock:
            chosen = rng.choice(faults) if rng.random() < share else None
        return chosen is not None and chosen(handler)

    return fault


PASSING: list[Fault] = [drop, lose_answer, cut_connection, delay(0.2), refuse(429), refuse(500), refuse(503)]
"""Faults that a request survives when it is sent again."""


@contextlib.contextmanager
def run_proxy(upstream: str) -> Iterator[Proxy]:
    """Runs a proxy."""
    proxy = Proxy(upstream)
    # It looks for its end as often as this, by default twice a second.
    thread = threading.Thread(target=proxy.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield proxy
    finally:
        proxy.shutdown()
        proxy.server_close()
        thread.join()
