"""Ring attention: devices that share the positions of a row pass keys and values around, and never hold all of them.

Blocks of keys move from device to device. Each device adds the contribution of a block to its queries' softmax, which
keeps a running maximum (Liu et al. 2023, arXiv 2310.01889; Milakov and Gimelshein 2018, arXiv 1805.02867). The backward
pass sends the blocks around a second time, recomputes the probabilities from the logarithm of the softmax sums, and
sends the gradients of keys and values along with the blocks (Dao et al. 2022, arXiv 2205.14135, algorithm 4). No array
covers both all queries and all keys.

With a causal mask, the last positions of a row need most of the work. A row is therefore split into twice as many
chunks as there are devices, and device i of n has the chunks i and 2n - 1 - i (Grattafiori et al. 2024, arXiv
2407.21783, section 3.3.2), so that all devices compute the same number of blocks.

Shape letters: B rows, S queries, T keys (of all devices), N heads, K key and value heads, G query heads that share one
key head, H head size, L blocks of positions on one device, Q queries of a block, C keys of a block.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from lm_trainer.nn.attention_kernel import MASK_VALUE
from lm_trainer.nn.linear import dropout
from lm_trainer.nn.positions import alibi_slopes
from lm_trainer.nn.ring_layout import Index, RingLayout
from lm_trainer.nn.spec import AlibiSpec, AttentionSpec
from lm_trainer.parallel.collectives import axis_index, axis_size, rotate

Entries = TypeVar("Entries")
Shared = TypeVar("Shared")
State = TypeVar("State")
KeysAndValues = tuple[jax.Array, ...]


class RowMetadata(NamedTuple):
    """Segments and positions of a row, int32: for this device's queries, and for the keys of all devices in order."""

    segments_BS: jax.Array
    segments_BT: jax.Array
    positions_BS: jax.Array
    positions_BT: jax.Array


def ring_attention(  # noqa: PLR0913 - the arguments of attention
    spec: AttentionSpec,
    q_BSNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    row: RowMetadata,
    key: jax.Array | None = None,
    *,
    sinks_N: jax.Array | None = None,
) -> jax.Array:
    """Computes softmax(q k^T + bias) v, [B, S, N, H] in the dtype of `v_BSKH`; scores and softmax are float32.

    The order of every sum depends only on the number of devices along `context`.

    Args:
        spec: the attention spec; the layout is `RingLayout.for_rows` of this spec.
        q_BSNH: this device's queries, already scaled, with positions in the order of `to_zigzag`.
        k_BSKH: this device's keys.
        v_BSKH: this device's values.
        row: segments and positions of the queries and keys.
        key: for dropout of the probabilities; None disables it.
        sinks_N: logits of the sinks, if the spec has sinks.
    """
    assert spec.sinks == (sinks_N is not None)
    layout = RingLayout.for_rows(spec, q_BSNH.shape[1], axis_size("context"))
    sinks_KG = None if sinks_N is None else sinks_N.astype(jnp.float32).reshape(k_BSKH.shape[2], -1)
    key_data = None if key is None or spec.scores.dropout == 0.0 else jax.random.key_data(key)
    q_LBKGQH = _split_blocks(layout, q_BSNH, k_BSKH.shape[2])
    k_LBKCH, v_LBKCH = (_split_blocks(layout, x, x.shape[2])[:, :, :, 0] for x in (k_BSKH, v_BSKH))
    o_LBKGQH: Any = _attend(_Ring(spec, layout), q_LBKGQH, k_LBKCH, v_LBKCH, sinks_KG, row, key_data)
    return jnp.transpose(o_LBKGQH, (1, 0, 4, 2, 3, 5)).reshape(*q_BSNH.shape[:3], v_BSKH.shape[3])


