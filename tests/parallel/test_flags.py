"""Flags of all processes, exchanged by the devices or by the hosts."""

from __future__ import annotations

import signal
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

import jax
import pytest

from lm_trainer.health import signals
from lm_trainer.health.signals import Requests, SaveRequests
from lm_trainer.parallel.flags import FlagExchange, HostFlags
from tests.hangs import HANG_SECONDS


def test_one_process_knows_its_flags_at_once() -> None:
    exchange = FlagExchange()
    for flags in ({"stop": False, "save": True}, {"stop": True, "save": False}):
        assert exchange.exchange(flags) == flags


def test_several_processes_know_their_flags_one_call_later(monkeypatch: pytest.MonkeyPatch) -> None:
    # All emulated devices belong to this process, which is enough for an exchange among devices.
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    exchange = FlagExchange()
    calls = [{"stop": False, "save": True}, {"stop": True, "save": False}, {"stop": False, "save": False}]
    returned, seconds = list[dict[str, bool]](), list[object]()
    for step, flags in enumerate(calls):
        returned.append(exchange.exchange(flags, [step, 0.5]))
        seconds.append(None if exchange.seconds is None else exchange.seconds.tolist())
    assert returned == [{"stop": False, "save": False}, *calls[:2]]
    assert seconds == [None, [[0.0, 0.5]], [[1.0, 0.5]]], "one row for the one process that has devices"


class LateExchange(FlagExchange):
    """The exchange of two processes, of which the other one sets no flag."""

    def __init__(self) -> None:
        super().__init__()
        self._sent: dict[str, bool] | None = None

    @property
    def is_late(self) -> bool:
        return True

    def exchange(self, flags: Mapping[str, bool], seconds: Sequence[float] = ()) -> dict[str, bool]:
        del seconds
        sent, self._sent = self._sent, dict(flags)
        return dict.fromkeys(flags, False) if sent is None else sent


def test_a_request_that_is_known_late_is_fulfilled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signals, "_CHECK_SECONDS", 0.0)
    monkeypatch.setattr(signals, "FlagExchange", LateExchange)
    nothing = Requests(stop=False, save=False, stop_after_save=False, overdue=False)
    with SaveRequests(tmp_path) as requests:
        assert requests.agree_on_requests(False) == nothing
        signal.raise_signal(signal.SIGUSR1)
        assert requests.agree_on_requests(False) == nothing
        assert requests.agree_on_requests(False) == nothing._replace(save=True)
        requests.mark_saved(permanently=True)
        # The flag was sent a second time before the checkpoint was saved.
        assert [requests.agree_on_requests(False) for _ in range(3)] == [nothing] * 3

        # A temporary checkpoint does not fulfil a request for a permanent one.
        (tmp_path / signals.SAVE_NOW).touch()
        assert requests.agree_on_requests(False, overdue=True) == nothing
        assert requests.agree_on_requests(False, overdue=True) == nothing._replace(save=True, overdue=True)
        requests.mark_saved(permanently=False)
        assert requests.agree_on_requests(False) == nothing._replace(save=True)
        requests.mark_saved(permanently=True)
        assert not (tmp_path / signals.SAVE_NOW).exists()
        assert [requests.agree_on_requests(False) for _ in range(2)] == [nothing] * 2


class Service:
    """The coordination service of `jax.distributed`, for processes that are threads of this one."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}
        self._changed = threading.Condition()

    def key_value_set(self, key: str, value: str) -> None:
        with self._changed:
            assert key not in self.values, "a key is set twice"
            self.values[key] = value
            self._changed.notify_all()

    def key_value_delete(self, key: str) -> None:
        with self._changed:
            self.values = {name: value for name, value in self.values.items() if not name.startswith(key)}

    def blocking_key_value_get(self, key: str, timeout_in_ms: int) -> str:
        del timeout_in_ms
        with self._changed:
            assert self._changed.wait_for(lambda: key in self.values, HANG_SECONDS)
            return self.values[key]


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Service:
    service = Service()
    monkeypatch.setattr("lm_trainer.parallel.flags.coordination_client", lambda: service)
    monkeypatch.setattr("lm_trainer.parallel.flags.gather_texts", lambda _: ["run"])
    monkeypatch.setattr(jax, "process_count", lambda: 3)
    monkeypatch.setattr(jax, "process_index", lambda: int(threading.current_thread().name))
    return service


def test_hosts_combine_their_flags_in_every_round_and_leave_only_the_last(service: Service) -> None:
    rounds = [[0, 0, 0], [0, 0, 1], [1, 1, 0], [0, 0, 0]]
    combined: dict[int, list[dict[str, bool]]] = {}

    def run(process: int) -> None:
        exchange = HostFlags()
        combined[process] = [exchange.combine({"own": bool(set_by[process]), "all": True}) for set_by in rounds]

    threads = [threading.Thread(target=run, args=(process,), name=str(process)) for process in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANG_SECONDS)
    expected = [{"own": any(set_by), "all": True} for set_by in rounds]
    assert combined == dict.fromkeys(range(3), expected)
    assert {key.rsplit("/", 2)[1] for key in service.values} == {str(len(rounds) - 1)}


def test_one_host_has_its_own_flags() -> None:
    assert HostFlags().combine({"growing": True, "fails": False}) == {"growing": True, "fails": False}
