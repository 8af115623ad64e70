"""The layers of a decoder: parameters always stacked, execution as one loop or unrolled.

Shape letters: B rows, S positions, D hidden dimension.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from lm_trainer.nn import mxfp8
from lm_trainer.nn.attention import ForwardContext
from lm_trainer.nn.attention_kernel import RESIDUAL
from lm_trainer.nn.block import Block
from lm_trainer.nn.cache import KvCache
from lm_trainer.nn.init import Initializer, build_stacked
from lm_trainer.nn.moe import RouterStats, zero_router_stats
from lm_trainer.nn.read import gathers, saves_all_but_gathered
from lm_trainer.nn.spec import DecoderSpec, OffloadPolicy, Remat

# Their kernels are products as well, which would otherwise all run twice.
_KERNELS = jax.checkpoint_policies.save_only_these_names(RESIDUAL, mxfp8.RESIDUAL)
_POLICIES = {
    "full": None,
    "dots": jax.checkpoint_policies.save_from_both_policies(jax.checkpoint_policies.dots_saveable, _KERNELS),
    "dots_no_batch": jax.checkpoint_policies.save_from_both_policies(
        jax.checkpoint_policies.dots_with_no_batch_dims_saveable, _KERNELS
    ),
}

_Carry = tuple[jax.Array, KvCache | None, RouterStats | None]
_Run = Callable[[_Carry, Block, jax.Array | int], _Carry]


def build_blocks(spec: DecoderSpec, *, init: Initializer) -> nnx.Dict:
    """Builds all layers: entry "j" holds those at place j of the period, each parameter with a leading `layers` axis.

    Every layer has a key of its own, so the way of execution changes no parameter.
    """
    keys = jax.random.split(init.rngs.params(), len(spec.blocks))

    def build(slot: int, rngs: nnx.Rngs) -> Block:
        return Block(spec.blocks[slot], spec.hidden_dim, init=dataclasses.replace(init, rngs=rngs, flat=True))

    slots = range(spec.period)
    return nnx.Dict({str(j): build_stacked(functools.partial(build, j), keys[j :: spec.period]) for j in slots})


def run_blocks(  # noqa: PLR0913 - what a pass through the layers shares
    spec: DecoderSpec,
    blocks: nnx.Dict,
    x_BSD: jax.Array,
    context: ForwardContext,
    *,
    key: jax.Array | None = None,
    cache: KvCache | None = None,
    first: jax.Array | None = None,
) -> _Carry:
    """Runs all layers in order; with a cache nothing is rematerialised, since no gradient is taken.

    `first` is the number of the first layer, where the spec is that of a part of a model.

    Returns the stream, the cache, and the sums of router statistics over layers, None without routers.
    """
    slots = [blocks[str(j)] for j in range(len(blocks))]
    apply = _apply if cache is not None else _rematerialised(spec.remat, in_loop=spec.scan)

    def run(carry: _Carry, block: Block, layer: jax.Array | int) -> _Carry:
        layer = layer if first is None else first + layer
        layer_key = None if key is None else jax.random.fold_in(key, layer)
        return apply(block, carry, context, jnp.asarray(layer, jnp.int32), layer_key)

    stats = zero_router_stats() if spec.num_routers else None
    if not spec.scan:
        return _run_unrolled(run, (x_BSD, cache, stats), slots, len(spec.blocks))
    return _run_as_loop(
        run, (x_BSD, cache, stats), slots, len(spec.blocks), 0 if cache is not None else spec.remat_groups
    )


def run_layer(  # noqa: PLR0913 - as for `run_blocks`
    block: Block,
    x_BSD: jax.Array,
    stats: RouterStats | None,
    context: ForwardContext,
    layer: jax.Array,
    *,
    key: jax.Array | None,
    remat: Remat = "none",
) -> tuple[jax.Array, RouterStats | None]:
    """One layer as `run_blocks` computes it: the stream after it, and the sums of router statistics up to it.

    Args:
        block: the layer.
        x_BSD: the stream before it.
        stats: the sums before it, None without routers.
        context: of all layers.
        layer: its number, an int32 scalar.
        key: that of all layers; None switches dropout off.
        remat: what a derivative of this call computes again. There is no barrier between it and this call.
    """
    apply = _rematerialised(remat, in_loop=True)
    layer_key = None if key is None else jax.random.fold_in(key, layer)
    x_BSD, _, stats = apply(block, (x_BSD, None, stats), context, layer, layer_key)
    return x_BSD, stats


def _run_unrolled(run: _Run, carry: _Carry, slots: Sequence[Block], num_layers: int) -> _Carry:
    period = len(slots)
    rows = [unstack(block, -(-(num_layers - j) // period)) for j, block in enumerate(slots)]
    for layer in range(num_layers):
        carry = run(carry, rows[layer % period][layer // period], layer)
    return carry


def _run_as_loop(run: _Run, carry: _Carry, slots: Sequence[Block], num_layers: int, groups: int) -> _Carry:
    """One turn of the loop is one period; a period that is cut short at the end runs after it, as turns do that are
    left over by groups of equal size.
    """
    period = len(slots)
    turns, rest = divmod(num_layers, period)

    def body(carry: _Carry, turn: tuple[Sequence[Block], jax.Array]) -> tuple[_Carry, None]:
        blocks, index = turn
        for j, block in enumerate(blocks):
            carry = run(carry, block, index * period + j)
        return carry, None

    # The first `rest` places of the period have one layer more than there are turns.
    whole = [jax.tree.map(lambda a: a[:turns], block) if j < rest else block for j, block in enumerate(slots)]
    every, grouped = (whole, jnp.arange(turns)), 0
    if groups and (size := turns // groups):
        # Only the input of each group is kept; the group is run again, and then keeps the inputs of its layers (Chen et
        # al. 2016, arXiv 1604.06174). A loop needs no barrier against common subexpressions.
        grouped = groups * size
        parts = jax.tree.map(lambda a: a[:grouped].reshape(groups, size, *a.shape[1:]), every)
        carry, _ = jax.lax.scan(jax.checkpoint(lambda c, x: jax.lax.scan(body, c, x), prevent_cse=False), carry, parts)
    if grouped < turns:
        carry, _ = jax.lax.scan(body, carry, jax.tree.map(lambda a: a[grouped:], every))
    for j in range(rest):
        carry = run(carry, jax.tree.map(lambda a: a[turns], slots[j]), turns * period + j)
    return carry


def _apply(block: Block, carry: _Carry, context: ForwardContext, layer: jax.Array, key: jax.Array | None) -> _Carry:
    x_BSD, cache, total = carry
    # The name by which an `OffloadPolicy` moves it to the host.
    x_BSD = checkpoint_name(x_BSD, "input")
    x_BSD, cache, stats = block(x_BSD, context, layer, key=key, cache=cache)
    return x_BSD, cache, total if stats is None else jax.tree.map(jnp.add, total, stats)


def _rematerialised(remat: Remat, *, in_loop: bool) -> Callable[..., _Carry]:
    if remat == "none" and not gathers():
        return _apply
    # A function of its own where parameters are gathered: JAX would take a trace of `_apply` that gathers none.
    apply = functools.partial(_apply) if gathers() else _apply
    match remat:
        case "none":
            policy = saves_all_but_gathered
        case OffloadPolicy():
            policy = jax.checkpoint_policies.save_and_offload_only_these_names(
                names_which_can_be_saved=list(remat.device),
                names_which_can_be_offloaded=list(remat.host),
                offload_src="device",
                offload_dst="pinned_host",
            )
        case tuple():
            policy = jax.checkpoint_policies.save_only_these_names(*remat)
        case _:
            policy = _POLICIES[remat]
    # Inside a loop the compiler cannot merge the recomputation with the original, so it needs no barrier.
    return jax.checkpoint(apply, policy=policy, prevent_cse=not in_loop)


def unstack(tree: Any, count: int) -> list[Any]:
    """The `count` slices along the first axis of every leaf.

    Split, not indexed: its gradient is one concatenation instead of a sum of `count` padded arrays.
    """
    leaves, structure = jax.tree.flatten(tree)
    rows = [[part.reshape(part.shape[1:]) for part in jax.lax.split(leaf, (1,) * count)] for leaf in leaves]
    return [jax.tree.unflatten(structure, list(parts)) for parts in zip(*rows, strict=True)]
