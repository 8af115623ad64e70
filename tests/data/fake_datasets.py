"""A hub of data sets on loopback, just large enough for huggingface_hub to list and read files."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar
from urllib.parse import parse_qs, unquote, urlsplit

COMMIT = "c0ffee" * 6 + "c0ff"


@dataclass
class FakeDatasets:
    endpoint: str = ""
    files: dict[str, dict[str, bytes]] = field(default_factory=dict)
    """The content of every file of every data set."""
    cards: dict[str, dict[str, Any]] = field(default_factory=dict)
    """The YAML of a data set's card, parsed."""
    requests: list[str] = field(default_factory=list)


@contextmanager
def fake_datasets() -> Iterator[FakeDatasets]:
    """Serves one commit, `COMMIT`, of every data set, also under the name `main`, until the block ends."""
    hub = FakeDatasets()
    handler = type("Handler", (_Handler,), {"hub": hub})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.daemon_threads = True
        hub.endpoint = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        try:
            yield hub
        finally:
            server.shutdown()
            thread.join()


class _Handler(BaseHTTPRequestHandler):
    hub: ClassVar[FakeDatasets]

    def log_message(self, *_: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self._serve()

    def do_GET(self) -> None:
        self._serve()

    def do_POST(self) -> None:
        self._serve()

    def _serve(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path = unquote(urlsplit(self.path).path)
        self.hub.requests.append(f"{self.command} {path}")
        if match := re.fullmatch(
            r"/api/datasets/([^/]+/[^/]+)(?:/(revision|paths-info|tree)/([^/]+)(?:/(.*))?)?", path
        ):
            name, verb, revision, below = match.groups()
            if name in self.hub.files and revision in (None, "main", COMMIT):
                return self._api(name, verb, below or "", body)
        elif match := re.fullmatch(r"/datasets/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            content = self.hub.files.get(match[1], {}).get(match[3])
            if content is not None and match[2] == COMMIT:
                return self._file(content)
        return self._send(404, {"error": "not found"}, {"X-Error-Code": "RepoNotFound"})

    def _api(self, name: str, verb: str | None, below: str, body: bytes) -> None:
        files = self.hub.files[name]
        if verb == "paths-info":
            paths = json.loads(body)["paths"] if body[:1] == b"{" else parse_qs(body.decode())["paths"]
            return self._send(200, [_entry(path, files[path]) for path in paths if path in files])
        if verb == "tree":
            return self._send(200, [_entry(p, c) for p, c in files.items() if p.startswith(below)])
        siblings = [{"rfilename": path, "size": len(content)} for path, content in files.items()]
        info = {"_id": "1", "id": name, "sha": COMMIT, "private": False, "tags": [], "downloads": 0, "likes": 0}
        return self._send(200, {**info, "siblings": siblings, "cardData": self.hub.cards.get(name)})

    def _file(self, content: bytes) -> None:
        headers = {"ETag": f'"{hashlib.sha1(content).hexdigest()}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        if match := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or ""):
            start, stop = int(match[1]), int(match[2] or len(content) - 1) + 1
            total = len(content)
            content = content[start:stop]
            headers["Content-Range"] = f"bytes {start}-{start + len(content) - 1}/{total}"
            return self._send(206, content, headers)
        return self._send(200, content, headers)

    def _send(self, status: int, content: Any, headers: dict[str, str] | None = None) -> None:
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        kind = "application/octet-stream" if isinstance(content, bytes) else "application/json"
        for key, value in {"Content-Type": kind, "Content-Length": str(len(data)), **(headers or {})}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)


def _entry(path: str, content: bytes) -> dict[str, Any]:
    return {"type": "file", "path": path, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
