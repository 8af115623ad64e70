"""Products of rows, sorted by group, with one matrix per group: the experts of a layer.

Only the rows of a group are multiplied with its matrix, whereas `jax.lax.ragged_dot` computes every group for every
row on most platforms. Each kernel has the gradient of the matrices in the transposed kernel. The kernels add the rows
of a group in the order of the slots, without atomics, so the bits follow from the arguments alone.

Shape letters: P slots, D width of a row, F width of a result, E groups, N blocks of slots, R slots of a block.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

from lm_trainer.nn.expert_slots import Slots
from lm_trainer.nn.gpu_generation import local_gpu_obstacle
from lm_trainer.nn.tpu_product import SLOT_MULTIPLE, megablox_product
from lm_trainer.nn.triton_product import grouped_product

CPU_SLOTS = 32
"""Slots of a block on CPUs. Smaller blocks read the matrices more often; larger blocks have more empty slots."""


@dataclass(frozen=True)
class GroupedKernel:
    """A way to compute grouped products."""

    product: Callable[[jax.Array, jax.Array, Slots], jax.Array]
    """`product(x_PD, w_EDF, slots)` returns [P, F] in the dtype of `x_PD`. Rows of empty slots are zero, if these rows
    of `x_PD` are."""
    align: int = 1
    """The slots of each group must start at a multiple of this number."""
    multiple: int = 1
    """The number of slots must be a multiple of this number."""
    find_obstacle: Callable[[], str | None] = lambda: None
    """Returns the reason why the devices of this process cannot run the kernel; None if they can."""


class _Blocks(NamedTuple):
    """Blocks of slots that each belong to one group."""

    expert_N: jax.Array
    used: jax.Array
    """Number of blocks that have slots in use, which come first."""


@jax.custom_vjp
def _block_product(x_PD: jax.Array, w_EDF: jax.Array, blocks: _Blocks) -> jax.Array:
    """Multiplies block by block in a loop over the blocks in use. Results of other blocks are zero."""
    blocks_NRD = x_PD.reshape(blocks.expert_N.shape[0], -1, x_PD.shape[1])

    def multiply(i: jax.Array, y_NRF: jax.Array) -> jax.Array:
        y_RF = jnp.matmul(blocks_NRD[i], w_EDF[blocks.expert_N[i]], preferred_element_type=jnp.float32)
        return jax.lax.dynamic_update_index_in_dim(y_NRF, y_RF.astype(y_NRF.dtype), i, 0)

    zeros = jnp.zeros((*blocks_NRD.shape[:2], w_EDF.shape[2]), x_PD.dtype)
    return jax.lax.fori_loop(0, blocks.used, multiply, zeros).reshape(x_PD.shape[0], -1)


def _block_forward(
    x_PD: jax.Array, w_EDF: jax.Array, blocks: _Blocks
) -> tuple[jax.Array, tuple[jax.Array, jax.Array, _Blocks]]:
    return _block_product(x_PD, w_EDF, blocks), (x_PD, w_EDF, blocks)


def _block_backward(
    residuals: tuple[jax.Array, jax.Array, _Blocks], cotangent_PF: jax.Array
) -> tuple[jax.Array, jax.Array, None]:
    x_PD, w_EDF, blocks = residuals
    dx_PD = _block_product(cotangent_PF, w_EDF.transpose(0, 2, 1), blocks)
    x_NRD, dy_NRF = (x.reshape(blocks.expert_N.shape[0], -1, x.shape[1]) for x in (x_PD, cotangent_PF))

    def add(i: jax.Array, dw_EDF: jax.Array) -> jax.Array:
        expert = blocks.expert_N[i]
        term_DF = jnp.matmul(x_NRD[i].T, dy_NRF[i], preferred_element_type=jnp.float32)
        return jax.lax.dynamic_update_index_in_dim(dw_EDF, dw_EDF[expert] + term_DF, expert, 0)

    dw_EDF = jax.lax.fori_loop(0, blocks.used, add, jnp.zeros(w_EDF.shape, jnp.float32))
    return dx_PD, dw_EDF.astype(w_EDF.dtype), None


_block_product.defvjp(_block_forward, _block_backward)


def _product_in_blocks(x_PD: jax.Array, w_EDF: jax.Array, slots: Slots) -> jax.Array:
    used = jnp.sum(-(-slots.counts_E // CPU_SLOTS))
    return _block_product(x_PD, w_EDF, _Blocks(slots.expert_P[::CPU_SLOTS], used))


KERNELS = {
    "cpu": GroupedKernel(_product_in_blocks, align=CPU_SLOTS, multiple=CPU_SLOTS),
    "gpu": GroupedKernel(grouped_product, find_obstacle=local_gpu_obstacle),
    "tpu": GroupedKernel(megablox_product, multiple=SLOT_MULTIPLE),
}
"""The kernel of each platform that has one."""

INTERPRETED_GPU = GroupedKernel(functools.partial(grouped_product, interpret=True))
"""The kernel for GPUs, emulated."""

INTERPRETED_TPU = GroupedKernel(functools.partial(megablox_product, interpret=True), multiple=SLOT_MULTIPLE)
"""The kernel for TPUs, emulated."""
