"""Text and finished caches that are read from a web server."""

from __future__ import annotations

import gzip
import http.server
import json
import sys
import threading
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lm_trainer.core.errors import UserError
from lm_trainer.data import DataConfig, open_data
from lm_trainer.data.dataset import Data
from lm_trainer.data.sources import Row, shards_of_urls
from lm_trainer.data.tokenizer.bytes import ByteTokenizer

TEXTS = [f"document {i} of the server" for i in range(40)]


class Server(http.server.ThreadingHTTPServer):
    """Serves a directory, whole files and ranges; counts the requests at once and in all."""

    daemon_threads, request_queue_size = True, 128

    def __init__(self, root: Path):
        super().__init__(("127.0.0.1", 0), Handler)
        self.root, self.lock = root, threading.Lock()
        self.ranges, self.at_once, self.most_at_once = 0, 0, 0
        self.knows_ranges, self.etag = True, ""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Silent: a client that wanted a part of a file hangs up on the whole."""


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        with self.server.lock:
            self.server.at_once += 1
            self.server.most_at_once = max(self.server.most_at_once, self.server.at_once)
        try:
            self._answer(body=True)
        finally:
            with self.server.lock:
                self.server.at_once -= 1

    def _answer(self, *, body: bool) -> None:
        path = self.server.root / urllib.parse.unquote(self.path).lstrip("/")
        if path.name == "forbidden.jsonl":
            return self._send(403, b"", body=body)
        if not path.is_file():
            return self._send(404, b"", body=body)
        content, requested = path.read_bytes(), self.headers.get("Range")
        if not requested or not self.server.knows_ranges:
            return self._send(200, content, body=body)
        first, last = (int(number) for number in requested.removeprefix("bytes=").split("-"))
        self.server.ranges += 1
        content_range = f"bytes {first}-{min(last, len(content) - 1)}/{len(content)}"
        return self._send(206, content[first : last + 1], body=body, **{"Content-Range": content_range})

    def _send(self, status: int, content: bytes, *, body: bool, **headers: str) -> None:
        self.send_response(status)
        length = len(content) * (2 if self.path.endswith("cut.jsonl") else 1)
        ranges = "bytes" if self.server.knows_ranges else "none"
        headers |= {"Content-Length": str(length), "Accept-Ranges": ranges, "Last-Modified": "yesterday"}
        headers |= {"ETag": self.server.etag} if self.server.etag else {}
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if body:
            self.wfile.write(content)
        self.close_connection = self.path.endswith("cut.jsonl")

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    (tmp_path / "served").mkdir()
    with Server(tmp_path / "served") as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_text_of_a_server(server: Server) -> None:
    pytest.importorskip("aiohttp")
    lines = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS).encode()
    (server.root / "a.jsonl").write_bytes(lines)
    (server.root / "b.jsonl.gz").write_bytes(gzip.compress(lines))
    (server.root / "c.txt").write_text("one text")
    (server.root / "cut.jsonl").write_bytes(lines)
    urls = [f"{server.url}/{name}" for name in ("{a.jsonl,b.jsonl.gz}", "c.txt")]
    shards = shards_of_urls("train", urls, "text")
    assert [row.text for shard in shards for row in shard.rows() if isinstance(row, Row)] == [
        *TEXTS,
        *TEXTS,
        "one text",
    ]
    assert shards[0].identity()["files"][0] == {
        "url": f"{server.url}/a.jsonl",
        "size": len(lines),
        "version": "yesterday",
    }
    with pytest.raises(UserError, match=r"data\.train_urls: there is no file http://127\.0\.0\.1:\d+/nothing\.jsonl"):
        shards_of_urls("train", [f"{server.url}/nothing.jsonl"], "text")
    with pytest.raises(UserError, match=r"cannot read http://127\.0\.0\.1:\d+/forbidden\.jsonl: 403"):
        shards_of_urls("train", [f"{server.url}/forbidden.jsonl"], "text")
    with pytest.raises(UserError, match=r"cannot read http://127\.0\.0\.1:\d+/cut\.jsonl: "):
        list(shards_of_urls("train", [f"{server.url}/cut.jsonl"], "text")[0].rows())


def test_the_query_of_a_url_is_no_part_of_the_name(server: Server) -> None:
    pytest.importorskip("aiohttp")
    (server.root / "a.jsonl.gz?signature=1.x").write_bytes(gzip.compress(b'{"text": "packed"}\n'))
    (shard,) = shards_of_urls("train", [f"{server.url}/a.jsonl.gz?signature=1.x"], "text")
    assert [row.text for row in shard.rows() if isinstance(row, Row)] == ["packed"]


def test_a_file_that_changes_while_it_is_tokenised(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("aiohttp")
    (server.root / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    server.etag = "first"
    encode = ByteTokenizer.encode_batch

    def encode_batch(self: ByteTokenizer, texts: list[str]) -> list[Any]:
        server.etag = "second"
        return encode(self, texts)

    monkeypatch.setattr(ByteTokenizer, "encode_batch", encode_batch)
    monkeypatch.setattr("lm_trainer.data.tokenize.shard_reader.BATCH_ROWS", 4)
    keys = {"train_urls": f"{server.url}/a.jsonl", "tokenizer": "bytes", "cache_dir": str(tmp_path / "cache")}
    with pytest.raises(UserError, match=r"a\.jsonl changed while .* \(version first\), now \d+ \(version second\)"):
        open_data(DataConfig.model_validate(keys), seq_len=8, seed=0)


def test_a_server_that_does_not_answer(server: Server) -> None:
    pytest.importorskip("aiohttp")
    with Server(server.root) as gone:
        url = f"{gone.url}/a.jsonl"
    with pytest.raises(UserError, match=r"cannot read http://127\.0\.0\.1:\d+/a\.jsonl: Cannot connect"):
        shards_of_urls("train", [url], "text")


@pytest.mark.parametrize("says_so", [True, False])
def test_a_server_that_knows_no_ranges(server: Server, monkeypatch: pytest.MonkeyPatch, *, says_so: bool) -> None:
    pytest.importorskip("aiohttp")
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table({"text": [f"{i * i} {i}" for i in range(50_000)]}), server.root / "a.parquet")
    server.knows_ranges = False
    if not says_so:
        send = Handler.send_header
        monkeypatch.setattr(Handler, "send_header", lambda self, k, v: None if v == "none" else send(self, k, v))
    (shard,) = shards_of_urls("train", [f"{server.url}/a.parquet"], "text")
    with pytest.raises(UserError, match=r"a\.parquet: its server does not send parts of a file .* download it"):
        list(shard.rows())


def test_the_package_for_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for scheme in ("http", "https"):
        monkeypatch.delitem(sys.modules["fsspec.registry"]._registry, scheme, raising=False)
    monkeypatch.delitem(sys.modules, "fsspec.implementations.http", raising=False)
    monkeypatch.setitem(sys.modules, "aiohttp", None)
    with pytest.raises(UserError, match=r"http://host/a\.jsonl needs a package; run: pip install aiohttp"):
        shards_of_urls("train", ["http://host/a.jsonl"], "text")


def test_a_cache_of_a_server_is_read_by_ranges(server: Server) -> None:
    def opened(source: dict[str, Any], **more: Any) -> Data:
        section = {"source": source, "tokenizer": "bytes", "shuffle": True, **more}
        return open_data(DataConfig.model_validate(section), seq_len=16, seed=0)

    opened({"type": "memory", "train": TEXTS * 20}, cache_dir=str(server.root))
    local, remote = (opened({"type": "cache", "path": path}) for path in (str(server.root), server.url))
    assert local.fingerprint() == remote.fingerprint()
    server.ranges = server.most_at_once = 0
    rows, steps = 64, 3
    pairs = zip(*(data.train(rows, rows=range(rows), num_steps=steps) for data in (local, remote)), strict=True)
    for a, b in pairs:
        np.testing.assert_array_equal(a.tokens, b.tokens)
        np.testing.assert_array_equal(a.segments, b.segments)
    assert 0 < server.ranges <= rows * steps
    assert server.most_at_once <= 32


def test_a_cache_cannot_be_built_on_a_server(server: Server) -> None:
    section = {"source": {"type": "memory", "train": TEXTS}, "tokenizer": "bytes", "cache_dir": server.url}
    with pytest.raises(UserError, match=r"can only be read; set data\.cache_dir to another place"):
        open_data(DataConfig.model_validate(section), seq_len=16, seed=0)
    named = {"source": {"type": "cache", "path": server.url}, "tokenizer": "bytes"}
    with pytest.raises(UserError, match="holds no cache; build one with: lmt data build"):
        open_data(DataConfig.model_validate(named), seq_len=16, seed=0)
