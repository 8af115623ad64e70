"""Compilation while a run goes on: all of it before the second step, or left out of the speed."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import pytest

from lm_trainer.checkpoint.digest import compute_checksums, compute_hashes, find_non_finite
from lm_trainer.optim import OptimizerConfig
from lm_trainer.profile.workload import random_batch
from lm_trainer.run.build.setup import build_setup
from lm_trainer.run.config.run_config import RunConfig
from lm_trainer.run.trainer import Trainer
from lm_trainer.run.weights.saved_state import arrays_to_save, compile_hashing
from tests.run.own_model import OPTIMIZER, Bigrams, Numbered, loss, settings

COMPILED = "/jax/core/compile/backend_compile_duration"
LATE = {"save_interval": "1h", "keep": [{"every": 100}]}


@pytest.fixture
def compilations() -> Iterator[list[str]]:
    """The names of the programs that JAX compiles, or reads from its cache, one after the other."""
    names: list[str] = []

    def listen(event: str, duration_secs: float, **facts: Any) -> None:
        del duration_secs
        if event == COMPILED:
            names.append(str(facts.get("fun_name")))

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield names
    jax.monitoring.unregister_event_duration_listener(listen)


@pytest.fixture
def train(in_tmp_path: Path, compilations: list[str]) -> Callable[..., dict[int, list[str]]]:
    """Trains a table of bigrams and returns what was compiled in each step and all that followed it."""

    def train(optimizer: OptimizerConfig, **changes: Any) -> dict[int, list[str]]:
        steps: dict[int, list[str]] = {}
        with Trainer(settings(**{"max_devices": 2, **changes}), optimizer, loss) as trainer:
            trainer.add_eval_hook(Numbered())
            state = trainer.initial_state(model_init=Bigrams)
            compilations.clear()
            for info in trainer.training_steps(state, trainer.data_loader(Numbered())):
                steps[info.step] = [*compilations]
                compilations.clear()
        return steps

    return train


def speeds(field: str) -> dict[int, float]:
    lines = [json.loads(line) for line in Path("logs/own/metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line[field] for line in lines if field in line}


@pytest.mark.parametrize(("determinism", "devices"), [("elastic", 1), ("elastic", 2), ("fast", 2)])
def test_nothing_is_compiled_after_the_second_step(train: Any, determinism: str, devices: int) -> None:
    steps = train(
        OPTIMIZER,
        determinism=determinism,
        max_devices=devices,
        num_train_steps=6,
        steps_per_eval=2,
        checkpointer={"keep": [{"every": 2}]},
        watch={"watch_targets": "grads, updates, opt_state", "interval": 3},
    )
    assert "_values" in "".join(steps.pop(1))
    # Evaluation and a checkpoint come first after the second step, norms after the third.
    steps.pop(2)
    assert steps == {3: [], 4: [], 5: [], 6: []}
    assert {3, 6} == speeds("updates/norm/total").keys()
    assert speeds("throughput/step_time").keys() == {2, 4, 6}


@pytest.mark.parametrize(
    "determinism", ["elastic", *(pytest.param(name, marks=pytest.mark.slow) for name in ("layerwise", "fast"))]
)
def test_the_second_step_compiles_nothing(compilations: list[str], determinism: str) -> None:
    model = {"type": "gpt2", "seq_len": 16, "hidden_dim": 16, "num_layers": 2, "num_heads": 2, "scan_layers": True}
    trainer = {"train_batch_size": 8, "per_device_parallelism": 1, "determinism": determinism}
    config = RunConfig.model_validate({"model": model, "trainer": trainer})
    setup, batch, compiled_by_step = (
        build_setup(config, 61, jax.devices()[:2]),
        random_batch(8, 16, 61),
        list[list[str]](),
    )
    state = setup.init()
    setup.step.compile(batch)
    for step in range(3):
        state, _ = setup.step(state, setup.step.put(batch, step), 1e-3)
        compiled_by_step.append([*compilations])
        compilations.clear()
    assert compiled_by_step[0]
    assert compiled_by_step[1:] == [[], []]


@pytest.mark.parametrize("devices", [1, 2])
def test_a_save_compiles_nothing_after_the_programs_were_compiled_in_another_thread(
    compilations: list[str], devices: int
) -> None:
    # So wide that programs hash the matrices, and a width that no other test has.
    model = {"type": "gpt2", "seq_len": 16, "hidden_dim": 264, "num_layers": 1, "num_heads": 2}
    config = RunConfig.model_validate({"model": model, "trainer": {"train_batch_size": 8, "elastic_shards": 2}})
    setup = build_setup(config, 61, jax.devices()[:devices])
    state = setup.init()
    compilations.clear()
    with ThreadPoolExecutor(1) as executor:
        executor.submit(compile_hashing, setup).result()
    assert {*compilations} == {"jit(_on_devices)", "jit(_all_finite)"}
    compilations.clear()
    arrays = arrays_to_save(state, setup)
    assert len(compute_hashes(state.params)) == len(state.params)
    assert compute_checksums(arrays).keys() == arrays.keys()
    assert find_non_finite(state.params) == []
    assert compilations == []


def test_the_compilation_for_another_batch_size_is_no_time_of_a_step(train: Any) -> None:
    sizes = [{"start": 0, "value": 8}, {"start": 3, "value": 16}]
    steps = train(
        OPTIMIZER, max_devices=1, num_train_steps=5, train_batch_size=sizes, steps_per_eval=9, checkpointer=LATE
    )
    assert [step for step, names in steps.items() if any("lane" in name for name in names)] == [1, 4]
    assert speeds("throughput/step_time").keys() == {2, 3, 5}


def test_norms_that_are_never_due_are_not_compiled(train: Any) -> None:
    assert "_values" not in str(train(OPTIMIZER, max_devices=1, num_train_steps=2, watch={"interval": 3}))
