"""Attention with the splash kernel of JAX's Pallas library, on TPUs.

The kernel saves no scores, and skips blocks of keys that the causal mask or the window hides.

Shape letters: B rows, S queries and keys, N heads, K key and value heads, H head size.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from lm_trainer.nn.attention_kernel import (
    NO_SECOND_DERIVATIVE,
    RESIDUAL,
    AttentionInputs,
    AttentionKernel,
    AttentionMetadata,
    first_reason,
)
from lm_trainer.nn.spec import AlibiSpec, AttentionSpec
from lm_trainer.parallel.mesh import BATCH_AXES
from lm_trainer.parallel.target_platform import compilation_target

_PLATFORMS = ("tpu",)
LANES = 128
"""Number of lanes of a TPU's vector registers; block sizes are multiples of it."""
_LARGEST_BLOCK = 1024
"""Maximum default number of positions of a block. On a TPU v6e, AXLearn measured a kernel a third faster with blocks of
1024 than with its former default (https://github.com/apple/axlearn/pull/958)."""
_LARGEST_BLOCKS = {"TPU v5 lite": 2048, "TPU v6 lite": 2048}
"""The same for kinds of TPUs for which MaxText publishes larger blocks, and whose compiler gives a kernel enough vector
memory for them without further flags, which excludes v4 and v5p."""
_BLOCKS_OF_ROW = 4
"""Minimum default number of blocks of a row of at least 2048 positions. With fewer, the kernel skips fewer of the
scores that the causal mask hides."""
_COMPUTED_AT_ONCE = 512
"""Maximum number of keys whose scores are computed at once, and also the default size of blocks of shorter rows. The
vector memory must hold float32 scores of a block of queries and this number of keys, several times."""
_MAX_PARTS = 4
"""Maximum number of partial gradients of the queries that the backward pass writes, each as large as the gradient."""
_MAX_KEY_BYTES = 512 * 1024
"""Maximum size in bytes of a block of keys; the vector memory of a chip holds several blocks."""


def unsupported_reason(spec: AttentionSpec, metadata: AttentionMetadata) -> str | None:
    """Returns the reason why splash cannot compute attention of `spec`; None if it can."""
    name, scores, size = jnp.dtype(metadata.dtype).name, spec.scores, spec.scores.block_size
    length = metadata.keys
    block = 0 if size is None else min(size, length)
    return first_reason((
        (metadata.platform != "tpu", f"the platform is {metadata.platform}, not a TPU"),
        (name not in ("bfloat16", "float32"), f"it computes in bfloat16 or float32, not {name}"),
        (isinstance(spec.positions, AlibiSpec), "it adds no bias to scores (ALiBi)"),
        (metadata.second_derivative, NO_SECOND_DERIVATIVE),
        (scores.dropout > 0, "it has no dropout of probabilities"),
        (metadata.cached, "it does not decode with a cache"),
        (metadata.queries != metadata.keys, "devices share the positions of a row (context_axis_size)"),
        (length % LANES != 0, f"rows of {length} positions are not a multiple of {LANES}"),
        (block > 0 and (block % LANES != 0 or length % block != 0),
         f"flash_attention_block_size={size} is not a multiple of {LANES} that divides rows of {length} positions"),
    ))  # fmt: skip


def compute(spec: AttentionSpec, inputs: AttentionInputs, *, interpret: bool = False) -> jax.Array:
    """Computes attention. The mask is built from the segments and the window; the bias is ignored.

    Args:
        spec: the attention spec.
        inputs: inputs of the kernel.
        interpret: run the kernel with the interpreter of Pallas, on any platform.
    """
    q_BSNH, k_BSKH, v_BSKH, _, segments_BS, sinks_N = inputs
    assert segments_BS is not None
    run = functools.partial(_run, spec, interpret=interpret)
    mesh = jax.typeof(q_BSNH).sharding.mesh
    free = {axis for axis in mesh.axis_names if axis not in mesh.manual_axes}
    if all(mesh.shape[axis] == 1 for axis in free):
        return run(q_BSNH, k_BSKH, v_BSKH, segments_BS, sinks_N)

    def divisible_axes(axes: tuple[str, ...], count: int) -> tuple[str, ...]:
        axes = tuple(axis for axis in axes if axis in free)
        return axes if count % math.prod(mesh.shape[axis] for axis in axes) == 0 else ()

    # XLA cannot partition a kernel. If a mesh axis does not divide a dimension, each device on the axis computes all of
    # it.
    rows, heads = divisible_axes(BATCH_AXES, q_BSNH.shape[0]), divisible_axes(("model",), k_BSKH.shape[2])
    partition = PartitionSpec(rows, None, heads)
    divided = jax.shard_map(
        run,
        mesh=mesh,
        in_specs=(partition, partition, partition, PartitionSpec(rows), PartitionSpec(heads)),
        out_specs=partition,
        axis_names=free,
        check_vma=False,
    )
    return divided(q_BSNH, k_BSKH, v_BSKH, segments_BS, sinks_N)


