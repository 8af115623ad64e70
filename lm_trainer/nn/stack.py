"""The layers of a decoder: parameters always stacked, execution as one loop or unrolled.

Shape letters: B rows, S positions, D hidden dimension.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from lm_trainer.nn.attention import Context
from lm_trainer.nn.block import Block
from lm_trainer.nn.cache import KvCache
from lm_trainer.nn.linear import LOGICAL_AXES
from lm_trainer.nn.spec import DecoderSpec, Remat

_POLICIES = {
    "full": None,
    "dots": jax.checkpoint_policies.dots_saveable,
    "dots_no_batch": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
}

_Carry = tuple[jax.Array, KvCache | None]


class Stack(nnx.Module):
    """All layers; `blocks["j"]` holds those at place j of the period, each parameter with a leading `layers` axis.

    Every layer is initialised from a key of its own, so the way of execution changes no parameter.
    """

    def __init__(self, spec: DecoderSpec, *, rngs: nnx.Rngs):
        self.scan, self.remat, self.num_layers = spec.scan, spec.remat, len(spec.blocks)
        keys = jax.random.split(rngs.params(), self.num_layers)
        out_std = spec.init_std / math.sqrt(2 * self.num_layers)
        self.blocks = nnx.Dict()
        for slot in range(spec.period):

            def build(key: jax.Array, slot: int = slot) -> Block:
                block = spec.blocks[slot]
                return Block(block, spec.hidden_dim, std=spec.init_std, out_std=out_std, rngs=nnx.Rngs(key))

            stacked = jax.vmap(build)(keys[slot :: spec.period])
            for _, variable in nnx.iter_graph(stacked):
                if isinstance(variable, nnx.Param):
                    axes = variable.get_metadata(LOGICAL_AXES)
                    variable.set_metadata(**{LOGICAL_AXES: ("layers", *axes)})
            self.blocks[str(slot)] = stacked

    def __call__(
        self, x_BSD: jax.Array, context: Context, *, key: jax.Array | None = None, cache: KvCache | None = None
    ) -> tuple[jax.Array, KvCache | None]:
        """Runs all layers; with a cache nothing is rematerialised, since no gradient is taken."""
        slots = [self.blocks[str(j)] for j in range(len(self.blocks))]
        remat: Remat = "none" if cache is not None else self.remat

        def run(carry: _Carry, block: Block, layer: jax.Array | int) -> _Carry:
            layer_key = None if key is None else jax.random.fold_in(key, layer)
            apply = _rematerialised(_apply, remat, in_loop=self.scan)
            return apply(block, carry, context, jnp.asarray(layer, jnp.int32), layer_key)

        whole, rest = divmod(self.num_layers, len(slots))
        carry: _Carry = (x_BSD, cache)
        if self.scan:

            def body(carry: _Carry, turn: tuple[list[Block], jax.Array]) -> tuple[_Carry, None]:
                blocks, index = turn
                for j, block in enumerate(blocks):
                    carry = run(carry, block, index * len(slots) + j)
                return carry, None

            carry, _ = jax.lax.scan(body, carry, ([_head(block, whole) for block in slots], jnp.arange(whole)))
            for j in range(rest):
                carry = run(carry, jax.tree.map(lambda a: a[whole], slots[j]), whole * len(slots) + j)
            return carry
        layers = [unstack(block, whole + (j < rest)) for j, block in enumerate(slots)]
        for i in range(self.num_layers):
            carry = run(carry, layers[i % len(slots)][i // len(slots)], i)
        return carry


def _apply(block: Block, carry: _Carry, context: Context, layer: jax.Array, key: jax.Array | None) -> _Carry:
    x_BSD, cache = carry
    return block(x_BSD, context, layer, key=key, cache=cache)


def _rematerialised(apply: Any, remat: Remat, *, in_loop: bool) -> Any:
    # Inside a loop the compiler cannot merge the recomputation with the original, so it needs no barrier.
    return apply if remat == "none" else jax.checkpoint(apply, policy=_POLICIES[remat], prevent_cse=not in_loop)


def _head(tree: Any, count: int) -> Any:
    return jax.tree.map(lambda a: a if a.shape[0] == count else a[:count], tree)


def unstack(tree: Any, count: int) -> list[Any]:
    """The `count` slices along the first axis of every leaf.

    Split, not indexed: its gradient is one concatenation instead of a sum of `count` padded arrays.
    """
    leaves, structure = jax.tree.flatten(tree)
    rows = [[part.reshape(part.shape[1:]) for part in jax.lax.split(a, (1,) * count)] for a in leaves]
    return [jax.tree.unflatten(structure, list(parts)) for parts in zip(*rows, strict=True)]
