"""Base classes of tokenizers. A tokenizer is a Hugging Face `tokenizer.json` with its companion files.

Shape letters: T tokens of a text.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import numpy as np

from lm_trainer.core.config import Config
from lm_trainer.core.errors import MachineError, UserError
from lm_trainer.core.files import local_path
from lm_trainer.data.tokenizer.files import CONFIG_FILE, TEMPLATE_FILE, TEMPLATES, TOKEN_MAP_FILE, TOKENIZER_FILE
from lm_trainer.data.tokenizer.rust import open_rust, settings_without_sampling, without_sampling

if TYPE_CHECKING:
    from tokenizers import Tokenizer as RustTokenizer

logger = logging.getLogger(__name__)

EOS_TOKEN = "<|endoftext|>"
"""The end-of-document token of tokenizers that lm_trainer creates."""

_DEFAULT_SETTINGS = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
"""Default contents of tokenizer_config.json, for tokenizers without this file."""
_USUAL_EOS = (EOS_TOKEN, "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]")


Identity = dict[str, Any]
"""JSON object that identifies a tokenizer."""


class Tokenizer(Protocol):
    """Converts text to token ids and back."""

    @property
    def vocab_size(self) -> int:
        """One more than the largest id, including special tokens."""
        ...

    @property
    def batch_bytes(self) -> int:
        """The best size of a batch for `encode_batch`, in UTF-8 bytes of text."""
        ...

    @property
    def eos_id(self) -> int:
        """The end-of-document token. Text is never encoded as this token."""
        ...

    @property
    def bos_id(self) -> int | None:
        """The start-of-document token; None if the tokenizer does not add one."""
        ...

    def encode(self, text: str) -> list[int]:
        """Returns the ids of plain text, without BOS and EOS. Names of special tokens are encoded as plain text."""
        ...

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Encodes several texts like `encode`."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of the ids without special tokens."""
        ...

    def identity(self) -> Identity:
        """Returns JSON that identifies the tokenizer for which a model is trained.

        It does not depend on the backend.
        """
        ...

    def fingerprint(self) -> Identity:
        """Returns JSON that changes whenever ids may change: the identity, the backend and its version."""
        ...

    def save(self, directory: str | Path) -> None:
        """Writes the files that `transformers.AutoTokenizer` and `load_tokenizer` read."""
        ...


class TokenizerConfig(Config):
    """Base of every member of the union of tokenizers."""


