"""Models whose attention logits can be clipped by `lm_trainer.nn.logit_clip`."""

from __future__ import annotations

from lm_trainer.nn.mixer_spec import softmax_specs
from lm_trainer.nn.spec import AttentionSpec, DecoderSpec


def unclippable_reason(spec: DecoderSpec) -> str | None:
    """Returns the reason why the attention logits of a model cannot be clipped; None if they can be."""
    if spec.encoder is not None or spec.senses is not None:
        part = "cross-attention" if spec.encoder is not None else "the attention that weighs senses"
        return f"the logits of {part} are not measured; remove it"
    attentions = softmax_specs(spec.all_blocks)
    if not attentions:
        return "the model has no attention with a softmax; remove it"
    return next((reason for attention in attentions if (reason := _attention_reason(attention))), None)


def _attention_reason(spec: AttentionSpec) -> str | None:
    if spec.qk_norm is not None:
        return (
            "the model normalizes queries and keys, which bounds the logits and undoes any scale of their weights; "
            "remove it"
        )
    if spec.clip is not None:
        return "the model clips queries and keys, whose logits do not follow the scale of the weights; remove it"
    if spec.module is not None:
        return "the attention is code of your own, whose logits are not measured; remove it"
    if spec.scores.backend == "ring":
        return "attn_backend: ring holds only parts of the keys of a row; write another backend, or auto"
    return None
