"""Layers that hand values on to their derivatives: the numbers of those that compute all again, and the same bits."""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np
import pytest

from lm_trainer.parallel.rehearsal import on_one_shard
from lm_trainer.profile.roofline import list_operations
from lm_trainer.profile.workload import random_batch
from lm_trainer.run.build.setup import build_setup
from lm_trainer.run.build.startup_notes import recomputation_note
from lm_trainer.run.config.run_config import RunConfig
from lm_trainer.step.dispatch.executable import Executables
from lm_trainer.step.dispatch.recorder import measure_traced
from lm_trainer.step.state.train_state import to_host
from tests.step.test_layerwise import GEMMA2, GPT2, LLAMA, MIXTRAL, VOCAB, assert_close, config_of, gradient

MIXED = {"mp": "p=f32,c=bfloat16"}
SETTINGS = [
    "dots_no_batch",
    pytest.param(False, marks=pytest.mark.slow),
    pytest.param("dots", marks=pytest.mark.slow),
    pytest.param({"save_block_internals": ["attention", "mlp"]}, marks=[pytest.mark.slow, pytest.mark.optimised]),
]


def config_with(model: dict[str, Any], remat: Any, **trainer: Any) -> RunConfig:
    return config_of({**model, "gradient_checkpointing": remat}, **trainer)


@functools.cache
def stepped_without_choice() -> dict[str, np.ndarray]:
    """The parameters after two steps in which all is computed again, with which all settings are compared."""
    return stepped(config_with(GPT2, True, **MIXED), 1)[1]


def stepped(config: RunConfig, devices: int) -> tuple[str, dict[str, np.ndarray]]:
    """The hash of the programs, and the parameters after two steps."""
    setup, batch = build_setup(config, VOCAB, jax.devices()[:devices]), random_batch(8, 16, VOCAB)
    programs, state = setup.step.compile(batch).fingerprint(), setup.init()
    for _ in range(2):
        state, _ = setup.take_step(state, batch)
    return programs, to_host(state.params)


@pytest.mark.slow
@pytest.mark.parametrize("remat", SETTINGS, ids=str)
def test_two_steps_on_one_and_on_four_devices(remat: Any) -> None:
    hash_of_one, one = stepped(config_with(GPT2, remat, **MIXED), 1)
    hash_of_four, four = stepped(config_with(GPT2, remat, **MIXED), 4)
    assert hash_of_one == hash_of_four
    for name, x in stepped_without_choice().items():
        np.testing.assert_array_equal(four[name], one[name])
        np.testing.assert_allclose(one[name], x, atol=2e-5, err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("model", [LLAMA, GEMMA2, MIXTRAL], ids=lambda model: model["type"])
def test_families(model: dict[str, Any]) -> None:
    assert_close(gradient(config_with(model, False), 2), gradient(config_with(model, True)))


def programs_of(model: dict[str, Any], remat: Any) -> Executables:
    config = config_with(model, remat)
    setup = build_setup(config, VOCAB, jax.devices()[:1])
    executables = setup.step.compile(random_batch(8, 16, VOCAB))
    assert isinstance(executables, Executables)
    return executables


def flops(programs: Executables, name: str) -> float:
    return sum(op.flops for op in list_operations(programs.by_name[name].hlo(), ()))


@pytest.mark.slow
def test_the_derivative_computes_no_product_of_the_layer_again() -> None:
    """A product has two derivatives, each a product of the same size."""
    all_again, some_again = (programs_of(LLAMA, remat) for remat in (True, "dots_no_batch"))
    forward = flops(all_again, "layer 0")
    for none_again in (programs_of(LLAMA, remat) for remat in ("dots", False)):
        assert flops(none_again, "layer 0 gradient") == 2 * forward
    # The product of the last weights follows from nothing else that is computed, and nobody needs its result.
    assert 2 * forward < flops(some_again, "layer 0 gradient") < flops(all_again, "layer 0 gradient") < 3 * forward


def activations(config: RunConfig) -> int:
    """Bytes of activations of layers that one device holds, by the plan."""
    with on_one_shard():
        setup = build_setup(config, VOCAB, jax.devices()[:8])
    phases = setup.rehearse(random_batch(1, config.model.seq_len, VOCAB), "cpu", measure_traced).phases
    # While the derivative of the loss is computed, nothing that was handed on is used up yet.
    (phase,) = (phase for phase in phases if phase.name == "leave gradient")
    return phase.parts["activations of layers"]


@pytest.mark.parametrize(
    ("model", "remat"),
    [
        (LLAMA, False),
        (GPT2, "dots_no_batch"),
        (MIXTRAL, "dots_no_batch"),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in ((LLAMA, "dots_no_batch"), (GPT2, False))),
        *(pytest.param(GEMMA2, remat, marks=pytest.mark.slow) for remat in (False, "dots_no_batch")),
        pytest.param(MIXTRAL, False, marks=pytest.mark.slow),
    ],
    ids=lambda value: value["type"] if isinstance(value, dict) else str(value),
)
def test_what_is_handed_on_grows_with_the_rows(model: dict[str, Any], remat: Any) -> None:
    """So no weights are among it, of which each microbatch and layer would hold a copy."""
    first, second = (
        activations(config_with(model, remat, train_batch_size=8 * rows, elastic_shards=8)) for rows in (1, 2)
    )
    # Statistics of a router are sums over the rows, a few numbers.
    assert second == pytest.approx(2 * first, rel=2e-3)


def test_elementwise_values_are_not_handed_on() -> None:
    """A layer of GPT-2 hands on the results of its products; of its GELU alone JAX would save six arrays."""
    products, everything = (activations(config_with(GPT2, remat, train_batch_size=8)) for remat in ("dots", False))
    assert products <= everything < 1.5 * products


def test_the_plan_counts_what_is_handed_on() -> None:
    config = config_with(LLAMA, "dots", train_batch_size=8, elastic_shards=8)
    results = jax.tree.leaves(programs_of(LLAMA, "dots").by_name["layer 0"].compiled.out_info)
    stream = 16 * LLAMA["hidden_dim"] * 4
    returned = sum(x.size * x.dtype.itemsize for x in results)
    # The stream before the first layer, and after each.
    assert activations(config) == LLAMA["num_layers"] * returned + stream


def test_a_choice_that_is_not_made_is_said() -> None:
    def note(remat: Any, **trainer: Any) -> str | None:
        config = config_with(LLAMA, remat, **trainer)
        return recomputation_note(config.trainer, config.model.spec(VOCAB))

    for notes in (note(True), note(False), note("dots"), note("offload", gather="model")):
        assert notes is None
    for ignored in (note("offload"), note("nested"), note("dots", context_axis_size=2)):
        assert ignored is not None
        assert "gradient_checkpointing has no effect here" in ignored
