"""All settings of a published model as one value, which is kept unchanged from import to export."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from lm_trainer.core.errors import UserError
from lm_trainer.data.tokenizer.base import token_text
from lm_trainer.data.tokenizer.files import CONFIG_FILE, read_copied_files
from lm_trainer.export.files import CONFIG, GENERATION, PREPROCESSOR, PROCESSOR_FILES
from lm_trainer.export.weights import read_json
from lm_trainer.models import hf
from lm_trainer.models.generation_fields import generation_from_config
from lm_trainer.models.hf_section import allows_any_length
from lm_trainer.models.text_part import has_other_parts, text_config

if TYPE_CHECKING:
    from lm_trainer.data.tokenizer import HfTokenizer, Tokenizer
    from lm_trainer.models.base import DecoderConfig


@dataclass(frozen=True)
class HfSettings:
    """The settings of a published model, with all fields."""

    config: Mapping[str, Any]
    """config.json."""
    generation: Mapping[str, Any]
    """generation_config.json, or the generation fields of config.json if the file does not exist."""
    preprocessor: Mapping[str, Any] | None = None
    """preprocessor_config.json."""
    files: Mapping[str, bytes] = field(default_factory=dict)
    """Contents of further files by file name. They are not interpreted."""

    @classmethod
    def read(cls, directory: Path) -> Self:
        """Reads the files of a directory written by `write`, transformers or other programs.

        Raises:
            UserError: for the same reasons as in `read_copied_files`, for a damaged file, and for an end token that is
                not an id.
        """
        raw = read_json(directory / CONFIG)
        config = _without_quantization(text_config(raw))
        generation_file, preprocessor_file = directory / GENERATION, directory / PREPROCESSOR
        generation = read_json(generation_file) if generation_file.is_file() else generation_from_config(config)
        if not all(isinstance(end, int) for end in _as_list(generation.get("eos_token_id"))):
            raise UserError(
                f"{generation_file if generation_file.is_file() else directory / CONFIG}: "
                f"eos_token_id={generation['eos_token_id']!r} is no id and no list of ids"
            )
        if has_other_parts(raw):
            # Further files describe images and sound, which the text model does not read.
            return cls(config, generation)
        preprocessor = read_json(preprocessor_file) if preprocessor_file.is_file() else None
        return cls(config, generation, preprocessor, read_copied_files(directory, PROCESSOR_FILES))

    @classmethod
    def default_for(cls, model: DecoderConfig, vocab_size: int, tokenizer: Tokenizer) -> Self:
        """Makes default settings for a model without imported settings.

        Raises:
            UserError: for a setting that the format cannot express.
        """
        config = hf.config_to_hf(model, vocab_size=vocab_size, eos_id=tokenizer.eos_id, bos_id=tokenizer.bos_id)
        ids = {key: config[key] for key in ("bos_token_id", "eos_token_id") if config[key] is not None}
        generation = model.generation_to_hf({"do_sample": True, "temperature": 0.8, **ids})
        return cls(config, generation, model.preprocessor_to_hf())

    @property
    def end_ids(self) -> tuple[int, ...]:
        """Tokens that end a text."""
        return tuple(_as_list(self.generation.get("eos_token_id")))

    @property
    def stop_texts(self) -> tuple[str, ...]:
        """Texts that end a text."""
        return tuple(text for text in _as_list(self.generation.get("stop_strings")) if isinstance(text, str) and text)

    def with_end_token(self, token: int) -> Self:
        """Returns settings for a model with an additional end token."""

        def add_end_token(fields: Mapping[str, Any]) -> dict[str, Any]:
            ends = _as_list(fields.get("eos_token_id"))
            return dict(fields) if token in ends else {**fields, "eos_token_id": [*ends, token] if ends else token}

        return replace(self, config=add_end_token(self.config), generation=add_end_token(self.generation))

    def adapt_to_tokenizer(self, tokenizer: HfTokenizer, model_directory: Path) -> Self:
        """Returns settings for a tokenizer whose end-of-document token may differ from the model's.

        Args:
            tokenizer: the tokenizer in use.
            model_directory: directory of the model. If it names no end token, the tokenizer's end token counts as
                different.
        """
        named = read_json(model_directory / CONFIG_FILE) if (model_directory / CONFIG_FILE).is_file() else {}
        same_end = token_text(named.get("eos_token")) == tokenizer.named_tokens()["eos_token"]
        return self if same_end else self.with_end_token(tokenizer.eos_id)

    def adapt_to_model(
        self, model: DecoderConfig, vocab_size: int, tokenizer: Tokenizer, *, context: int | None = None
    ) -> Self:
        """Updates the settings with the user's changes to the model. Unchanged values keep the form of the source.

        Args:
            model: the current configuration.
            vocab_size: number of rows of the model's embedding.
            tokenizer: the tokenizer in use.
            context: context length in tokens. None means the longer of the source's context and the row length of
                training.

        Raises:
            UserError: for a setting that the format cannot express.
        """
        source, rows = hf.config_from_hf(self.config)
        source = source.with_generation(self.generation)
        # The user did not change generation settings that are missing from the model section.
        model = model.with_generation({**self.generation, **getattr(model, "generation_config", {})})
        if allows_any_length(model, vocab_size):
            model = model.model_copy(update={"seq_len": context or max(model.seq_len, source.seq_len)})
        source_defaults, model_defaults = (
            self.default_for(source, rows, tokenizer),
            self.default_for(model, vocab_size, tokenizer),
        )
        same_family = type(model) is type(source)
        return replace(
            self,
            config=_merge_changes(self.config, source_defaults.config, model_defaults.config)
            if same_family
            else model_defaults.config,
            generation=_merge_changes(self.generation, source_defaults.generation, model_defaults.generation),
            preprocessor=model_defaults.preprocessor
            if self.preprocessor is None
            else _merge_changes(
                self.preprocessor, source_defaults.preprocessor or {}, model_defaults.preprocessor or {}
            ),
        )

    def write(self, directory: Path) -> None:
        """Writes the files."""
        directory.mkdir(parents=True, exist_ok=True)
        texts = {CONFIG: self.config, GENERATION: self.generation}
        if self.preprocessor is not None:
            texts[PREPROCESSOR] = self.preprocessor
        for name, fields in texts.items():
            # Keys are sorted, so that equal content gives equal bytes. Unlike `write_json`, this allows infinite
            # values.
            text = json.dumps(fields, indent=2, sort_keys=True, ensure_ascii=False)
            (directory / name).write_text(text + "\n", encoding="utf-8")
        for name, content in self.files.items():
            (directory / name).write_bytes(content)


def _without_quantization(config: Mapping[str, Any]) -> dict[str, Any]:
    block = config.get("quantization_config")
    return {key: x for key, x in config.items() if key != "quantization_config" or not is_read_quantization(block)}


def is_read_quantization(block: object) -> bool:
    """Returns True if a `quantization_config` describes weights that are read: in MXFP4, or in NF4 of bitsandbytes.

    They are not written, so exports have no such field.
    """
    if not isinstance(block, Mapping):
        return False
    return block.get("quant_method") == "mxfp4" or block.get("bnb_4bit_quant_type") == "nf4"


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [] if value is None else [value]


def _merge_changes(
    source: Mapping[str, Any], before_change: Mapping[str, Any], after_change: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns `source`, updated with the fields that differ between `before_change` and `after_change`.

    Both have the same form. A token that `after_change` does not name is kept.
    """
    absent = object()
    changed = {
        key
        for key in before_change.keys() | after_change.keys()
        if before_change.get(key, absent) != after_change.get(key, absent)
        and not (key.endswith("_token_id") and after_change.get(key) is None)
    }
    unchanged = {key: value for key, value in source.items() if key not in changed}
    return {**unchanged, **{key: after_change[key] for key in changed if key in after_change}}
