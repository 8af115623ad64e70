"""Grouped products of experts, as the compilers of TPUs and GPUs write them for devices that are only described."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import SingleDeviceSharding

from benchmarks import compiled_exchange
from lm_trainer.nn.expert_spec import ExpertKernel, MoeSpec
from lm_trainer.nn.moe import Moe
from lm_trainer.parallel.target_platform import compiling_for
from lm_trainer.plan.devices import parse_devices
from lm_trainer.plan.programs import ProgramWork
from lm_trainer.profile.collectives import bytes_sent
from lm_trainer.profile.devices import device_platform
from lm_trainer.profile.expert_kernels import TRITON
from lm_trainer.step.dispatch.repeatable import compile_repeatable
from tests.compiled.test_programs import described
from tests.nn.common import make_init

pytestmark = pytest.mark.aot

M, D, F, E, K = 2048, 512, 1024, 8, 2


def compile_experts(kernel: ExpertKernel, target: str = "v5e:2x2") -> jax.stages.Compiled:
    """Loss and gradient of the experts of a layer, in bfloat16."""
    device, platform = described(target)[0], device_platform(parse_devices(target).kind)
    spec = MoeSpec(F, E, K, kernel=kernel)
    graph, params = nnx.split(nnx.eval_shape(lambda: Moe(spec, D, init=make_init())), nnx.Param)

    def loss(params: nnx.State, x_BSD: jax.Array) -> jax.Array:
        y_BSD, _ = nnx.merge(graph, params)(x_BSD, jnp.ones(x_BSD.shape[:2], bool))
        return jnp.sum(jnp.sin(y_BSD.astype(jnp.float32)))

    def on_device(x: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=SingleDeviceSharding(device))

    arguments = jax.tree.map(on_device, (params, jax.ShapeDtypeStruct((1, M, D), jnp.bfloat16)))
    with compiling_for(platform):
        return compile_repeatable(jax.jit(jax.grad(loss, argnums=(0, 1))).lower(*arguments), platform)


def test_a_tpu_computes_only_the_chosen_experts() -> None:
    grouped = compile_experts("grouped")
    # Three products, each with two gradients.
    assert len(re.findall(r'custom_call_target="tpu_custom_call"', grouped.as_text() or "")) == 9
    useful = 3 * 3 * 2 * M * K * D * F
    # The kernels state their FLOPs. The rest is the router.
    cost = grouped.cost_analysis()
    assert cost is not None
    assert useful <= cost["flops"] < 1.05 * useful


@pytest.mark.skipif(jax.__version_info__ >= (0, 11), reason="JAX lowers this kernel only on a machine with a GPU")
@pytest.mark.parametrize("target", ["1xA100", "1xH100", "1xB200"])
def test_a_gpu_computes_only_the_chosen_experts(target: str) -> None:
    grouped, dense = (compile_experts(kernel, target) for kernel in ("grouped", "dense"))
    assert (grouped.as_text() or "").count(f'custom_call_target="{TRITON}"') == 9
    works = [ProgramWork.from_hlo("experts", 1, program.as_text() or "") for program in (grouped, dense)]
    useful = 3 * 3 * 2 * M * K * D * F
    # The last tiles of the experts are partly empty, except in the gradients of the matrices. The rest is the router.
    empty = 2 / 3 * E * 64 / (M * K)
    assert works[0].flops / useful == pytest.approx(1 + empty, rel=0.02)
    assert works[1].flops / useful == pytest.approx(E / K, rel=0.02)
    assert works[0].num_bytes < works[1].num_bytes


@pytest.mark.parametrize("target", ["v5e:2x2", "4xH100"])
def test_devices_that_share_experts_exchange_chosen_tokens(target: str) -> None:
    described(target)
    case = compiled_exchange.Case(target, 4, 512, 256, 512, 8, 2)
    program = compiled_exchange.compile_experts(case).as_text() or ""
    # Tokens, results, and their gradients. Gathers would bring whole tokens to other devices.
    assert len(re.findall(r" ragged-all-to-all(?:-start)?\(", program)) == 4
    sent, choices = bytes_sent(program), 3 * 512 * 2 * 4
    router = 4 * 256 * 8
    rows = 4 * 3 / 4 * 512 * 2 * 256 * 2
    assert rows <= sent["all-to-all"] <= rows + choices + router
    assert sent["all-gather"] <= 2 * choices + router
    assert case.expected <= rows < case.gathered
