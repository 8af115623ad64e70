"""Exchange of rows among the devices along an axis: each device sends different rows, and any number, to each device.

Rows are sorted by receiver on the sender, and by sender on the receiver, without gaps. The arrays have room for the
largest possible number of rows, because their shapes are static, but only rows in use are sent.

Shape letters: G devices along the axis, P rows of the array that is sent, R rows of the array that is received, C rows
of a block, D width of a row.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from lm_trainer.parallel.collectives import axis_index
from lm_trainer.parallel.target_platform import target_platform

_BLOCK_ROWS = 256
"""Rows of a block, where blocks are sent. Smaller blocks need more rounds; larger blocks have more padding."""


class Segments(NamedTuple):
    """The rows that this device exchanges in one direction: one segment for each device along the axis."""

    start_G: jax.Array
    """int32 first row in the array of this device."""
    peer_start_G: jax.Array
    """int32 first row in the array of the other device."""
    count_G: jax.Array
    """int32 number of rows."""


class RowExchange(NamedTuple):
    """The rows that a device sends and receives."""

    sent: Segments
    received: Segments
    longest: jax.Array
    """int32 [1]: number of rows of the longest segment between any two devices along the axis."""

    def reversed(self) -> RowExchange:
        """Returns the exchange that sends every row back to where it came from."""
        return RowExchange(self.received, self.sent, self.longest)


def plan_exchange(counts_GG: jax.Array, axis: str) -> RowExchange:
    """Returns the exchange along `axis` in which device i sends `counts_GG[i, j]` rows to device j.

    Args:
        counts_GG: int32 numbers of rows, equal on all devices along the axis.
        axis: a mesh axis with more than one device.
    """
    device = axis_index(axis)
    departures_GG = jnp.cumsum(counts_GG, axis=1, dtype=jnp.int32) - counts_GG
    arrivals_GG = jnp.cumsum(counts_GG, axis=0, dtype=jnp.int32) - counts_GG
    return RowExchange(
        sent=Segments(departures_GG[device], arrivals_GG[device], counts_GG[device]),
        received=Segments(arrivals_GG[:, device], departures_GG[:, device], counts_GG[:, device]),
        longest=jnp.max(counts_GG)[None],
    )


def exchange_rows(x_PD: jax.Array, exchange: RowExchange, num_rows: int, axis: str) -> jax.Array:
    """Returns the rows that the devices along `axis` send to this one, [num_rows, D]; rows not in use are zero."""
    return _exchange(x_PD, exchange, num_rows, axis)


# The gradient is the reversed exchange. JAX's own gradient of `ragged_all_to_all` exchanges the offsets first.


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _exchange(x_PD: jax.Array, exchange: RowExchange, num_rows: int, axis: str) -> jax.Array:
    received_RD = jnp.zeros((num_rows, x_PD.shape[1]), x_PD.dtype)
    if target_platform() == "cpu":
        # XLA for CPUs has no ragged exchange.
        return _exchange_in_blocks(x_PD, received_RD, exchange, axis)
    sent, received = exchange.sent, exchange.received
    return lax.ragged_all_to_all(
        x_PD, received_RD, sent.start_G, sent.count_G, sent.peer_start_G, received.count_G, axis_name=axis
    )


def _exchange_forward(
    x_PD: jax.Array, exchange: RowExchange, num_rows: int, axis: str
) -> tuple[jax.Array, tuple[RowExchange, jax.Array]]:
    # An array of no elements keeps the number of rows.
    return _exchange(x_PD, exchange, num_rows, axis), (exchange, jnp.zeros((x_PD.shape[0], 0), x_PD.dtype))


def _exchange_backward(
    num_rows: int, axis: str, residuals: tuple[RowExchange, jax.Array], cotangent_RD: jax.Array
) -> tuple[jax.Array, None]:
    del num_rows
    exchange, rows = residuals
    return _exchange(cotangent_RD, exchange.reversed(), rows.shape[0], axis), None


_exchange.defvjp(_exchange_forward, _exchange_backward)


def _exchange_in_blocks(x_PD: jax.Array, received_RD: jax.Array, exchange: RowExchange, axis: str) -> jax.Array:
    """Sends one block of each segment at a time, in as many rounds as the longest segment has blocks."""
    block = min(_BLOCK_ROWS, x_PD.shape[0], received_RD.shape[0])

    def rows_of_block(segments: Segments, i: jax.Array, end: int) -> jax.Array:
        offset_C = i * block + jnp.arange(block, dtype=jnp.int32)
        used_GC = offset_C[None, :] < segments.count_G[:, None]
        return jnp.where(used_GC, segments.start_G[:, None] + offset_C[None, :], end)

    def send_block(i: jax.Array, received_RD: jax.Array) -> jax.Array:
        sent_GC = rows_of_block(exchange.sent, i, x_PD.shape[0])
        block_GCD = jnp.take(x_PD, sent_GC, axis=0, mode="fill", fill_value=0)
        block_GCD = lax.all_to_all(block_GCD, axis, split_axis=0, concat_axis=0, tiled=True)
        received_GC = rows_of_block(exchange.received, i, received_RD.shape[0])
        return received_RD.at[received_GC].set(block_GCD, mode="drop")

    return lax.fori_loop(0, -(-exchange.longest[0] // block), send_block, received_RD)
