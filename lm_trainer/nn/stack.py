"""The layers of a decoder. Parameters are always stacked; the layers run as a loop or unrolled.

Shape letters: B rows, S positions, D hidden dimension.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from lm_trainer.nn import mxfp8
from lm_trainer.nn.attention import ForwardContext
from lm_trainer.nn.attention_kernel import RESIDUAL
from lm_trainer.nn.block import Block
from lm_trainer.nn.cache import LayerCache
from lm_trainer.nn.costly_values import saves_costly_values
from lm_trainer.nn.init import Initializer, build_stacked
from lm_trainer.nn.layer_sections import LayerSection
from lm_trainer.nn.layer_values import SharedKeys
from lm_trainer.nn.read import is_gathering, saves_all_but_gathered
from lm_trainer.nn.router import RouterStats, zero_router_stats
from lm_trainer.nn.spec import DecoderSpec, OffloadPolicy, Remat

# Results of kernels that contain matrix products; without these names, a policy would run the kernels twice.
_KERNELS = jax.checkpoint_policies.save_only_these_names(RESIDUAL, mxfp8.RESIDUAL)
_POLICIES = {
    "full": None,
    "dots": jax.checkpoint_policies.save_from_both_policies(jax.checkpoint_policies.dots_saveable, _KERNELS),
    "dots_no_batch": jax.checkpoint_policies.save_from_both_policies(
        jax.checkpoint_policies.dots_with_no_batch_dims_saveable, _KERNELS
    ),
    "elementwise": saves_costly_values,
}

LayerRemat = Remat | Literal["elementwise"]
"""`Remat` for one layer; `elementwise`: its backward pass recomputes elementwise values."""
Carry = tuple[jax.Array, LayerCache | SharedKeys | None, RouterStats | None]
"""The stream, the cache or the keys that layers share, and the sums of router statistics."""
_Run = Callable[[Carry, Block, jax.Array | int], Carry]


def build_blocks(spec: DecoderSpec, *, init: Initializer) -> nnx.Dict:
    """Builds all layers. Entry "j" holds the layers at slot j; each parameter has a leading `layers` axis.

    Every layer has its own key, so parameters do not depend on how the layers are run.
    """
    keys = jax.random.split(init.rngs.params(), len(spec.blocks))

    def build(layer: int, rngs: nnx.Rngs) -> Block:
        return Block(spec.blocks[layer], spec.hidden_dim, init=dataclasses.replace(init, rngs=rngs, flat=True))

    def build_slot(layers: range) -> Block:
        slot_keys = keys[layers.start : layers.stop : layers.step]
        return build_stacked(functools.partial(build, layers.start), slot_keys)

    return nnx.Dict({str(slot): build_slot(layers) for slot, layers in enumerate(spec.layers_by_slot)})


def run_blocks(  # noqa: PLR0913 - what a pass through the layers shares
    spec: DecoderSpec,
    blocks: nnx.Dict,
    x_BSD: jax.Array,
    context: ForwardContext,
    *,
    key: jax.Array | None = None,
    cache: LayerCache | SharedKeys | None = None,
    first: jax.Array | None = None,
) -> Carry:
    """Runs all layers in order. With a cache there is no rematerialization, because no gradient is computed.
    `SharedKeys` in its place are no cache.

    `first` is the index of the first layer if `spec` describes a part of a model.

    Returns the stream, the cache, and the sums of the router statistics over the layers (None without routers).
    """
    decoding = cache is not None and not isinstance(cache, SharedKeys)
    apply = _apply if decoding else _apply_with_remat(spec.remat, in_loop=spec.scan)

    def run(carry: Carry, block: Block, layer: jax.Array | int) -> Carry:
        layer = layer if first is None else first + layer
        layer_key = None if key is None else jax.random.fold_in(key, layer)
        return apply(block, carry, context, jnp.asarray(layer, jnp.int32), layer_key)

    carry: Carry = (x_BSD, cache, zero_router_stats() if spec.num_routers else None)
    groups = 0 if decoding else spec.remat_groups
    for section in _sections(spec, blocks):
        slots = [blocks[str(slot)] for slot in section.slots]
        from_first = _count_from(section.layers.start, run)
        if spec.scan:
            carry = _run_as_loop(from_first, carry, slots, len(section.layers), groups)
        else:
            carry = _run_unrolled(from_first, carry, slots, len(section.layers))
    return carry


def _sections(spec: DecoderSpec, blocks: nnx.Dict) -> Sequence[LayerSection]:
    """Returns the sections of the layers of `blocks`, which may be a part of a model, or have a slot for each layer."""
    return spec.sections if spec.prefix else (LayerSection(range(len(spec.blocks)), len(blocks)),)


def _count_from(start: int, run: _Run) -> _Run:
    """Returns `run` for layers that are counted from layer `start`."""
    return (lambda carry, block, layer: run(carry, block, start + layer)) if start else run


def run_layer(  # noqa: PLR0913 - as for `run_blocks`
    block: Block,
    x_BSD: jax.Array,
    stats: RouterStats | None,
    context: ForwardContext,
    layer: jax.Array,
    *,
    key: jax.Array | None,
    keys: SharedKeys | None = None,
    remat: LayerRemat = "none",
    in_loop: bool = True,
) -> tuple[jax.Array, SharedKeys | None, RouterStats | None]:
    """Runs one layer as `run_blocks` does. Returns the stream after it, the keys that layers share, and the sums of
    router statistics including it.

    Args:
        block: the layer.
        x_BSD: the stream before the layer.
        stats: the sums of router statistics before the layer; None without routers.
        context: the context that all layers share.
        layer: index of the layer, an int32 scalar.
        key: key from which the keys of all layers are derived; None disables dropout.
        keys: keys and values that layers share; None if they share none.
        remat: values that a derivative of this call recomputes.
        in_loop: leaves out the optimization barrier, which only a derivative in the same program as this call needs.
    """
    apply = _apply_with_remat(remat, in_loop=in_loop)
    layer_key = None if key is None else jax.random.fold_in(key, layer)
    x_BSD, shared, stats = apply(block, (x_BSD, keys, stats), context, layer, layer_key)
    assert shared is None or isinstance(shared, SharedKeys)
    return x_BSD, shared, stats


def _run_unrolled(run: _Run, carry: Carry, slots: Sequence[Block], num_layers: int) -> Carry:
    period = len(slots)
    rows = [unstack(block, -(-(num_layers - j) // period)) for j, block in enumerate(slots)]
    for layer in range(num_layers):
        carry = run(carry, rows[layer % period][layer // period], layer)
    return carry


def _run_as_loop(run: _Run, carry: Carry, slots: Sequence[Block], num_layers: int, groups: int) -> Carry:
    """Runs one period per iteration. After the loop it runs the iterations left over by groups of equal size, and the
    layers of an incomplete last period.
    """
    period = len(slots)
    iterations, remainder = divmod(num_layers, period)

    def body(carry: Carry, iteration: tuple[Sequence[Block], jax.Array]) -> tuple[Carry, None]:
        blocks, index = iteration
        for j, block in enumerate(blocks):
            carry = run(carry, block, index * period + j)
        return carry, None

    # The first `remainder` slots of the period have one more layer than there are iterations.
    full_slots = [
        jax.tree.map(lambda a: a[:iterations], block) if j < remainder else block for j, block in enumerate(slots)
    ]
    scanned, grouped_iterations = (full_slots, jnp.arange(iterations)), 0
    if groups and (size := iterations // groups):
        # Only the input of each group is saved. The backward pass runs the group a second time, saving the inputs of
        # its layers (Chen et al. 2016, arXiv 1604.06174). A loop needs no barrier against common subexpression
        # elimination.
        grouped_iterations = groups * size
        parts = jax.tree.map(lambda a: a[:grouped_iterations].reshape(groups, size, *a.shape[1:]), scanned)
        carry, _ = jax.lax.scan(jax.checkpoint(lambda c, x: jax.lax.scan(body, c, x), prevent_cse=False), carry, parts)
    if grouped_iterations < iterations:
        carry, _ = jax.lax.scan(body, carry, jax.tree.map(lambda a: a[grouped_iterations:], scanned))
    for j in range(remainder):
        carry = run(carry, jax.tree.map(lambda a: a[iterations], slots[j]), iterations * period + j)
    return carry


def _apply(block: Block, carry: Carry, context: ForwardContext, layer: jax.Array, key: jax.Array | None) -> Carry:
    x_BSD, cache, total = carry
    # An `OffloadPolicy` moves the value with this name to the host.
    x_BSD = checkpoint_name(x_BSD, "input")
    x_BSD, cache, stats = block(x_BSD, context, layer, key=key, cache=cache)
    return x_BSD, cache, total if stats is None else jax.tree.map(jnp.add, total, stats)


def _apply_with_remat(remat: LayerRemat, *, in_loop: bool) -> Callable[..., Carry]:
    if remat == "none" and not is_gathering():
        return _apply
    # A new function if parameters are gathered; otherwise JAX would reuse a trace of `_apply` without gathering.
    apply = functools.partial(_apply) if is_gathering() else _apply
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
    """Splits every leaf into its `count` slices along the first axis.

    Split, not indexed: the gradient of a split is one concatenation instead of a sum of `count` padded arrays.
    """
    leaves, structure = jax.tree.flatten(tree)
    rows = [[part.reshape(part.shape[1:]) for part in jax.lax.split(leaf, (1,) * count)] for leaf in leaves]
    return [jax.tree.unflatten(structure, list(parts)) for parts in zip(*rows, strict=True)]
