"""A model hub on loopback, just large enough for what huggingface_hub asks when it pushes and downloads a model."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar
from urllib.parse import unquote, urlsplit

TOKEN = "hf_CANARYcanaryCANARYcanary"


@dataclass
class Repo:
    private: bool
    files: dict[str, bytes] = field(default_factory=dict)

    @property
    def sha(self) -> str:
        return hashlib.sha1(repr(sorted(self.files)).encode()).hexdigest()


@dataclass
class FakeHub:
    endpoint: str = ""
    repos: dict[str, Repo] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)
    answer: int | None = None
    """An HTTP status that every request gets instead of service."""

    def environment(self, token: str | None = TOKEN) -> dict[str, str]:
        """The environment of a client in a subprocess, in which it sees this hub alone."""
        base = {"HF_ENDPOINT": self.endpoint, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
        return base | ({"HF_TOKEN": token} if token is not None else {})


@contextmanager
def fake_hub() -> Iterator[FakeHub]:
    """Serves until the block ends. Takes only `TOKEN`, and lets anybody read what is public."""
    hub = FakeHub()
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
    hub: ClassVar[FakeHub]

    def log_message(self, *_: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self._serve("HEAD")

    def do_GET(self) -> None:
        self._serve("GET")

    def do_POST(self) -> None:
        self._serve("POST")

    def _serve(self, method: str) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path = unquote(urlsplit(self.path).path)
        self.hub.requests.append(f"{method} {path}")
        if self.hub.answer:
            return self._send(self.hub.answer, {"error": "the hub says no"})
        authorized = self.headers.get("Authorization") == f"Bearer {TOKEN}"
        if path == "/api/validate-yaml":
            return self._send(200, {"errors": [], "warnings": []})
        if path == "/api/whoami-v2":
            return self._send(200, {"name": "me"}) if authorized else self._send(401, {"error": "Invalid token"})
        if path == "/api/repos/create":
            return self._create(json.loads(body), authorized)
        if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/(revision|tree|preupload|commit)/([^/]+))?", path):
            return self._api(match[1], match[2], body, authorized)
        if match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/[^/]+/(.+)", path):
            return self._file(match[1], match[2], authorized)
        return self._send(404, {"error": "not found"})

    def _repo(self, name: str, authorized: bool) -> Repo | None:
        repo = self.hub.repos.get(name)
        return repo if repo and (authorized or not repo.private) else None

    def _create(self, request: dict[str, Any], authorized: bool) -> None:
        if not authorized:
            return self._send(401, {"error": "Invalid username or password."})
        name = f"{request['organization']}/{request['name']}"
        if name in self.hub.repos:
            return self._send(409, {"error": "You already created this model repo", "url": self._url(name)})
        private = request.get("private", request.get("visibility") == "private")
        self.hub.repos[name] = Repo(private=private)
        return self._send(200, {"url": self._url(name), "name": name, "id": name})

    def _url(self, name: str) -> str:
        return f"{self.hub.endpoint}/{name}"

    def _api(self, name: str, verb: str | None, body: bytes, authorized: bool) -> None:
        repo = self._repo(name, authorized)
        if repo is None:
            code = "RepoNotFound" if authorized else ""
            return self._send(404 if authorized else 401, {"error": "Repository not found"}, {"X-Error-Code": code})
        if verb == "preupload":
            requested_files = json.loads(body)["files"]
            plan = [{"path": f["path"], "uploadMode": "regular", "shouldIgnore": False} for f in requested_files]
            return self._send(200, {"files": plan})
        if verb == "commit":
            return self._commit(name, repo, body)
        if verb == "tree":
            tree = [
                {"type": "file", "path": path, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                for path, data in repo.files.items()
            ]
            return self._send(200, tree)
        siblings = [{"rfilename": path} for path in repo.files]
        info = {"_id": "1", "id": name, "modelId": name, "sha": repo.sha, "private": repo.private}
        return self._send(200, {**info, "siblings": siblings, "tags": [], "downloads": 0, "likes": 0})

    def _commit(self, name: str, repo: Repo, body: bytes) -> None:
        for line in body.decode().splitlines():
            operation = json.loads(line)
            value = operation["value"]
            if operation["key"] == "file":
                repo.files[value["path"]] = base64.b64decode(value["content"])
            elif operation["key"] == "deletedFile":
                del repo.files[value["path"]]
        url = f"{self._url(name)}/commit/{repo.sha}"
        self._send(200, {"success": True, "commitOid": repo.sha, "commitUrl": url})

    def _file(self, name: str, path: str, authorized: bool) -> None:
        repo = self._repo(name, authorized)
        if repo is None or path not in repo.files:
            return self._send(404 if authorized else 401, {"error": "not found"}, {"X-Error-Code": "EntryNotFound"})
        data = repo.files[path]
        etag = {"ETag": f'"{hashlib.sha1(data).hexdigest()}"', "X-Repo-Commit": repo.sha}
        return self._send(200, data, etag)

    def _send(self, status: int, content: Any, headers: dict[str, str] | None = None) -> None:
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        kind = "application/octet-stream" if isinstance(content, bytes) else "application/json"
        for key, value in {"Content-Type": kind, "Content-Length": str(len(data)), **(headers or {})}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)
