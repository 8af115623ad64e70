"""Host threads that enqueue programs."""

import threading

import jax
import jax.numpy as jnp
import pytest

from lm_trainer.parallel import dispatch_threads
from lm_trainer.parallel.dispatch_threads import DispatchThreads, programs_at_once

pytestmark = pytest.mark.optimised


def test_calls_take_turns_among_threads():
    two = DispatchThreads(2)
    names = [two(threading.get_ident) for _ in range(6)]
    assert len(set(names)) == 2
    assert names[::2] == [names[0]] * 3
    assert threading.get_ident() not in names


def test_one_thread_is_the_thread_that_calls():
    assert DispatchThreads(1)(threading.get_ident) == threading.get_ident()


def test_what_a_call_raises_comes_out():
    with pytest.raises(ZeroDivisionError):
        DispatchThreads(2)(lambda: 1 // 0)


def test_what_is_enqueued_side_by_side_waits_for_what_it_needs():
    two, step = DispatchThreads(2), jax.jit(lambda x: jnp.tanh(x @ x) + 1).lower(jnp.eye(200)).compile()
    x = y = jnp.eye(200)
    for _ in range(20):
        x, y = two(step, x), step(y)
    assert (x == y).all()


@pytest.mark.parametrize(
    ("platform", "cores", "groups", "size", "at_once"),
    [
        ("cpu", 2, 1, 1, 2),
        ("cpu", 1, 1, 1, 1),
        ("cpu", 2, 2, 1, 1),
        ("cpu", 64, 8, 1, 2),
        ("cpu", 8, 1, 2, 1),
        ("gpu", 64, 1, 1, 1),
    ],
)
def test_how_many_run_side_by_side(platform, cores, groups, size, at_once, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(dispatch_threads, "available_cores", lambda: cores)
    assert programs_at_once(platform, groups, size) == at_once
