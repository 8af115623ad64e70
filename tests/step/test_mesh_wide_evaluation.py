"""Evaluation by one program for all devices: the bits of one device, in fewer programs."""

from __future__ import annotations

import itertools
import logging
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lm_trainer.core.batch import Batch
from lm_trainer.profile.workload import random_batch
from lm_trainer.run.build.model import TokenNll
from lm_trainer.run.build.setup import build_setup, split_loss_into_stages
from lm_trainer.step.dispatch import mesh_executable
from lm_trainer.step.dispatch.mesh_group import dispatching_for
from lm_trainer.step.evaluate import Evaluator
from tests.host_work import HostWork, count_host_work
from tests.step.test_layerwise import LLAMA, VOCAB, config_of

MICROBATCHES, LENGTH = 8, 16


class Evaluated:
    """Sums over two batches, and values of each row of them, on some devices."""

    def __init__(self, gather: str, devices: int, work: HostWork, *, wide: bool = True):
        config = config_of({**LLAMA, "num_layers": 4}, gather=gather)
        with dispatching_for("gpu" if wide else "cpu"):
            setup = build_setup(config, VOCAB, jax.devices()[:devices])
            loss, mesh = TokenNll(jnp.float32, top=2), setup.sharding.mesh
            staged = split_loss_into_stages(loss, setup.model, mesh) if setup.gathers_layers else None
            rows = Evaluator(setup.model, loss, setup.step.devices, setup.plan.evaluation, staged=staged)
        params = setup.init().params
        # The last batch is padded, as the last one of a held-out set is.
        padded = random_batch(MICROBATCHES, LENGTH, VOCAB, seed=1)
        padded.weights[-3:] = 0
        batches: list[Batch] = [random_batch(MICROBATCHES, LENGTH, VOCAB), padded]
        work.clear()
        self.sums = setup.evaluate.compute_sums(params, batches)
        self.programs = work.programs.copy()
        self.rows: list[dict[str, Any]] = [*rows.compute_row_values(params, batches)]


def assert_equal(actual: Evaluated, expected: Evaluated) -> None:
    assert actual.sums == expected.sums
    for values, expected_values in zip(actual.rows, expected.rows, strict=True):
        assert {name: x.shape for name, x in values.items()} == {name: x.shape for name, x in expected_values.items()}
        jax.tree.map(np.testing.assert_array_equal, values, expected_values)


@pytest.mark.slow
@pytest.mark.optimised
@pytest.mark.parametrize("gather", ["model", "layer"])
def test_one_program_for_all_devices_evaluates_with_the_bits_of_one_device(
    gather: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On three devices, one of them has a microbatch less than the others."""
    work = count_host_work(monkeypatch)
    expected = Evaluated(gather, 1, work)
    assert expected.rows[0]["nll"].shape == (MICROBATCHES, LENGTH)
    assert expected.rows[0]["top_ids"].shape == (MICROBATCHES, LENGTH, 2)
    name = "microbatch" if gather == "model" else "leave"
    assert expected.programs[name] == 2 * MICROBATCHES
    for devices in (2, 3, 4, 8):
        evaluated = Evaluated(gather, devices, work)
        assert_equal(evaluated, expected)
        calls = 2 * math.ceil(MICROBATCHES / devices)
        assert evaluated.programs[name] == calls
        if gather == "layer":
            # All layers but the last gather the next one.
            assert evaluated.programs["layer 0 with gather layer 0"] == 3 * 2
            assert evaluated.programs["layer 0"] == 4 * calls - 3 * 2


@pytest.mark.slow
def test_an_evaluation_that_is_compiled_otherwise_in_one_program_gets_one_for_each_device(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    work = count_host_work(monkeypatch)
    # By layers, because XLA for CPUs cannot load a large program on a second device once it was read from the cache.
    expected = Evaluated("layer", 1, work)
    different = itertools.count()
    monkeypatch.setattr(mesh_executable, "output_hashes", lambda _: [str(next(different))])
    with caplog.at_level(logging.WARNING):
        evaluated = Evaluated("layer", 2, work)
    assert_equal(evaluated, expected)
    assert evaluated.programs["leave"] == 2 * MICROBATCHES
    assert "is compiled differently in one program for all devices" in caplog.text
