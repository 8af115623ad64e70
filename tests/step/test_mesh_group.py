"""Microbatches of all devices in one program: the bits of programs of single devices, and less for the host to do."""

from __future__ import annotations

import itertools
import json
import logging
import subprocess
import sys
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lm_trainer.launch.supervise import find_free_address
from lm_trainer.profile.program_graph import output_hashes
from lm_trainer.profile.workload import random_batch
from lm_trainer.run.build.setup import TrainingSetup, build_setup
from lm_trainer.step.check.layer_checksums import LayerChecksums
from lm_trainer.step.dispatch import mesh_executable
from lm_trainer.step.dispatch.device_groups import DeviceGroups
from lm_trainer.step.dispatch.mesh_group import MeshWide, dispatching_for
from lm_trainer.step.dispatch.program import Program
from lm_trainer.step.state.train_state import to_host
from tests.conftest import lmt_environment
from tests.step.test_host_work import programs_by_layers, waits_by_layers
from tests.step.test_layerwise import GEMMA2, GPT2, LLAMA, MIXTRAL, PREFIXED, VOCAB, config_of

pytestmark = pytest.mark.optimised

LAYERS = {"num_layers": 4}
"""Enough for layers with a layer on either side, two at each place of a period of two."""


def planned(model: dict[str, Any], devices: int, *, mesh_wide: bool, **trainer: Any) -> TrainingSetup:
    config = config_of({**model, **LAYERS}, **trainer)
    with dispatching_for("gpu" if mesh_wide else "cpu"):
        return build_setup(config, VOCAB, jax.devices()[:devices])


def trained(setup: TrainingSetup, steps: int = 2) -> dict[str, bytes]:
    """The parameters after some steps."""
    batch = random_batch(len(setup.step.local_rows()), 16, VOCAB)
    setup.step.compile(batch)
    state = setup.init()
    for _ in range(steps):
        state, _ = setup.step(state, setup.step.put(batch, state.step), 1e-2)
    return {name: np.asarray(x).tobytes() for name, x in to_host(state.params).items()}


def computing(setup: TrainingSetup) -> Any:
    return setup.step._computing  # pyright: ignore[reportAttributeAccessIssue, reportPrivateUsage]


