"""The promise of equal bits, on runs drawn at random; `benchmarks/equality.py` draws more of them."""

from __future__ import annotations

import pytest

from tests.step.random_runs import (
    RandomRun,
    difference,
    draw_family,
    draw_shapes,
    draw_uneven,
    outcome,
    reference_of,
    uneven,
)

pytestmark = pytest.mark.optimised

QUICK, SHAPES, FAMILIES = (0,), range(12), (2, 11, 13)
"""Numbers of runs. What is quick: a few parameters, on two devices. The families: a window, replicas, experts."""


@pytest.mark.parametrize("number", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in SHAPES])
def test_parameters_of_random_shapes(number: int) -> None:
    run = draw_shapes(number)
    mismatch = difference(run)
    assert mismatch is None, f"{run}: {mismatch}"


@pytest.mark.parametrize("number", [pytest.param(n, marks=() if n == 0 else pytest.mark.slow) for n in (0, 1, 4, 7)])
def test_any_number_of_devices(number: int) -> None:
    run = uneven(draw_shapes(number))
    mismatch = difference(run)
    assert mismatch is None, f"{run}: {mismatch}"


@pytest.mark.slow
@pytest.mark.parametrize("run", [draw_uneven(n) for n in (2, 3, 5)], ids=str)
def test_any_number_of_devices_with_language_models(run: RandomRun) -> None:
    mismatch = difference(run)
    assert mismatch is None, mismatch


@pytest.mark.slow
@pytest.mark.parametrize("number", FAMILIES)
def test_random_language_models(number: int) -> None:
    run = draw_family(number)
    mismatch = difference(run)
    assert mismatch is None, f"{run}: {mismatch}"


@pytest.mark.slow
@pytest.mark.parametrize("determinism", ["elastic", "layerwise"])
def test_products_in_blocks_that_share_a_scale(determinism: str) -> None:
    model = {"type": "llama", "seq_len": 24, "hidden_dim": 32, "intermediate_dim": 64, "num_layers": 2, "num_heads": 1,
             "num_kv_heads": 1}  # fmt: skip
    trainer = {"seed": 0, "num_train_steps": 4, "mp": "p=f32,c=bfloat16", "train_batch_size": 8, "elastic_shards": 8,
               "per_device_parallelism": 2, "determinism": determinism, "quantization": {"type": "mxfp8"}}  # fmt: skip
    run = RandomRun(trainer, {"type": "adam", "learning_rate": 1e-2, "warmup": 0}, devices=4, mesh={}, model=model)
    mismatch = difference(run)
    assert mismatch is None, mismatch


@pytest.mark.slow
def test_another_order_of_additions_is_noticed() -> None:
    run = draw_shapes(0)
    half = run.trainer["per_device_parallelism"] * 2
    assert reference_of(run).first_difference(outcome(run, 1, {"per_device_parallelism": half})) is not None
