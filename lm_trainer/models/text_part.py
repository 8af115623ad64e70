"""The text model in the files of a published model that also reads images, video or sound."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from lm_trainer.core.errors import UserError

_MODULE = "language_model"
"""Name of the text model's module in the names of tensors."""
_HEAD = "lm_head."
_SHARED = ("quantization_config", "bos_token_id", "eos_token_id", "pad_token_id")
"""Fields of config.json that hold for the text model too, if its part of the file lacks them."""
_TIED = "tie_word_embeddings"

T = TypeVar("T")


def has_other_parts(hf: Mapping[str, Any]) -> bool:
    """Returns True for the config.json of a model that reads more than text."""
    return isinstance(hf.get("text_config"), Mapping)


def text_config(hf: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the fields of the text model, or `hf` itself if the model reads only text."""
    if not has_other_parts(hf):
        return hf
    fields = {**{name: hf[name] for name in _SHARED if name in hf}, **hf["text_config"]}
    # The head belongs to the model as a whole.
    return {**fields, _TIED: hf[_TIED]} if _TIED in hf else fields


def text_tensors(tensors: Mapping[str, T]) -> dict[str, T]:
    """Returns the tensors of the text model, under the names that they have in a model that reads only text.

    Raises:
        UserError: if two tensors get the same name.
    """
    if not any(_MODULE in name.split(".") for name in tensors):
        return dict(tensors)
    renamed: dict[str, T] = {}
    for name, tensor in tensors.items():
        parts = name.split(".")
        if _MODULE in parts:
            # `language_model.model.layers...` or, since transformers 5, `model.language_model.layers...`.
            parts.remove(_MODULE)
        elif not name.startswith(_HEAD):
            continue
        text_name = ".".join(parts)
        if text_name in renamed:
            raise UserError(f"{name} and another tensor are both {text_name} of the text model")
        renamed[text_name] = tensor
    return renamed
