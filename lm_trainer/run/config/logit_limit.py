"""Checks that the attention logits of a run can be measured and clipped."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lm_trainer.nn.clipped_logits import unclippable_reason
from lm_trainer.objectives import NextTokenConfig

if TYPE_CHECKING:
    from lm_trainer.run.config.run_config import RunConfig


def check_logit_limit(config: RunConfig) -> None:
    """Checks that every part of a run fits a limit of its attention logits.

    Raises:
        ValueError: if a part does not fit; names the part.
    """
    if config.optimizer.logit_limit is None:
        return
    if config.adapter is not None:
        raise ValueError("optimizer.qk_clip scales weights, which an adapter leaves frozen; remove one of them")
    if not isinstance(config.loss, NextTokenConfig):
        raise ValueError("optimizer.qk_clip is for loss: {type: next_token}; remove it")
    if config.trainer.pipeline_axis_size > 1:
        raise ValueError(
            "optimizer.qk_clip: pipeline_axis_size computes the rows of a microbatch one by one, and adds what a layer "
            "reports of them; set it to 1"
        )
    # With `use_hf_model_config` the model is not known yet.
    if config.use_hf_model_config:
        return
    if config.model.own_code:
        raise ValueError("optimizer.qk_clip cannot measure the attention of a model with code of your own; remove it")
    if reason := unclippable_reason(config.model.spec(vocab_size=1)):
        raise ValueError(f"optimizer.qk_clip: {reason}")
