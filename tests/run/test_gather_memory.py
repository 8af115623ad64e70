"""The microbatches that share what is gathered follow from the memory of the devices."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import jax
import numpy as np
import pytest

from lm_trainer.plan.memory import StepMemory
from lm_trainer.profile.workload import random_batch
from lm_trainer.run.build.gather_memory import choose_layers_at_once, min_device_memory, plan_for_memory
from lm_trainer.run.build.model import trace_model
from lm_trainer.run.build.setup import setup_from_config
from lm_trainer.run.config.run_config import RunConfig
from lm_trainer.run.config.trainer_config import TrainerConfig

VOCAB = 61
CONFIG = RunConfig.model_validate(
    {
        "model": {
            "type": "gpt2",
            "seq_len": 128,
            "hidden_dim": 32,
            "num_layers": 2,
            "num_heads": 2,
            # So that what is kept of each microbatch weighs more than gradients.
            "gradient_checkpointing": False,
        },
        "trainer": {"train_batch_size": 4, "determinism": "layerwise", "per_device_parallelism": 1},
    }
)


@functools.cache
def planned_peak(together: int | None) -> int:
    """The peak in the plan of `lmt plan`."""
    trainer = CONFIG.trainer.model_copy(update={"microbatches_per_gather": together})
    memory = StepMemory(CONFIG.model_copy(update={"trainer": trainer}), VOCAB, jax.devices()[:1], "cpu")
    return memory.plan().peak.bytes


def choose_gather(trainer: TrainerConfig, memory: Callable[[], int | None]) -> tuple[int, str]:
    """The microbatches that share a gather, and what is said of them."""
    model, notes = trace_model(CONFIG, VOCAB), list[str]()
    setup = plan_for_memory(
        lambda trainer: setup_from_config(CONFIG, trainer, model, devices=jax.devices()[:1]),
        trainer,
        random_batch(1, CONFIG.model.seq_len, VOCAB),
        notes.append,
        memory=memory,
    )
    return setup.step.devices.divide_microbatches(setup.step.plans.at(0)).max_terms, "".join(notes)


@pytest.mark.slow
def test_as_many_microbatches_share_a_gather_as_the_memory_holds() -> None:
    two, four = planned_peak(2), planned_peak(None)
    assert two < 0.9 * four
    together, note = choose_gather(CONFIG.trainer, lambda: round(two / 0.94))
    assert together == 2
    assert note.startswith(f"microbatches_per_gather=2: a step needs {two / 2**30:.2f} GiB of the ")
    assert note.endswith("with all 4 microbatches of a device together. The numbers are the same")


@pytest.mark.slow
def test_nothing_is_said_where_all_fit_and_what_is_missing_where_none_does() -> None:
    assert choose_gather(CONFIG.trainer, lambda: round(planned_peak(None) / 0.94)) == (4, "")
    together, note = choose_gather(CONFIG.trainer, lambda: 1000)
    assert together == 1
    assert "even with microbatches_per_gather=1; `lmt plan --search` looks for a layout that fits" in note


@pytest.mark.parametrize("settings", [{"microbatches_per_gather": 2}, {"gather": "model"}], ids=str)
def test_what_is_configured_stays(settings: dict[str, object]) -> None:
    def memory() -> int | None:
        raise AssertionError("not asked for")

    expected = 2 if "microbatches_per_gather" in settings else 4
    assert choose_gather(CONFIG.trainer.model_copy(update=settings), memory) == (expected, "")


@pytest.mark.parametrize(
    ("peaks", "expected"),
    [({2: 10, 3: 10, 4: 10}, 4), ({2: 10, 3: 10, 4: 11}, 3), ({2: 10, 3: 11, 4: 12}, 2)],
    ids=["free", "partly free", "at the peak"],
)
def test_the_queue_of_layers_is_as_deep_as_the_peak_allows(peaks: dict[int, int], expected: int) -> None:
    assert choose_layers_at_once(peaks.__getitem__) == expected


@pytest.mark.slow
def test_a_run_queues_as_many_layers_as_the_plan_counts() -> None:
    config = CONFIG.model_copy(update={"model": CONFIG.model.model_copy(update={"num_layers": 5})})
    model, plan = trace_model(config, VOCAB), StepMemory(config, VOCAB, jax.devices()[:1], "cpu")
    setup = plan_for_memory(
        lambda trainer: setup_from_config(config, trainer, model, devices=jax.devices()[:1]),
        config.trainer,
        random_batch(1, config.model.seq_len, VOCAB),
        lambda _: None,
        memory=lambda: 1 << 40,
    )
    by_depth = {depth: plan.with_layers_at_once(depth).plan() for depth in (2, 3, 4)}
    peaks = {depth: memory.peak.bytes for depth, memory in by_depth.items()}
    assert setup.step.devices.layers_at_once == max(depth for depth in peaks if peaks[depth] <= peaks[2])

    # Each further layer in the queue takes the memory of its parameters while a later one is gathered.
    gathers = [next(x.bytes for x in memory.phases if x.name == "gather layer 0") for memory in by_depth.values()]
    layer = 4 * sum(
        math.prod(x.shape[1:]) for name, x in setup.model.shapes.items() if x.shape[:1] == (config.model.num_layers,)
    )
    assert np.diff(gathers).tolist() == pytest.approx([layer, layer], rel=0.01)


def test_a_cpu_does_not_say_how_much_memory_it_has() -> None:
    assert min_device_memory() is None
