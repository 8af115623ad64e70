"""Memory that attention kernels allocate and that a compiler can count only if it has the device."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from lm_trainer.nn.mixer_spec import softmax_specs
from lm_trainer.plan.gpu_target import compute_capability
from lm_trainer.run.config.run_config import RunConfig

_GRADIENTS = re.compile(r"microbatch|(?:\w+ )?layer \d+ gradient")
"""Names of the programs that contain the backward pass of attention."""
_HOPPER = 9
_BYTES_PER_PAIR = 2


@dataclass(frozen=True)
class AttentionWorkspace:
    """Memory on a device for the backward pass of attention. Layers run one after another and share it."""

    bytes_per_row: int = 0
    """Size in bytes for one row of a microbatch."""
    row_by_row: bool = False
    """True if a device computes one row of a microbatch at a time."""

    @classmethod
    def of(
        cls, config: RunConfig, vocab_size: int, kind: str, backend: str, axes: Mapping[str, int]
    ) -> AttentionWorkspace:
        """Returns the workspace of a run.

        On Hopper GPUs, cuDNN's deterministic backward pass stores 2 bytes for each query-key pair of each head, which
        lets it sum in a fixed order (NVIDIA/cudnn-frontend, pull request 398).

        Args:
            config: configuration of the run.
            vocab_size: number of rows of the token embedding.
            kind: the target device, as `jax.Device.device_kind`.
            backend: the attention backend on that device.
            axes: mesh axis -> number of devices along it.
        """
        trainer = config.trainer
        if backend != "cudnn" or not trainer.bitwise or compute_capability(kind) != _HOPPER:
            return cls()
        heads = max(spec.num_heads for spec in softmax_specs(config.model.spec(vocab_size).blocks))
        head_shards = trainer.step_plan.compute_shards("heads", axes)
        pairs = config.model.seq_len**2 // axes.get("context", 1)
        return cls(_BYTES_PER_PAIR * heads * pairs // head_shards, axes.get("pipeline", 1) > 1)

    def bytes(self, rows: int) -> int:
        """Returns the size in bytes for a microbatch of `rows` rows."""
        return self.bytes_per_row * (1 if self.row_by_row else rows)

    def of_program(self, name: str, rows: int) -> int:
        """Returns the size in bytes that the program `name` needs for a microbatch of `rows` rows."""
        return self.bytes(rows) if _GRADIENTS.fullmatch(name) else 0


NO_WORKSPACE = AttentionWorkspace()