def _split_blocks(layout: RingLayout, x_BSNH: jax.Array, groups: int) -> jax.Array:
    """Reshapes to [L, B, K, G, Q, H]."""
    rows, _, heads, size = x_BSNH.shape
    parts = x_BSNH.reshape(rows, -1, layout.size, groups, heads // groups, size)
    return jnp.transpose(parts, (1, 0, 3, 4, 2, 5))


@dataclass(frozen=True)
class _Ring:
    """Computes the scores of a block, in the same way in the forward and backward passes."""

    spec: AttentionSpec
    layout: RingLayout

    def scores(
        self, q_BKGQH: jax.Array, k_BKCH: jax.Array, row: RowMetadata, pair: _Pair
    ) -> tuple[jax.Array, jax.Array]:
        """Returns float32 [B, K, G, Q, C] twice: scores bounded by `softcap`, and the same with biases and mask."""
        product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
        plain_BKGQC = product("bkgqh,bkch->bkgqc", q_BKGQH, k_BKCH)
        if (cap := self.spec.scores.softcap) is not None:
            plain_BKGQC = cap * jnp.tanh(plain_BKGQC * (1.0 / cap))
        biased_BKGQC = plain_BKGQC
        if isinstance(self.spec.positions, AlibiSpec):
            slopes_N = jnp.asarray(alibi_slopes(self.spec.positions, self.spec.num_heads))
            slopes_1KG11 = slopes_N.reshape(1, self.spec.kv_heads, -1, 1, 1)
            distances_BQC = pair.slice_queries(row.positions_BS) - pair.slice_keys(row.positions_BT)
            biased_BKGQC = biased_BKGQC - slopes_1KG11 * distances_BQC[:, None, None].astype(jnp.float32)
        same_BQC = pair.slice_queries(row.segments_BS) == pair.slice_keys(row.segments_BT)
        visible_B11QC = (same_BQC & pair.visibility_mask(self.spec.window))[:, None, None]
        return plain_BKGQC, jnp.where(visible_B11QC, biased_BKGQC, MASK_VALUE)

    def drop_scores(self, x_BKGQC: jax.Array, key_data: jax.Array | None, pair: _Pair) -> jax.Array:
        """Applies dropout with a key per pair of blocks, so that the backward pass draws the same random numbers."""
        if key_data is None:
            return x_BKGQC
        key = jax.random.fold_in(jax.random.wrap_key_data(key_data), pair.query_block)
        return dropout(x_BKGQC, self.spec.scores.dropout, jax.random.fold_in(key, pair.key_block))

    def fold_pairs(
        self,
        owner: Index,
        per_query: Entries,
        shared: Shared,
        attend_pair: Callable[[Entries, Shared, _Pair], tuple[Entries, Shared]],
    ) -> tuple[Entries, Shared]:
        """Applies a function to each local block of queries and each block of `owner`'s keys visible to it, in row
        order.

        Args:
            owner: the device that the keys belong to.
            per_query: arrays with an entry for each local block of queries.
            shared: arrays shared by all blocks.
            attend_pair: `attend_pair(entries, shared, pair)` returns the updated entries and shared arrays.
        """
        layout, device = self.layout, axis_index("context") if self.layout.devices > 1 else 0

        def queries(local: jax.Array, state: tuple[Entries, Shared]) -> tuple[Entries, Shared]:
            per_query, shared = state
            query_block = layout.block_index(device, local)
            state = jax.tree.map(lambda x: _take_block(x, local), per_query), shared
            for half in (0, 1):
                first = layout.chunk_index(owner, half) * layout.blocks

                def keys(
                    block: jax.Array, state: tuple[Entries, Shared], half: int = half, first: Index = first
                ) -> tuple[Entries, Shared]:
                    local_key = half * layout.blocks + block - first
                    pair = _Pair(
                        layout.size, local, query_block, owner * 2 * layout.blocks + local_key, local_key, block
                    )
                    entries, shared = state
                    return attend_pair(entries, shared, pair)

                low, high = layout.visible_blocks(query_block, first)
                state = lax.fori_loop(low, high, keys, state)
            entries, shared = state
            return jax.tree.map(lambda x, new: _update_block(x, new, local), per_query, entries), shared

        return lax.fori_loop(0, 2 * layout.blocks, queries, (per_query, shared))


class _Pair(NamedTuple):
    """A block of queries and a block of keys; all fields except the first are int32 scalars."""

    size: int
    local_query: jax.Array
    """Index of the query block among the blocks of this device."""
    query_block: Index
    """Index of the query block in the row."""
    gathered_key: Index
    """Index of the key block among the blocks of all devices, in order of devices."""
    local_key: Index
    """Index of the key block on the device that the keys belong to."""
    key_block: jax.Array

    def slice_queries(self, x_BS: jax.Array) -> jax.Array:
        """Returns the entries of the query block, [B, Q, 1]."""
        return lax.dynamic_slice_in_dim(x_BS, self.local_query * self.size, self.size, 1)[:, :, None]

    def slice_keys(self, x_BT: jax.Array) -> jax.Array:
        """Returns the entries of the key block, [B, 1, C]."""
        return lax.dynamic_slice_in_dim(x_BT, self.gathered_key * self.size, self.size, 1)[:, None, :]

    def visibility_mask(self, window: int | None) -> jax.Array:
        """Returns [1, Q, C]: true where the key is at or before the query and inside its window."""
        inside = jnp.arange(self.size)
        distances_1QC = ((self.query_block - self.key_block) * self.size + inside[:, None] - inside[None, :])[None]
        return (distances_1QC >= 0) if window is None else (distances_1QC >= 0) & (distances_1QC < window)


_Softmax = tuple[jax.Array, jax.Array, jax.Array]
"""Weighted values, maximum score and sum of exponentials of each query so far."""


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(  # noqa: PLR0913 - the arguments of attention
    ring: _Ring,
    q_LBKGQH: jax.Array,
    k_LBKCH: jax.Array,
    v_LBKCH: jax.Array,
    sinks_KG: jax.Array | None,
    row: RowMetadata,
    key_data: jax.Array | None,
) -> jax.Array:
    return _forward(ring, q_LBKGQH, k_LBKCH, v_LBKCH, sinks_KG, row, key_data)[0]


def _forward(  # noqa: PLR0913 - the arguments of attention
    ring: _Ring,
    q_LBKGQH: jax.Array,
    k_LBKCH: jax.Array,
    v_LBKCH: jax.Array,
    sinks_KG: jax.Array | None,
    row: RowMetadata,
    key_data: jax.Array | None,
) -> tuple[jax.Array, Any]:
    product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)

    def visit(state: _Softmax, kv: KeysAndValues, owner: Index) -> _Softmax:
        def attend_pair(entries: _Softmax, shared: tuple[()], pair: _Pair) -> tuple[_Softmax, tuple[()]]:
            o_BKGQH, highest_BKGQ, sum_BKGQ = entries
            k_BKCH, v_BKCH = (_take_block(x, pair.local_key) for x in kv)
            _, scores_BKGQC = ring.scores(_take_block(q_LBKGQH, pair.local_query), k_BKCH, row, pair)
            higher_BKGQ = jnp.maximum(highest_BKGQ, jnp.max(scores_BKGQC, axis=-1))
            # Terms that were added under a lower maximum, including masked pairs, shrink by the exponential of the
            # difference.
            shrink_BKGQ = jnp.exp(highest_BKGQ - higher_BKGQ)
            e_BKGQC = jnp.exp(scores_BKGQC - higher_BKGQ[..., None])
            sum_BKGQ = shrink_BKGQ * sum_BKGQ + jnp.sum(e_BKGQC, axis=-1)
            e_BKGQC = ring.drop_scores(e_BKGQC, key_data, pair).astype(v_BKCH.dtype)
            o_BKGQH = shrink_BKGQ[..., None] * o_BKGQH + product("bkgqc,bkch->bkgqh", e_BKGQC, v_BKCH)
            return (o_BKGQH, higher_BKGQ, sum_BKGQ), shared

        return ring.fold_pairs(owner, state, (), attend_pair)[0]

    shape = q_LBKGQH.shape[:-1]
    o_LBKGQH = jnp.zeros((*shape, v_LBKCH.shape[-1]), jnp.float32)
    state = o_LBKGQH, jnp.full(shape, MASK_VALUE, jnp.float32), jnp.zeros(shape, jnp.float32)
    if sinks_KG is not None:
        # The softmax starts with the sink: it is the maximum so far, and its exponential is 1.
        highest_LBKGQ = jnp.broadcast_to(sinks_KG[None, None, :, :, None], shape)
        state = o_LBKGQH, highest_LBKGQ, jnp.ones(shape, jnp.float32)
    for route in ring.layout.routes():
        state = _run_route(visit, state, (k_LBKCH, v_LBKCH), route)
    o_LBKGQH, highest_LBKGQ, sum_LBKGQ = state
    # The explicit reciprocal is needed because a compiler may turn a division into it in one program and not in
    # another.
    o_LBKGQH = (o_LBKGQH * (1.0 / sum_LBKGQ)[..., None]).astype(v_LBKCH.dtype)
    lse_LBKGQ = highest_LBKGQ + jnp.log(sum_LBKGQ)
    return o_LBKGQH, (q_LBKGQH, k_LBKCH, v_LBKCH, sinks_KG, row, key_data, o_LBKGQH, lse_LBKGQ)


