"""Laps of `soak_world` with checkpoints, caches and exports in object storage that returns wrong answers."""

from __future__ import annotations

import atexit
import contextlib
import random
import shutil
import threading
from typing import Any, NamedTuple

from benchmarks.soak_world_runs import World, hash_results
from tests.object_storage.proxy import (
    Fault,
    Handler,
    Proxy,
    cut_connection,
    delay,
    drop,
    lose_answer,
    refuse,
    run_proxy,
)
from tests.object_storage.servers import BUCKET, environment, run_s3_server

KIND = "object storage lies"
PROMISES = {
    KIND: "exit code 0 with the same losses and exports, or 1 or 2 with a reason and without a traceback; the same "
    "command in an empty directory comes to the same losses and exports",
}


class Lap(NamedTuple):
    kind: str
    name: str
    first: int
    """Index of the first request with the fault."""
    count: int
    """Number of requests with the fault."""
    number: int

    def __str__(self) -> str:
        return f"train with everything in a bucket: {self.name}, {self.count} requests from request {self.first}"


def draw_lap(kind: str, number: int, seed: int, calls: object) -> Lap:
    """Draws the lap `number`."""
    del calls
    rng = random.Random(f"{seed}/{kind}/{number}")
    name = tuple(LIES)[number % len(LIES)]
    count = 10_000 if name == "500 from there on" else rng.choice((1, 3, 20))
    return Lap(kind, name, rng.randint(1, 300), count, number)


class _Window:
    """A fault that is limited to a range of requests."""

    def __init__(self, fault: Fault, first: int, count: int):
        self._fault, self._first, self._last = fault, first, first + count
        self._count, self._lock = 0, threading.Lock()

    def __call__(self, handler: Handler) -> bool:
        with self._lock:
            self._count += 1
            number = self._count
        return self._first <= number < self._last and self._fault(handler)


class _StaleListings:
    """Repeats the first answer to each listing request."""

    def __init__(self) -> None:
        self._first_answers: dict[str, Any] = {}

    def __call__(self, handler: Handler) -> bool:
        if handler.command != "GET" or "list-type" not in handler.path:
            return False
        if handler.path not in self._first_answers:
            self._first_answers[handler.path] = handler.forward()
        handler.answer(*self._first_answers[handler.path])
        return True


def _flip_bit(handler: Handler) -> bool:
    """Flips a bit in the content of objects that are read."""
    status, headers, content = handler.forward()
    if handler.command == "GET" and content and "list-type" not in handler.path:
        changed = bytearray(content)
        changed[len(changed) // 2] ^= 4
        content = bytes(changed)
    handler.answer(status, headers, content)
    return True


def _truncate_object(handler: Handler) -> bool:
    """Answers with half of the object as if it were complete."""
    status, headers, content = handler.forward()
    handler.answer(status, headers, content[: len(content) // 2] if handler.command == "GET" else content)
    return True


LIES = {
    "500": refuse(500, "InternalError"),
    "500 from there on": refuse(500, "InternalError"),
    "a time-out": delay(8.0),
    "a body that is cut off": cut_connection,
    "a body that is short": _truncate_object,
    "a flipped bit": _flip_bit,
    "stale listings": None,
    "lost answers": lose_answer,
    "lost requests": drop,
    "429": refuse(429, "SlowDown"),
}


_servers = contextlib.ExitStack()
_endpoints: list[str] = []
_opening = threading.Lock()


def _s3_endpoint() -> str:
    """Starts the S3 server that all worlds share, because a second moto server would empty the first."""
    with _opening:
        if not _endpoints:
            _endpoints.append(_servers.enter_context(run_s3_server()))
            atexit.register(_servers.close)
        return _endpoints[0]


def _run_train(world: World, proxy: Proxy, prefix: str, *more: str) -> tuple[int, str]:
    base = f"s3://{BUCKET}/{prefix}"
    settings = (f"trainer.checkpointer.base_path={base}/checkpoints", f"data.cache_dir={base}/cache")
    return world.run(
        "train",
        "CONFIG",
        *settings,
        f"hf_save_path={base}/exports",
        "trainer.checkpointer.retry_for=15s",
        *more,
        env=environment("s3", proxy.endpoint),
    )


def _read_losses(world: World) -> dict[str, Any]:
    (world.lap / "checkpoints" / "run").mkdir(parents=True, exist_ok=True)
    return {"losses": hash_results(world.lap)["losses"]}


def run(world: World, lap: Lap, expected: dict[str, str]) -> str:
    """Runs a lap. Returns a description of the outcome.

    Raises:
        AssertionError: if a promise is broken.
    """
    if "proxy" not in world.cache:
        world.cache["proxy"] = world.opened.enter_context(run_proxy(_s3_endpoint()))
    proxy, prefix = world.cache["proxy"], f"{world.out.name}/lap-{lap.number}"
    world.reset_lap(None)
    fault = _StaleListings() if lap.name == "stale listings" else LIES[lap.name]
    assert fault is not None
    proxy.fault = _Window(fault, lap.first, lap.count)
    try:
        code, text = _run_train(world, proxy, prefix)
    finally:
        proxy.fault = None
    assert "Traceback" not in text, f"a traceback, exit code {code}\n{text[-3500:]}"
    assert code in (0, 1, 2), f"exit code {code}\n{text[-2500:]}"
    if code:
        assert "error:" in text, f"exit code {code} and no reason\n{text[-2500:]}"
    else:
        assert _read_losses(world)["losses"] == expected["losses"], f"other losses\n{text[-1500:]}"
    shutil.rmtree(world.lap)
    world.lap.mkdir()
    rerun_code, text = _run_train(world, proxy, prefix)
    assert rerun_code == 0, f"the same command in an empty directory: exit code {rerun_code}\n{text[-2500:]}"
    assert _read_losses(world)["losses"] == expected["losses"], f"other losses in an empty directory\n{text[-1500:]}"
    return f"exit code {code}"
