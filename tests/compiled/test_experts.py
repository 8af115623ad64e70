"""Grouped products of experts, as the compiler of TPUs writes them for devices that are only described."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import SingleDeviceSharding

from lm_trainer.nn.expert_spec import ExpertKernel, MoeSpec
from lm_trainer.nn.moe import Moe
from lm_trainer.parallel.target_platform import compiling_for
from tests.compiled.test_programs import described
from tests.nn.common import make_init

pytestmark = pytest.mark.aot

M, D, F, E, K = 2048, 512, 1024, 8, 2


def compile_experts(kernel: ExpertKernel) -> Any:
    """Loss and gradient of the experts of a layer, in bfloat16."""
    device = described("v5e:2x2")[0]
    spec = MoeSpec(F, E, K, kernel=kernel)
    graph, params = nnx.split(nnx.eval_shape(lambda: Moe(spec, D, init=make_init())), nnx.Param)

    def loss(params: nnx.State, x_BSD: jax.Array) -> jax.Array:
        y_BSD, _ = nnx.merge(graph, params)(x_BSD, jnp.ones(x_BSD.shape[:2], bool))
        return jnp.sum(jnp.sin(y_BSD.astype(jnp.float32)))

    def on_device(x: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=SingleDeviceSharding(device))

    arguments = jax.tree.map(on_device, (params, jax.ShapeDtypeStruct((1, M, D), jnp.bfloat16)))
    with compiling_for("tpu"):
        return jax.jit(jax.grad(loss, argnums=(0, 1))).lower(*arguments).compile()


def test_a_tpu_computes_only_the_chosen_experts() -> None:
    grouped = compile_experts("grouped")
    # Three products, each with two gradients.
    assert len(re.findall(r'custom_call_target="tpu_custom_call"', grouped.as_text())) == 9
    useful = 3 * 3 * 2 * M * K * D * F
    # The kernels state their FLOPs. The rest is the router.
    assert useful <= grouped.cost_analysis()["flops"] < 1.05 * useful