def _backward(ring: _Ring, residuals: Any, do_LBKGQH: jax.Array) -> Any:
    q_LBKGQH, k_LBKCH, v_LBKCH, sinks_KG, row, key_data, o_LBKGQH, lse_LBKGQ = residuals
    product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
    mean_LBKGQ = jnp.sum(do_LBKGQH.astype(jnp.float32) * o_LBKGQH.astype(jnp.float32), axis=-1)

    def gradients(dq_LBKGQH: jax.Array, kv: KeysAndValues, owner: Index) -> tuple[jax.Array, KeysAndValues]:
        def attend_pair(dq_BKGQH: jax.Array, d_kv: KeysAndValues, pair: _Pair) -> tuple[jax.Array, KeysAndValues]:
            q_BKGQH, do_BKGQH, lse_BKGQ, mean_BKGQ = (
                _take_block(x, pair.local_query) for x in (q_LBKGQH, do_LBKGQH, lse_LBKGQ, mean_LBKGQ)
            )
            k_BKCH, v_BKCH = (_take_block(x, pair.local_key) for x in kv)
            plain_BKGQC, scores_BKGQC = ring.scores(q_BKGQH, k_BKCH, row, pair)
            p_BKGQC = jnp.exp(scores_BKGQC - lse_BKGQ[..., None])
            dropped_BKGQC = ring.drop_scores(p_BKGQC, key_data, pair).astype(do_BKGQH.dtype)
            dv_BKCH = product("bkgqc,bkgqh->bkch", dropped_BKGQC, do_BKGQH)
            dp_BKGQC = ring.drop_scores(product("bkgqh,bkch->bkgqc", do_BKGQH, v_BKCH), key_data, pair)
            ds_BKGQC = p_BKGQC * (dp_BKGQC - mean_BKGQ[..., None])
            if (cap := ring.spec.scores.softcap) is not None:
                ds_BKGQC = ds_BKGQC * (1.0 - jnp.square(plain_BKGQC * (1.0 / cap)))
            ds_BKGQC = ds_BKGQC.astype(q_BKGQH.dtype)
            dk_BKCH = product("bkgqc,bkgqh->bkch", ds_BKGQC, q_BKGQH)
            d_kv = tuple(
                _update_block(x, _take_block(x, pair.local_key) + new, pair.local_key)
                for x, new in zip(d_kv, (dk_BKCH, dv_BKCH), strict=True)
            )
            return dq_BKGQH + product("bkgqc,bkch->bkgqh", ds_BKGQC, k_BKCH), d_kv

        return ring.fold_pairs(owner, dq_LBKGQH, _zeros_like(kv), attend_pair)

    def visit(
        state: tuple[jax.Array, KeysAndValues], kv: KeysAndValues, owner: Index, hop: int
    ) -> tuple[jax.Array, KeysAndValues]:
        dq_LBKGQH, sums = state
        # Sent on before this device's terms are computed, to overlap communication and computation.
        arrived = rotate(sums, "context", hop)
        dq_LBKGQH, terms = gradients(dq_LBKGQH, kv, owner)
        return dq_LBKGQH, jax.tree.map(jnp.add, arrived, terms)

    local_kv = (k_LBKCH, v_LBKCH)
    dq_LBKGQH, d_kv = jnp.zeros(q_LBKGQH.shape, jnp.float32), _zeros_like(local_kv)
    for hop, first, last in ring.layout.routes():
        visit_hop = functools.partial(visit, hop=hop)
        dq_LBKGQH, sums = _run_route(visit_hop, (dq_LBKGQH, _zeros_like(local_kv)), local_kv, (hop, first, last))
        d_kv = jax.tree.map(jnp.add, d_kv, rotate(sums, "context", -hop * last))
    dk_LBKCH, dv_LBKCH = d_kv
    gradients_qkv = dq_LBKGQH.astype(q_LBKGQH.dtype), dk_LBKCH.astype(k_LBKCH.dtype), dv_LBKCH.astype(v_LBKCH.dtype)
    d_sinks_KG = None
    if sinks_KG is not None:
        # The derivative of a score is its probability times the difference of its value and the mean; the value of a
        # sink is zero.
        p_LBKGQ = jnp.exp(sinks_KG[None, None, :, :, None] - lse_LBKGQ)
        d_sinks_KG = -jnp.sum(p_LBKGQ * mean_LBKGQ, axis=(0, 1, 4))
    # Integers have no gradient.
    return *gradients_qkv, d_sinks_KG, None, None


