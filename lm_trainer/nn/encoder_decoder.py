"""Encoder-decoder for speech: a decoder that generates text from encoded audio features.

Shape letters: B rows, S positions, T new tokens, M frames of the input, P features of a frame, F positions of the
encoder, C channels, D hidden dimension, L layers, K key heads, H head size.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from lm_trainer.core.batch import Batch
from lm_trainer.core.errors import UserError
from lm_trainer.nn.attention import UNLIMITED, ForwardContext, make_cache_context, make_context
from lm_trainer.nn.cache import KvCache
from lm_trainer.nn.decoder import Decoder
from lm_trainer.nn.init import Initializer
from lm_trainer.nn.linear import ACTIVATIONS, Linear, dropout
from lm_trainer.nn.norm import make_norm
from lm_trainer.nn.positions import sinusoids
from lm_trainer.nn.read import read
from lm_trainer.nn.router import RouterStats
from lm_trainer.nn.spec import DecoderSpec
from lm_trainer.nn.stack import build_blocks, run_blocks

_WIDTH = 3
"""Kernel width of the convolutions, in frames."""


class EncoderKeys(NamedTuple):
    """Dropout keys of the parts of an encoder; None disables dropout."""

    embed: jax.Array | None = None
    blocks: jax.Array | None = None
    adapters: jax.Array | None = None
    """For the adapters of the convolutions."""


class Encoder(nnx.Module):
    """The encoder described by an `EncoderSpec`."""

    def __init__(self, spec: DecoderSpec, *, rngs: nnx.Rngs):
        assert spec.encoder is not None
        self.spec, self.stack = spec.encoder, spec.encoder_stack
        init = Initializer(rngs, spec.init_std, self.stack.residual_std)
        dim, kernel = {"embed": spec.hidden_dim}, {"kernel": _WIDTH}
        self.conv1 = Linear({**kernel, "features": self.spec.num_features}, dim, bias=True, init=init)
        self.conv2 = Linear({**kernel, "channels": spec.hidden_dim}, dim, bias=True, init=init)
        # A parameter, because checkpoints store it at their own precision. The `frozen_params` of a model keep it
        # fixed.
        table = jnp.asarray(sinusoids(self.spec.num_positions, spec.hidden_dim))
        self.positions = nnx.Param(table, logical_axes=("position", "embed"))
        self.blocks = build_blocks(self.stack, init=init)
        self.final_norm = make_norm(self.spec.final_norm, dim, init=init)

    @jax.named_scope("encoder")
    def __call__(
        self, features_BMP: jax.Array, *, dtype: DTypeLike = jnp.float32, key: jax.Array | None = None
    ) -> jax.Array:
        """Computes the normalized stream after the last layer, [B, F, D] in `dtype`. The key is for dropout.

        Raises:
            UserError: if the shape of the features does not match the spec.
        """
        keys = self.dropout_keys(key)
        x_BFD = self.embed_input(features_BMP, dtype=dtype, keys=keys)
        x_BFD, _, _ = run_blocks(self.stack, self.blocks, x_BFD, self.make_context(x_BFD), key=keys.blocks)
        return self.final_norm(x_BFD)

    def dropout_keys(self, key: jax.Array | None) -> EncoderKeys:
        """Derives the dropout keys of the parts of the encoder; None disables dropout."""
        return EncoderKeys() if key is None else EncoderKeys(*jax.random.split(key, 3))

    def embed_input(self, features_BMP: jax.Array, *, dtype: DTypeLike, keys: EncoderKeys) -> jax.Array:
        """Computes the stream before the first layer, [B, F, D] in `dtype`; raises as `__call__`."""
        self._check_shape(features_BMP.shape)
        activation = ACTIVATIONS[self.spec.activation]
        x_BMD = activation(self.conv1(_conv_windows(features_BMP.astype(dtype), 1), key=keys.adapters))
        x_BFD = activation(self.conv2(_conv_windows(x_BMD, 2), key=keys.adapters))
        x_BFD = (x_BFD.astype(jnp.float32) + read(self.positions, jnp.float32)[None]).astype(dtype)
        return dropout(x_BFD, self.spec.dropout, keys.embed)

    @staticmethod
    def make_context(x_BFD: jax.Array) -> ForwardContext:
        """Returns the context that all layers share: every position attends to all positions."""
        rows, length = x_BFD.shape[:2]
        positions_BF = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32)[None], (rows, length))
        bias_11FF = jnp.zeros((1, 1, length, length), jnp.float32)
        return ForwardContext(positions_BF, positions_BF, {UNLIMITED: bias_11FF}, jnp.ones((rows, length), bool))

    def _check_shape(self, shape: tuple[int, ...]) -> None:
        frames, features = 2 * self.spec.num_positions, self.spec.num_features
        if shape[1:] != (frames, features):
            raise UserError(
                f"the model hears {frames} frames of {features} features, but the rows have {shape[1]} of {shape[2]}; "
                f"make those of the data and of the model agree"
            )


def _conv_windows(x_BMC: jax.Array, stride: int) -> jax.Array:
    """Gathers the frames read by each position of a convolution, [B, M / stride, 3, C]. Rows are zero-padded at both
    ends.

    The convolution is then a product of two matrices, whose sums have the same order on every device.
    """
    frames = x_BMC.shape[1]
    padded = jnp.pad(x_BMC, ((0, 0), (1, 1), (0, 0)))
    return jnp.stack([padded[:, tap : tap + frames : stride] for tap in range(_WIDTH)], axis=2)


class EncodedCache(NamedTuple):
    """Keys and values of the tokens so far and of the encoder output."""

    self_attention: KvCache
    cross: KvCache
    """[L, B, F, K, H]; they do not change during decoding."""


class EncoderDecoder(Decoder):
    """A decoder with an encoder. Each layer has cross-attention between self-attention and the MLP."""

    def __init__(self, spec: DecoderSpec, *, rngs: nnx.Rngs):
        super().__init__(spec, rngs=rngs)
        self.encoder = Encoder(spec, rngs=rngs)

    def batch_hidden_and_stats(
        self, batch: Batch, *, dtype: DTypeLike = jnp.float32, key: jax.Array | None = None
    ) -> tuple[jax.Array, RouterStats | None]:
        """Same as for `Decoder`.

        Raises:
            UserError: if the batch has no features.
        """
        keys = self.dropout_keys(key)
        tokens_BS, positions_BS, segments_BS = map(jnp.asarray, (batch.tokens, batch.positions, batch.segments))
        memory_BFD = self.encoder(self._features(batch), dtype=dtype, key=self._encoder_key(key))
        x_BSD = self.embed_input(tokens_BS, positions_BS, dtype=dtype, key=keys.embed)
        context = make_context(self.spec.blocks, positions_BS, segments_BS)._replace(memory=memory_BFD)
        x_BSD, _, stats = run_blocks(self.spec, self.blocks, x_BSD, context, key=keys.blocks)
        return self.head_input(x_BSD, tokens_BS, segments_BS, key=keys.head), stats

    def embed_features(self, batch: Batch, *, dtype: DTypeLike, key: jax.Array | None) -> jax.Array:
        """Computes the stream before the encoder's first layer, [B, F, D] in `dtype`; raises as
        `batch_hidden_and_stats`.
        """
        return self.encoder.embed_input(self._features(batch), dtype=dtype, keys=self.encoder_keys(key))

    def encoder_keys(self, key: jax.Array | None) -> EncoderKeys:
        """Derives the dropout keys of the encoder from the key of a microbatch; None disables dropout."""
        return self.encoder.dropout_keys(self._encoder_key(key))

    def _encoder_key(self, key: jax.Array | None) -> jax.Array | None:
        return None if key is None else jax.random.fold_in(key, 2)

    def _features(self, batch: Batch) -> jax.Array:
        if batch.features is None:
            raise UserError(_NO_FEATURES)
        return jnp.asarray(batch.features)

    def hidden_and_stats(self, *_: Any, **__: Any) -> Any:
        """Raises `UserError`, because this model needs features as well as tokens; use `batch_hidden_and_stats`."""
        raise UserError(_NO_FEATURES)

    def init_cache(self, *_: Any, **__: Any) -> Any:
        """Raises `UserError`, because a cache of this model is created from features; use `encode`."""
        raise UserError(_NO_FEATURES)

    def encode(self, features_BMP: jax.Array, capacity: int, *, dtype: DTypeLike = jnp.float32) -> EncodedCache:
        """Encodes rows of features and makes the cache for `decode`.

        Args:
            features_BMP: float32 features of the input frames.
            capacity: number of token positions per row.
            dtype: dtype of the cache and of all computation.
        """
        memory_BFD = self.encoder(features_BMP, dtype=dtype)

        def keys_and_values(block: nnx.Module) -> tuple[jax.Array, jax.Array]:
            return block.cross.keys_and_values(memory_BFD)  # pyright: ignore[reportAttributeAccessIssue]

        # All layers have the same spec, so they are stacked in the only slot.
        assert len(self.spec.layers_by_slot) == 1
        cross = KvCache(*jax.lax.map(keys_and_values, self.blocks["0"]))
        return EncodedCache(super().init_cache(len(features_BMP), capacity, dtype=dtype), cross)

    def decode_hidden(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, tokens_BT: jax.Array, positions_BT: jax.Array, cache: EncodedCache, counts_B: jax.Array | None = None
    ) -> tuple[jax.Array, EncodedCache]:
        """Same as for `Decoder`, with a cache made by `encode`."""
        self_cache = cache.self_attention
        x_BTD = self.embed(tokens_BT, positions_BT).astype(self_cache.k.dtype)
        context = make_cache_context(self.spec.blocks, positions_BT, self_cache.k.shape[2], counts_B)
        context = context._replace(memory=cache.cross)
        x_BTD, filled, _ = run_blocks(self.spec, self.blocks, x_BTD, context, cache=self_cache)
        assert filled is not None
        return self.extend_head_input(self.final_norm(x_BTD)), cache._replace(self_attention=filled)


_NO_FEATURES = (
    "this model writes what it hears, but there is text alone: its rows need the features of audio (`data.format: "
    "{type: audio}`), and it goes on from no prompt of text"
)
