"""Attention by cuDNN's fused kernels, on NVIDIA GPUs.

Shape letters: B rows, S queries, T keys, N heads, H head size.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from lm_trainer.nn.attention_kernel import (
    NO_SECOND_DERIVATIVE,
    AttentionInputs,
    AttentionKernel,
    AttentionMetadata,
    first_reason,
)
from lm_trainer.nn.spec import AttentionSpec

_PLATFORMS = ("gpu", "cuda")
_LEAST_CAPABILITY = (8, 0)
"""Compute capability of the first GPUs that have the kernels, those of the generation Ampere."""
_BLACKWELL = (10, 0)
_REPEATS_ON_BLACKWELL = 91801
"""Version of cuDNN, 9.18.1, from which on its backward pass can add in a fixed order on GPUs of the generation
Blackwell (https://github.com/NVIDIA/TransformerEngine/pull/2584)."""
_HEAD_DIM = 128
_MASKED = {"bfloat16": -(2.0**41), "float16": -(2.0**15)}
"""The least bias in each dtype that it computes in. The kernels scale scores by log2(e), and compute differences of
two that are masked: near the largest number, both would be infinite, and their difference no number."""


def unsupported_reason(spec: AttentionSpec, metadata: AttentionMetadata) -> str | None:
    """The reason why cuDNN cannot compute attention of `spec`; None when it can."""
    name, scores = jnp.dtype(metadata.dtype).name, spec.scores
    odd = metadata.queries > 1 and (metadata.queries % 2 or metadata.keys % 2)
    return first_reason((
        (metadata.platform not in _PLATFORMS, f"the platform is {metadata.platform}, not an NVIDIA GPU"),
        (metadata.device_lacks is not None, str(metadata.device_lacks)),
        (name not in _MASKED, f"it computes in bfloat16 or float16, not {name}"),
        (spec.head_dim % 8 != 0 or spec.head_dim > _HEAD_DIM,
         f"head_dim={spec.head_dim} is not a multiple of 8 up to {_HEAD_DIM}"),
        (bool(odd), f"rows of {metadata.keys} positions: it trains on even numbers of them only"),
        (scores.softcap is not None, "it cannot bound scores (softcap)"),
        (scores.dropout > 0, "its dropout is another one"),
        (metadata.twice, NO_SECOND_DERIVATIVE),
        (scores.upcast, "it cannot compute scores in float32 (upcast_attn)"),
        (scores.block_size is not None, "it has no use for flash_attention_block_size"),
    ))  # fmt: skip


def device_lacks() -> str | None:
    """The reason why the GPU of this process has no such kernel; None where it may have one, or is none."""
    gpu: Any = next((device for device in jax.local_devices() if device.platform == "gpu"), None)
    if gpu is None:
        return None
    if "cuda" not in gpu.client.platform_version:
        return f"{gpu.device_kind} is no GPU of NVIDIA"
    capability, version = tuple(map(int, gpu.compute_capability.split("."))), cudnn_version()
    if capability < _LEAST_CAPABILITY:
        return f"{gpu.device_kind} is of compute capability {gpu.compute_capability}, and it needs 8.0 (Ampere) or more"
    if capability >= _BLACKWELL and version is not None and version < _REPEATS_ON_BLACKWELL:
        text = f"{version // 10000}.{version // 100 % 100}.{version % 100}"
        return f"cuDNN {text} has no backward pass for {gpu.device_kind} that repeats its bits, as 9.18.1 has"
    return None


def cudnn_version() -> int | None:
    """The version of cuDNN that JAX runs with, such as 91801 for 9.18.1; None where there is none."""
    # JAX has no public way to ask.
    from jax._src.lib import cuda_versions

    return None if cuda_versions is None else int(cuda_versions.cudnn_get_version())


def compute(spec: AttentionSpec, inputs: AttentionInputs) -> jax.Array:
    """Computes attention as `AttentionKernel.compute`; the bias holds the whole mask."""
    del spec
    q_BSNH, k_BTKH, v_BTKH, bias_BNST, segments_BS = inputs
    bias_BNST = jnp.maximum(bias_BNST, _MASKED[v_BTKH.dtype.name]).astype(v_BTKH.dtype)
    # The bias says what is causal as well, but only the flag has blocks left out that are hidden, which are half of
    # them. A window stays in the bias: before cuDNN 9.10 there is no window beside one.
    itself = segments_BS is not None and q_BSNH.shape[1] == k_BTKH.shape[1]
    # A scale of 1: the queries are scaled already.
    return jax.nn.dot_product_attention(
        q_BSNH, k_BTKH, v_BTKH, bias_BNST, scale=1.0, is_causal=itself, implementation="cudnn"
    )


CUDNN = AttentionKernel(_PLATFORMS, unsupported_reason, compute)
