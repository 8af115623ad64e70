"""The loss of pre-training and supervised fine-tuning."""

from __future__ import annotations

from typing import Literal

from lm_trainer.objectives.base import LossConfig


class NextTokenConfig(LossConfig):
    """Cross-entropy of the next token, -log p(target) in nats, averaged over all counted tokens of the batch."""

    type: Literal["next_token"] = "next_token"
