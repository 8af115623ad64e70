"""`determinism: fast` computes what `elastic` does, up to the order of additions."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import pytest

from lm_trainer.core.batch import Batch
from lm_trainer.profile.collectives import bytes_sent
from lm_trainer.profile.workload import random_batch
from lm_trainer.run.build.setup import TrainingSetup, build_setup
from lm_trainer.run.config.run_config import RunConfig
from lm_trainer.step.state.model_def import Params
from lm_trainer.step.state.train_state import to_host

VOCAB, ROWS, SEQ = 61, 8, 16
MIXTURE = {
    "type": "mixtral",
    "intermediate_dim": 24,
    "num_kv_heads": 2,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "expert_kernel": "grouped",
}


def setup(
    devices: int,
    *,
    optimizer: str = "adam",
    block: int | None = None,
    model: Mapping[str, Any] | None = None,
    **trainer: Any,
) -> TrainingSetup:
    sizes = {"type": "gpt2", "seq_len": SEQ, "hidden_dim": 16, "num_layers": 1, "num_heads": 2}
    sizes["cross_entropy_block_size"] = block
    config = RunConfig.model_validate(
        {
            "model": {**sizes, "gradient_checkpointing": False, **(model or {})},
            "data": {"tokenizer": "bytes"},
            "trainer": {"train_batch_size": ROWS, "elastic_shards": 4, **trainer},
            "optimizer": {"type": optimizer, "learning_rate": 1e-2, "warmup": 0},
        }
    )
    return build_setup(config, VOCAB, jax.devices()[:devices])


def batch() -> Batch:
    """Random tokens, of which some count for nothing."""
    rows = random_batch(ROWS, SEQ, VOCAB)
    weights = np.asarray(rows.weights).copy()
    weights[2:4, 5:] = 0.0
    return rows._replace(weights=weights)


class RecordingObserver:
    """An observer that keeps what it is shown."""

    def before_step(self, state: Any) -> int:
        return state.step

    def after_step(self, before: int, grads: Params, weight: jax.Array, state: Any) -> None:
        self.step, self.weight, self.grads = before, float(weight), to_host(grads)


def trained(planned: TrainingSetup, observer: Any = None) -> tuple[list[float], dict[str, np.ndarray]]:
    state, metrics = planned.init(), []
    planned.step.compile(batch())
    for _ in range(3):
        state, step_metrics = planned.step(state, planned.step.put(batch()), 1e-2, observer)
        metrics += [float(step_metrics[name]) for name in ("loss", "grad_norm", "tokens")]
    return metrics, to_host(state.params)


@functools.cache
def observed_elastic() -> tuple[Any, RecordingObserver]:
    """Metrics and weights of `determinism: elastic` on one device, with the loss of all tokens at once, and its last
    gradient."""
    observer = RecordingObserver()
    return trained(setup(1), observer), observer


def trained_elastic() -> tuple[list[float], dict[str, np.ndarray]]:
    return observed_elastic()[0]


def assert_close(fast: Any, elastic: Any) -> None:
    np.testing.assert_allclose(fast[0], elastic[0], rtol=1e-5)
    for name, value in elastic[1].items():
        np.testing.assert_allclose(fast[1][name], value, atol=1e-4, err_msg=name)


def test_fast_is_one_program_that_is_close_to_elastic() -> None:
    fast = setup(2, determinism="fast")
    assert not fast.step.is_compiled(0)
    assert_close(trained(fast), trained_elastic())
    assert fast.step.is_compiled(0)
    text = fast.step.compile(batch()).hlo()
    assert "all-reduce" in text, "XLA adds across devices inside the program"
    assert f"s32[{ROWS // 2},{SEQ}]" in text, "a device computes all its rows at once"


@pytest.mark.slow
def test_blocks_of_the_loss_are_of_a_devices_own_tokens() -> None:
    # 24 tokens do not divide the 32 of a device: each device fills up its own last block.
    fast = setup(4, determinism="fast", block=24)
    assert_close(trained(fast), trained_elastic())
    text = fast.step.compile(batch()).hlo()
    exchanged = re.findall(rf"f32\[\d+,{VOCAB}\]\S* (?:all-\w+|collective-permute)", text)
    assert not exchanged, "logits do not leave their device"
    assert f"f32[24,{VOCAB}]" in text, "a device computes one block of its own at a time"
    more = setup(4, determinism="fast", block=4).step.compile(batch()).hlo()
    sent, sent_by_more = (sum(bytes_sent(hlo).values()) for hlo in (text, more))
    assert sent_by_more < sent + VOCAB * 16 * 4, "the gradient of the head is added up once, not for each block"


@pytest.mark.slow
def test_fast_accumulates_where_per_device_parallelism_is_set() -> None:
    fast, observer = setup(2, determinism="fast", per_device_parallelism=1), RecordingObserver()
    elastic, expected = observed_elastic()
    assert_close(trained(fast, observer), elastic)
    assert f"s32[1,{SEQ}]" in fast.step.compile(batch()).hlo()
    assert (observer.step, observer.weight) == (expected.step, expected.weight) == (2, np.sum(batch().weights))
    for name, value in expected.grads.items():
        np.testing.assert_allclose(observer.grads[name], value, atol=1e-3, err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["sophia-g", "muon"])
def test_fast_takes_estimates_of_curvature_and_updates_of_whole_matrices(optimizer: str) -> None:
    fast, elastic = (trained(setup(2, optimizer=optimizer, determinism=kind)) for kind in ("fast", "elastic"))
    np.testing.assert_allclose(fast[0], elastic[0], rtol=1e-3)


@pytest.mark.slow
def test_fast_adds_16_bit_gradients_of_grouped_experts_over_devices() -> None:
    """Each device computes the experts of its own rows by `shard_map`, which adds the gradients of their weights."""
    one, two = RecordingObserver(), RecordingObserver()
    for devices, observer in ((1, one), (2, two)):
        planned = setup(devices, model=MIXTURE, determinism="fast", mp="p=f32,c=bfloat16")
        planned.step.compile(batch())
        planned.step(planned.init(), planned.step.put(batch()), 1e-2, observer)
    for name, expected in one.grads.items():
        # bfloat16 has steps of 1/256.
        assert np.linalg.norm(two.grads[name] - expected) <= np.linalg.norm(expected) / 128, name
