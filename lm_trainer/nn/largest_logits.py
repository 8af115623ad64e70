"""The largest attention logit of each head over the rows of a microbatch.

Shape letters: B rows, S queries, T keys, N heads, K key heads, G query heads of a key head, H head size, C queries of
one block, L blocks.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

_BLOCK = 256
"""Number of queries whose logits are held at once."""


def largest_logits(q_BSNH: jax.Array, k_BTKH: jax.Array, bias_B1ST: jax.Array, valid_BS: jax.Array) -> jax.Array:
    """Returns the largest q k^T of each head over all pairs that the mask allows, float32 [N]; -inf without a pair.

    A maximum does not depend on the order of its terms, so neither the blocks nor the kernel that computes the
    attention affect it. The products are added in float32.

    Args:
        q_BSNH: queries, already scaled.
        k_BTKH: keys of the full row.
        bias_B1ST: 0 for pairs that attention sees, and the negative mask value for all others.
        valid_BS: bool, false for padding.
    """
    rows, length, heads, size = q_BSNH.shape
    q_BSKGH = q_BSNH.reshape(rows, length, k_BTKH.shape[2], -1, size)
    allowed_BST = (bias_B1ST[:, 0] >= 0) & valid_BS[:, :, None]

    def largest(block: tuple[jax.Array, jax.Array]) -> jax.Array:
        q_BCKGH, allowed_BCT = block
        logits_BKGCT = jnp.einsum("bckgh,btkh->bkgct", q_BCKGH, k_BTKH, preferred_element_type=jnp.float32)
        masked_BKGCT = jnp.where(allowed_BCT[:, None, None], logits_BKGCT, -jnp.inf)
        return jnp.max(masked_BKGCT, axis=(0, 3, 4)).reshape(heads)

    if length <= _BLOCK:
        return largest((q_BSKGH, allowed_BST))
    blocks_LN = jax.lax.map(largest, (_split_queries(q_BSKGH), _split_queries(allowed_BST)))
    return jnp.max(blocks_LN, axis=0)


def _split_queries(x_BSX: jax.Array) -> jax.Array:
    """Splits axis 1 into blocks, [L, B, C, ...]. The last block is padded with zeros, which are no allowed pairs."""
    rows, length, *inner_sizes = x_BSX.shape
    count = -(-length // _BLOCK)
    padded = jnp.pad(x_BSX, [(0, 0), (0, count * _BLOCK - length), *[(0, 0)] * len(inner_sizes)])
    return jnp.moveaxis(padded.reshape(rows, count, _BLOCK, *inner_sizes), 1, 0)


@jax.custom_vjp
def report_largest(param_N: jax.Array, q_BSNH: jax.Array, largest_N: jax.Array) -> jax.Array:
    """Returns `q_BSNH`. The gradient of `param_N` is `largest_N`, for any cotangent."""
    del param_N, largest_N
    return q_BSNH


def _report_forward(param_N: jax.Array, q_BSNH: jax.Array, largest_N: jax.Array) -> tuple[jax.Array, jax.Array]:
    return report_largest(param_N, q_BSNH, largest_N), largest_N


def _report_backward(largest_N: jax.Array, d_q_BSNH: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    return largest_N, d_q_BSNH, jnp.zeros_like(largest_N)


report_largest.defvjp(_report_forward, _report_backward)
