"""Modules that predict tokens after the next one (arXiv 2412.19437, section 2.2).

Shape letters: B rows, S positions, D hidden dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from lm_trainer.core.batch import Batch
from lm_trainer.nn.attention import ForwardContext, make_context
from lm_trainer.nn.attention_dispatch import uses_ring
from lm_trainer.nn.block import Block
from lm_trainer.nn.init import Initializer, build_stacked
from lm_trainer.nn.linear import Linear
from lm_trainer.nn.multi_token_spec import MultiTokenSpec
from lm_trainer.nn.norm import make_norm
from lm_trainer.nn.ring_layout import from_zigzag, to_zigzag
from lm_trainer.nn.router import RouterStats
from lm_trainer.nn.spec import DecoderSpec
from lm_trainer.nn.stack import run_layer, unstack
from lm_trainer.parallel.collectives import all_gather, axis_index, axis_size


class LaterTokens(NamedTuple):
    """Rows for the module that predicts the token `depth` positions after the next one.

    A position counts if the token `depth` positions later belongs to its document, so no module reads or predicts a
    token of another document.
    """

    tokens_BS: jax.Array
    """int32; the tokens `depth` positions later, which the module reads."""
    targets_BS: jax.Array
    """int32; the tokens after them, which it predicts."""
    weights_BS: jax.Array
    """float32; weights of the targets, 0 where a position does not count."""
    segments_BS: jax.Array
    """int32; as in `Batch`, -1 where a position does not count."""

    @classmethod
    def from_batch(cls, batch: Batch, depth: int) -> LaterTokens:
        """Shifts the rows of a batch."""
        segments_BS = jnp.asarray(batch.segments)
        later_BS = _shift(segments_BS, depth, fill=-1)
        counts_BS = (segments_BS == later_BS) & (segments_BS >= 0)
        weights_BS = _shift(jnp.asarray(batch.weights).astype(jnp.float32), depth)
        return cls(
            _shift(jnp.asarray(batch.tokens), depth),
            _shift(jnp.asarray(batch.targets), depth),
            jnp.where(counts_BS, weights_BS, 0.0),
            jnp.where(counts_BS, segments_BS, -1),
        )


def _shift(x_BS: jax.Array, count: int, fill: int = 0) -> jax.Array:
    """Returns the values `count` positions later in each row; `fill` after its end."""
    length = x_BS.shape[1]
    # The devices that share the positions of a row have consecutive parts of it.
    padded = jnp.pad(all_gather(x_BS, "context", 1), [(0, 0), (0, count)], constant_values=fill)
    if axis_size("context") == 1:
        return padded[:, count:]
    return jax.lax.dynamic_slice_in_dim(padded, axis_index("context") * length + count, length, axis=1)


class MultiTokenModule(nnx.Module):
    """One module: a linear map of its two inputs, a layer, and the norm of its output."""

    def __init__(self, spec: MultiTokenSpec, dim: int, *, init: Initializer):
        axis = {"embed": dim}
        self.token_norm = make_norm(spec.norm, axis, init=init)
        self.hidden_norm = make_norm(spec.norm, axis, init=init)
        # One matrix as in published files, whose first inputs are the embedding.
        self.join = Linear({"embed": 2 * dim}, {"latent": dim}, bias=False, init=init)
        self.layer = Block(spec.block, dim, init=init)
        self.final_norm = make_norm(spec.norm, axis, init=init)

    def join_inputs(self, e_BSD: jax.Array, h_BSD: jax.Array) -> jax.Array:
        """Computes the input of the layer, [B, S, D], from embeddings and inputs of a head (equation 21)."""
        return self.join(jnp.concatenate([self.token_norm(e_BSD), self.hidden_norm(h_BSD)], axis=-1))


class MultiToken(nnx.Module):
    """All modules of a decoder. Parameters are stacked over the modules, like layers."""

    def __init__(self, spec: DecoderSpec, *, init: Initializer):
        assert spec.multi_token is not None
        self.spec, self.modules_spec = spec, spec.multi_token
        keys = jax.random.split(init.rngs.params(), self.modules_spec.depth)

        def build(rngs: nnx.Rngs) -> MultiTokenModule:
            module_init = Initializer(rngs, init.std, init.residual_std, flat=True)
            return MultiTokenModule(self.modules_spec, spec.hidden_dim, init=module_init)

        self.blocks = nnx.Dict({"0": build_stacked(build, keys)})

    def __call__(
        self,
        embed: Callable[[jax.Array, jax.Array], jax.Array],
        h_BSD: jax.Array,
        stats: RouterStats | None,
        batch: Batch,
    ) -> Iterator[tuple[LaterTokens, jax.Array, RouterStats | None]]:
        """Runs the modules in order, each on the result of the one before it.

        Args:
            embed: the embedding of the model, `embed(tokens_BS, positions_BS)`.
            h_BSD: inputs of the model's head.
            stats: sums of the router statistics of the layers; None without routers.
            batch: the rows.

        Yields:
            For each module its rows, the inputs of its head, [B, S, D], and the router statistics including its layer.
        """
        positions_BS = jnp.asarray(batch.positions)
        for index, module in enumerate(self._modules()):
            rows = LaterTokens.from_batch(batch, index + 1)
            x_BSD = module.join_inputs(embed(rows.tokens_BS, positions_BS).astype(h_BSD.dtype), h_BSD)
            number = jnp.int32(len(self.spec.blocks) + index)
            x_BSD, stats = self._run_layer(module.layer, x_BSD, stats, rows.segments_BS, positions_BS, number)
            h_BSD = module.final_norm(x_BSD)
            yield rows, h_BSD, stats

    def _modules(self) -> list[MultiTokenModule]:
        stacked, depth = self.blocks["0"], self.modules_spec.depth
        # Without a split, a single module can be read in the dtype to which it is cast.
        return [jax.tree.map(lambda x: x[0], stacked)] if depth == 1 else unstack(stacked, depth)

    def _run_layer(
        self,
        layer: Block,
        x_BSD: jax.Array,
        stats: RouterStats | None,
        segments_BS: jax.Array,
        positions_BS: jax.Array,
        number: jax.Array,
    ) -> tuple[jax.Array, RouterStats | None]:
        blocks = (self.modules_spec.block,)
        ring = uses_ring(blocks, x_BSD.dtype, x_BSD.shape[1])
        if ring:
            x_BSD, segments_BS, positions_BS = map(to_zigzag, (x_BSD, segments_BS, positions_BS))
        context: ForwardContext = make_context(blocks, positions_BS, segments_BS, ring=ring)
        remat = self.spec.remat
        x_BSD, _, stats = run_layer(layer, x_BSD, stats, context, number, key=None, remat=remat, in_loop=False)
        return from_zigzag(x_BSD) if ring else x_BSD, stats
