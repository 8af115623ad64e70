"""`log` in the layers of a decoder, however they are run, against what they compute without tracing."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from lm_trainer.core.batch import Batch
from lm_trainer.core.errors import UserError
from lm_trainer.models import Gpt2Config
from lm_trainer.nn.log import log
from lm_trainer.nn.loss import token_loss
from lm_trainer.run.build.model import next_token_loss
from tests.run.test_logged import BATCH, LAYERS, LENGTH, ROWS, SHARDS, VOCAB, drop_step_metrics, first_step, plan


@pytest.fixture(autouse=True)
def _run_in_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


class LoggingMlp(nnx.Module):
    """An MLP that logs the root mean square of its results."""

    def __init__(self, inner: Any):
        self.inner = inner

    def __call__(self, h_BSD: jax.Array, **options: Any) -> jax.Array:
        y_BSD = self.inner(h_BSD, **options)
        rms = jnp.sqrt(jnp.mean(jnp.square(y_BSD)))
        if RECORD is not None:
            RECORD.append(float(rms))
        log("mlp_rms", rms, each=True)
        return y_BSD


RECORD: list[float] | None = None
"""Values that the layers of a decoder saw, while it is a list: they are then run without tracing."""


def decoder(**changes: Any) -> Any:
    config = Gpt2Config.model_validate(
        {"seq_len": LENGTH, "hidden_dim": 8, "num_heads": 2, "num_layers": LAYERS, **changes}
    )
    model = config.build(VOCAB, rngs=nnx.Rngs(0))
    for block in model.blocks.values():
        block.mlp = LoggingMlp(block.mlp)
    return model


def decoder_loss(model: Any, batch: Batch, key: jax.Array | None) -> Any:
    total, weight, metrics = token_loss(model, batch, key=key)
    log("weights", jnp.sum(jnp.asarray(batch.weights) ** 2), reduce="sum")
    return total, weight, metrics


@functools.cache
def expected_values() -> dict[str, float]:
    """The values to be logged, of layers that ran without tracing, microbatch by microbatch."""
    global RECORD
    model = jax.jit(lambda: decoder(scan_layers=False, gradient_checkpointing=False))()
    rms = np.zeros(LAYERS)
    for rows in np.split(np.arange(ROWS), SHARDS):
        part = jax.tree.map(lambda x, rows=rows: x[rows], BATCH)
        RECORD = []
        with jax.disable_jit():
            model(part.tokens, part.positions, part.segments)
        values, RECORD = RECORD, None
        rms += np.asarray(values) * part.weights.sum()
    rms /= BATCH.weights.sum()
    assert len({*rms}) == LAYERS
    return {
        "mlp_rms": float(rms.mean()),
        "weights": float((BATCH.weights**2).sum() / BATCH.weights.sum()),
        **{f"mlp_rms/{i}": float(x) for i, x in enumerate(rms)},
    }


@pytest.mark.slow
class TestDecoder:
    @pytest.mark.parametrize(
        "changes",
        [
            {"scan_layers": True},
            {"scan_layers": False},
            {"scan_layers": True, "gradient_checkpointing": False},
            {"scan_layers": False, "gradient_checkpointing": "dots"},
            {"gradient_checkpointing": "nested"},
            {"gradient_checkpointing": "offload", "scan_layers": True},
            {"gradient_checkpointing": {"save_block_internals": ["attention"]}},
        ],
        ids=str,
    )
    def test_every_way_to_run_the_layers(self, changes: dict[str, Any]) -> None:
        metrics = first_step(plan(functools.partial(decoder, **changes), decoder_loss))
        assert drop_step_metrics(metrics) == pytest.approx(expected_values(), rel=1e-5)

    def test_the_bits_are_those_of_one_device(self) -> None:
        one, several = (plan(decoder, decoder_loss, devices=n) for n in (1, 4))
        weights = {name: np.asarray(x) for name, x in one.init().params.items()}
        assert first_step(several, weights=weights) == first_step(one, weights=weights)

    def test_devices_that_share_a_microbatch_add_their_shares(self) -> None:
        metrics = first_step(plan(decoder, decoder_loss, devices=2, context_axis_size=2))
        assert metrics["weights"] == pytest.approx(expected_values()["weights"], rel=1e-6)

    def test_layers_of_a_pipeline_refuse(self) -> None:
        build = functools.partial(decoder, num_layers=2)
        program = plan(build, decoder_loss, devices=2, pipeline_axis_size=2)
        with pytest.raises(UserError, match=r"'mlp_rms' .* cannot be logged here: pipeline_axis_size is not 1"):
            program.step.compile(BATCH)

    @pytest.mark.parametrize("axes", [{}, {"context_axis_size": 2}], ids=["alone", "context"])
    def test_layers_that_are_computed_one_by_one(self, axes: dict[str, int]) -> None:
        programs = [
            plan(decoder, next_token_loss(jnp.float32), devices=devices, determinism="layerwise", **axes)
            for devices in (2, 4)
        ]
        weights = {name: np.asarray(x) for name, x in programs[0].init().params.items()}
        metrics_by_program = [first_step(program, weights=weights) for program in programs]
        expected = {name: x for name, x in expected_values().items() if name != "weights"}
        if not axes:
            assert drop_step_metrics(metrics_by_program[0]) == pytest.approx(expected, rel=1e-5)
        assert metrics_by_program[0] == metrics_by_program[1]
        elastic = plan(decoder, next_token_loss(jnp.float32), devices=2, **axes)
        assert metrics_by_program[0] == pytest.approx(first_step(elastic, weights=weights), rel=1e-5)
        held_out = [program.evaluate(program.from_weights(weights).params, [BATCH]) for program in (*programs, elastic)]
        assert held_out[0] == held_out[1]
        assert held_out[0] == pytest.approx(held_out[2], rel=1e-5)
