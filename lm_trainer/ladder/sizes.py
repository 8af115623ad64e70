"""Sizes of OLMo-core's ladder, with their microbatch sizes and numbers of devices."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

from lm_trainer.core.errors import UserError


class ModelShape(NamedTuple):
    """Hyperparameters of one size of OLMo 3."""

    hidden_dim: int
    num_layers: int
    num_heads: int
    intermediate_dim: int


class TransformerSize(StrEnum):
    """Named sizes in ascending order. The name is the approximate number of parameters without embeddings."""

    size_60M = "60M"
    size_100M = "100M"
    size_190M = "190M"
    size_370M = "370M"
    size_600M = "600M"
    size_760M = "760M"
    size_1B = "1B"
    size_3B = "3B"
    size_7B = "7B"
    size_13B = "13B"

    @property
    def approx_num_params(self) -> int:
        """Number of parameters according to the name."""
        return int(self[:-1]) * {"M": 10**6, "B": 10**9}[self[-1]]

    @property
    def shape(self) -> ModelShape:
        """Hyperparameters of this size."""
        return _SHAPES[self]


_SHAPES = {
    TransformerSize.size_60M: ModelShape(384, 8, 8, 1536),
    TransformerSize.size_100M: ModelShape(512, 12, 8, 2048),
    TransformerSize.size_190M: ModelShape(768, 12, 12, 3072),
    TransformerSize.size_370M: ModelShape(1024, 16, 16, 4096),
    TransformerSize.size_600M: ModelShape(1280, 16, 16, 5120),
    TransformerSize.size_760M: ModelShape(1536, 16, 16, 6144),
    TransformerSize.size_1B: ModelShape(2048, 16, 16, 8192),
    TransformerSize.size_3B: ModelShape(3328, 16, 16, 13312),
    TransformerSize.size_7B: ModelShape(4096, 32, 32, 11008),
    TransformerSize.size_13B: ModelShape(5120, 40, 40, 13824),
}

_MICROBATCH = {"100M": 4, "190M": 16, "370M": 12, "760M": 10, "1B": 8, "3B": 4, "13B": 2}
"""OLMo-core's microbatch size on an H100 in units of 4096 tokens, for model sizes up to the key."""
_SEQUENCE_LENGTHS = (2048, 4096, 8192)


def olmo_microbatch_size(size_spec: str, sequence_length: int, device_type: str) -> int:
    """Returns the number of tokens in a device's microbatch in OLMo-core, for one of its sizes.

    Raises:
        UserError: if OLMo-core has no figure for the size, sequence length or device.
    """
    name = device_type.lower()
    # A B200 has about twice the memory of an H100, and OLMo-core doubles the microbatch.
    factor = 2 if "b200" in name else 1 if "h100" in name else None
    if size_spec not in list(TransformerSize) or sequence_length not in _SEQUENCE_LENGTHS or factor is None:
        raise UserError(
            f"OLMo-core has no microbatch for size {size_spec}, sequence_length {sequence_length} and device_type "
            f"{device_type!r} (it has sizes {', '.join(TransformerSize)}; sequence lengths 2048, 4096, 8192; H100 and "
            f"B200); set model_configurator.rank_microbatch_size"
        )
    params = TransformerSize(size_spec).approx_num_params
    # The keys of the table include 13B, the largest size, so one of them is large enough.
    limit = next(name for name in _MICROBATCH if params <= TransformerSize(name).approx_num_params)
    return _MICROBATCH[limit] * 4096 * factor


def olmo_minimal_devices(size_spec: str) -> int:
    """Returns the minimum number of devices for a size in OLMo-core."""
    return 32 if size_spec == TransformerSize.size_13B else 8
