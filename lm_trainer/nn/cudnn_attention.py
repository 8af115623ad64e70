"""Attention with cuDNN's fused kernels, on NVIDIA GPUs.

Shape letters: B rows, S queries, T keys, N heads, H head size.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from lm_trainer.core.jax_internals import cudnn_version
from lm_trainer.nn.attention_kernel import (
    NO_SECOND_DERIVATIVE,
    AttentionInputs,
    AttentionKernel,
    AttentionMetadata,
    first_reason,
)
from lm_trainer.nn.gpu_generation import gpu_capability, local_gpu, local_gpu_obstacle
from lm_trainer.nn.spec import AttentionSpec

_PLATFORMS = ("gpu", "cuda")
_BLACKWELL = (10, 0)
_REPEATS_ON_BLACKWELL = 91801
"""First version of cuDNN, 9.18.1, whose backward pass can sum in a fixed order on Blackwell GPUs
(https://github.com/NVIDIA/TransformerEngine/pull/2584)."""
_HEAD_DIM = 128
_MASKED = {"bfloat16": -(2.0**41), "float16": -(2.0**15)}
"""Lowest bias in each compute dtype. The kernels scale scores by log2(e) and subtract masked scores from each other:
near the largest representable number, both would be infinite and their difference NaN."""


def unsupported_reason(spec: AttentionSpec, metadata: AttentionMetadata) -> str | None:
    """Returns the reason why cuDNN cannot compute attention of `spec`; None if it can."""
    name, scores = jnp.dtype(metadata.dtype).name, spec.scores
    odd = metadata.queries > 1 and (metadata.queries % 2 or metadata.keys % 2)
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
    ))  # fmt: skip


def device_unsupported_reason() -> str | None:
    """Returns the reason why this process's GPU has no cuDNN kernel; None if it may have one or there is no GPU."""
    gpu, obstacle = local_gpu(), local_gpu_obstacle()
    if gpu is None or obstacle is not None:
        return obstacle
    capability, version = gpu_capability(gpu), cudnn_version()
    if capability >= _BLACKWELL and version is not None and version < _REPEATS_ON_BLACKWELL:
        text = f"{version // 10000}.{version // 100 % 100}.{version % 100}"
        return f"cuDNN {text} has no backward pass for {gpu.device_kind} that repeats its bits, as 9.18.1 has"
    return None


def compute(spec: AttentionSpec, inputs: AttentionInputs) -> jax.Array:
    """Same as `AttentionKernel.compute`; the bias contains the full mask."""
    del spec
    q_BSNH, k_BTKH, v_BTKH, bias_BNST, segments_BS, _ = inputs
    bias_BNST = jnp.maximum(bias_BNST, _MASKED[v_BTKH.dtype.name]).astype(v_BTKH.dtype)
    # The bias contains the causal mask as well, but only the flag makes the kernel skip hidden blocks, which are half
    # of all blocks. A window remains in the bias, because before cuDNN 9.10 a window and a bias cannot be combined.
    self_attention = segments_BS is not None and q_BSNH.shape[1] == k_BTKH.shape[1]
    # A scale of 1, because the queries are already scaled.
    return jax.nn.dot_product_attention(
        q_BSNH, k_BTKH, v_BTKH, bias_BNST, scale=1.0, is_causal=self_attention, implementation="cudnn"
    )


CUDNN = AttentionKernel(_PLATFORMS, unsupported_reason, compute)
