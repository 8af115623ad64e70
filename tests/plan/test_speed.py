"""Expected time of a step by formula, against counts by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from benchmarks.plan_error import VOCAB, config_of
from lm_trainer.plan.communication import communication
from lm_trainer.plan.layout_work import LayoutWork, Recomputation
from lm_trainer.plan.machine import Machine
from lm_trainer.plan.speed import StepCost, step_cost
from lm_trainer.profile.devices import Bandwidths
from lm_trainer.profile.efficiency import Efficiency, device_efficiency
from lm_trainer.profile.flops import flops_per_token
from lm_trainer.run.config.gather import with_resolved_gather
from lm_trainer.step.dispatch.microbatch_plan import MicrobatchPlan

LAYERS, HIDDEN, MLP, LENGTH, HEADS = 8, 256, 512, 256, 4
LLAMA = {"type": "llama", "seq_len": LENGTH, "hidden_dim": HIDDEN, "intermediate_dim": MLP, "num_layers": LAYERS,
         "num_heads": HEADS, "num_kv_heads": HEADS, "gradient_checkpointing": False}  # fmt: skip
WEIGHTS = LAYERS * (4 * HIDDEN * HIDDEN + 3 * HIDDEN * MLP) + VOCAB * HIDDEN
EFFICIENCY = Efficiency(
    products=0.5, attention_forward=0.25, attention_backward=0.2, memory=0.8, links=0.4, adapters=0.1, head_width=64
)
MACHINE = Machine("NVIDIA H100 80GB HBM3", 1e9, Bandwidths(1e9, 1e6, "none", between_nodes=1e4), EFFICIENCY)
TOKENS = 2 * LENGTH
"""Tokens of a microbatch."""


def work_of(trainer: dict[str, Any] | None = None, model: dict[str, Any] | None = None, **changes: Any) -> LayoutWork:
    section = {"train_batch_size": 16, "mp": "p=f32,c=bfloat16", "gather": "model", **(trainer or {})}
    config = config_of({"model": {**LLAMA, **(model or {})}, "trainer": section})
    spec = config.model.spec(VOCAB)
    trainer_config = with_resolved_gather(config, VOCAB).trainer
    defaults = {
        "spec": spec,
        "trainer": trainer_config,
        "seq_len": LENGTH,
        "plan": MicrobatchPlan(16, 8, 2),
        "sizes": sizes_of(data=4),
        "shards": 4,
        "gathers": 1,
        "params": 1000,
        "backend": "cudnn",
        "training_flops": flops_per_token(spec, LENGTH).training,
        "recomputation": Recomputation.of(spec, trainer_config),
    }
    return LayoutWork(**{**defaults, **changes})


def sizes_of(**sizes: int) -> dict[str, int]:
    axes = ("replica_dcn", "replica", "data", "pipeline", "context", "expert", "model")
    return {axis: sizes.get(axis, 1) for axis in axes}


def cost_of(*sections: dict[str, Any], **changes: Any) -> StepCost:
    return step_cost(work_of(*sections, **changes), MACHINE)


def test_the_parts_of_a_step_by_hand():
    cost = cost_of()
    # Two microbatches of 2 rows on each of four devices; forward and backward pass with two FLOPs a weight each.
    assert cost.compute == pytest.approx(2 * TOKENS * 6 * WEIGHTS / 0.5e9)
    forward = 2 * TOKENS * LAYERS * 4 * HIDDEN * (LENGTH + 1) / 2
    assert cost.attention == pytest.approx(forward / 0.25e9 + 2.5 * forward / 0.2e9)
    # Each microbatch casts the parameters and writes a gradient; both gradients are added (two readings, one writing).
    microbatches = 2 * (4 + 2 + 4) + 3 * 4
    # Gathered parameters are written and rearranged; gradients are cut into slices, exchanged, and read for their sum.
    exchange = 3 * 4 + 5 * 4
    # Then a quarter is updated.
    of_parameters = 1000 * (microbatches + exchange) + 1000 / 4 * 8 * 4
    stream, rotary = 16 * HIDDEN, 2 * 2 * 2 * HIDDEN
    activations = 3 * MLP + 6 * MLP
    of_tokens = 2 * TOKENS * (LAYERS * 2 * (stream + rotary + activations) + 11 * 4 * VOCAB)
    workspace = 2 * TOKENS * LAYERS * HEADS * LENGTH * 3 * 2
    assert cost.memory == pytest.approx((of_parameters + of_tokens + workspace) / 0.8e9)
    # Parameters come from, and gradients go to, three of four devices, in float32.
    assert cost.network == pytest.approx(0.75 * 1000 * (4 + 4) / 0.4e6)
    assert (cost.recompute, cost.hidden, cost.idle) == (0, 0, 0)
    assert cost.seconds == cost.compute + cost.attention + cost.memory + cost.network


def test_measuring_the_largest_logits_takes_a_product_and_its_traffic():
    plain, measured = cost_of(), cost_of(measures_logits=True)
    pairs = 2 * TOKENS * LAYERS * HEADS * LENGTH
    assert measured.attention - plain.attention == pytest.approx(pairs * 2 * HIDDEN / HEADS / 0.5e9)
    # Float32 logits are written and read.
    assert measured.memory - plain.memory == pytest.approx(pairs * 2 * 4 / 0.8e9)


def test_gradients_of_other_modes_are_not_float32_everywhere():
    def bytes_of_parameters(trainer: dict[str, Any], **changes: Any) -> float:
        few, many = (cost_of(trainer, params=params, **changes).memory for params in (0, 10**6))
        return (many - few) * 0.8e9 / 1e6

    update = 8 * 4 / 4
    # Two gradients in bfloat16 are written, and read for their float32 sum, which is exchanged. There are two gathers.
    layerwise = 2 * 2 + (2 * 2 + 4) + 5 * 4 + 2 * 2 * 2
    assert bytes_of_parameters({"gather": "layer"}) == pytest.approx(layerwise + update)
    # The only gradient of a device is exchanged in bfloat16.
    alone = 2 + 5 * 2 + 2 * 2 * 2
    assert bytes_of_parameters({"gather": "layer"}, plan=MicrobatchPlan(16, 4, 4)) == pytest.approx(alone + update)
    # Two groups of one microbatch share the gathered model. Each exchanges its float32 gradient.
    groups = 2 * (4 + 2 + 4) + 3 * 4 + 2 * 5 * 4
    assert bytes_of_parameters({"gather": "model"}, gathers=2) == pytest.approx(groups + update)
    # A gradient in bfloat16 is written and read, and its sum in float32 is read and written.
    fast = {"gather": "auto", "determinism": "fast"}
    assert bytes_of_parameters(fast) == pytest.approx(2 * 12 + update)
    assert bytes_of_parameters(fast, plan=MicrobatchPlan(16, 4, 4)) == pytest.approx(4 + update)


def test_products_of_few_tokens_wait_for_their_weights():
    params = 10**10
    assert cost_of(params=params).compute == pytest.approx(2 * 3 * 2 * params / 0.8e9)


def test_operations_in_a_step_are_slower_than_alone():
    slower = step_cost(work_of(), replace(MACHINE, efficiency=replace(EFFICIENCY, in_step=0.8)))
    alone = cost_of()
    for part in ("compute", "attention", "memory"):
        assert getattr(slower, part) == pytest.approx(getattr(alone, part) / 0.8)
    assert slower.network == alone.network


def test_recomputed_layers_leave_out_their_last_product():
    kept, repeated = cost_of(), cost_of({}, {"gradient_checkpointing": True})
    forward = 2 * TOKENS * LAYERS * (2 * (4 * HIDDEN * HIDDEN + 2 * HIDDEN * MLP)) / 0.5e9
    attention = 2 * TOKENS * LAYERS * 4 * HIDDEN * (LENGTH + 1) / 2 / 0.25e9
    assert repeated.recompute == pytest.approx(forward + attention)
    assert (repeated.compute, repeated.attention) == (kept.compute, kept.attention)
    assert repeated.memory > kept.memory
    products_kept = cost_of({}, {"gradient_checkpointing": "dots_no_batch"})
    assert products_kept.recompute == pytest.approx(attention)


def test_devices_wait_for_those_with_more_microbatches_and_for_stages():
    even, uneven = cost_of(), cost_of(plan=MicrobatchPlan(18, 9, 2))
    assert uneven.compute == pytest.approx(even.compute * 9 / 8)
    # Nine microbatches take four devices the time of three on each.
    busy = uneven.compute + uneven.attention
    assert busy + uneven.idle == pytest.approx((even.compute + even.attention) * 3 / 2)
    staged = cost_of(sizes=sizes_of(data=2, pipeline=2), shards=2)
    # Two rows flow through two stages in three turns.
    assert staged.idle == pytest.approx((even.compute + even.attention) / 2)


def test_only_gathers_of_layers_and_fast_steps_overlap():
    # Enough computation for all communication; an overlapping second slows computation down by 0.2.
    machine = replace(MACHINE, efficiency=replace(EFFICIENCY, overlap_slowdown=0.2))
    fast, layer, model = (
        step_cost(work_of(trainer), machine)
        for trainer in ({"gather": "auto", "determinism": "fast"}, {"gather": "layer"}, {"gather": "model"})
    )
    for cost in (fast, layer):
        # The first gather and the last reduction are exposed.
        assert cost.hidden == pytest.approx(0.8 * cost.network * (1 - 1 / LAYERS))
    assert model.hidden == 0
    # Half of the exchanges are separate programs.
    half = step_cost(work_of({"gather": "layer"}, overlap=0.5), machine)
    assert half.hidden == pytest.approx(layer.hidden / 2)
    # The program that overlaps contains one of two microbatches, and the network is the bottleneck.
    slow = replace(machine, bandwidths=replace(machine.bandwidths, network=1.0))
    layer = step_cost(work_of({"gather": "layer"}), slow)
    busy = layer.compute + layer.attention + layer.recompute + layer.memory
    assert layer.hidden == pytest.approx(0.8 * busy / 2)


def test_more_nodes_send_by_their_adapters():
    def network(devices: int, microbatches: int, machine: Machine = MACHINE) -> float:
        work = work_of(
            sizes=sizes_of(data=devices), shards=devices, plan=MicrobatchPlan(2 * microbatches, microbatches, 2)
        )
        return step_cost(work, machine).network

    # A gather passes through each node once, by all of its eight adapters, and so does a sum in two stages.
    assert network(16, 16) == pytest.approx(15 / 16 * 1000 * 4 * (1 / 8e3 + 1 / 8e3))
    # With three nodes, gradients go from each device to each.
    assert network(24, 24) == pytest.approx(23 / 24 * 1000 * 4 * (1 / 8e3 + 1 / 1e3))
    # A slice of 4 x 4 x 4 chips: gathers use all links; in an exchange, data pass through three chips on average.
    tpu = replace(MACHINE, kind="TPU v5")
    assert network(64, 64, tpu) == pytest.approx(63 / 64 * 1000 * 4 * (1 + 3) / 0.4e6)


def test_groups_of_chips_use_the_links_along_their_axes():
    v5p, v6e = (replace(MACHINE, kind=kind) for kind in ("TPU v5", "TPU v6 lite"))
    assert v5p.link_bandwidth(4) == pytest.approx(0.4e6 / 3)
    assert v5p.link_bandwidth(16, 4) == pytest.approx(0.4e6 * 2 / 3)
    assert v5p.link_bandwidth(512) == pytest.approx(0.4e6)
    assert v6e.link_bandwidth(16) == pytest.approx(0.4e6 / 2)
    assert v6e.link_bandwidth(256) == pytest.approx(0.4e6)


def test_tensor_parallelism_sends_sums_and_shares_products():
    alone, shared = cost_of(), cost_of(sizes=sizes_of(data=4, model=2))
    head = 2 * TOKENS * 6 * VOCAB * HIDDEN / 0.5e9
    assert shared.compute == pytest.approx((alone.compute - head) / 2 + head)
    assert cost_of(sizes=sizes_of(data=4, model=2), head_shards=2).compute == pytest.approx(alone.compute / 2)
    # Two microbatches; two sums in each layer and pass; a ring of two sends all of it.
    sums = 2 * 4 * LAYERS * TOKENS * HIDDEN * 2 / 0.4e6
    assert shared.network - alone.network == pytest.approx(sums)


@pytest.mark.parametrize("recomputes", [False, True])
def test_tokens_go_to_the_devices_of_their_experts(recomputes: bool) -> None:
    experts = {"type": "mixtral", "n_routed_experts": 4, "num_experts_per_tok": 2}
    model = {**experts, "gradient_checkpointing": recomputes}
    work = work_of(model=model, sizes=sizes_of(data=2, expert=4), shards=2, plan=MicrobatchPlan(4, 2, 2))
    # Two experts are on two of four devices, so a token goes to 2 x 3/4 others, in four or five passes.
    rows = LAYERS * 2 * 3 / 4 * HIDDEN * 2 * (5 if recomputes else 4)
    # Experts and weights of all tokens, and gradients of the weights.
    choices = LAYERS * 3 * 2 * 4 * (2 * (2 if recomputes else 1) + 1)
    of_params = 2 * 3 / 4 * 1000 * 4
    assert communication(work, MACHINE).activations == pytest.approx(
        (TOKENS / 4 * (rows + choices) + of_params) / 0.4e6
    )


def test_more_devices_are_faster_and_slower_ones_are_not():
    def seconds(devices: int, **changes: float) -> float:
        work = work_of(sizes=sizes_of(data=devices), shards=devices, plan=MicrobatchPlan(64, 32, 2))
        bandwidths = replace(MACHINE.bandwidths, **changes)
        return step_cost(work, replace(MACHINE, bandwidths=bandwidths)).seconds

    times = [seconds(devices) for devices in (1, 2, 4, 8)]
    assert times == sorted(times, reverse=True)
    assert seconds(8, network=1e5) > seconds(8) > seconds(8, network=1e7)
    assert seconds(8, memory=1e8) > seconds(8)
    for figure in ("products", "attention_forward", "attention_backward", "memory", "links"):
        worse = replace(MACHINE, efficiency=replace(EFFICIENCY, **{figure: 0.05}))
        assert step_cost(work_of(), worse).seconds > step_cost(work_of(), MACHINE).seconds


def test_attention_without_a_kernel_computes_and_moves_all_scores():
    kernel, plain = cost_of(), cost_of(backend="xla")
    forward = 2 * TOKENS * LAYERS * 4 * HIDDEN * LENGTH
    assert plain.attention == pytest.approx(3 * forward / 0.5e9)
    scores = 2 * TOKENS * LAYERS * HEADS * LENGTH
    # Instead of the workspace of the deterministic kernel.
    assert plain.memory - kernel.memory == pytest.approx((10 * 4 - 3 * 2) * scores / 0.8e9)


def test_narrow_heads_fill_a_part_of_the_matrix_unit():
    v6e = device_efficiency("TPU v6 lite")
    assert v6e is not None
    assert v6e.attention(128, backward=False) == pytest.approx(v6e.attention(256, backward=False) / 2)
    assert v6e.attention(512, backward=True) == v6e.attention(256, backward=True)
