"""The model section of a configuration beside the config.json of a checkpoint: taken over, or compared."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from pydantic import ValidationError

from lm_trainer.core.config import Config
from lm_trainer.core.errors import UserError
from lm_trainer.models.base import DecoderConfig


def adopt_hf_config(
    section: DecoderConfig, given: Collection[str], theirs: DecoderConfig, vocab_size: int
) -> DecoderConfig:
    """The model of config.json, with what the section says beyond it.

    Args:
        section: the model section.
        given: the keys that are written in it.
        theirs: what config.json says.
        vocab_size: of the checkpoint.

    Raises:
        UserError: naming every key that contradicts config.json.
    """
    if not given:
        return theirs
    if type(section) is not type(theirs):
        raise UserError(
            f"use_hf_model_config: the checkpoint is a {theirs.type} model, but model.type is {section.type} (the "
            f"first, where none is written); write model.type: {theirs.type}, or remove the model section"
        )
    wanted = {key: getattr(section, key) for key in given}
    problems = [
        f"model.{key} is {ours}, but {value} in config.json"
        for key, ours, value in _differences(section, theirs, vocab_size)
        if key in given and not (key == "seq_len" and any_length(theirs, vocab_size))
    ]
    if problems:
        raise UserError(
            "use_hf_model_config: " + "; ".join(problems) + ". Remove these keys, or use_hf_model_config: false"
        )
    try:
        return type(theirs).model_validate({**theirs.model_dump(), **wanted})
    except ValidationError as error:
        raise UserError(f"use_hf_model_config: {error.errors()[0]['msg'].removeprefix('Value error, ')}") from None


def compare_with_hf_config(
    section: DecoderConfig, given: Collection[str], theirs: DecoderConfig, vocab_size: int
) -> list[str]:
    """Lists the keys that the user wrote with another value than config.json has; one text for each key.

    Raises:
        UserError: for another family, and for keys that differ because nothing is written: their defaults would change
            what the checkpoint computes.
    """
    if type(section) is not type(theirs):
        raise UserError(
            f"initialize_from_hf: the checkpoint is a {theirs.type} model, but model.type is {section.type}; write "
            f"model.type: {theirs.type}, or use_hf_model_config: true"
        )
    problems, notes = [], []
    for key, ours, value in _differences(section, theirs, vocab_size):
        if key == "seq_len" and any_length(theirs, vocab_size):
            continue
        text = f"model.{key} is {ours}, but {value} in config.json"
        (notes if key in given else problems).append(text)
    if problems:
        raise UserError(
            "initialize_from_hf: the model section does not describe the checkpoint: "
            + "; ".join(problems)
            + ". Write these keys out, or use_hf_model_config: true"
        )
    return notes


def _differences(section: DecoderConfig, theirs: DecoderConfig, vocab_size: int) -> Iterator[tuple[str, str, str]]:
    """Keys that config.json sets and that would change what the model computes, each with our value and theirs."""
    spec = theirs.spec(vocab_size)
    for key in sorted(theirs.model_fields_set - _OF_TRAINING):
        ours, value = getattr(section, key), getattr(theirs, key)
        if ours == value:
            continue
        # Equal specs compute the same: a default that is written out, for example, is no difference.
        try:
            same = type(theirs).model_validate({**theirs.model_dump(), key: ours}).spec(vocab_size) == spec
        # The key alone may contradict the others of the file.
        except ValidationError:
            same = False
        if not same:
            yield key, _shown(ours), _shown(value)


def _shown(value: Any) -> str:
    if isinstance(value, Config):
        plain = value.model_dump(mode="json")
        # The kind first, as people write it.
        value = {**({"type": plain["type"]} if "type" in plain else {}), **plain}
    return str(value)


_OF_TRAINING = frozenset(
    {"initializer_range", "embed_pdrop", "resid_pdrop", "attn_pdrop", "upcast_attn", "lbl_coef", "rzl_coef"}
)
"""Keys that do not change what a trained model computes."""


def any_length(config: DecoderConfig, vocab_size: int) -> bool:
    """Returns true if rows may be longer or shorter than the checkpoint's: no parameter has a row for each position."""
    return not config.spec(vocab_size).embedding.learned_positions
