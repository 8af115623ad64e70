"""The phases that a step gives of itself, and the bytes that a plan puts into them."""

from __future__ import annotations

from typing import Any

import jax
import pytest

from benchmarks.plan_error import VOCAB, config_of
from lm_trainer.profile.workload import random_batch
from lm_trainer.run.build.program import build_program
from lm_trainer.step.dispatch.memory import ProgramBytes, phase_bytes
from lm_trainer.step.dispatch.phases import Phase, StepProgram

MODEL = {"type": "llama", "seq_len": 16, "hidden_dim": 16, "intermediate_dim": 16, "num_layers": 1}
HEADS = {"num_heads": 2, "num_kv_heads": 1}
SUMS = ["microbatch", "reduction"]
WHOLE = ["update: gather", "update", "update: scatter"]
AVERAGED = {"model_averaging": {"type": "ema"}}
FAST = {"determinism": "fast"}
LAYERWISE = {"determinism": "layerwise"}
_PARTS = ("enter", "layer 0", "leave")
LAYERS = [
    *(f"{what}{part}" for part in _PARTS[:2] for what in ("gather ", "")),
    *(each for part in reversed(_PARTS) for each in (f"gather {part}", f"{part} gradient", f"reduce {part}")),
]


def phases_of(devices: int, optimizer: str, **trainer: Any) -> list[Phase]:
    settings = {"model": {**MODEL, **HEADS}, "trainer": {"train_batch_size": 8, **trainer}}
    config = config_of({**settings, "optimizer": {"type": optimizer, "learning_rate": 1e-3}})
    step = build_program(config, VOCAB, jax.devices()[:devices]).step
    return [*step.phases(random_batch(1, 16, VOCAB), step.plans.at(0), "gpu")]


@pytest.mark.parametrize(
    ("devices", "optimizer", "trainer", "names"),
    [
        (1, "adam", {}, [*SUMS, "norm", "update"]),
        (2, "adam", AVERAGED, ["gather", *SUMS, "norm", "update", "average"]),
        (2, "muon", {}, ["gather", *SUMS, "norm", *WHOLE]),
        (1, "sophia-h", {}, [*SUMS, "curvature", "reduction", "norm", "update"]),
        (2, "muon", LAYERWISE, [*LAYERS, "norm", *WHOLE]),
        (2, "sophia-h", LAYERWISE, [*LAYERS, *(f"curvature {name}" for name in LAYERS), "norm", "update"]),
        (2, "adam", {**FAST, **AVERAGED}, ["step", "average"]),
        (1, "sophia-h", FAST, ["curvature", "step"]),
    ],
)
def test_a_step_names_the_programs_that_it_runs(devices: int, optimizer: str, trainer: Any, names: list[str]) -> None:
    assert [phase.name for phase in phases_of(devices, optimizer, **trainer)] == names


def test_bytes_follow_what_is_added_freed_and_left() -> None:
    made = ProgramBytes(arguments=100, outputs=10, aliased=4, temporary=1)

    def program(name: str) -> StepProgram:
        return StepProgram(name, lambda: pytest.fail("nothing is compiled"))

    first, second = program("first"), program("second")
    phases = [
        Phase("one", first, adds={"x": 2 * first.outputs}, leaves={"x": first.new}, at_once=3),
        Phase("two", second, adds={"x": second.new + second.arguments}, frees=("x",), leaves={"y": second.outputs}),
        Phase("three", first),
    ]
    found = phase_bytes(phases, {"first": made, "second": made}, {"state": 1000})
    assert [phase.parts for phase in found] == [
        {"state": 1000, "x": 20, "temporary": 3},
        {"state": 1000, "x": 6 + 6 + 100, "temporary": 1},
        {"state": 1000, "y": 10, "temporary": 1},
    ]
    assert [phase.bytes for phase in found] == [1023, 1113, 1011]
