"""The part of GCS's JSON API that a lease needs, with its preconditions, which the emulator does not heed.

https://cloud.google.com/storage/docs/json_api/v1/objects, and .../request-preconditions.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    # Of clients that connect at once, one that finds no place in the queue tries again after a second.
    request_queue_size = 128

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.objects: dict[str, tuple[int, bytes]] = {}
        self.generations = itertools.count(1)
        self.one_at_a_time = threading.Lock()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    # An answer is two writes, of which the second would wait some 40 ms for the client to confirm the first.
    disable_nagle_algorithm = True
    server: _Server

    def do_GET(self) -> None:
        name, query = self._parse_request()
        if not name:
            items = [{"name": key} for key in sorted(self.server.objects) if key.startswith(query.get("prefix", ""))]
            self._answer(200, json.dumps({"kind": "storage#objects", "items": items}).encode())
        elif name not in self.server.objects:
            self._answer(404)
        else:
            generation, content = self.server.objects[name]
            self._answer(200, content, generation)

    def do_POST(self) -> None:
        _, query = self._parse_request()
        content = self.rfile.read(int(self.headers["Content-Length"]))
        with self.server.one_at_a_time:
            held, generation = self._matches_generation(query["name"], query), next(self.server.generations)
            if held:
                self.server.objects[query["name"]] = generation, content
        named = json.dumps({"name": query["name"], "generation": str(generation)})
        self._answer(200 if held else 412, named.encode())

    def do_DELETE(self) -> None:
        name, query = self._parse_request()
        with self.server.one_at_a_time:
            status = 404 if name not in self.server.objects else 204 if self._matches_generation(name, query) else 412
            if status == 204:
                del self.server.objects[name]
        self._answer(status)

    def _matches_generation(self, name: str, query: dict[str, str]) -> bool:
        """Tells whether the object is at the generation that the request names; 0 means that there is none."""
        expected_generation = query.get("ifGenerationMatch")
        return expected_generation is None or int(expected_generation) == self.server.objects.get(name, (0, b""))[0]

    def _parse_request(self) -> tuple[str, dict[str, str]]:
        """The object of the path, empty where it is that of all objects, and the query."""
        parts = urlsplit(self.path)
        query = {key: values[0] for key, values in parse_qs(parts.query).items()}
        return unquote(parts.path.partition("/o")[2].removeprefix("/")), query

    def _answer(self, status: int, content: bytes = b"", generation: int | None = None) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        if generation is not None:
            self.send_header("X-Goog-Generation", str(generation))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        """Says nothing."""


@contextlib.contextmanager
def conditional_gcs() -> Iterator[str]:
    """Runs the server; yields its endpoint. Any bucket exists."""
    server = _Server()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