class HfTokenizer:
    """Runs a `tokenizer.json` with the `tokenizers` package. Picklable.

    Args:
        content: the text of `tokenizer.json`, kept byte for byte except for random sampling, which is turned off.
        settings: the contents of `tokenizer_config.json`.
        extras: further files of the tokenizer, keyed by name.
        eos_token: overrides the end-of-document token of the settings.
        origin: source of the tokenizer, for messages.

    Raises:
        UserError: if the content is not a tokenizer, or has no known end-of-document token.
    """

    backend: ClassVar[str] = "tokenizers"
    package: ClassVar[str | None] = "tokenizers"
    """The package whose version determines the ids."""
    batch_bytes: int = 1 << 20
    """Small enough that encoding, which takes about 100 bytes of memory per byte of text, fits in memory."""

    def __init__(
        self,
        content: str,
        settings: Mapping[str, object] | None = None,
        extras: Mapping[str, bytes] | None = None,
        *,
        eos_token: str | None = None,
        origin: str = "the tokenizer",
    ):
        self._content, off = without_sampling(content)
        self._settings, off_in_settings = settings_without_sampling(settings or _DEFAULT_SETTINGS)
        self._extras, self._origin = dict(extras or {}), origin
        self._token_map = self._read_token_map()
        for file, changed in ((TOKENIZER_FILE, off), (CONFIG_FILE, off_in_settings)):
            if changed:
                logger.warning(
                    "%s: %s says %s, by which one text becomes other tokens each time; that is off here, and in what "
                    "is saved",
                    *(origin, file, ", ".join(changed)),
                )
        try:
            self._rust = open_rust(self._content)
        except Exception as error:  # the package has no narrower error type
            raise UserError(f"{origin}: {TOKENIZER_FILE} cannot be read: {error}") from None
        self._with_specials: RustTokenizer | None = None
        vocabulary = self._rust.get_vocab(with_added_tokens=True)
        self._vocab_size = max(vocabulary.values(), default=-1) + 1
        self._eos_token = self._find_eos(vocabulary, eos_token)
        # The settings may hold an object with more than the token's text, which is kept.
        named_end = token_text(self._settings.get("eos_token")) or self._token_map.get("eos_token")
        if named_end != self._eos_token:
            self._settings["eos_token"] = self._eos_token
        self._eos_id = vocabulary[self._eos_token]
        self._bos_id = self._find_bos()
        # Text that looks like a special token is encoded as plain text, as a document must not contain its own EOS.
        self._rust.encode_special_tokens = True
        if self._eos_id in self.encode(self._eos_token):
            raise UserError(
                f"{origin}: the text {self._eos_token!r} inside a document would become the end-of-document token; "
                f"declare it special in {TOKENIZER_FILE}"
            )

    def _read_token_map(self) -> dict[str, str]:
        """Returns the named tokens in special_tokens_map.json, which older tokenizers have instead of the settings.

        As in transformers, settings with the key `added_tokens_decoder` name all tokens themselves.
        """
        content = self._extras.get(TOKEN_MAP_FILE)
        if content is None or "added_tokens_decoder" in self._settings:
            return {}
        try:
            named = json.loads(content)
            texts = {key: token_text(value) for key, value in named.items() if key.endswith("_token")}
        except (ValueError, AttributeError):
            raise UserError(
                f"{self._origin}: {TOKEN_MAP_FILE} is no JSON object; put back a copy, or remove it"
            ) from None
        return {key: text for key, text in texts.items() if isinstance(text, str)}

    def _find_eos(self, vocabulary: Mapping[str, int], eos_token: str | None) -> str:
        named = eos_token or token_text(self._settings.get("eos_token")) or self._token_map.get("eos_token")
        if named is None:
            named = next((token for token in _USUAL_EOS if token in vocabulary), None)
        if named is None:
            raise UserError(
                f"{self._origin}: {CONFIG_FILE} names no eos_token; choose the token that ends a document with "
                "data.tokenizer: {type: hf, name: ..., eos_token: ...}"
            )
        if named not in vocabulary:
            raise UserError(f"{self._origin}: the eos_token {named!r} is not in its vocabulary")
        return named

    def _find_bos(self) -> int | None:
        """Returns the id of the special token that the post-processor puts in front of a text; None if it adds none."""
        # Found by encoding a text, since post-processors come in several kinds and may be nested.
        if not self._rust.num_special_tokens_to_add(is_pair=False):
            return None
        with_special, plain = self._rust.encode("a"), self._rust.encode("a", add_special_tokens=False)
        first = with_special.ids[0] if with_special.ids else None
        return first if plain.ids and first != plain.ids[0] and first != self._eos_id else None

    def with_backend(self, kind: type[HfTokenizer]) -> HfTokenizer:
        """Returns the same tokenizer with another backend."""
        return _rebuild(kind, self._content, self._settings, self._extras, self._origin)

    def with_chat_template(self, source: str) -> HfTokenizer:
        """Returns the same tokenizer with another default chat template."""
        extras = {**self._extras, TEMPLATE_FILE: source.encode()}
        return _rebuild(type(self), self._content, self._settings, extras, self._origin)

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self), self._content, self._settings, self._extras, self._origin)

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    @property
    def eos_id(self) -> int:
        return self._eos_id

    @property
    def bos_id(self) -> int | None:
        return self._bos_id

    def encode(self, text: str) -> list[int]:
        return self._rust.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [encoding.ids for encoding in self._rust.encode_batch_fast(list(texts), add_special_tokens=False)]

    def encode_plain(self, text: str) -> tuple[list[int], np.ndarray]:
        """Returns the same ids as `encode`, and the range of characters [start, end) of every token: int [T, 2]."""
        return _encode_with_offsets(self._rust, text)

    def encode_template(self, text: str) -> tuple[list[int], np.ndarray]:
        """Encodes like `encode_plain`, but recognises special tokens. Used for text written by a chat template."""
        return _encode_with_offsets(self._special_rust(), text)

    def encode_special(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Returns the same ids as transformers. Recognises special tokens in the text, and can add BOS and EOS."""
        return self._special_rust().encode(text, add_special_tokens=add_special_tokens).ids

    def _special_rust(self) -> RustTokenizer:
        # A second copy, since switching `encode_special_tokens` would affect other threads while they encode.
        if self._with_specials is None:
            self._with_specials = open_rust(self._content)
        return self._with_specials

    def used_ids(self) -> set[int]:
        """Returns all ids that are in use."""
        return set(self._rust.get_vocab(with_added_tokens=True).values())

    def added_tokens(self) -> dict[int, str]:
        """Returns the tokens added to the base vocabulary, including special tokens."""
        return {index: token.content for index, token in self._rust.get_added_tokens_decoder().items()}

    def special_tokens(self) -> dict[str, int]:
        """Returns the text and id of every special token."""
        added = self._rust.get_added_tokens_decoder()
        return {token.content: index for index, token in added.items() if token.special}

    def named_tokens(self) -> dict[str, str]:
        """Returns the named tokens, such as `eos_token`."""
        texts = {key: token_text(value) for key, value in self._settings.items() if key.endswith("_token")}
        named = {key: text for key, text in texts.items() if isinstance(text, str)}
        return {**named, **self._token_map, "eos_token": self._eos_token}

    @property
    def chat_template(self) -> str | None:
        """The chat template of the tokenizer."""
        if TEMPLATE_FILE in self._extras:
            return self._extras[TEMPLATE_FILE].decode("utf-8")
        template: Any = self._settings.get("chat_template")
        if isinstance(template, list):  # several named templates
            template = next((entry["template"] for entry in template if entry.get("name") == "default"), None)
        return template

    @property
    def named_chat_templates(self) -> dict[str, str]:
        """Further chat templates of the tokenizer, such as `tool_use`, by their names."""
        settings: Any = self._settings.get("chat_template")
        listed = settings if isinstance(settings, list) else []
        named = {entry["name"]: entry["template"] for entry in listed if entry.get("name") and entry.get("template")}
        for file, content in self._extras.items():
            if file.startswith(f"{TEMPLATES}/"):
                named[Path(file).stem] = content.decode("utf-8")
        return named

    def decode(self, ids: Sequence[int]) -> str:
        return self._rust.decode([int(i) for i in ids], skip_special_tokens=True)

    def decode_all(self, ids: Sequence[int]) -> str:
        """Returns the text of the ids, including the names of special tokens."""
        return self._rust.decode([int(i) for i in ids], skip_special_tokens=False)

    def identity(self) -> Identity:
        return {
            "sha256": hashlib.sha256(self._content.encode()).hexdigest(),
            "vocab_size": self.vocab_size,
            "eos_id": self.eos_id,
            "bos_id": self.bos_id,
        }

    def fingerprint(self) -> Identity:
        version = importlib.metadata.version(self.package) if self.package else "1"
        return {**self.identity(), "backend": self.backend, "version": version}

    def files(self) -> dict[str, bytes]:
        """Returns the contents of all files of the tokenizer, by their relative paths."""
        return {
            TOKENIZER_FILE: self._content.encode(),
            CONFIG_FILE: (json.dumps(self._settings, indent=2, ensure_ascii=False) + "\n").encode(),
            **self._extras,
        }

    def save(self, directory: str | Path) -> None:
        """Writes all files, or none if the disk is full.

        Raises:
            MachineError: if the files cannot be written.
            UserError: if `directory` is a URL.
        """
        directory = local_path(directory)
        drafts = {name: (directory / name).with_name(f".{Path(name).name}.tmp") for name in self.files()}
        try:
            for name, content in self.files().items():
                drafts[name].parent.mkdir(parents=True, exist_ok=True)
                with drafts[name].open("wb") as file:
                    file.write(content)
                    file.flush()
                    os.fsync(file.fileno())
            for name, draft in drafts.items():
                draft.replace(Path(directory) / name)
        except OSError as error:
            for draft in drafts.values():
                with contextlib.suppress(OSError):
                    draft.unlink()
            raise MachineError(f"cannot write the tokenizer to {directory}: {error.strerror or error}") from None


def _encode_with_offsets(rust: RustTokenizer, text: str) -> tuple[list[int], np.ndarray]:
    encoding = rust.encode(text, add_special_tokens=False)
    return encoding.ids, np.asarray(encoding.offsets, np.int64).reshape(-1, 2)


def _rebuild(kind: type[HfTokenizer], content: str, settings: dict, extras: dict, origin: str) -> HfTokenizer:
    return kind(content, settings, extras, origin=origin)


def token_text(value: Any) -> str | None:
    """Returns the text of a token, which settings hold as text or as an object with the text in `content`."""
    return value.get("content") if isinstance(value, dict) else value
