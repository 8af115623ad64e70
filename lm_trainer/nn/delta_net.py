"""Gated DeltaNet as sequence mixer: linear attention whose state is corrected by the delta rule.

Shape letters: B rows, S positions, D hidden dimension, G heads of queries and keys, R heads of values per head of keys,
N heads of values (G x R), K size of queries and keys, P size of values, J all projections of a head of keys.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from lm_trainer.nn.attention import ForwardContext
from lm_trainer.nn.cache import LayerCache, StateCache
from lm_trainer.nn.gated_norm import GatedNorm
from lm_trainer.nn.init import Initializer
from lm_trainer.nn.linear import Linear
from lm_trainer.nn.mixer_spec import DeltaSpec
from lm_trainer.nn.read import read
from lm_trainer.nn.recurrence import RecurrenceInputs, ShortConv, document_numbers, run_recurrence, with_rank_of_rows

_NORM_EPSILON = 1e-6
_LOWEST_DECAY, _HIGHEST_DECAY = 0.01, 16.0
"""Range of the initial exp(a_log)."""


class DeltaNet(nnx.Module):
    """Gated DeltaNet (Yang et al. 2025, arXiv 2412.06464, equation 10).

    Queries and keys have length 1 (queries divided by sqrt(K)). The log decay is -exp(a_log) softplus(a + dt_bias), and
    the rate of the delta rule sigmoid(b), with a and b linear in the input.
    """

    def __init__(self, spec: DeltaSpec, dim: int, *, init: Initializer):
        self.spec = spec
        keys = {"heads": spec.num_key_heads, "head_size": spec.key_dim}
        values = {"heads": spec.num_heads, "head_size": spec.value_dim}
        embed, width, ratio = {"embed": dim}, spec.conv_width, spec.num_heads // spec.num_key_heads
        per_head = {"heads": spec.num_heads}
        if spec.separate_maps:
            self.q_in = Linear(embed, keys, bias=False, init=init)
            self.k_in = Linear(embed, keys, bias=False, init=init)
            self.v_in = Linear(embed, values, bias=False, init=init)
            self.z_in = Linear(embed, values, bias=False, init=init)
            self.b_in = Linear(embed, per_head, bias=False, init=init)
            self.a_in = Linear(embed, per_head, bias=False, init=init)
        else:
            # All projections of a head of keys, and of its heads of values, are next to each other, as in files.
            joined = {"heads": spec.num_key_heads, "head_size": 2 * spec.key_dim + 2 * ratio * spec.value_dim}
            self.qkvz = Linear(embed, joined, bias=False, init=init)
            self.ba = Linear(embed, {"heads": spec.num_key_heads, "head_size": 2 * ratio}, bias=False, init=init)
        self.q_conv = ShortConv(keys, width=width, bias=False, init=init)
        self.k_conv = ShortConv(keys, width=width, bias=False, init=init)
        self.v_conv = ShortConv(values, width=width, bias=False, init=init)
        self.dt_bias = init.constant(per_head, 1.0)
        draw = jax.random.uniform(init.rngs.params(), (spec.num_heads,), jnp.float32, _LOWEST_DECAY, _HIGHEST_DECAY)
        self.a_log = init.given(per_head, jnp.log(draw))
        self.norm = GatedNorm(spec.norm, width=spec.value_dim, groups=1, gate_first=False, init=init)
        self.readout = Linear(values, embed, bias=False, init=init, residual=True)

    def __call__(
        self,
        x_BSD: jax.Array,
        context: ForwardContext,
        layer: jax.Array | int,
        *,
        key: jax.Array | None = None,
        adapter_key: jax.Array | None = None,
        cache: LayerCache | None = None,
    ) -> tuple[jax.Array, LayerCache | None]:
        """Mixes the positions of `x_BSD`, after the state in the cache if there is one. `key` has no effect."""
        del key
        assert cache is None or isinstance(cache, StateCache)
        spec, documents_BS = self.spec, document_numbers(context.segments_BS)
        valid_BS = None if cache is None else context.valid_BS
        counts_B = None if valid_BS is None else jnp.sum(valid_BS.astype(jnp.int32), axis=1)
        *histories, state = (None,) * 4 if cache is None else cache.read_states(layer)
        q_BSGK, k_BSGK, v_BSNP, gate_BSNP, b_BSN, a_BSN = self._project(x_BSD, adapter_key)
        (q_BSGK, q_history), (k_BSGK, k_history), (v_BSNP, v_history) = (
            conv(x, documents_BS, history, counts_B)
            for conv, x, history in zip(
                (self.q_conv, self.k_conv, self.v_conv), (q_BSGK, k_BSGK, v_BSNP), histories, strict=True
            )
        )
        log_decay_BSN, rate_BSN = self._gates(a_BSN, b_BSN, valid_BS)
        rows, length = x_BSD.shape[:2]
        grouped = spec.num_key_heads, spec.num_heads // spec.num_key_heads
        if state is None:
            state = jnp.zeros((rows, *grouped, spec.key_dim, spec.value_dim), jnp.float32)
        inputs = RecurrenceInputs(
            _to_unit_length(q_BSGK) * spec.key_dim**-0.5,
            _to_unit_length(k_BSGK),
            v_BSNP.astype(jnp.float32).reshape(rows, length, *grouped, spec.value_dim),
            log_decay_BSN.reshape(rows, length, *grouped),
            rate_BSN.reshape(rows, length, *grouped),
        )
        y_BSGRP, state = run_recurrence(inputs, state, documents_BS, spec.chunk_size)
        out_BSD = self.readout(self.norm(y_BSGRP.reshape(v_BSNP.shape), gate_BSNP), key=adapter_key)
        return out_BSD, cache and cache.write_states(layer, (q_history, k_history, v_history, state))

    def _project(self, x_BSD: jax.Array, key: jax.Array | None) -> tuple[jax.Array, ...]:
        """Returns queries, keys, values, the gate of the result, and the inputs of rate and decay."""
        spec = self.spec
        if spec.separate_maps:
            maps = self.q_in, self.k_in, self.v_in, self.z_in, self.b_in, self.a_in
            return tuple(linear(x_BSD, key=key) for linear in maps)
        size, width = spec.key_dim, spec.num_heads // spec.num_key_heads * spec.value_dim
        parts = jnp.split(self.qkvz(x_BSD, key=key), [size, 2 * size, 2 * size + width], axis=-1)
        q_BSGK, k_BSGK, *wide = parts
        heads = (*x_BSD.shape[:2], spec.num_heads)
        v_BSNP, gate_BSNP = (part.reshape(*heads, spec.value_dim) for part in wide)
        b_BSN, a_BSN = (part.reshape(heads) for part in jnp.split(self.ba(x_BSD, key=key), 2, axis=-1))
        return q_BSGK, k_BSGK, v_BSNP, gate_BSNP, b_BSN, a_BSN

    def _gates(self, a_BSN: jax.Array, b_BSN: jax.Array, valid_BS: jax.Array | None) -> tuple[jax.Array, jax.Array]:
        """Returns log decays and rates, float32; both are 0 at positions that must not change the state."""
        steps_BSN = jax.nn.softplus(a_BSN.astype(jnp.float32) + read(self.dt_bias, jnp.float32)[None, None])
        log_decay_BSN = -jnp.exp(read(self.a_log, jnp.float32))[None, None] * steps_BSN
        rate_BSN = jax.nn.sigmoid(b_BSN.astype(jnp.float32))
        if valid_BS is None:
            return log_decay_BSN, rate_BSN
        valid_BS1 = with_rank_of_rows(valid_BS, rate_BSN)
        return jnp.where(valid_BS1, log_decay_BSN, 0.0), jnp.where(valid_BS1, rate_BSN, 0.0)


def _to_unit_length(x_BSGK: jax.Array) -> jax.Array:
    x_BSGK = x_BSGK.astype(jnp.float32)
    return x_BSGK * jax.lax.rsqrt(jnp.sum(jnp.square(x_BSGK), axis=-1, keepdims=True) + _NORM_EPSILON)
