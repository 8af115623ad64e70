"""Reading of rows: quick, but with the outcome of the plain way; and the thread that reads ahead and helps."""

from __future__ import annotations

import gzip
import json
import random
import threading
import time
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from lm_trainer.core.errors import UserError
from lm_trainer.data.sources import Row, jsonl, list_shards
from lm_trainer.data.tokenize.shard_reader import AHEAD, map_with_prefetch

FRAGMENTS = [
    *(b"{", b"}", b"[", b"]", b'"', b",", b":", b"\\", b"/", b" ", b"\t", b"\r", b"\0", b"\x1f", b"\x7f"),
    *(b"\\u", b"\\ud83d", b"\\ude00", b"\\u00e9", b"\\u0000", b"\\uD800", b"\\n", b"\\x", b"\\/", b"\xef\xbb\xbf"),
    *(b"\xff", b"\xc3\xa9", b"\xed\xa0\x80", b"\xf0\x9f\x98\x80", b"\xe2\x80\xa8", b"text", b'"text":', b'"text":"a"'),
    *(b"NaN", b"Infinity", b"-Infinity", b"null", b"true", b"1e999", b"-0", b"01", b"1.", b".5", b"1E+2", b"+1"),
    *(b"18446744073709551616", b"9" * 400, b"9" * 5000, b"0." + b"1" * 400, b"[" * 300, b"[" * 1010 + b"]" * 1010),
]


def lines(count: int) -> Iterator[bytes]:
    """Objects that are changed at random places, so that most are nearly JSON."""
    draw = random.Random(0)
    nested = [None, 1, 2.5, "x", {"text": "inner"}, [1, [2]], 10**30, "é\ud800"]
    for _ in range(count):
        value = {key: draw.choice(nested) for key in draw.sample(["text", "id", "é", "meta"], 3)}
        value |= {"text": draw.choice(["plain", "ünï \n", '"\\/', "\ud83d", "😀"])} if draw.random() < 0.8 else {}
        line = bytearray(json.dumps(value, ensure_ascii=draw.random() < 0.5).encode("utf-8", "surrogatepass"))
        for _ in range(draw.choice([0, 0, 1, 1, 2, 4])):
            position = draw.randrange(len(line) + 1)
            line[position : position + draw.choice([0, 0, 1, 5])] = draw.choice(FRAGMENTS)
        yield bytes(line.replace(b"\n", b" "))
    for depth in (200, 300, 900, 990, 1000, 1015, 1030, 5000):
        yield b'{"text": "deep", "meta": ' + b"[" * depth + b"]" * depth + b"}"


@pytest.mark.slow
def test_the_fast_decoder_gives_what_the_other_gives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("orjson")
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(lines(20_000)))
    shard = list_shards("train", [str(tmp_path / "a.jsonl")], "text")[0]
    fast = list(shard.rows())
    monkeypatch.setattr(jsonl, "_fast_decoder", lambda: None)
    plain = list(shard.rows())
    assert fast == plain
    kinds = [type(row) for row in plain]
    assert min(kinds.count(kind) for kind in set(kinds)) > 4000
    assert len(kinds) == 20_008


@pytest.mark.parametrize("block", [1, 7, 1 << 20])
def test_lines_from_blocks_are_those_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    monkeypatch.setattr(jsonl, "_BLOCK_BYTES", block)
    texts = ["one", "", "carriage\r return", "line\u2028separator", "long " * 40, "last"]
    content = "\r\n\n".join(json.dumps({"text": text}, ensure_ascii=False) for text in texts).encode()
    for name, stored in {"a.jsonl": content, "b.json": content + b"\n", "c.jsonl.gz": gzip.compress(content)}.items():
        (tmp_path / name).write_bytes(stored)
        rows = list(list_shards("train", [str(tmp_path / name)], "text")[0].rows())
        assert [row.text for row in rows if isinstance(row, Row) and row.number % 2 == 0] == texts
        assert [row.where.rpartition(":")[2] for row in rows] == [str(n) for n in range(1, 12)]


def test_what_comes_before_a_truncation_is_read(tmp_path: Path) -> None:
    draw = random.Random(0)
    content = "".join(json.dumps({"text": f"{i} {draw.random()}"}) + "\n" for i in range(150_000)).encode()
    packed = gzip.compress(content, 1)
    (tmp_path / "a.jsonl.gz").write_bytes(packed[: len(packed) // 2])
    rows = iter(list_shards("train", [str(tmp_path / "a.jsonl.gz")], "text")[0].rows())
    assert sum(isinstance(next(rows), Row) for _ in range(8000)) == 8000
    with pytest.raises(UserError, match=r"a\.jsonl\.gz is damaged"):
        list(rows)


def test_the_thread_that_reads_helps_with_the_work_and_the_order_stays() -> None:
    helped, main_thread, workers = threading.Event(), threading.get_ident(), []

    def work(number: int) -> int:
        workers.append(threading.get_ident())
        if workers[-1] != main_thread:
            helped.set()
        return number * number

    done = map_with_prefetch((number for number in range(20)), work)
    results = [next(done)]
    # The caller does nothing more meanwhile, so another thread must have read ahead and begun to work.
    assert helped.wait(10)
    results += done
    assert results == [(number, number * number) for number in range(20)]
    assert len(set(workers)) == 2
    assert main_thread in workers


def test_items_are_not_made_without_end() -> None:
    produced = []

    def items() -> Generator[int, None, None]:
        for number in range(100):
            produced.append(number)
            yield number

    done = map_with_prefetch(items(), lambda number: number)
    next(done)
    time.sleep(0.2)
    assert len(produced) <= AHEAD + 2
    done.close()
    assert len(produced) <= AHEAD + 2


@pytest.mark.parametrize("stage", ["made", "worked on"])
@pytest.mark.parametrize("behind", [False, True])
def test_errors_come_in_their_place_and_the_items_are_closed(stage: str, behind: bool) -> None:
    closed = threading.Event()

    def items() -> Generator[int, None, None]:
        try:
            for number in range(9):
                if stage == "made" and number == 6:
                    raise UserError("the seventh")
                yield number
        finally:
            closed.set()

    def work(number: int) -> int:
        if stage == "worked on" and number == 6:
            raise UserError("the seventh")
        return -number

    def slowly(pairs: Iterator[tuple[int, int]]) -> Iterator[tuple[int, int]]:
        for pair in pairs:
            yield pair
            time.sleep(0.01 * behind)

    results = []
    with pytest.raises(UserError, match="the seventh"):
        results.extend(slowly(map_with_prefetch(items(), work)))
    assert results == [(number, -number) for number in range(6)]
    assert closed.is_set()


def test_closing_early_closes_the_items() -> None:
    closed = threading.Event()

    def items() -> Generator[int, None, None]:
        try:
            yield from range(100)
        finally:
            closed.set()

    done = map_with_prefetch(items(), lambda number: number)
    assert next(done) == (0, 0)
    done.close()
    assert closed.is_set()
