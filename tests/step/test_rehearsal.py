"""A step that is rehearsed calls the programs that it runs, and holds what it holds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import SingleDeviceSharding

from benchmarks.plan_error import VOCAB, config_of, train
from lm_trainer.parallel.rehearsal import Buffer, Memory, on_one_shard, rehearsing
from lm_trainer.profile.workload import random_batch
from lm_trainer.run.build.setup import build_setup
from lm_trainer.step import rehearse
from lm_trainer.step.dispatch.memory import PhaseBytes, ProgramBytes
from lm_trainer.step.dispatch.program import Program
from lm_trainer.step.dispatch.recorder import Key, MeasuredProgram, Recorder, measure_compiled, measure_traced
from lm_trainer.step.rehearse import StepRecord

MODEL = {"type": "llama", "seq_len": 16, "hidden_dim": 16, "intermediate_dim": 16, "num_layers": 2}
HEADS = {"num_heads": 2, "num_kv_heads": 1}
SUMS = ["microbatch", "add", "reduction"]
UNSHARDED_UPDATE = ["update: gather", "update", "update: scatter"]
AVERAGED = {"model_averaging": {"type": "ema"}}
FAST = {"determinism": "fast"}
BY_LAYER = {"gather": "layer"}
FORWARD = ["gather enter", "enter", "gather layer 0", "layer 0", "gather leave"]
BACKWARD = ["leave gradient", "add", "reduce leave", "layer 0 gradient", "zeros layer 0", "reduce layer 0"]
LAYERS = [*FORWARD, *BACKWARD, "enter gradient", "reduce enter"]
STEPS: list[tuple[int, str, dict[str, Any], list[str]]] = [
    (1, "adam", {}, [*SUMS, "norm", "update"]),
    (2, "adam", AVERAGED, ["gather", *SUMS, "norm", "update", "average"]),
    (2, "muon", {}, ["gather", *SUMS, "norm", *UNSHARDED_UPDATE]),
    (1, "sophia-h", {}, [*SUMS, "curvature", "norm", "update"]),
    (2, "muon", BY_LAYER, [*LAYERS, "norm", *UNSHARDED_UPDATE]),
    (2, "adam", {**BY_LAYER, "microbatches_per_gather": 2}, [*LAYERS, "add turns", "norm", "update"]),
    (2, "adam", {**FAST, **AVERAGED}, ["step", "average"]),
    (1, "sophia-h", FAST, ["curvature", "step"]),
]


def config_for(optimizer: str, trainer: dict[str, Any]) -> Any:
    settings = {"model": {**MODEL, **HEADS}, "trainer": {"train_batch_size": 8, "elastic_shards": 8, **trainer}}
    return config_of({**settings, "optimizer": {"type": optimizer, "learning_rate": 1e-3}})


def rehearsed(devices: int, optimizer: str, trainer: dict[str, Any]) -> StepRecord:
    with on_one_shard():
        program = build_setup(config_for(optimizer, trainer), VOCAB, jax.devices()[:devices])
    return program.rehearse(random_batch(1, 16, VOCAB), "gpu", measure_traced)


@pytest.mark.parametrize(("devices", "optimizer", "trainer", "names"), STEPS)
def test_a_step_names_the_programs_that_it_runs(
    devices: int, optimizer: str, trainer: dict[str, Any], names: list[str]
) -> None:
    assert [phase.name for phase in rehearsed(devices, optimizer, trainer).phases] == names


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """A count of the programs that are called."""
    calls, call = Counter[str](), Program.__call__

    def count(program: Program, *args: Any) -> Any:
        calls[program.name] += 1
        return call(program, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Program, "__call__", count)
        yield calls


@pytest.mark.slow
@pytest.mark.parametrize(("optimizer", "trainer"), [(step[1], step[2]) for step in STEPS])
def test_a_run_calls_what_the_rehearsal_did(optimizer: str, trainer: dict[str, Any]) -> None:
    config = config_for(optimizer, trainer)
    program = build_setup(config, VOCAB, jax.devices()[:1])
    with counted() as calls:
        train(program, config, steps=1)
    runs = Counter[str]()
    for key, count in rehearsed(1, optimizer, trainer).runs.items():
        runs[key[0]] += count
    assert runs == calls


@pytest.mark.parametrize("trainer", [{}, BY_LAYER, {**BY_LAYER, "microbatches_per_gather": 2}])
def test_many_microbatches_are_as_some_are(trainer: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    many = {**trainer, "train_batch_size": 512, "elastic_shards": 512}
    every = rehearsed(2, "adam", many)
    monkeypatch.setattr(rehearse, "MAX_MICROBATCHES", 128)
    some = rehearsed(2, "adam", many)
    peak, extrapolated_peak = (max(record.phases, key=lambda phase: phase.bytes) for record in (every, some))
    # A step makes a few numbers once, and the rehearsals of one step share them.
    assert extrapolated_peak.name == peak.name
    assert extrapolated_peak.parts == {part: pytest.approx(size, abs=64) for part, size in peak.parts.items()}
    assert [*some.runs.values()] == [*every.runs.values()]


def phases_of(*calls: Any) -> list[PhaseBytes]:
    """The phases of programs that are called by hand on one device, on which a kibibyte is held."""
    held = jax.ShapeDtypeStruct((256,), jnp.float32, sharding=SingleDeviceSharding(jax.devices()[0]))

    def measure(program: Program, key: Key, args: tuple[Any, ...]) -> MeasuredProgram:
        del key
        measured, _ = measure_compiled(program, args)
        size = measured.bytes
        return MeasuredProgram(
            ProgramBytes(size.arguments, size.outputs, size.aliased, 100),
            measured.structure,
            measured.results,
            measured.consumed,
        )

    recorder = Recorder(measure, jax.devices()[:1], at_once=3)
    with rehearsing(recorder):
        x = recorder.create_abstract_arrays(held, "state")
        for call in calls:
            x = call(x)
    return [*recorder.phases]


def test_a_program_that_consumes_its_argument_takes_no_more() -> None:
    double = Program("double", jax.jit(lambda x: 2 * x, donate_argnums=0), "doubled")
    copy = Program("copy", jax.jit(lambda x: 2 * x), "copied")
    first, second = phases_of(double, copy)
    assert first.parts == {"state": 1024, "doubled": 0, "temporary": 100}
    assert second.parts == {"doubled": 1024, "copied": 1024, "temporary": 100}


def test_an_array_takes_memory_until_python_drops_it() -> None:
    first, second, third = (Program(name, jax.jit(lambda x: x + 1), name) for name in ("first", "second", "third"))
    parts = [phase.parts for phase in phases_of(first, second, third)]
    assert parts[1] == {"first": 1024, "second": 1024, "temporary": 100}
    assert parts[2] == {"second": 1024, "third": 1024, "temporary": 100}


def test_programs_that_overlap_take_their_memory_at_once() -> None:
    lane = Program("lane", jax.jit(lambda x: x + 1), "lanes", overlaps=True)
    assert phases_of(lane)[0].parts == {"state": 1024, "lanes": 3 * 1024, "temporary": 300}


def test_what_is_queued_is_taken_until_the_host_has_waited() -> None:
    memory = Memory(jax.devices()[0])
    for number in (1, 2, 3):
        memory.calls = number
        buffer = Buffer(memory, "gathered", 100, queued=True)
        del buffer
    assert memory.held == {"gathered": 300}
    memory.free_finished(2)
    assert memory.held == {"gathered": 100}


def test_a_step_may_be_rehearsed_again() -> None:
    with on_one_shard():
        program = build_setup(config_for("adam", {}), VOCAB, jax.devices()[:1])
    first, second = (program.rehearse(random_batch(1, 16, VOCAB), "gpu", measure_traced) for _ in range(2))
    assert first.runs == second.runs
    assert program.step.plans.at(0).count == 8
