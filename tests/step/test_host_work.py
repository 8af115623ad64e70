"""Work of the host in a step: the programs that it dispatches, and its waits for the devices. All numbers are exact.

A change that dispatches another program or waits once more must change these numbers, and say why.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.profiler import ProfileData

from lm_trainer.parallel.rehearsal import comparing_programs, on_one_shard
from lm_trainer.profile.program_graph import output_hashes
from lm_trainer.profile.workload import random_batch
from lm_trainer.run.build.setup import TrainingSetup, build_setup
from lm_trainer.run.config.run_config import RunConfig
from lm_trainer.step.dispatch import mesh_executable
from lm_trainer.step.dispatch.device_groups import LAYERS_AT_ONCE
from lm_trainer.step.dispatch.measured_programs import MeasuredPrograms
from lm_trainer.step.dispatch.mesh_group import dispatching_for
from lm_trainer.step.dispatch.recorder import measure_traced
from lm_trainer.step.state.train_state import TrainState, to_host
from tests.host_work import HostWork, count_host_work
from tests.step.test_layerwise import LLAMA, VOCAB, config_of

LAYERS, MICROBATCHES, LENGTH = 3, 4, 16
LAYER, GRADIENT = "layer 0", "layer 0 gradient"
WITH_GATHER, WITH_BOTH = " with gather layer 0", " with gather layer 0, reduce layer 0"
EVERY_STEP = {"norm": 1, "update": 1}


def programs_of_whole_model(devices: int, *, wide: bool) -> Counter[str]:
    """The programs that the host dispatches in a step that gathers the whole model."""
    calls = MICROBATCHES // devices if wide else MICROBATCHES
    # On one device, all parameters are where they are read.
    gathers = {} if devices == 1 else {"gather": 1}
    adds = calls - (1 if wide else devices)
    return +Counter({**gathers, "microbatch": calls, "add": adds, "reduction": 1, **EVERY_STEP})


def programs_by_layers(
    devices: int, *, wide: bool, layers: int = LAYERS, microbatches: int = MICROBATCHES
) -> Counter[str]:
    """The programs that the host dispatches in a step that gathers each layer, of which there are at least three."""
    calls = microbatches // devices if wide else microbatches
    counts = Counter(
        {
            "enter": calls,
            "gather layer 0": 2 * layers,
            LAYER: layers * calls,
            "leave gradient": calls,
            "reduce leave": 1,
            "zeros layer 0": 1,
            GRADIENT: layers * calls,
            "reduce layer 0": layers,
            "enter gradient": calls,
            "reduce enter": 1,
            # In each of the layers, the head and the embedding.
            "add": (layers + 2) * (calls - (1 if wide else devices)),
            **EVERY_STEP,
        }
    )
    if devices > 1:
        counts |= {"gather enter": 1, "gather leave": 1}
    if wide:
        # The first microbatch of each layer but the last gathers the next layer. In the backward pass, that of each
        # layer but the first and the last gathers the layer below and reduces the layer above.
        forward, backward = layers - 1, layers - 2
        counts += Counter({LAYER + WITH_GATHER: forward, GRADIENT + WITH_BOTH: backward})
        moved = {LAYER: forward, GRADIENT: backward, "gather layer 0": forward + backward, "reduce layer 0": backward}
        counts -= Counter(moved)
    return +counts


def waits_by_layers(layers: int = LAYERS, layers_at_once: int = LAYERS_AT_ONCE) -> Counter[str]:
    """The waits of the host in a step that gathers each layer: for the layer that was queued some layers before."""
    return Counter({"LayerQueue.push": 2 * (layers - layers_at_once + 1)})


def step_config(gather: str) -> RunConfig:
    # Without a gather of each layer, their number changes nothing.
    model = {**LLAMA, "num_layers": LAYERS if gather == "layer" else 1}
    return config_of(model, gather=gather, train_batch_size=MICROBATCHES, elastic_shards=MICROBATCHES)


def plan_steps(gather: str, devices: int, *, wide: bool) -> tuple[TrainingSetup, TrainState]:
    """A step that has run once, so that everything is compiled and what is kept between steps is there."""
    with dispatching_for("gpu" if wide else "cpu"):
        setup = build_setup(step_config(gather), VOCAB, jax.devices()[:devices])
    setup.step.compile(random_batch(MICROBATCHES, LENGTH, VOCAB))
    return setup, take_step(setup, setup.init())


def take_step(setup: TrainingSetup, state: TrainState) -> TrainState:
    return setup.take_step(state, random_batch(MICROBATCHES, LENGTH, VOCAB))[0]


def count_second_step(work: HostWork, gather: str, devices: int, *, wide: bool) -> HostWork:
    setup, state = plan_steps(gather, devices, wide=wide)
    work.clear()
    take_step(setup, state)
    return work


@pytest.mark.parametrize(
    ("devices", "wide"),
    [(1, False), pytest.param(2, False, marks=pytest.mark.slow), pytest.param(4, True, marks=pytest.mark.slow)],
)
def test_a_step_of_the_whole_model_waits_for_nothing(devices: int, wide: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    work = count_second_step(count_host_work(monkeypatch), "model", devices, wide=wide)
    assert work.programs == programs_of_whole_model(devices, wide=wide)
    assert not work.waits


@pytest.mark.slow
@pytest.mark.parametrize(("devices", "wide"), [(1, False), (2, False), (2, True), (4, True)])
def test_a_step_by_layers_waits_only_for_its_queue(devices: int, wide: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    work = count_second_step(count_host_work(monkeypatch), "layer", devices, wide=wide)
    assert work.programs == programs_by_layers(devices, wide=wide)
    assert work.waits == waits_by_layers()


SHARED_BY_THREE = programs_by_layers(2, wide=True) - Counter({"gather enter": 1, "gather leave": 1})
"""On three devices, of which one has two of four microbatches, the host dispatches what two on each device take. The
embedding and the head cannot be divided by three, so they are not gathered."""


@pytest.mark.slow
def test_unequal_shares_take_one_program_for_all_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    work = count_second_step(count_host_work(monkeypatch), "layer", 3, wide=True)
    assert work.programs == SHARED_BY_THREE
    assert work.waits == waits_by_layers()


@pytest.mark.parametrize(
    ("devices", "expected"),
    [
        (3, SHARED_BY_THREE),
        pytest.param(4, programs_by_layers(4, wide=True), marks=pytest.mark.slow),
    ],
)
def test_a_plan_counts_the_programs_that_the_host_dispatches(devices: int, expected: Counter[str]) -> None:
    with on_one_shard(), dispatching_for("gpu"):
        setup = build_setup(step_config("layer"), VOCAB, jax.devices()[:devices])
    runs = Counter[str]()
    for (name, *_), times in setup.rehearse(random_batch(1, LENGTH, VOCAB), "gpu", measure_traced).runs.items():
        runs[name] += times
    assert runs == expected


@pytest.mark.slow
@pytest.mark.parametrize("equal", [True, False])
def test_a_plan_that_compares_programs_leaves_out_exchanges_that_change_a_layer(
    equal: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def hash_outputs(hlo: str) -> list[str]:
        hashes = output_hashes(hlo)
        return hashes if equal or "all-gather" not in hlo else [f"{x} with an exchange" for x in hashes]

    monkeypatch.setattr(mesh_executable, "output_hashes", hash_outputs)
    with on_one_shard(), dispatching_for("gpu"):
        setup = build_setup(step_config("layer"), VOCAB, jax.devices()[:4])
    programs = MeasuredPrograms()
    with comparing_programs(), programs.measure_for_rows(1) as measure:
        runs = setup.rehearse(random_batch(1, LENGTH, VOCAB), "gpu", measure).runs
    names = {name for name, *_ in runs}
    assert {WITH_GATHER in name for name in names} == ({True, False} if equal else {False})
    assert ("compiled differently, so the layer runs without them" in caplog.text) != equal


@pytest.mark.slow
def test_a_deeper_queue_waits_less_and_keeps_the_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    setup, state = plan_steps("layer", 1, wide=False)
    # A step consumes its state.
    copied = jax.tree.map(lambda x: jnp.copy(x) if isinstance(x, jax.Array) else x, state)
    expected = to_host(take_step(setup, copied).params)
    setup.step.devices.layers_at_once = LAYERS_AT_ONCE + 1
    work = count_host_work(monkeypatch)
    state = take_step(setup, state)
    assert work.programs == programs_by_layers(1, wide=False)
    assert work.waits == waits_by_layers(layers_at_once=LAYERS_AT_ONCE + 1)
    jax.tree.map(np.testing.assert_array_equal, to_host(state.params), expected)


def count_executions(directory: Path) -> int:
    """The executions of programs on one device in XLA's own trace."""
    (path,) = directory.glob("**/*.xplane.pb")
    events = (
        event for plane in ProfileData.from_file(str(path)).planes for line in plane.lines for event in line.events
    )
    return sum(event.name.endswith("::ExecuteHelperOnSingleDevice") for event in events)


@pytest.mark.slow
@pytest.mark.parametrize("gather", ["model", "layer"])
def test_xla_runs_no_program_that_is_not_counted(gather: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    double, x = jax.jit(lambda x: 2 * x), jnp.ones(())
    double(x)
    setup, state = plan_steps(gather, 1, wide=False)
    work = count_host_work(monkeypatch)
    with jax.profiler.trace(str(tmp_path)):
        jax.block_until_ready(take_step(setup, state).params)
        # Shows that the trace has executions under this name.
        jax.block_until_ready([double(x) for _ in range(3)])
    assert count_executions(tmp_path) - 3 == work.programs.total() > 0
