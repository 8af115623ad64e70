"""The promise: the same losses and the same weights, bit for bit, on any mesh."""

from __future__ import annotations

import hashlib
import struct
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from lm_trainer.config.loader import load
from lm_trainer.data import open_data
from lm_trainer.run.build.setup import build_setup
from lm_trainer.run.config.run_config import RunConfig
from lm_trainer.step.state.train_state import to_host
from tests.run.conftest import MakeConfig, Plain, merge

SHORT: Plain = {"trainer": {"num_train_steps": 20}, "optimizer": {"learning_rate": 1e-2}}
"""Changes of the tiny run, which then learns in fewer steps."""


def run(path: Path, devices: int, **trainer: Any) -> tuple[list[bytes], str, float]:
    """The bits of every loss and gradient norm, a hash of all weights and moments, and the validation loss."""
    config = load(path, [f"trainer.{k}={v}" for k, v in trainer.items()], RunConfig).config
    data = open_data(config.data, seq_len=config.model.seq_len, seed=config.trainer.seed)
    setup = build_setup(config, data.tokenizer.vocab_size, jax.devices()[:devices])
    state = setup.init()
    series, rate = [], config.learning_rate()
    rows, steps = setup.step.local_rows(), config.trainer.num_train_steps
    for step, batch in enumerate(data.train(config.trainer.batch_schedule.at(0), rows=rows, num_steps=steps)):
        if step == 0:
            setup.step.compile(batch)
        state, metrics = setup.step(state, setup.step.put(batch), rate(step))
        series.append(struct.pack("<ff", float(metrics["loss"]), float(metrics["grad_norm"])))
    evaluate = setup.evaluate
    held_out = data.validation()["validation"].batches(evaluate.batch_size, rows=evaluate.local_rows, max_batches=3)
    loss = evaluate(state.params, held_out)["loss"]
    data.close()
    digest = hashlib.sha256()
    params = to_host(state.params)
    for name in sorted(params):
        digest.update(params[name].tobytes())
    for leaf in jax.tree.leaves(state.opt_state):
        digest.update(np.asarray(leaf).tobytes())
    return series, digest.hexdigest(), loss


_REFERENCES: dict[str, tuple[list[bytes], str, float]] = {}


def on_one_device(path: Path) -> tuple[list[bytes], str, float]:
    """`run` on one device, once for each configuration."""
    text = path.read_text()
    if text not in _REFERENCES:
        _REFERENCES[text] = run(path, 1)
    return _REFERENCES[text]


def check_all_equal(path: Path, variants: list[tuple[int, Plain]]) -> None:
    reference = on_one_device(path)
    losses = [struct.unpack("<ff", bits)[0] for bits in reference[0]]
    assert np.isfinite(losses).all()
    assert np.mean(losses[-5:]) < np.mean(losses[:5]) - 1, "the run learns, so that its bits mean something"
    for devices, trainer in variants:
        series, weights, held_out = run(path, devices, **trainer)
        first = next((i for i, (a, b) in enumerate(zip(series, reference[0], strict=True)) if a != b), None)
        assert first is None, f"{devices} devices, {trainer}: the losses part at step {first}"
        assert weights == reference[1], f"{devices} devices, {trainer}: other weights"
        assert held_out == reference[2], f"{devices} devices, {trainer}: another validation loss"


def test_one_device_and_two(make_config: MakeConfig, in_tmp_path: Path) -> None:
    check_all_equal(make_config(**SHORT), [(2, {})])


@pytest.mark.slow
@pytest.mark.optimised
def test_one_two_and_eight_devices(make_config: MakeConfig, in_tmp_path: Path) -> None:
    """On four there are replicas below."""
    changes = {"model": {"num_layers": 2, "scan_layers": False, "gradient_checkpointing": True}}
    check_all_equal(make_config(**SHORT, **changes), [(2, {}), (8, {})])


@pytest.mark.slow
def test_precisions_shapes_and_odd_numbers_of_microbatches(make_config: MakeConfig, in_tmp_path: Path) -> None:
    changes = {
        "model": {"hidden_dim": 48, "num_layers": 3, "cross_entropy_block_size": 24, "attn_pdrop": 0.1},
        "trainer": {"mp": "p=f32,c=bfloat16", "train_batch_size": 24, "per_device_parallelism": 1},
    }
    check_all_equal(make_config(**merge(SHORT, changes)), [(2, {})])


@pytest.mark.slow
def test_replicas_and_unsharded_state(make_config: MakeConfig, in_tmp_path: Path) -> None:
    variants = [
        (2, {"fsdp_axis": "null"}),
        (4, {"replica_ici_axis_size": 2, "fsdp_axis": "mlp"}),
        (8, {"replica_dcn_axis_size": 2, "replica_ici_axis_size": 2}),
    ]
    check_all_equal(make_config(**SHORT), variants)


@pytest.mark.slow
def test_the_comparison_notices_another_order_of_sums(make_config: MakeConfig, in_tmp_path: Path) -> None:
    reference = on_one_device(make_config(**SHORT))
    changes = {"trainer": {"per_device_parallelism": 4}, "model": {"resid_pdrop": 0.0, "embed_pdrop": 0.0}}
    other = run(make_config(**merge(SHORT, changes)), 1)
    assert reference[1] != other[1]


@pytest.mark.slow
def test_initial_weights_of_odd_widths_are_those_of_one_device() -> None:
    model = {"type": "gpt2", "hidden_dim": 24, "num_layers": 3, "num_heads": 2, "seq_len": 24}
    trainer = {"train_batch_size": 8, "elastic_shards": 8}
    config = RunConfig.model_validate({"model": model, "trainer": trainer, "optimizer": {"type": "adam"}})
    one, *sharded = (to_host(build_setup(config, 61, jax.devices()[:n]).init().params) for n in (1, 2, 8))
    for other in sharded:
        for name, x in one.items():
            np.testing.assert_array_equal(other[name], x, err_msg=name)


def test_state_is_sharded_from_the_first_byte(make_config: MakeConfig, in_tmp_path: Path) -> None:
    config = load(make_config(), [], RunConfig).config
    setup = build_setup(config, 257, jax.devices())
    state = setup.init()
    up = "blocks.0.mlp.up.weight"
    assert up in state.params, sorted(state.params)
    assert state.params[up].shape == (2, 32, 128)
    assert {s.data.shape for s in state.params[up].addressable_shards} == {(2, 4, 128)}
    moments = [x for x in jax.tree.leaves(state.opt_state) if x.shape == (2, 32, 128)]
    assert len(moments) == 2
    assert all(x.addressable_shards[0].data.shape == (2, 4, 128) for x in moments)
