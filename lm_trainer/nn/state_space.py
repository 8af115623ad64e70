"""A state-space model as sequence mixer.

Shape letters: B rows, S positions, D hidden dimension, G groups, R heads of a group, N heads (G x R), P size of a head,
K size of the state of a dimension, T taps of the convolution.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from flax import nnx

from lm_trainer.nn.attention import ForwardContext
from lm_trainer.nn.cache import LayerCache, StateCache
from lm_trainer.nn.gated_norm import GatedNorm
from lm_trainer.nn.init import Initializer
from lm_trainer.nn.linear import Linear
from lm_trainer.nn.mixer_spec import StateSpaceSpec
from lm_trainer.nn.read import read
from lm_trainer.nn.recurrence import RecurrenceInputs, ShortConv, document_numbers, run_recurrence, with_rank_of_rows


class StateSpace(nnx.Module):
    """A selective state-space model with a scalar decay per head (Dao and Gu 2024, arXiv 2405.21060, section 7).

    With x, B and C from the convolutions, and the time step dt = softplus(dt + dt_bias), a head computes S_t =
    exp(-exp(a_log) dt_t) S_{t-1} + B_t (dt_t x_t)^T and y_t = S_t^T C_t + d x_t.
    """

    def __init__(self, spec: StateSpaceSpec, dim: int, *, init: Initializer):
        self.spec = spec
        heads = {"heads": spec.num_heads, "head_size": spec.head_dim}
        groups = {"kv_heads": spec.num_groups, "head_size": spec.state_dim}
        per_head = {"heads": spec.num_heads}
        embed, width = {"embed": dim}, spec.conv_width
        self.gate = Linear(embed, heads, bias=spec.bias, init=init)
        self.x = Linear(embed, heads, bias=spec.bias, init=init)
        self.b = Linear(embed, groups, bias=spec.bias, init=init)
        self.c = Linear(embed, groups, bias=spec.bias, init=init)
        self.dt = Linear(embed, per_head, bias=spec.bias, init=init)
        self.x_conv = ShortConv(heads, width=width, bias=spec.conv_bias, init=init)
        self.b_conv = ShortConv(groups, width=width, bias=spec.conv_bias, init=init)
        self.c_conv = ShortConv(groups, width=width, bias=spec.conv_bias, init=init)
        self.dt_bias = init.given(per_head, _initial_dt_bias(spec, init))
        self.a_log = init.given(per_head, jnp.log(jnp.arange(1, spec.num_heads + 1, dtype=jnp.float32)))
        self.d = init.constant(per_head, 1.0)
        self.norm = GatedNorm(
            spec.norm, width=spec.num_heads * spec.head_dim, groups=spec.norm_groups, gate_first=True, init=init
        )
        self.readout = Linear(heads, embed, bias=spec.bias, init=init, residual=True)

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
        counts_B = None if cache is None else jnp.sum(context.valid_BS.astype(jnp.int32), axis=1)
        *histories, state = (None,) * 4 if cache is None else cache.read_states(layer)
        gate_BSNP, dt_BSN = self.gate(x_BSD, key=adapter_key), self.dt(x_BSD, key=adapter_key)
        (x_BSNP, x_history), (b_BSGK, b_history), (c_BSGK, c_history) = (
            conv(linear(x_BSD, key=adapter_key), documents_BS, history, counts_B)
            for conv, linear, history in zip(
                (self.x_conv, self.b_conv, self.c_conv), (self.x, self.b, self.c), histories, strict=True
            )
        )
        dt_BSN = self._time_steps(dt_BSN, None if cache is None else context.valid_BS)
        x_BSNP = x_BSNP.astype(jnp.float32)
        rows, length, grouped = x_BSD.shape[0], x_BSD.shape[1], (spec.num_groups, spec.num_heads // spec.num_groups)
        log_decay_BSN = -jnp.exp(read(self.a_log, jnp.float32))[None, None] * dt_BSN
        if state is None:
            state = jnp.zeros((rows, *grouped, spec.state_dim, spec.head_dim), jnp.float32)
        inputs = RecurrenceInputs(
            c_BSGK.astype(jnp.float32),
            b_BSGK.astype(jnp.float32),
            (x_BSNP * dt_BSN[..., None]).reshape(rows, length, *grouped, spec.head_dim),
            log_decay_BSN.reshape(rows, length, *grouped),
        )
        y_BSGRP, state = run_recurrence(inputs, state, documents_BS, spec.chunk_size)
        y_BSNP = y_BSGRP.reshape(x_BSNP.shape) + read(self.d, jnp.float32)[None, None, :, None] * x_BSNP
        out_BSD = self.readout(self.norm(y_BSNP, gate_BSNP), key=adapter_key)
        return out_BSD, cache and cache.write_states(layer, (x_history, b_history, c_history, state))

    def _time_steps(self, dt_BSN: jax.Array, valid_BS: jax.Array | None) -> jax.Array:
        """Returns the time steps, float32; 0 at positions that must not change the state."""
        dt_BSN = jax.nn.softplus(dt_BSN.astype(jnp.float32) + read(self.dt_bias, jnp.float32)[None, None])
        low, high = self.spec.time_step_limit
        if (low, high) != (0.0, math.inf):
            dt_BSN = jnp.clip(dt_BSN, low, high)
        return dt_BSN if valid_BS is None else jnp.where(with_rank_of_rows(valid_BS, dt_BSN), dt_BSN, 0.0)


def _initial_dt_bias(spec: StateSpaceSpec, init: Initializer) -> jax.Array:
    """Samples time steps whose logarithms are uniform, and returns the biases that give them."""
    low, high, floor = spec.time_step_range
    uniform_N = jax.random.uniform(init.rngs.params(), (spec.num_heads,), jnp.float32)
    steps_N = jnp.maximum(jnp.exp(uniform_N * (math.log(high) - math.log(low)) + math.log(low)), floor)
    # The inverse of softplus.
    return steps_N + jnp.log(-jnp.expm1(-steps_N))
