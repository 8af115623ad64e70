"""Memory that attention kernels allocate and that a compiler can count only if it has the device."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from lm_trainer.nn.cudnn_attention import workspace_bytes
from lm_trainer.nn.mixer_spec import softmax_specs
from lm_trainer.parallel.target_platform import Target
from lm_trainer.run.build.attention import describe_attention
from lm_trainer.run.config.run_config import RunConfig

_GRADIENTS = re.compile(r"microbatch|(?:\w+ )?layer \d+ gradient")
"""Names of the programs that contain the backward pass of attention."""


@dataclass(frozen=True)
class AttentionWorkspace:
    """Memory on a device for the backward pass of attention. Layers run one after another and share it."""

    bytes_per_row: int = 0
    """Size in bytes for one row of a microbatch."""
    row_by_row: bool = False
    """True if a device computes one row of a microbatch at a time."""

    @classmethod
    def of(
        cls, config: RunConfig, vocab_size: int, target: Target, backend: str, axes: Mapping[str, int]
    ) -> AttentionWorkspace:
        """Returns the workspace of a run.

        Args:
            config: configuration of the run.
            vocab_size: number of rows of the token embedding.
            target: the target devices.
            backend: the attention backend on these devices.
            axes: mesh axis -> number of devices along it.
        """
        if backend != "cudnn":
            return cls()
        metadata = describe_attention(config, target)
        specs = softmax_specs(config.model.spec(vocab_size).blocks)
        head_shards = config.trainer.step_plan.compute_shards("heads", axes)
        largest = max(workspace_bytes(spec, metadata) for spec in specs)
        return cls(largest // head_shards, axes.get("pipeline", 1) > 1)

    def bytes(self, rows: int) -> int:
        """Returns the size in bytes for a microbatch of `rows` rows."""
        return self.bytes_per_row * (1 if self.row_by_row else rows)

    def of_program(self, name: str, rows: int) -> int:
        """Returns the size in bytes that the program `name` needs for a microbatch of `rows` rows."""
        return self.bytes(rows) if _GRADIENTS.fullmatch(name) else 0


NO_WORKSPACE = AttentionWorkspace()
