"""Settings that a published model has beside its weights: one value, carried unchanged from import to export."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from lm_trainer.core.errors import UserError
from lm_trainer.data.tokenizer.base import token_text
from lm_trainer.data.tokenizer.files import CONFIG_FILE, read_carried
from lm_trainer.export.files import CONFIG, GENERATION, PREPROCESSOR, PROCESSOR_FILES
from lm_trainer.export.generation_fields import generation_of_config
from lm_trainer.export.weights import read_json
from lm_trainer.models import hf
from lm_trainer.models.hf_section import any_length

if TYPE_CHECKING:
    from lm_trainer.data.tokenizer import HfTokenizer, Tokenizer
    from lm_trainer.models.base import DecoderConfig


@dataclass(frozen=True)
class HfSettings:
    """The settings of a published model, to the field."""

    config: Mapping[str, Any]
    """config.json."""
    generation: Mapping[str, Any]
    """generation_config.json, or the fields of it that config.json has, where there is none."""
    preprocessor: Mapping[str, Any] | None = None
    """preprocessor_config.json."""
    files: Mapping[str, bytes] = field(default_factory=dict)
    """Further files by name, unread."""

    @classmethod
    def read(cls, directory: Path) -> Self:
        """Reads the files of a directory that `write`, transformers or anybody else wrote.

        Raises:
            UserError: as `read_carried`, for a damaged file, and for a token that ends texts which is no id.
        """
        config = read_json(directory / CONFIG)
        own, sound = directory / GENERATION, directory / PREPROCESSOR
        generation = read_json(own) if own.is_file() else generation_of_config(config)
        if not all(isinstance(end, int) for end in _listed(generation.get("eos_token_id"))):
            raise UserError(
                f"{own if own.is_file() else directory / CONFIG}: eos_token_id={generation['eos_token_id']!r} is no id "
                f"and no list of ids"
            )
        preprocessor = read_json(sound) if sound.is_file() else None
        return cls(config, generation, preprocessor, read_carried(directory, PROCESSOR_FILES))

    @classmethod
    def made_for(cls, model: DecoderConfig, vocab_size: int, tokenizer: Tokenizer) -> Self:
        """Makes the settings of a model that has none from elsewhere.

        Raises:
            UserError: for a setting that the format has no place for.
        """
        config = hf.config_to_hf(model, vocab_size=vocab_size, eos_id=tokenizer.eos_id, bos_id=tokenizer.bos_id)
        ids = {key: config[key] for key in ("bos_token_id", "eos_token_id") if config[key] is not None}
        generation = model.generation_to_hf({"do_sample": True, "temperature": 0.8, **ids})
        return cls(config, generation, model.preprocessor_to_hf())

    @property
    def end_ids(self) -> tuple[int, ...]:
        """The tokens that each end a text."""
        return tuple(_listed(self.generation.get("eos_token_id")))

    def with_end(self, token: int) -> Self:
        """The settings for a model whose texts another token ends as well."""

        def extended(fields: Mapping[str, Any]) -> dict[str, Any]:
            ends = _listed(fields.get("eos_token_id"))
            return dict(fields) if token in ends else {**fields, "eos_token_id": [*ends, token] if ends else token}

        return replace(self, config=extended(self.config), generation=extended(self.generation))

    def for_tokenizer(self, tokenizer: HfTokenizer, own: Path) -> Self:
        """The settings for a tokenizer that ends documents by another token than the model's own.

        Args:
            tokenizer: the one that is used.
            own: directory of the model's own; where it names no such token, that of `tokenizer` counts as another one.
        """
        named = read_json(own / CONFIG_FILE) if (own / CONFIG_FILE).is_file() else {}
        same = token_text(named.get("eos_token")) == tokenizer.named_tokens()["eos_token"]
        return self if same else self.with_end(tokenizer.eos_id)

    def for_model(
        self, model: DecoderConfig, vocab_size: int, tokenizer: Tokenizer, *, context: int | None = None
    ) -> Self:
        """The settings with what a user has changed of the model: what equals the source keeps the source's form.

        Args:
            model: as it is now.
            vocab_size: rows of its embedding.
            tokenizer: the one that is used.
            context: tokens that the model is said to read. None: as many as in the source, or more where the rows of
                training are longer.

        Raises:
            UserError: for a setting that the format has no place for.
        """
        theirs, rows = hf.config_from_hf(self.config)
        theirs = theirs.with_generation(self.generation)
        # What the model section does not say of generation is no wish for a change.
        model = model.with_generation({**self.generation, **getattr(model, "generation_config", {})})
        if any_length(model, vocab_size):
            model = model.model_copy(update={"seq_len": context or max(model.seq_len, theirs.seq_len)})
        before, after = self.made_for(theirs, rows, tokenizer), self.made_for(model, vocab_size, tokenizer)
        same_family = type(model) is type(theirs)
        return replace(
            self,
            config=_merged(self.config, before.config, after.config) if same_family else after.config,
            generation=_merged(self.generation, before.generation, after.generation),
            preprocessor=after.preprocessor
            if self.preprocessor is None
            else _merged(self.preprocessor, before.preprocessor or {}, after.preprocessor or {}),
        )

    def write(self, directory: Path) -> None:
        """Writes the files."""
        directory.mkdir(parents=True, exist_ok=True)
        texts = {CONFIG: self.config, GENERATION: self.generation}
        if self.preprocessor is not None:
            texts[PREPROCESSOR] = self.preprocessor
        for name, fields in texts.items():
            # Sorted, so that equal content gives equal bytes. Unlike `write_json`, it takes the infinities of a source.
            text = json.dumps(fields, indent=2, sort_keys=True, ensure_ascii=False)
            (directory / name).write_text(text + "\n", encoding="utf-8")
        for name, content in self.files.items():
            (directory / name).write_bytes(content)


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [] if value is None else [value]


def _merged(theirs: Mapping[str, Any], before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """`theirs` with the fields that differ between `before` and `after`, which describe one thing in one form.

    A token that `after` does not name stays.
    """
    absent = object()
    changed = {
        key
        for key in before.keys() | after.keys()
        if before.get(key, absent) != after.get(key, absent)
        and not (key.endswith("_token_id") and after.get(key) is None)
    }
    kept = {key: value for key, value in theirs.items() if key not in changed}
    return {**kept, **{key: after[key] for key in changed if key in after}}
