"""Tokenizer files of the Hugging Face ecosystem, with the names that all classes of transformers use."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lm_trainer.core.errors import UserError
from lm_trainer.core.safe_names import path_inside

TOKENIZER_FILE = "tokenizer.json"
CONFIG_FILE = "tokenizer_config.json"
TOKEN_MAP_FILE = "special_tokens_map.json"

TEMPLATE_FILE = "chat_template.jinja"
"""The default chat template."""
TEMPLATES = "additional_chat_templates"
"""Directory of the named chat templates."""

COPIED_FILES = (
    # Complete tokenizers for other versions of transformers, such as tokenizer.4.0.0.json.
    "tokenizer.*.json",
    TOKEN_MAP_FILE,
    "added_tokens.json",
    # Chat templates: the default, further ones by name, and the file that processors used in earlier versions.
    TEMPLATE_FILE,
    f"{TEMPLATES}/*.jinja",
    "chat_template.json",
    # Vocabularies of slow tokenizers, which other programs still read: llama.cpp converts Gemma from tokenizer.model.
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
"""Patterns of files that are copied without reading them, so that an exported model keeps its source's tokenizer."""

TOKENIZER_FILES = (TOKENIZER_FILE, CONFIG_FILE, *COPIED_FILES)
"""Patterns of all files of a tokenizer."""


def read_copied_files(directory: Path, patterns: Sequence[str] = COPIED_FILES) -> dict[str, bytes]:
    """Reads the files to copy unchanged. Returns them keyed by their path relative to `directory`.

    Args:
        directory: directory of a published model or its tokenizer.
        patterns: patterns of the files to read; by default, tokenizer files.

    Raises:
        UserError: if a file cannot be read, or is a link out of the directory.
    """
    files = [path for pattern in patterns for path in sorted(directory.glob(pattern)) if path.is_file()]
    try:
        names = [path.relative_to(directory).as_posix() for path in files]
        # The files are exported unread, so a link must not add another file of this machine.
        return {name: path_inside(directory, name, directory).read_bytes() for name in names}
    except OSError as error:
        raise UserError(f"{directory}: a file cannot be read: {error}") from None
