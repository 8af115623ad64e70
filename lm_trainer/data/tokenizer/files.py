"""Files of a tokenizer in the Hugging Face ecosystem, and their names in every class of transformers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lm_trainer.core.errors import UserError
from lm_trainer.core.inside import path_inside

TOKENIZER_FILE = "tokenizer.json"
CONFIG_FILE = "tokenizer_config.json"

_TEMPLATES = "additional_chat_templates"

CARRIED_FILES = (
    # The whole tokenizer for other versions of transformers, as tokenizer.4.0.0.json.
    "tokenizer.*.json",
    "special_tokens_map.json",
    "added_tokens.json",
    # Templates: the tokenizer's, its further ones by name, and the one that processors had in earlier versions.
    "chat_template.jinja",
    f"{_TEMPLATES}/*.jinja",
    "chat_template.json",
    # Vocabularies of the slow tokenizers, which other programs still read: llama.cpp converts Gemma from
    # tokenizer.model.
    "tokenizer.model",
    "tokenizer.model.v*",
    "tekken.json",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "normalizer.json",
    "spiece.model",
    "spm.model",
    "spm_char.model",
    "sentencepiece.model",
    "sentencepiece.bpe.model",
    "bpe.codes",
    "byte_maps.json",
    "dict.txt",
    "emoji.json",
    "entity_vocab.json",
    "prophetnet.tokenizer",
    "source.spm",
    "target.spm",
    "target_vocab.json",
    "vocab-src.json",
    "vocab-tgt.json",
    "word_pronunciation.json",
    "word_shape.json",
)
"""Patterns of the files that are carried along unread, so that an exported model's tokenizer is that of its source."""

TOKENIZER_FILES = (TOKENIZER_FILE, CONFIG_FILE, *CARRIED_FILES)
"""Patterns of all files of a tokenizer."""


def read_carried(directory: Path, patterns: Sequence[str] = CARRIED_FILES) -> dict[str, bytes]:
    """Reads the files that are carried along unread, by their path below `directory`.

    Args:
        directory: of a published model or its tokenizer.
        patterns: of the files; by default those of a tokenizer.

    Raises:
        UserError: when one of them cannot be read, or is a link that leads out of the directory.
    """
    files = [path for pattern in patterns for path in sorted(directory.glob(pattern)) if path.is_file()]
    try:
        names = [path.relative_to(directory).as_posix() for path in files]
        # They go into exports unread: a link must not take another file of this machine along.
        return {name: path_inside(directory, name, directory).read_bytes() for name in names}
    except OSError as error:
        raise UserError(f"{directory}: a file cannot be read: {error}") from None