@pytest.mark.parametrize(
    ("model", "devices", "trainer", "reducing"),
    [
        pytest.param(LLAMA, 2, {}, 2, marks=pytest.mark.exhaustive),
        pytest.param(LLAMA, 4, {"microbatches_per_gather": 1, "mp": "p=f32,c=bfloat16"}, 2, marks=pytest.mark.slow),
        pytest.param({**GPT2, "attn_pdrop": 0.1}, 8, {}, 2, marks=pytest.mark.slow),
        # One device has a microbatch less than the others, or one of them a microbatch more in each turn.
        pytest.param({**GPT2, "attn_pdrop": 0.1}, 3, {}, 2, marks=pytest.mark.slow),
        pytest.param(LLAMA, 3, {"microbatches_per_gather": 1, "mp": "p=f32,c=bfloat16"}, 2, marks=pytest.mark.slow),
        pytest.param(LLAMA, 6, {}, 2, marks=pytest.mark.exhaustive),
        pytest.param(GEMMA2, 2, {}, 2, marks=pytest.mark.exhaustive),
        # One of the two layers in the middle has a neighbour at another slot.
        pytest.param(PREFIXED, 2, {}, 1, marks=pytest.mark.slow),
    ],
)
def test_one_program_for_all_devices_has_the_bits_of_one_for_each(
    model: dict[str, Any], devices: int, trainer: dict[str, Any], reducing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = Counter[str]()
    run = Program.__call__

    def counted(self: Program, *args: Any) -> Any:
        runs[self.name] += 1
        return run(self, *args)

    alone = planned(model, 1, mesh_wide=True, **trainer)
    assert isinstance(computing(alone), DeviceGroups)
    expected = trained(alone)
    monkeypatch.setattr(Program, "__call__", counted)
    wide = planned(model, devices, mesh_wide=True, **trainer)
    assert trained(wide) == expected
    assert isinstance(computing(wide), MeshWide)
    exchanging = {name: count for name, count in runs.items() if " with " in name}
    # Three of four layers gather the next one, and the two in the middle also reduce their neighbour's gradients.
    turns = 2 * (1 if trainer.get("microbatches_per_gather") is None else 8 // devices)
    assert sum(count for name, count in exchanging.items() if "reduce" in name) == reducing * turns
    assert sum(count for name, count in exchanging.items() if "reduce" not in name) == 3 * turns


@pytest.mark.slow
def test_unequal_shares_of_the_whole_model_have_the_bits_and_checksums_of_one_device() -> None:
    alone, wide = (planned(LLAMA, devices, mesh_wide=True, gather="model") for devices in (1, 3))
    assert trained(wide) == trained(alone)
    assert isinstance(computing(wide), MeshWide)
    assert gradient_checksums(wide) == gradient_checksums(alone)


def gradient_checksums(setup: TrainingSetup) -> Any:
    step: Any = setup.step
    tap = LayerChecksums([])
    step.gradient(setup.init(), step.put(random_batch(len(step.local_rows()), 16, VOCAB)), tap)
    return tap.read()


def start_processes(count: int, devices: int) -> list[subprocess.Popen[str]]:
    """Starts processes that train together, each with some emulated devices."""
    environ = lmt_environment(devices=devices)
    address = find_free_address()
    return [
        subprocess.Popen(
            [sys.executable, "-m", "tests.step.mesh_wide_process", address, str(count), str(index)],
            env=environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for index in range(count)
    ]


@pytest.mark.slow
def test_programs_of_the_devices_of_two_processes_have_the_bits_of_one_device() -> None:
    """Each process runs its part of one program over all four devices, and waits only for its queue of layers."""
    outputs = []
    for process in (*start_processes(2, devices=2), *start_processes(1, devices=1)):
        output, errors = process.communicate(timeout=600)
        assert process.returncode == 0, errors
        # Libraries of communication may print lines of their own.
        outputs.append(json.loads(output.splitlines()[-1]))
    *processes, alone = outputs
    for process in processes:
        assert process["computing"] == MeshWide.__name__
        assert process["digest"] == alone["digest"]
        assert process["programs"] == programs_by_layers(4, wide=True, layers=4, microbatches=8)
        assert process["waits"] == waits_by_layers(layers=4)
        set_in_both = {"lead": True, "last": True, "none": False}
        assert process["flags"] == [{**set_in_both, "once": True}, {**set_in_both, "once": False}]
    assert alone["waits"] == waits_by_layers(layers=4)


@pytest.mark.slow
def test_the_host_dispatches_no_more_programs_for_more_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    counts: list[Counter[str]] = []
    run = Program.__call__

    def counted(self: Program, *args: Any) -> Any:
        counts[-1][self.name] += 1
        return run(self, *args)

    monkeypatch.setattr(Program, "__call__", counted)
    for mesh_wide in (False, True):
        counts.append(Counter())
        trained(planned(LLAMA, 2, mesh_wide=mesh_wide), steps=1)
    by_device, wide = counts
    microbatches = 8
    assert by_device["layer 0"] == LAYERS["num_layers"] * microbatches
    layers = sum(count for name, count in wide.items() if name == "layer 0" or name.startswith("layer 0 with"))
    assert layers == LAYERS["num_layers"] * microbatches // 2


@pytest.mark.slow
def test_a_computation_that_is_compiled_otherwise_in_one_program_gets_one_for_each_device(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected = trained(planned(LLAMA, 1, mesh_wide=False))
    different = itertools.count()
    monkeypatch.setattr(mesh_executable, "output_hashes", lambda _: [str(next(different))])
    setup = planned(LLAMA, 2, mesh_wide=True)
    with caplog.at_level(logging.WARNING):
        assert trained(setup) == expected
    assert "is compiled differently in one program for all devices" in caplog.text
    assert isinstance(computing(setup), DeviceGroups)


@pytest.mark.slow
def test_exchanges_that_change_the_computation_run_by_themselves(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected = trained(planned(LLAMA, 1, mesh_wide=False))

    def without_exchanges(hlo: str) -> list[str]:
        hashes = output_hashes(hlo)
        return [f"{x} beside an exchange" for x in hashes] if "all-gather" in hlo else hashes

    monkeypatch.setattr(mesh_executable, "output_hashes", without_exchanges)
    setup = planned(LLAMA, 2, mesh_wide=True)
    with caplog.at_level(logging.WARNING):
        assert trained(setup) == expected
    assert "compiled differently, so the layer runs without them" in caplog.text
    assert isinstance(computing(setup), MeshWide)


@pytest.mark.parametrize(
    ("devices", "trainer"),
    [(2, {"context_axis_size": 2}), (4, {"tensor_parallel_axes": ["mlp"], "model_axis_size": 2})],
)
def test_devices_that_share_microbatches_have_programs_of_their_own(devices: int, trainer: dict[str, Any]) -> None:
    assert isinstance(computing(planned(LLAMA, devices, mesh_wide=True, **trainer)), DeviceGroups)


@pytest.mark.slow
def test_routers_keep_programs_of_their_own_devices() -> None:
    """XLA compiles sums of routing otherwise in a program for several devices."""
    expected = trained(planned(MIXTRAL, 1, mesh_wide=False))
    assert trained(planned(MIXTRAL, 2, mesh_wide=True)) == expected


def hashes_of(function: Any, *shapes: tuple[int, ...]) -> list[str]:
    arguments = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    return output_hashes(jax.jit(function).lower(*arguments).compile().as_text() or "")


def test_graphs_tell_what_is_computed() -> None:
    square = (16, 16)
    hashes = hashes_of(lambda x, y: (jnp.sin(x) @ y, y.sum(0)), square, square)
    assert len(set(hashes)) == 2
    # The order of results, names, and other work do not matter.
    assert hashes_of(lambda a, b: (b.sum(0), jnp.sin(a) @ b, (a * b).max()), square, square)[:2] == hashes[::-1]
    for other in (
        lambda x, y: (jnp.cos(x) @ y, y.sum(0) + 1),
        lambda x, y: (jnp.sin(y) @ x, x.sum(0)),
        lambda x, y: (jnp.sin(2 * x) @ y, y.sum(1)),
        lambda x, y: (jax.lax.optimization_barrier(jnp.sin(x) * 1.5) @ y, (y * y).sum(0)),
    ):
        assert not set(hashes_of(other, square, square)) & set(hashes)
    assert hashes_of(lambda x: x + 1.0, square) != hashes_of(lambda x: x + 2.0, square)
    assert hashes_of(lambda x: x + 1.0, square) != hashes_of(lambda x: x + 1.0, (8, 32))
