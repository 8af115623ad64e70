"""Fields of generation_config.json, as in transformers' GenerationConfig, and how this package treats them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal

Use = Literal["obeyed", "option", "unknown here", "of the program"]
"""`obeyed`: as in transformers. `option`: commands have an option for it, with another default. `unknown here`: changes
the text that transformers generates, and is not supported here. `of the program`: changes only how a text is computed,
or adds other results. All fields are kept from import to export."""

GENERATION_FIELDS: Mapping[str, Use] = {
    **dict.fromkeys(("eos_token_id", "stop_strings"), "obeyed"),
    # For evaluation tasks, as in the evaluation harness with transformers.
    "repetition_penalty": "obeyed",
    **dict.fromkeys(
        ("do_sample", "temperature", "top_k", "top_p", "max_length", "max_new_tokens", "num_return_sequences"),
        "option",
    ),
    # The tokenizer's settings are used: the token before a text, and no token for padded rows.
    **dict.fromkeys(("bos_token_id", "pad_token_id"), "option"),
    **dict.fromkeys(
        (
            *("min_length", "min_new_tokens", "num_beams", "length_penalty", "early_stopping"),
            *("min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff", "renormalize_logits"),
            *("encoder_repetition_penalty", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size"),
            *("bad_words_ids", "sequence_bias", "exponential_decay_length_penalty"),
            *("suppress_tokens", "begin_suppress_tokens", "forced_bos_token_id", "forced_eos_token_id"),
            *("guidance_scale", "watermarking_config", "token_healing", "decoder_start_token_id"),
            *("penalty_alpha", "dola_layers", "diversity_penalty", "num_beam_groups", "constraints"),
            *("force_words_ids", "max_time", "remove_invalid_values"),
        ),
        "unknown here",
    ),
    **dict.fromkeys(
        (
            *("use_cache", "cache_implementation", "cache_config", "max_cache_len", "use_mtp", "low_memory"),
            *("output_attentions", "output_hidden_states", "output_scores", "output_logits"),
            *("return_dict_in_generate", "compile_config", "disable_compile", "continuous_batching_config"),
            *("prefill_chunk_size", "is_assistant", "num_assistant_tokens", "num_assistant_tokens_schedule"),
            *("assistant_confidence_threshold", "assistant_early_exit", "assistant_lookbehind"),
            *("assistant_ensemble_weight", "target_lookbehind", "speculation_type", "prompt_lookup_num_tokens"),
            *("max_matching_ngram_size", "transformers_version"),
        ),
        "of the program",
    ),
}

_NEUTRAL: Mapping[str, Any] = {
    **dict.fromkeys(("num_beams", "num_beam_groups"), 1),
    **dict.fromkeys(("length_penalty", "encoder_repetition_penalty", "typical_p"), 1.0),
    **dict.fromkeys(("guidance_scale", "top_h"), 1.0),
}
"""Values with which a field has no effect. Fields not listed have no effect if null, false, 0 or empty."""


def generation_from_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the generation settings that transformers derives from a config.json without a generation_config.json."""
    return {name: config[name] for name in GENERATION_FIELDS if config.get(name) is not None}


def describe_unsupported(generation: Mapping[str, Any]) -> str | None:
    """Returns a note about the fields that `unsupported_fields` yields; None if there are none."""
    fields = ", ".join(f"{name}={value!r}" for name, value in unsupported_fields(generation))
    if not fields:
        return None
    return (
        f"the model's generation_config.json asks for {fields}, by which transformers writes other answers; it is not "
        f"computed here"
    )


def unsupported_fields(generation: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yields the fields, with their values, that make transformers generate a different text than this package."""
    for name, value in generation.items():
        if GENERATION_FIELDS.get(name) == "unknown here" and value and value != _NEUTRAL.get(name):
            yield name, value
