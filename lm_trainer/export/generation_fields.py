"""Fields of generation_config.json, as transformers' GenerationConfig has them, and what each means here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal

Use = Literal["obeyed", "option", "unknown here", "of the program"]
"""`obeyed`: as transformers does. `option`: commands have an option of their own, with another default.
`unknown here`: changes the text that transformers writes, and is not computed here. `of the program`: changes how a
text is computed, or what is returned beside it. All are carried from import to export."""

GENERATION_FIELDS: Mapping[str, Use] = {
    "eos_token_id": "obeyed",
    # Of tasks, as by the harness with transformers.
    "repetition_penalty": "obeyed",
    **dict.fromkeys(
        ("do_sample", "temperature", "top_k", "top_p", "max_length", "max_new_tokens", "num_return_sequences"),
        "option",
    ),
    # The tokenizer's own are used: the token in front of a text, and none where rows are filled up.
    **dict.fromkeys(("bos_token_id", "pad_token_id"), "option"),
    **dict.fromkeys(
        (
            *("min_length", "min_new_tokens", "stop_strings", "num_beams", "length_penalty", "early_stopping"),
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
"""Values with which a field changes nothing; of the others null, false, 0 and what is empty."""


def generation_of_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The content of the generation_config.json that transformers makes of a config.json without one beside it."""
    return {name: config[name] for name in GENERATION_FIELDS if config.get(name) is not None}


def not_computed(generation: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yields fields by which transformers would write another text than this package, each with its value."""
    for name, value in generation.items():
        if GENERATION_FIELDS.get(name) == "unknown here" and value and value != _NEUTRAL.get(name):
            yield name, value
