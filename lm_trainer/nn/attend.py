"""From queries, keys and values to what attention returns, and the choice of what computes it.

Shape letters: B rows, S queries, T keys, N heads, K key and value heads, G query heads of each, H head size,
C queries of one block, L blocks.
"""

from __future__ import annotations

import functools
import logging
from typing import NamedTuple

import jax
import jax.numpy as jnp

from lm_trainer.core.errors import UserError
from lm_trainer.core.group import gather
from lm_trainer.nn.cudnn import CUDNN
from lm_trainer.nn.kernel import Operands, Site
from lm_trainer.nn.linear import dropout
from lm_trainer.nn.spec import AttentionSpec
from lm_trainer.nn.splash import SPLASH

logger = logging.getLogger(__name__)

_KERNELS = {"cudnn": CUDNN, "splash": SPLASH}


class Choice(NamedTuple):
    """What computes attention, and why."""

    backend: str
    reason: str


def choose_backend(spec: AttentionSpec, site: Site) -> Choice:
    """The backend for `spec` at `site`; one that cannot do what the spec says is not chosen.

    A backend that the spec demands is for rows that attend to themselves: where it cannot decode, xla does, so that
    text can be generated with every model, on any platform.

    Raises:
        UserError: when the spec demands a backend that cannot do it.
    """
    wanted = spec.scores.backend
    if wanted == "xla":
        return Choice("xla", "asked for")
    names = tuple(_KERNELS) if wanted == "auto" else (wanted,)
    obstacles = {name: _KERNELS[name].cannot(spec, site) for name in names}
    able = next((name for name, obstacle in obstacles.items() if obstacle is None), None)
    if able is not None:
        return Choice(able, "asked for" if able == wanted else "can do all that the model asks for")
    reason = "; ".join(f"{name} cannot be used: {obstacle}" for name, obstacle in obstacles.items())
    if wanted != "auto" and not site.cached:
        raise UserError(f"attn_backend: {reason}; write xla, or auto to let it be chosen")
    return Choice("xla", reason)


@functools.cache
def _announce(choice: Choice) -> None:
    logger.info("attention is computed by %s: %s", choice.backend, choice.reason)


def attend(  # noqa: PLR0913 - the arguments of attention
    spec: AttentionSpec,
    q_BSNH: jax.Array,
    k_BTKH: jax.Array,
    v_BTKH: jax.Array,
    bias_BNST: jax.Array,
    *,
    segments_BS: jax.Array | None = None,
    key: jax.Array | None = None,
) -> jax.Array:
    """softmax(q k^T + bias) v, shape of q, dtype of v.

    `q_BSNH` is scaled already; the float32 bias may have one head for all, and holds the mask. Rows that attend to
    themselves come with the segments that the mask was made of. With the backend xla the vectors of `v_BTKH` may have
    another size than those of keys, and those of the result have it too.
    """
    # Where devices share the positions of a row, each has the keys and values of its own.
    k_BTKH, v_BTKH = gather(k_BTKH, "context", 1), gather(v_BTKH, "context", 1)
    operands = Operands(q_BSNH, k_BTKH, v_BTKH, bias_BNST, segments_BS)
    choice = choose_backend(spec, Site.of(operands, jax.default_backend()))
    if choice.backend != spec.scores.backend:
        _announce(choice)
    if choice.backend in _KERNELS:
        return _KERNELS[choice.backend].compute(spec, operands)
    scores = spec.scores
    plain = functools.partial(dot_product_attention, dropout_rate=scores.dropout, softcap=scores.softcap)
    if scores.block_size is None or scores.block_size >= q_BSNH.shape[1]:
        return plain(q_BSNH, k_BTKH, v_BTKH, bias_BNST, key=key)
    return _in_blocks(plain, scores.block_size, q_BSNH, k_BTKH, v_BTKH, bias_BNST, key)


