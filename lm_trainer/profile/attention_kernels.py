"""FLOPs of attention kernels, which XLA's text does not show.

Shape letters: S queries, T keys.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from lm_trainer.nn.spec import AttentionSpec
from lm_trainer.nn.splash_attention import LANES, choose_block_size
from lm_trainer.profile.devices import device_platform
from lm_trainer.profile.hlo import Program, walk_fusion, walk_instructions

_CUDNN_BLOCK = 128
"""Number of positions in a block of queries or keys of cuDNN's kernels."""
_SPLASH = re.compile(r"splash_\w*_(fwd|dkv|dq)(?:_|\.|$)")
_CUDNN = re.compile(r'custom_call_target="__cudnn\$fmha\w*?(Backward)?"')
_FORWARD, _BACKWARD = "forward", "backward"
_PRODUCTS: Mapping[str, int] = {_FORWARD: 2, _BACKWARD: 5, "dkv": 4, "dq": 3}
"""Kernel -> products of the size of queries times keys. The forward pass computes scores and weighted values. The
backward pass computes scores again, and the gradients of probabilities, values, keys and queries; with one kernel for
keys and values and one for queries, both compute scores and gradients of probabilities."""


def count_products(program: Program) -> float:
    """Returns the number of products of queries and keys that the attention kernels of a program compute."""
    kernels: dict[str, float] = {}
    for op, _, runs in walk_instructions(program):
        for one in (op, *(inner for inner, _ in walk_fusion(program, op))):
            if kernel := _kernel(one.name, one.attributes):
                kernels[kernel] = kernels.get(kernel, 0.0) + runs
    if "dq" not in kernels and "dkv" in kernels:
        kernels[_BACKWARD] = kernels.pop("dkv")
    return sum(_PRODUCTS[kernel] * runs for kernel, runs in kernels.items())


def _kernel(name: str, attributes: str) -> str | None:
    if match := _CUDNN.search(attributes):
        return _BACKWARD if match[1] else _FORWARD
    if "tpu_custom_call" in attributes and (match := _SPLASH.search(name)):
        return _FORWARD if match[1] == "fwd" else match[1]
    return None


def kernel_block(spec: AttentionSpec, length: int, kind: str, itemsize: int = 2) -> int:
    """Returns the number of positions in a block of queries or keys of the kernel on a device.

    Rows that no kernel of the device's platform computes are a single block.

    Args:
        spec: attention of a layer.
        length: positions of a row.
        kind: the device, as `jax.Device.device_kind`.
        itemsize: size in bytes of a number in queries and keys.
    """
    platform = device_platform(kind)
    if platform == "tpu" and length % LANES == 0:
        return choose_block_size(spec, length, kind, itemsize)
    return min(_CUDNN_BLOCK, length) if platform == "gpu" else length


def computed_share(spec: AttentionSpec, length: int, block: int) -> float:
    """Returns the share of pairs that a kernel computes in a row of `length` positions.

    Args:
        spec: attention of a layer, causal.
        length: positions of a row.
        block: queries and keys of a block. The kernel skips blocks of which every pair is masked.
    """
    blocks = -(-length // block)
    reach = blocks if spec.window is None else -(-(spec.window - 1) // block)
    computed = sum(min(query, reach) + 1 for query in range(blocks))
    return computed / blocks**2


def visible_share(spec: AttentionSpec, length: int) -> float:
    """Returns the share of pairs that the mask of a causal attention leaves in a row of `length` positions."""
    chunk = length if spec.chunk is None else min(spec.chunk, length)
    sizes = [chunk] * (length // chunk) + [length % chunk]
    return sum(_visible_pairs(size, spec.window) for size in sizes) / length**2


def _visible_pairs(length: int, window: int | None) -> float:
    window = length if window is None else min(window, length)
    return window * (window + 1) / 2 + (length - window) * window