def _run(  # noqa: PLR0913 - the arguments of attention
    spec: AttentionSpec,
    q_BSNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    segments_BS: jax.Array,
    sinks_N: jax.Array | None,
    *,
    interpret: bool,
) -> jax.Array:
    # With `upcast`, queries and keys are float32 and values are not, but the kernel supports only one dtype.
    q_BNSH, k_BKSH, v_BKSH = (x.swapaxes(1, 2).astype(q_BSNH.dtype) for x in (q_BSNH, k_BSKH, v_BSKH))
    kernel = _make_kernel(spec, q_BNSH, interpret=interpret)
    o_BNSH = jax.vmap(functools.partial(kernel, sinks=sinks_N))(q_BNSH, k_BKSH, v_BKSH, segments_BS)
    return o_BNSH.swapaxes(1, 2).astype(v_BSKH.dtype)


def _make_kernel(spec: AttentionSpec, q_BNSH: jax.Array, *, interpret: bool) -> Callable[..., jax.Array]:
    """Makes a function that computes attention for the inputs of one row."""
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    # The window includes the query itself; the mask of the kernel counts only the keys to its left.
    heads, length = q_BNSH.shape[1:3]
    shape, window = (length, length), spec.window
    mask = splash.CausalMask(shape) if window is None else splash.LocalMask(shape, (window - 1, 0), 0)
    size = choose_block_size(spec, length, compilation_target().kind, q_BNSH.dtype.itemsize)
    computed = _largest_divisor(size, _COMPUTED_AT_ONCE)
    fused_block = _choose_fused_block(length, size, window, spec.head_dim * q_BNSH.dtype.itemsize)
    # A single kernel for all gradients computes five products per block; two separate kernels compute seven.
    separate: dict[str, Any] = {} if fused_block else {"block_q_dq": size, "block_kv_dq": size}
    sizes = splash.BlockSizes(
        block_q=size,
        block_kv=size,
        block_kv_compute=computed,
        block_q_dkv=size,
        block_kv_dkv=fused_block or size,
        block_kv_dkv_compute=computed,
        use_fused_bwd_kernel=fused_block is not None,
        **separate,
    )
    kernel: Any = splash.make_splash_mha_single_device(
        splash.MultiHeadMask([mask] * heads),
        block_sizes=sizes,
        attn_logits_soft_cap=spec.scores.softcap,
        residual_checkpoint_name=RESIDUAL,
        interpret=interpret,
    )
    return lambda q, k, v, segments, sinks: kernel(q, k, v, splash.SegmentIds(segments, segments), sinks)


def choose_block_size(spec: AttentionSpec, length: int, kind: str | None = None, itemsize: int = 2) -> int:
    """Returns the number of positions of a block of queries or keys.

    Args:
        spec: the attention spec. If it sets no block size, a divisor of `length` is chosen: up to 1024 or 2048 for long
            rows, but up to 512 with a window, which smaller blocks follow more closely.
        length: number of positions of a row, a multiple of the lanes.
        kind: kind of TPU, as `jax.Device.device_kind`; None if it is unknown.
        itemsize: size in bytes of a number in queries and keys.
    """
    if spec.scores.block_size is not None:
        return min(spec.scores.block_size, length)
    if spec.window is not None:
        return _largest_divisor(length, _COMPUTED_AT_ONCE)
    limit = max(_COMPUTED_AT_ONCE, length // _BLOCKS_OF_ROW)
    large = _largest_divisor(length, min(_LARGEST_BLOCKS.get(kind or "", _LARGEST_BLOCK), limit))
    # The separate kernels for gradients need more vector memory.
    if large > _LARGEST_BLOCK and _choose_fused_block(length, large, None, spec.head_dim * itemsize) is None:
        return _largest_divisor(length, _LARGEST_BLOCK)
    return large


def _largest_divisor(length: int, limit: int) -> int:
    """Returns the largest multiple of the lanes up to `limit` that divides `length`."""
    return next(size for size in range(limit // LANES * LANES, 0, -LANES) if length % size == 0)


def _choose_fused_block(length: int, size: int, window: int | None, bytes_of_key: int) -> int | None:
    """Returns the number of positions of a key block if one kernel computes all gradients; None if two kernels do.

    For each key block, the single kernel writes a partial gradient of all queries, so the number of key blocks is
    limited. A key block must also fit into the vector memory.

    Args:
        length: number of positions of a row.
        size: number of positions of a query block, a divisor of `length`.
        window: window of the attention; with a window, fewer key blocks could be skipped if they were large.
        bytes_of_key: size in bytes of a key of one head.
    """
    blocks = length // size
    max_blocks = blocks if window is None else 1
    fitting = (size * n for n in range(1, max_blocks + 1) if blocks % n == 0 and blocks // n <= _MAX_PARTS)
    return next((keys for keys in fitting if keys * bytes_of_key <= _MAX_KEY_BYTES), None)


SPLASH = AttentionKernel(_PLATFORMS, unsupported_reason, compute)
