"""Experts that devices share, against every expert for every token on one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh, PartitionSpec

from lm_trainer.nn.expert_exchange import return_results, send_tokens
from lm_trainer.nn.expert_spec import ExpertKernel, MoeSpec, RouterSpec
from lm_trainer.nn.moe import Moe
from lm_trainer.parallel.mesh import MODEL_PARALLEL_AXES, MeshShape, build_mesh
from lm_trainer.parallel.row_exchange import exchange_rows, plan_exchange
from lm_trainer.parallel.target_platform import compiling_for
from tests.nn.common import built, make_init

D, F, E, G, ROWS, LENGTH = 12, 10, 8, 4, 8, 20
TOKENS = ROWS * LENGTH
ROUTER = RouterSpec(scores="sigmoid", renormalize=False)
SHARED = PartitionSpec("expert")
SPECS = {"router": PartitionSpec(None, "expert"), **dict.fromkeys(("gate", "up", "down"), SHARED)}
Params = dict[str, jax.Array]


def routes(name: str, top_k: int) -> np.ndarray:
    """Experts of each token, [TOKENS, top_k]."""
    rng = np.random.default_rng(0)
    if name == "one_takes_all":
        # One expert, or both experts of one device.
        return np.tile(4 + np.arange(top_k), (TOKENS, 1))
    # Experts 2 and 3, all of the second device, have no token.
    share = np.array([0.4, 0.2, 0, 0, 0.2, 0.1, 0.05, 0.05]) if name == "unequal" else np.full(E, 1 / E)
    return np.array([rng.choice(E, top_k, replace=False, p=share) for _ in range(TOKENS)])


def moe_and_tokens(spec: MoeSpec, route: str) -> tuple[nnx.GraphDef[Moe], Params, np.ndarray]:
    """Experts whose router reads its logits from the first values of a token."""
    graph, params = nnx.split(built(lambda: Moe(spec, D, init=make_init(0.5))), nnx.Param)
    x = np.random.default_rng(1).uniform(-2.0, 2.0, (TOKENS, D)).astype(np.float32)
    np.put_along_axis(x[:, :E], routes(route, spec.top_k), 3.0 + 0.1 * np.arange(spec.top_k, dtype=np.float32), axis=1)
    return graph, nnx.to_pure_dict(params) | {"router": jnp.eye(D, E)}, x.reshape(ROWS, LENGTH, D)


def run(graph: nnx.GraphDef[Moe], params: Params, x_BSD: jax.Array) -> jax.Array:
    state = nnx.State({name: nnx.Param(value) for name, value in params.items()})
    return nnx.merge(graph, state)(x_BSD, jnp.ones(x_BSD.shape[:2], bool))[0]


def on_several_devices(graph: nnx.GraphDef[Moe], mesh: Mesh) -> Callable[..., Any]:
    """Results, and gradients of parameters and tokens, on devices that have rows and experts of their own."""

    def compute(params: Params, x_BSD: jax.Array, dy_BSD: jax.Array) -> Any:
        y_BSD, backward = jax.vjp(lambda params, x_BSD: run(graph, params, x_BSD), params, x_BSD)
        return y_BSD, *backward(dy_BSD)

    return jax.shard_map(
        compute,
        mesh=mesh,
        in_specs=(SPECS, SHARED, SHARED),
        out_specs=(SHARED, SPECS, SHARED),
        axis_names=set(MODEL_PARALLEL_AXES),
        check_vma=False,
    )


@pytest.mark.parametrize(
    ("kernel", "route", "top_k", "weighs_inputs", "data"),
    [
        pytest.param("grouped", "equal", 2, False, 1, marks=pytest.mark.slow),
        ("grouped", "unequal", 2, False, 1),
        pytest.param("grouped", "one_takes_all", 1, False, 1, marks=pytest.mark.slow),
        pytest.param("grouped", "one_takes_all", 2, False, 1, marks=pytest.mark.slow),
        pytest.param("grouped", "unequal", 5, False, 1, marks=pytest.mark.slow),
        ("grouped", "unequal", 2, True, 1),
        pytest.param("grouped", "unequal", 2, False, 2, marks=pytest.mark.slow),
        ("dense", "unequal", 3, False, 1),
        pytest.param("dense", "one_takes_all", 2, False, 2, marks=pytest.mark.slow),
        pytest.param("ragged_dot", "unequal", 2, False, 1, marks=pytest.mark.slow),
    ],
)
def test_shared_experts_equal_every_expert_for_every_token(
    kernel: ExpertKernel, route: str, top_k: int, weighs_inputs: bool, data: int
) -> None:
    spec = MoeSpec(F, E, top_k, router=ROUTER, kernel=kernel, weighs_inputs=weighs_inputs)
    graph, params, x = moe_and_tokens(spec, route)
    dy = np.random.default_rng(2).standard_normal(x.shape, np.float32)
    mesh = build_mesh(MeshShape(expert=G), jax.devices()[: G * data])
    actual = jax.jit(on_several_devices(graph, mesh))(params, x, dy)

    def every_expert(params: Params, x_BSD: jax.Array) -> jax.Array:
        scores = jax.nn.sigmoid(x_BSD @ params["router"])
        chosen = jnp.any(routes(route, top_k)[:, :, None] == np.arange(E)[None, None, :], axis=1)
        weights = jnp.where(chosen.reshape(ROWS, LENGTH, E), scores, 0.0)
        inputs = x_BSD[:, :, None, :] * (weights[..., None] if weighs_inputs else jnp.ones((1, 1, E, 1)))
        gate, up = (jnp.einsum("bsed,edf->bsef", inputs, params[name]) for name in ("gate", "up"))
        down = jnp.einsum("bsef,efd->bsed", jax.nn.silu(gate) * up, params["down"])
        return jnp.sum(down if weighs_inputs else down * weights[..., None], axis=2)

    y, backward = jax.vjp(every_expert, params, jnp.asarray(x))
    for result, expected in zip(jax.tree.leaves(actual), jax.tree.leaves((y, *backward(dy))), strict=True):
        np.testing.assert_allclose(result, expected, atol=1e-5 * np.abs(expected).max())


def gather_of_ragged_rows(x: jax.Array, result: jax.Array, starts: jax.Array, counts: jax.Array, targets: jax.Array,
                          received: jax.Array, *, axis_name: str) -> jax.Array:  # fmt: skip
    """Does what the documentation of `jax.lax.ragged_all_to_all` says, by a loop over the rows of all devices."""
    x_GPD, starts_GG, counts_GG, targets_GG = (jax.lax.all_gather(a, axis_name) for a in (x, starts, counts, targets))
    here = jax.lax.axis_index(axis_name)
    for sender in range(G):
        for row in range(x.shape[0]):
            target = jnp.where(row < counts_GG[sender, here], targets_GG[sender, here] + row, result.shape[0])
            value = x_GPD[sender, jnp.minimum(starts_GG[sender, here] + row, x.shape[0] - 1)]
            result = result.at[target].set(value, mode="drop")
    expected = counts_GG[:, here] == received
    return jnp.where(jnp.all(expected), result, jnp.nan)


@pytest.mark.parametrize("platform", ["cpu", "tpu"])
def test_rows_go_to_their_devices_and_back(platform: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax.lax, "ragged_all_to_all", gather_of_ragged_rows)
    monkeypatch.setattr("lm_trainer.parallel.row_exchange._BLOCK_ROWS", 3)
    counts = np.array([[0, 7, 1, 2], [0, 0, 0, 0], [3, 0, 0, 1], [2, 4, 0, 3]], np.int32)
    rows = np.arange(1.0, 4 * 10 * 2 + 1, dtype=np.float32).reshape(4, 10, 2)
    dy = np.random.default_rng(0).standard_normal((4, 12, 2)).astype(np.float32)

    def exchange(x: jax.Array, dy: jax.Array) -> Any:
        plan = plan_exchange(jnp.asarray(counts), "expert")
        y, backward = jax.vjp(lambda x: exchange_rows(x, plan, 12, "expert"), x)
        return y, backward(dy)[0]

    mesh = build_mesh(MeshShape(expert=G), jax.devices()[:G])
    mapped = jax.shard_map(exchange, mesh=mesh, in_specs=SHARED, out_specs=SHARED, check_vma=False)
    with compiling_for(platform):
        received, dx = (
            np.asarray(x).reshape(4, -1, 2) for x in jax.jit(mapped)(rows.reshape(-1, 2), dy.reshape(-1, 2))
        )
    first = np.cumsum(counts, axis=1) - counts
    for device in range(G):
        parts = [rows[i, first[i, device] :][: counts[i, device]] for i in range(G)]
        used = np.concatenate(parts)
        np.testing.assert_array_equal(received[device], np.pad(used, ((0, 12 - len(used)), (0, 0))))
    ends = np.cumsum(counts, axis=0)
    for device in range(G):
        parts = [dy[j, ends[device, j] - counts[device, j] : ends[device, j]] for j in range(G)]
        used = np.concatenate(parts)
        np.testing.assert_array_equal(dx[device], np.pad(used, ((0, 10 - len(used)), (0, 0))))


def test_a_token_goes_once_to_each_device_of_its_experts() -> None:
    mesh = build_mesh(MeshShape(expert=G), jax.devices()[:G])
    experts = routes("unequal", 5)

    def send(x_MD: jax.Array, experts_MK: jax.Array) -> Any:
        tokens = send_tokens(x_MD, experts_MK, experts_MK.astype(jnp.float32), E // G)
        y_MD = return_results(tokens.x_RD, tokens.slots, tokens.exchange)
        return tokens.x_RD, tokens.experts_RK, tokens.weights_RK, tokens.exchange.sent.count_G, y_MD

    x = np.random.default_rng(0).standard_normal((TOKENS, D), np.float32)
    mapped = jax.shard_map(send, mesh=mesh, in_specs=SHARED, out_specs=SHARED, check_vma=False)
    received, received_experts, weights, counts, y = map(np.asarray, jax.jit(mapped)(x, experts))
    for device in range(G):
        chosen = np.flatnonzero(np.any(experts // (E // G) == device, axis=1))
        here = slice(device * TOKENS, device * TOKENS + len(chosen))
        np.testing.assert_array_equal(received[here], x[chosen])
        np.testing.assert_array_equal(received_experts[here], experts[chosen])
        np.testing.assert_array_equal(weights[here], experts[chosen])
        after = slice(here.stop, (device + 1) * TOKENS)
        assert not received[after].any()
        assert (received_experts[after] == -1).all()
    targets = [len(set(e // (E // G))) for e in experts]
    assert counts.sum() == sum(targets) < experts.size
    np.testing.assert_allclose(y, x * np.array(targets)[:, None], rtol=1e-6)
