"""Grouped products against loops over rows, forward and backward."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lm_trainer.core.jax_internals import remove_kernel_locations
from lm_trainer.nn.expert_slots import assign_slots, slots_to_assignments, tokens_to_slots
from lm_trainer.nn.expert_spec import GROUPED_PLATFORMS
from lm_trainer.nn.grouped_product import INTERPRETED_GPU, INTERPRETED_TPU, KERNELS, GroupedKernel
from lm_trainer.profile.expert_kernels import TRITON

M, K, D, F, E = 100, 2, 24, 20, 4
ROUTES = {
    "unequal": np.random.default_rng(0).choice(E, (M, K), p=[0.6, 0.3, 0.1, 0.0]),
    "empty_first": np.random.default_rng(1).choice([1, 3], (M, K)),
    "one_takes_all": np.full((M, K), 2),
    # Experts of another device have other numbers.
    "elsewhere": np.random.default_rng(2).integers(-2, E + 2, (M, K)),
    "all_elsewhere": np.full((M, K), E),
}


@pytest.mark.parametrize("align", [1, 8])
@pytest.mark.parametrize("name", ROUTES)
def test_slots_are_sorted_by_expert_and_then_by_token(name: str, align: int) -> None:
    experts_A = ROUTES[name].reshape(-1)
    slots = jax.tree.map(np.asarray, jax.jit(lambda x: assign_slots(x, E, align=align, multiple=16))(experts_A))
    assert len(slots.assignment_P) % 16 == 0
    filled = [(slot, int(a)) for slot, a in enumerate(slots.assignment_P) if a < M * K]
    expected = [int(a) for e in range(E) for a in np.flatnonzero(experts_A == e)]
    assert [assignment for _, assignment in filled] == expected
    for slot, assignment in filled:
        assert slots.slot_A[assignment] == slot
        assert slots.expert_P[slot] == experts_A[assignment]
    assert set(np.flatnonzero(slots.slot_A == len(slots.assignment_P))) == set(range(M * K)) - set(expected)
    np.testing.assert_array_equal(slots.counts_E, [np.sum(experts_A == e) for e in range(E)])
    first = {int(experts_A[assignment]): slot for slot, assignment in reversed(filled)}
    assert all(slot % align == 0 for slot in first.values())


def brute_force(experts_MK: np.ndarray, x: np.ndarray, w: np.ndarray, dy: np.ndarray) -> Any:
    """Row by row in float64: the results of every assignment, and the gradients of rows and matrices."""
    y, dx, dw = np.zeros(dy.shape), np.zeros(x.shape), np.zeros(w.shape)
    for m in range(M):
        for k, e in enumerate(experts_MK[m]):
            if 0 <= e < E:
                y[m, k] = x[m].astype(np.float64) @ w[e]
                dx[m] += w[e].astype(np.float64) @ dy[m, k]
                dw[e] += np.outer(x[m], dy[m, k])
    return y, dx, dw


@pytest.mark.parametrize("name", ROUTES)
@pytest.mark.parametrize(
    "kernel", [KERNELS["cpu"], INTERPRETED_TPU, INTERPRETED_GPU], ids=["cpu", "megablox", "triton"]
)
def test_kernels_equal_loops(kernel: GroupedKernel, name: str) -> None:
    check_against_loops(kernel, name, D, F)


def check_against_loops(kernel: GroupedKernel, name: str, dim: int, width: int) -> None:
    rng = np.random.default_rng(3)
    x, w, dy = (rng.standard_normal(shape, np.float32) for shape in ((M, dim), (E, dim, width), (M, K, width)))

    def run(x: jax.Array, w: jax.Array, experts_MK: jax.Array) -> jax.Array:
        slots = assign_slots(experts_MK.reshape(-1), E, align=kernel.align, multiple=kernel.multiple)
        return slots_to_assignments(kernel.product(tokens_to_slots(x, slots), w, slots), slots).reshape(M, K, width)

    def with_gradients(x: jax.Array, w: jax.Array, experts_MK: jax.Array) -> Any:
        y, backward = jax.vjp(lambda x, w: run(x, w, experts_MK), x, w)
        return y, *backward(jnp.asarray(dy))

    actual = jax.jit(with_gradients)(x, w, ROUTES[name])
    for result, expected in zip(actual, brute_force(ROUTES[name], x, w, dy), strict=True):
        np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-5 * max(1.0, np.abs(expected).max()))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["unequal", "elsewhere"])
def test_tiles_of_the_gpu_kernel_reach_past_the_ends_of_matrices(name: str) -> None:
    # Several tiles in each direction, and several terms of a contraction, the last of which are partly outside.
    check_against_loops(INTERPRETED_GPU, name, 136, 200)


def test_values_of_other_groups_do_not_enter_a_sum() -> None:
    # The third group is on another device.
    slots = assign_slots(jnp.repeat(jnp.arange(3), 40), 2)
    x_PD = jnp.where(jnp.arange(120)[:, None] < 40, jnp.ones((120, 16)), jnp.inf)

    def total(w: jax.Array) -> tuple[jax.Array, jax.Array]:
        y_PF = INTERPRETED_GPU.product(x_PD, w, slots)
        return jnp.sum(y_PF[:40]), y_PF

    (value, y_PF), gradient = jax.value_and_grad(total, has_aux=True)(jnp.ones((2, 16, 16)))
    assert value == 40 * 16 * 16
    np.testing.assert_array_equal(y_PF[80:], 0)
    np.testing.assert_array_equal(gradient[0], 40)


@pytest.fixture
def lowered_for_gpus() -> Iterator[jax.stages.Lowered]:
    """Loss and gradient by the kernel for GPUs, before a compiler for GPUs sees them."""
    if jax.__version_info__ >= (0, 11):
        pytest.skip("JAX lowers this kernel only on a machine with a GPU")
    # As outside of tests.
    limit = jax.config.values["jax_traceback_in_locations_limit"]
    jax.config.update("jax_traceback_in_locations_limit", 10)
    slots = jax.tree.map(jnp.asarray, assign_slots(ROUTES["unequal"].reshape(-1), E))

    def total(x_PD: jax.Array, w_EDF: jax.Array) -> jax.Array:
        return jnp.sum(KERNELS["gpu"].product(x_PD, w_EDF, slots))

    arguments = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((M * K, D), (E, D, F)))
    yield jax.jit(jax.grad(total, argnums=(0, 1))).trace(*arguments).lower(lowering_platforms=("cuda",))
    jax.config.update("jax_traceback_in_locations_limit", limit)


def test_kernels_for_gpus_have_no_atomics_and_no_paths(lowered_for_gpus: jax.stages.Lowered) -> None:
    assert ".py" in lowered_for_gpus.as_text()
    remove_kernel_locations(lowered_for_gpus, TRITON)
    text = lowered_for_gpus.as_text()
    assert ".py" not in text
    # The gradients of rows and of matrices.
    assert text.count("tt.dot") == text.count("scf.for") == 2
    assert "atomic" not in text


def test_every_platform_with_grouped_products_has_a_kernel() -> None:
    assert KERNELS.keys() == set(GROUPED_PLATFORMS)


@pytest.mark.parametrize("kernel", [KERNELS["cpu"], INTERPRETED_GPU], ids=["cpu", "triton"])
def test_rows_of_bfloat16_are_added_in_float32(kernel: GroupedKernel) -> None:
    count = 4096
    rows = jnp.ones((count, 1), jnp.bfloat16)
    slots = assign_slots(jnp.zeros(count, jnp.int32), 1, align=kernel.align, multiple=kernel.multiple)

    def total(w: jax.Array) -> jax.Array:
        return jnp.sum(kernel.product(tokens_to_slots(rows, slots), w, slots).astype(jnp.float32))

    # Additions in bfloat16 would stop at 256.
    assert float(jax.jit(jax.grad(total))(jnp.ones((1, 1, 1), jnp.bfloat16))[0, 0, 0]) == count
