"""Refusal of fields of config.json that no table knows: they could change the results of the model."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from lm_trainer.core.errors import UserError
from lm_trainer.models.base import DecoderConfig
from lm_trainer.models.generation_fields import GENERATION_FIELDS
from lm_trainer.models.hf_table import settings_to_hf

WITHOUT_EFFECT = frozenset(
    (
        # The file itself, and the code and numbers with which a model runs.
        *("architectures", "auto_map", "model_type", "transformers_version", "tokenizer_class"),
        *("dtype", "torch_dtype", "torchscript", "use_bfloat16", "tf_legacy_loss", "init_device", "verbose"),
        *("attn_implementation", "chunk_size_feed_forward", "return_dict", "is_decoder", "is_encoder_decoder"),
        *("gradient_checkpointing", "transformers.js_config"),
        # These are read elsewhere.
        *("vocab_size", "quantization_config"),
        # Ids of tokens, for tokenizers and generation.
        *("sep_token_id", "forced_decoder_ids"),
        # Heads for other tasks.
        *("id2label", "label2id", "num_labels", "problem_type", "finetuning_task", "task_specific_params"),
        *("summary_activation", "summary_proj_to_labels", "summary_type", "summary_use_proj"),
        *("classifier_proj_size", "use_weighted_layer_sum", "median_filter_width"),
        # Training alone: initial weights, losses of routers, and masks of SpecAugment.
        *("initializer_range", "output_router_logits", "router_aux_loss_coef", "router_jitter_noise"),
        *("mask_feature_length", "mask_feature_min_masks", "mask_feature_prob"),
        *("mask_time_length", "mask_time_min_masks", "mask_time_prob"),
        # Slices of a product whose results are added, and the length of the rows of the training.
        *("pretraining_tp", "max_sequence_length"),
    )
)
"""Fields of any model that do not change the results of a trained model, or that are read elsewhere."""

_WITHOUT_EFFECT = re.compile(r"_.*|.*dropout.*|.*_pdrop|.*_layerdrop|unsloth_.*")
"""Names of further fields without an effect: private ones, and rates of dropout."""

_ROPE = frozenset(
    ("max_position_embeddings", "original_max_position_embeddings", "rope_parameters", "rope_scaling", "rope_theta")
)


def check_fields_known(config_class: type[DecoderConfig], hf: Mapping[str, Any]) -> None:
    """Checks that the content of a config.json has no field of an unknown meaning, such as one of a later version.

    Null, `false` and empty values mean that a part is absent, and are accepted. So are `layer_types` of layers that all
    attend to every position, which transformers writes for families that know no other layers.

    Raises:
        UserError: naming all such fields.
    """
    known_names = known_fields(config_class)
    unknown = [
        f"{name}={value!r}"
        for name, value in hf.items()
        if name not in known_names
        and not _WITHOUT_EFFECT.fullmatch(name)
        and value is not None
        and value is not False
        and value not in ("", [], {})
        and not (name == "layer_types" and {*value} == {"full_attention"})
    ]
    if unknown:
        raise UserError(
            f"this {config_class.hf_family().model_type} model cannot be read: the meaning of {', '.join(unknown)} in "
            f"config.json is not known here; remove each field that changes no result"
        )


def known_fields(config_class: type[DecoderConfig]) -> frozenset[str]:
    """Returns the names of the fields of a family's config.json whose meaning is known."""
    family = config_class.hf_family()
    tables = {name for entry in family.fields for name in (entry.hf, *entry.old_names)}
    # Fields that are written are also read, except for the ones that follow from others.
    written = settings_to_hf(family, config_class()).keys()
    return frozenset(
        {*tables, *written, *family.read_only, *family.vocab_sizes, *WITHOUT_EFFECT, *GENERATION_FIELDS, *_ROPE}
    )
