"""The registry of sequence mixers: the module of each kind of spec."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import jax

from lm_trainer.nn.attention import Attention, ForwardContext
from lm_trainer.nn.cache import LayerCache
from lm_trainer.nn.delta_net import DeltaNet
from lm_trainer.nn.init import Initializer
from lm_trainer.nn.latent_attention import LatentAttention
from lm_trainer.nn.layer_values import SharedKeys
from lm_trainer.nn.mixer_spec import DeltaSpec, LatentSpec, Mixer, StateSpaceSpec
from lm_trainer.nn.spec import AttentionSpec
from lm_trainer.nn.state_space import StateSpace


class MixerModule(Protocol):
    """A sequence mixer."""

    def __call__(
        self,
        x_BSD: jax.Array,
        context: ForwardContext,
        layer: jax.Array | int,
        *,
        key: jax.Array | None = None,
        adapter_key: jax.Array | None = None,
        cache: LayerCache | SharedKeys | None = None,
    ) -> tuple[jax.Array, LayerCache | SharedKeys | None]:
        """Returns [B, S, D] in the dtype of `x_BSD`, and the cache with the new positions.

        In a model in which layers share keys, all mixers are attention, and `cache` is `SharedKeys` without a cache.

        A result depends on its own position and earlier ones of the same segment, including positions in the cache.
        `key` is for dropout inside the mixer, `adapter_key` for dropout in adapters.
        """
        ...


_MODULES: Mapping[type, Any] = {
    AttentionSpec: Attention,
    LatentSpec: LatentAttention,
    StateSpaceSpec: StateSpace,
    DeltaSpec: DeltaNet,
}


def build_mixer(spec: Mixer, dim: int, *, init: Initializer) -> MixerModule:
    """Builds the mixer of a layer with a stream of `dim` dimensions."""
    module = spec.module if isinstance(spec, AttentionSpec) else None
    return (module or _MODULES[type(spec)])(spec, dim, init=init)
