"""Plans of mixtures with latent attention, against counts by hand of DeepSeek-V3 and V2-Lite."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations

import jax
import pytest

from benchmarks.plan_error import config_of
from lm_trainer.core.errors import UserError
from lm_trainer.models import DeepseekV2Config, DeepseekV3Config
from lm_trainer.nn.expert_spec import MoeSpec
from lm_trainer.plan.devices import DeviceGroup
from lm_trainer.plan.estimate import Traces, estimate_step, estimate_temporary
from lm_trainer.plan.run import Assumptions, plan_run
from lm_trainer.profile.expert_kernels import expected_targets
from lm_trainer.profile.flops import flops_per_token, parameter_count
from lm_trainer.run.config.run_config import RunConfig

VOCAB, LENGTH, ROUTED, CHOSEN = 129280, 4096, 256, 8
HIDDEN, HEADS, LAYERS, DENSE = 7168, 128, 61, 3
PLAIN, ROTATED, VALUE, QUERY_LATENT, LATENT = 128, 64, 128, 1536, 512
ATTENTION = (
    HIDDEN * QUERY_LATENT
    + QUERY_LATENT * HEADS * (PLAIN + ROTATED)
    + HIDDEN * (LATENT + ROTATED)
    + LATENT * HEADS * (PLAIN + VALUE)
    + HEADS * VALUE * HIDDEN
)
MLP, EXPERT, ROUTER = 3 * HIDDEN * 18432, 3 * HIDDEN * 2048, HIDDEN * ROUTED
NORMS = 2 * HIDDEN + QUERY_LATENT + LATENT
SPARSE_LAYER = ATTENTION + NORMS + ROUTER + (ROUTED + 1) * EXPERT


def test_parameters_of_deepseek_v3() -> None:
    dense_layer = ATTENTION + NORMS + MLP
    total = DENSE * dense_layer + (LAYERS - DENSE) * SPARSE_LAYER + 2 * VOCAB * HIDDEN + HIDDEN
    # 671 billion, as published; its files also have a bias for each router.
    assert total == 671_026_404_352
    assert parameter_count(DeepseekV3Config().spec(VOCAB)) == total


def test_flops_of_deepseek_v3() -> None:
    active = LAYERS * ATTENTION + DENSE * MLP + (LAYERS - DENSE) * (ROUTER + (CHOSEN + 1) * EXPERT) + VOCAB * HIDDEN
    # 37 billion are published, with the embedding.
    assert (active + VOCAB * HIDDEN) / 1e9 == pytest.approx(37.55, abs=0.01)
    scores = LAYERS * HEADS * LENGTH * (2 * (PLAIN + ROTATED) + 2 * VALUE + 3)
    assert flops_per_token(DeepseekV3Config().spec(VOCAB), LENGTH).forward == 2 * active + scores


def test_parameters_of_deepseek_v2_lite() -> None:
    # 15.7 billion, as published.
    assert parameter_count(DeepseekV2Config().spec(102400)) == 15_706_484_224


def temporary_memory(config: RunConfig, platform: str) -> Mapping[str, int]:
    return estimate_temporary(config, VOCAB, 2, LENGTH, fused=True, platform=platform)


def step(devices: int) -> RunConfig:
    trainer = {"train_batch_size": devices, "per_device_parallelism": 1, "gather": "layer", "mp": "p=f32,c=bfloat16"}
    return config_of({"model": {"type": "deepseek_v3"}, "trainer": trainer})


def test_temporary_memory_of_each_kind_of_layer() -> None:
    queries, values = HEADS * (PLAIN + ROTATED), HEADS * VALUE
    outside_mlp = 8 * HIDDEN + 2 * queries + 2 * values + 2 * (QUERY_LATENT + LATENT + ROTATED)
    on_tpu, on_gpu = (temporary_memory(step(8), platform) for platform in ("tpu", "gpu"))
    assert on_tpu["layer 0 gradient"] == on_gpu["layer 0 gradient"] == 2 * LENGTH * (outside_mlp + 3 * 18432)
    chosen = 3 * (CHOSEN + 1) * 2048 + 2 * CHOSEN * HIDDEN
    assert on_tpu["layer 1 gradient"] == 2 * LENGTH * (outside_mlp + chosen)
    assert on_gpu["layer 1 gradient"] == on_tpu["layer 1 gradient"]
    # Every expert is computed for every token.
    dense = step(8)
    dense = dense.model_copy(update={"model": dense.model.model_copy(update={"expert_kernel": "dense"})})
    on_gpu = temporary_memory(dense, "gpu")
    assert on_gpu["layer 1 gradient"] == 2 * LENGTH * (outside_mlp + 3 * (ROUTED + 1) * 2048)


@pytest.mark.parametrize("devices", [4, 128])
def test_devices_that_share_experts_have_room_for_all_tokens(devices: int) -> None:
    def inside(kernel: str, expert: int) -> int:
        config = step(8)
        config = config.model_copy(update={"model": config.model.model_copy(update={"expert_kernel": kernel})})
        axes = {"expert": expert}
        memory = estimate_temporary(config, VOCAB, 2, LENGTH * expert, fused=True, platform="tpu", axes=axes)
        return memory["layer 1 gradient"]

    # For each token of a device: tokens that it sends and receives, and their results.
    exchanged = 2 * LENGTH * 2 * (devices + min(devices, CHOSEN)) * HIDDEN
    assert inside("dense", devices) - inside("dense", 1) == exchanged
    # A token of any device can have all of its experts on one device, but no more than the device has.
    assignments = {4: 4 * CHOSEN, 128: 128 * 2}[devices]
    of_assignment = 2 * LENGTH * (2 * HIDDEN + 3 * 2048)
    assert inside("grouped", devices) - inside("grouped", 1) == exchanged + (assignments - CHOSEN) * of_assignment


@pytest.mark.parametrize(("experts", "top_k", "devices"), [(8, 2, 4), (8, 3, 2), (6, 6, 3), (4, 1, 4)])
def test_expected_targets_equal_the_mean_over_all_choices(experts: int, top_k: int, devices: int) -> None:
    owners = [{expert // (experts // devices) for expert in choice} for choice in combinations(range(experts), top_k)]
    expected = sum(map(len, owners)) / len(owners)
    assert expected_targets(MoeSpec(8, experts, top_k), devices) == pytest.approx(expected)


def seconds_of_step(kind: str, kernel: str) -> float:
    sizes = {"seq_len": 512, "hidden_dim": 32, "num_layers": 1, "num_heads": 2, "num_kv_heads": 2}
    experts = {"intermediate_dim": 32, "n_routed_experts": 16, "num_experts_per_tok": 2, "expert_kernel": kernel}
    trainer = {"train_batch_size": 8, "num_train_steps": 10, "mp": "p=f32,c=float16"}
    config = config_of({"model": {"type": "olmoe", **sizes, **experts}, "trainer": trainer})
    time = plan_run(config, DeviceGroup(1, kind), jax.devices()[:1], Assumptions(vocab_size=64)).time
    assert time is not None
    return time.step_seconds


@pytest.mark.slow
def test_gpus_older_than_ampere_compute_every_expert() -> None:
    volta, hopper = "Tesla V100-SXM2-32GB", "NVIDIA H100 80GB HBM3"
    assert seconds_of_step(volta, "auto") == seconds_of_step(volta, "dense")
    assert seconds_of_step(hopper, "auto") < seconds_of_step(hopper, "dense")
    with pytest.raises(UserError, match="grouped has no kernel for a Tesla V100-SXM2-32GB"):
        seconds_of_step(volta, "grouped")


@pytest.mark.slow
def test_memory_of_deepseek_v3() -> None:
    phase = estimate_step(step(8), DeviceGroup(8, "TPU v5p"), temporary_memory(step(8), "tpu"), Traces(VOCAB))
    # Parameters and two moments of Adam in float32.
    assert phase.parts["state"] == pytest.approx(12 * 671_026_404_352 / 8, rel=0.01)
    assert phase.parts["gradients"] == pytest.approx(4 * 671_026_404_352 / 8, rel=0.01)
    assert phase.name.startswith("layer 1 gradient")
    # In bfloat16: the layer, the layer below it, and the layer above, whose gradients are reduced meanwhile.
    assert phase.parts["gathered layers"] == pytest.approx(3 * 2 * SPARSE_LAYER, rel=0.01)
