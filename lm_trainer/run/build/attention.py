"""The attention of a run, as its backends are told of it."""

from __future__ import annotations

from lm_trainer.nn.attention_kernel import AttentionMetadata
from lm_trainer.parallel.target_platform import Target
from lm_trainer.run.config.run_config import RunConfig


def describe_attention(config: RunConfig, target: Target) -> AttentionMetadata:
    """Describes the attention of a training step of a configuration on some devices."""
    length, trainer = config.model.seq_len, config.trainer
    return AttentionMetadata(
        target.platform,
        trainer.mp.compute_dtype,
        length // trainer.context_axis_size,
        length,
        gpu_generation=target.gpu_generation,
        fixed_order=trainer.bitwise,
    )
