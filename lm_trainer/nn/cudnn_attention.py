"""Attention with cuDNN's fused kernels, on NVIDIA GPUs.

The kernels take the mask as a bias or, if the number of documents in a row is bounded, as lengths of documents.

Shape letters: B rows, S queries, T keys, N heads, H head size, M runs of positions of one document.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from lm_trainer.core.jax_internals import attend_to_documents, cudnn_version
from lm_trainer.nn.attention_kernel import (
    NO_SECOND_DERIVATIVE,
    AttentionInputs,
    AttentionKernel,
    AttentionMetadata,
    first_reason,
)
from lm_trainer.nn.gpu_generation import gpu_capability, local_gpu, local_gpu_obstacle
from lm_trainer.nn.spec import AlibiSpec, AttentionSpec

_PLATFORMS = ("gpu", "cuda")
_HOPPER, _BLACKWELL = 9, 10
"""Major versions of the compute capability."""
_REPEATS_ON_BLACKWELL = 91801
"""First version of cuDNN, 9.18.1, whose backward pass can sum in a fixed order on Blackwell GPUs
(https://github.com/NVIDIA/TransformerEngine/pull/2584)."""
_HEAD_DIM = 128
_MAX_WORKSPACE = 8 * 2**30
"""Maximum size, in bytes, of the workspace of the backward pass for one row."""
_MASKED = {"bfloat16": -(2.0**41), "float16": -(2.0**15)}
"""Lowest bias in each compute dtype. The kernels scale scores by log2(e) and subtract masked scores from each other:
near the largest representable number, both would be infinite and their difference NaN."""


def unsupported_reason(spec: AttentionSpec, metadata: AttentionMetadata) -> str | None:
    """Returns the reason why cuDNN cannot compute attention of `spec`; None if it can."""
    name, scores = jnp.dtype(metadata.dtype).name, spec.scores
    odd = metadata.queries > 1 and (metadata.queries % 2 or metadata.keys % 2)
    runs, generation = _max_runs(spec, metadata), metadata.gpu_generation
    blackwell = generation is not None and generation >= _BLACKWELL
    before_hopper = generation is not None and generation < _HOPPER
    workspace = workspace_bytes(spec, metadata)
    return first_reason((
        (metadata.platform not in _PLATFORMS, f"the platform is {metadata.platform}, not an NVIDIA GPU"),
        (metadata.device_lacks is not None, str(metadata.device_lacks)),
        (name not in _MASKED, f"it computes in bfloat16 or float16, not {name}"),
        (spec.head_dim % 8 != 0 or spec.head_dim > _HEAD_DIM,
         f"head_dim={spec.head_dim} is not a multiple of 8 up to {_HEAD_DIM}"),
        (spec.value_size != spec.head_dim, f"value vectors have {spec.value_size} dimensions, not head_dim"),
        (bool(odd), f"rows of {metadata.keys} positions: it trains on even numbers of them only"),
        (scores.softcap is not None, "it cannot bound scores (softcap)"),
        (scores.dropout > 0, "its dropout is another one"),
        (metadata.second_derivative, NO_SECOND_DERIVATIVE),
        (scores.upcast, "it cannot compute scores in float32 (upcast_attn)"),
        (spec.sinks, "it has no attention sinks"),
        (scores.block_size is not None, "it has no use for flash_attention_block_size"),
        (before_hopper and runs is not None and runs > 1,
         "it takes the lengths of documents (attn_max_documents) only since Hopper"),
        (blackwell and runs is None and metadata.fixed_order and not metadata.cached,
         "its backward pass that repeats its bits takes no mask as an array on Blackwell; with "
         "model.attn_max_documents it takes lengths of documents"),
        (workspace > _MAX_WORKSPACE,
         f"its backward pass that repeats its bits takes {workspace / 2**30:.3g} GiB for a row of {metadata.keys} "
         "positions"),
    ))  # fmt: skip


def workspace_bytes(spec: AttentionSpec, metadata: AttentionMetadata) -> int:
    """Returns the size, in bytes, of the workspace of the backward pass for one row.

    On Hopper GPUs, the deterministic backward pass stores 2 bytes for each query-key pair of each head, which lets it
    sum in a fixed order (NVIDIA/cudnn-frontend, pull request 398). With lengths of documents, every run of positions
    counts as a row, because the kernel is given their maximum length.
    """
    if metadata.gpu_generation != _HOPPER or not metadata.fixed_order or metadata.cached:
        return 0
    return 2 * spec.num_heads * metadata.queries * metadata.keys * (_max_runs(spec, metadata) or 1)


def is_workspace_too_large(spec: AttentionSpec, metadata: AttentionMetadata) -> bool:
    """Returns true if the workspace of the backward pass for one row exceeds 8 GiB."""
    return workspace_bytes(spec, metadata) > _MAX_WORKSPACE


def _max_runs(spec: AttentionSpec, metadata: AttentionMetadata) -> int | None:
    """Returns the maximum number of runs of positions whose lengths the kernel is given; None if it takes a bias.

    If each row is a single document, padding at its end is no run of its own, because the causal mask hides it.
    """
    documents = spec.scores.max_documents
    attends_to_itself = not metadata.cached and metadata.queries == metadata.keys
    if documents is None or not attends_to_itself or isinstance(spec.positions, AlibiSpec):
        return None
    if spec.chunk is None:
        return documents if documents == 1 else documents + 1
    return documents + 1 + metadata.keys // spec.chunk


def device_unsupported_reason() -> str | None:
    """Returns the reason why this process's GPU has no cuDNN kernel; None if it may have one or there is no GPU."""
    gpu, obstacle = local_gpu(), local_gpu_obstacle()
    if gpu is None or obstacle is not None:
        return obstacle
    capability, version = gpu_capability(gpu), cudnn_version()
    if capability[0] >= _BLACKWELL and version is not None and version < _REPEATS_ON_BLACKWELL:
        text = f"{version // 10000}.{version // 100 % 100}.{version % 100}"
        return f"cuDNN {text} has no backward pass for {gpu.device_kind} that repeats its bits, as 9.18.1 has"
    return None


def compute(spec: AttentionSpec, inputs: AttentionInputs) -> jax.Array:
    """Same as `AttentionKernel.compute`; the bias contains the full mask."""
    q_BSNH, k_BTKH, v_BTKH, bias_BNST, segments_BS, _ = inputs
    cached, length = segments_BS is None, k_BTKH.shape[1]
    runs = _max_runs(spec, AttentionMetadata("gpu", v_BTKH.dtype, q_BSNH.shape[1], length, cached))
    if segments_BS is not None and runs is not None:
        return _compute_by_lengths(spec, q_BSNH, k_BTKH, v_BTKH, segments_BS, runs)
    bias_BNST = jnp.maximum(bias_BNST, _MASKED[v_BTKH.dtype.name]).astype(v_BTKH.dtype)
    # The bias contains the causal mask as well, but only the flag makes the kernel skip hidden blocks, which are half
    # of all blocks. A window remains in the bias, because before cuDNN 9.10 a window and a bias cannot be combined.
    self_attention = not cached and q_BSNH.shape[1] == length
    # A scale of 1, because the queries are already scaled.
    return jax.nn.dot_product_attention(
        q_BSNH, k_BTKH, v_BTKH, bias_BNST, scale=1.0, is_causal=self_attention, implementation="cudnn"
    )


def _compute_by_lengths(
    spec: AttentionSpec, q_BSNH: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array, segments_BS: jax.Array, runs: int
) -> jax.Array:
    """Computes attention with the mask as lengths of at most `runs` runs of positions in a row."""
    if runs == 1:
        window = None if spec.window is None else (spec.window - 1, 0)
        o_BSNH = jax.nn.dot_product_attention(
            q_BSNH, k_BSKH, v_BSKH, scale=1.0, is_causal=True, local_window_size=window, implementation="cudnn"
        )
    else:
        offsets_BM, lengths_BM = run_lengths(segments_BS, runs)
        o_BSNH = attend_to_documents(q_BSNH, k_BSKH, v_BSKH, offsets_BM, lengths_BM, window=spec.window)
    fits_B111 = fits_in_runs(segments_BS, runs)[:, None, None, None]
    # Attention across documents must not go unnoticed: the loss becomes NaN, which stops the run.
    return jnp.where(fits_B111, o_BSNH, jnp.asarray(jnp.nan, o_BSNH.dtype))


def run_lengths(segments_BS: jax.Array, runs: int) -> tuple[jax.Array, jax.Array]:
    """Returns int32 [B, M + 1], the first positions of the runs of equal segments in each row, and [B, M], the lengths
    of the runs; -1 where a row has fewer than M = `runs`.
    """
    length = segments_BS.shape[1]

    def of_row(starts_S: jax.Array) -> tuple[jax.Array, jax.Array]:
        (offsets_M,) = jnp.nonzero(starts_S, size=runs, fill_value=length)
        offsets_M = jnp.append(offsets_M, length).astype(jnp.int32)
        lengths_M = jnp.diff(offsets_M)
        return jnp.where(offsets_M < length, offsets_M, -1), jnp.where(lengths_M > 0, lengths_M, -1)

    return jax.vmap(of_row)(_run_starts(segments_BS))


def fits_in_runs(segments_BS: jax.Array, runs: int) -> jax.Array:
    """Returns bool [B], true for rows with at most `runs` runs of equal segments, in which the numbers of documents
    increase, so that no document has two runs. A single run may be followed by padding.
    """
    starts_BS = _run_starts(segments_BS)
    document_starts_BS = starts_BS[:, 1:] & (segments_BS[:, 1:] >= 0)
    if runs == 1:
        return ~jnp.any(document_starts_BS, axis=1)
    increases_BS = segments_BS[:, 1:] > jax.lax.cummax(segments_BS, axis=1)[:, :-1]
    return (jnp.sum(starts_BS, axis=1) <= runs) & jnp.all(increases_BS | ~document_starts_BS, axis=1)


def _run_starts(segments_BS: jax.Array) -> jax.Array:
    first_B1 = jnp.ones_like(segments_BS[:, :1], bool)
    return jnp.concatenate([first_B1, segments_BS[:, 1:] != segments_BS[:, :-1]], axis=1)


CUDNN = AttentionKernel(_PLATFORMS, unsupported_reason, compute)