def _in_blocks(  # noqa: PLR0913 - the arguments of attention
    plain: functools.partial[jax.Array],
    size: int,
    q_BSNH: jax.Array,
    k_BTKH: jax.Array,
    v_BTKH: jax.Array,
    bias_BNST: jax.Array,
    key: jax.Array | None,
) -> jax.Array:
    """The scores of `size` queries at a time; each query's numbers are those of the whole."""
    length = q_BSNH.shape[1]
    count = -(-length // size)

    def cut(x: jax.Array, axis: int) -> jax.Array:
        padding = [(0, count * size - length if a == axis else 0) for a in range(x.ndim)]
        parts = jnp.pad(x, padding).reshape(*x.shape[:axis], count, size, *x.shape[axis + 1 :])
        return jnp.moveaxis(parts, axis, 0)

    @jax.checkpoint
    def one(block: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
        index, q_BCNH, bias_BNCT = block
        block_key = None if key is None else jax.random.fold_in(key, index)
        return plain(q_BCNH, k_BTKH, v_BTKH, bias_BNCT, key=block_key)

    o_LBCNH = jax.lax.map(one, (jnp.arange(count), cut(q_BSNH, 1), cut(bias_BNST, 2)))
    o_BLCNH = jnp.moveaxis(o_LBCNH, 0, 1)
    return o_BLCNH.reshape(q_BSNH.shape[0], count * size, *o_BLCNH.shape[3:])[:, :length]


def dot_product_attention(  # noqa: PLR0913 - the arguments of attention
    q_BSNH: jax.Array,
    k_BTKH: jax.Array,
    v_BTKH: jax.Array,
    bias_BNST: jax.Array,
    *,
    dropout_rate: float = 0.0,
    softcap: float | None = None,
    key: jax.Array | None = None,
) -> jax.Array:
    """softmax(softcap(q k^T) + bias) v; scores in the dtype of q, softmax in float32. Gradients flow to q, k and v."""
    scores_BNST = _scores(q_BSNH, k_BTKH).astype(jnp.float32)
    if softcap is not None:
        scores_BNST = softcap * jnp.tanh(scores_BNST * (1.0 / softcap))
    scores_BNST = scores_BNST + bias_BNST
    highest = jax.lax.stop_gradient(jnp.max(scores_BNST, axis=-1, keepdims=True))
    e_BNST = jnp.exp(scores_BNST - highest)
    # The result is divided instead of the probabilities, which are T / H times as many. The reciprocal is written
    # out because a compiler may turn a division into it in one program and not in another.
    r_BSN1 = (1.0 / jnp.sum(e_BNST, axis=-1)).transpose(0, 2, 1)[..., None]
    e_BNST = dropout(e_BNST, dropout_rate, key).astype(v_BTKH.dtype)
    return _mix(e_BNST, v_BTKH) * r_BSN1.astype(v_BTKH.dtype)


def _scores(q_BSNH: jax.Array, k_BTKH: jax.Array) -> jax.Array:
    rows, queries, heads, size = q_BSNH.shape
    keys, kv_heads = k_BTKH.shape[1:3]
    if heads == kv_heads:
        return jnp.einsum("bsnh,btnh->bnst", q_BSNH, k_BTKH)
    q_BSKGH = q_BSNH.reshape(rows, queries, kv_heads, -1, size)
    return jnp.einsum("bskgh,btkh->bkgst", q_BSKGH, k_BTKH).reshape(rows, heads, queries, keys)


def _mix(e_BNST: jax.Array, v_BTKH: jax.Array) -> jax.Array:
    rows, heads, queries, keys = e_BNST.shape
    kv_heads, size = v_BTKH.shape[2:]
    if heads == kv_heads:
        return jnp.einsum("bnst,btnh->bsnh", e_BNST, v_BTKH)
    e_BKGST = e_BNST.reshape(rows, kv_heads, -1, queries, keys)
    return jnp.einsum("bkgst,btkh->bskgh", e_BKGST, v_BTKH).reshape(rows, queries, heads, size)