_attend.defvjp(_forward, _backward)


def _run_route(
    visit: Callable[[State, KeysAndValues, Index], State],
    state: State,
    local_kv: KeysAndValues,
    route: tuple[int, int, int],
) -> State:
    """Calls `visit(state, keys and values, their device)` at each stop of the routes of `RingLayout.routes`."""
    hop, first, last = route

    def step(carry: tuple[State, KeysAndValues], hops: jax.Array) -> tuple[tuple[State, KeysAndValues], None]:
        state, kv = carry
        # Receives the next block while the current one is being used.
        arriving = rotate(kv, "context", hop)
        return (visit(state, kv, _owner_after_hops(hops, hop)), arriving), None

    start = (state, rotate(local_kv, "context", hop * first))
    (state, kv), _ = lax.scan(step, start, jnp.arange(first, last, dtype=jnp.int32))
    return visit(state, kv, _owner_after_hops(last, hop))


def _owner_after_hops(hops: Index, hop: int) -> Index:
    """Returns the device whose keys are local after `hops` hops of `hop` devices each."""
    devices = axis_size("context")
    return 0 if devices == 1 else (axis_index("context") - hops * hop) % devices


def _zeros_like(kv: KeysAndValues) -> KeysAndValues:
    return jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), kv)


def _take_block(x_L: jax.Array, index: Index) -> jax.Array:
    return lax.dynamic_index_in_dim(x_L, index, keepdims=False)


def _update_block(x_L: jax.Array, new: jax.Array, index: Index) -> jax.Array:
    return lax.dynamic_update_index_in_dim(x_L, new, index, 0)
