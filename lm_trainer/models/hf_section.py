"""Comparison and merging of the model section of a configuration with the config.json of a checkpoint."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from pydantic import ValidationError

from lm_trainer.core.config import Config
from lm_trainer.core.errors import UserError
from lm_trainer.models.base import DecoderConfig


def adopt_hf_config(
    section: DecoderConfig, written_keys: Collection[str], hf_config: DecoderConfig, vocab_size: int
) -> DecoderConfig:
    """Returns the model that config.json describes, with settings that config.json lacks taken from the section.

    Args:
        section: the model section.
        written_keys: the keys that the user wrote in the section.
        hf_config: the model described by config.json.
        vocab_size: vocabulary size of the checkpoint.

    Raises:
        UserError: if keys contradict config.json; names all of them.
    """
    if not written_keys:
        return hf_config
    if type(section) is not type(hf_config):
        raise UserError(
            f"use_hf_model_config: the checkpoint is a {hf_config.type} model, but model.type is {section.type} (the "
            f"first, where none is written); write model.type: {hf_config.type}, or remove the model section"
        )
    overrides = {key: getattr(section, key) for key in written_keys}
    problems = [
        f"model.{key} is {value}, but {hf_value} in config.json"
        for key, value, hf_value in _find_differences(section, hf_config, vocab_size)
        if key in written_keys and not (key == "seq_len" and allows_any_length(hf_config, vocab_size))
    ]
    if problems:
        raise UserError(
            "use_hf_model_config: " + "; ".join(problems) + ". Remove these keys, or use_hf_model_config: false"
        )
    try:
        return type(hf_config).model_validate({**hf_config.model_dump(), **overrides})
    except ValidationError as error:
        raise UserError(f"use_hf_model_config: {error.errors()[0]['msg'].removeprefix('Value error, ')}") from None


def compare_with_hf_config(
    section: DecoderConfig, written_keys: Collection[str], hf_config: DecoderConfig, vocab_size: int
) -> list[str]:
    """Returns one message for each key that the user set to a value other than the one in config.json.

    Raises:
        UserError: if the family differs, or a key that the user did not write differs, because its default would change
            the results of the checkpoint.
    """
    if type(section) is not type(hf_config):
        raise UserError(
            f"initialize_from_hf: the checkpoint is a {hf_config.type} model, but model.type is {section.type}; write "
            f"model.type: {hf_config.type}, or use_hf_model_config: true"
        )
    problems, notes = [], []
    for key, value, hf_value in _find_differences(section, hf_config, vocab_size):
        if key == "seq_len" and allows_any_length(hf_config, vocab_size):
            continue
        text = f"model.{key} is {value}, but {hf_value} in config.json"
        (notes if key in written_keys else problems).append(text)
    if problems:
        raise UserError(
            "initialize_from_hf: the model section does not describe the checkpoint: "
            + "; ".join(problems)
            + ". Write these keys out, or use_hf_model_config: true"
        )
    return notes


def _find_differences(
    section: DecoderConfig, hf_config: DecoderConfig, vocab_size: int
) -> Iterator[tuple[str, str, str]]:
    """Yields the keys whose values would change the model's results, with our value and the value in config.json."""
    spec = hf_config.spec(vocab_size)
    for key in sorted(hf_config.model_fields_set - _OF_TRAINING):
        value, hf_value = getattr(section, key), getattr(hf_config, key)
        if value == hf_value:
            continue
        # Equal specs compute the same. For example, a default that is written out is not a difference.
        try:
            equal = type(hf_config).model_validate({**hf_config.model_dump(), key: value}).spec(vocab_size) == spec
        # A single key may contradict other keys of the file.
        except ValidationError:
            equal = False
        if not equal:
            yield key, _format_value(value), _format_value(hf_value)


def _format_value(value: Any) -> str:
    if isinstance(value, Config):
        plain = value.model_dump(mode="json")
        # The type comes first, as users write it.
        value = {**({"type": plain["type"]} if "type" in plain else {}), **plain}
    return str(value)


_OF_TRAINING = frozenset(
    (
        *("initializer_range", "embed_pdrop", "resid_pdrop", "attn_pdrop", "upcast_attn"),
        *("lbl_coef", "rzl_coef", "mtp_loss_weight"),
    )
)
"""Keys that do not affect the results of a trained model."""


def allows_any_length(config: DecoderConfig, vocab_size: int) -> bool:
    """Returns True if rows may have any length, because no parameter of the checkpoint has a row per position."""
    return not config.spec(vocab_size).embedding.learned_positions
