"""The `data` section of a configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from lm_trainer.core.config import Config
from lm_trainer.data.shuffle import AnyShuffle, FullShuffle, NoShuffle, ShuffleConfig
from lm_trainer.data.sources import AnySource, Shard, SourceConfig, Split, shards_of_urls
from lm_trainer.data.sources.embedded import Embedded
from lm_trainer.data.tokenizer import AnyTokenizer, TokenizerConfig, tokenizer_config


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


Urls = Annotated[list[str], BeforeValidator(_as_list, json_schema_input_type=str | list[str])]

_LATER = "not available yet"


class SetConfig(Config):
    """One set of documents: where they come from, and how they are read."""

    train_urls: Urls = []
    """Files to train on: paths or fsspec URLs; globs, `{1..128}` and `{a,b}` are expanded, `.gz`, `.bz2` and `.xz` are
    unpacked. `.jsonl` files hold one document per line under `text_key`, `.txt`, `.md`, `.py` and the like hold one."""
    validation_urls: Urls = []
    """Files to evaluate on, like `train_urls`. If absent, nothing is held out from `train_urls` and evaluation is left
    out."""
    source: AnySource | None = None
    """How to read documents: by the names of the files, if absent; `embedded` where there are no `train_urls`."""
    text_key: str = "text"
    """The field of a JSON line that holds the document."""
    cache_dir: str | None = None
    """Where tokenised text is kept: `tokenizer/`, `train/` and `validation/` below it. If absent, a directory of its
    own below `cache/` for every combination of source and tokenizer. With a directory named here, another source or
    tokenizer is refused. May be a `gs://` or `s3://` URL."""

    refused_keys: ClassVar[Mapping[str, str]] = {
        "id": f"Hugging Face datasets are {_LATER}; name their files with train_urls",
        "name": f"Hugging Face datasets are {_LATER}; name their files with train_urls",
        "stream": f"Hugging Face datasets are {_LATER}; name their files with train_urls",
        "splits": f"Hugging Face datasets are {_LATER}; use train_urls and validation_urls",
        "plaintext": "files whose names end in .txt are read as text; or set source.type: text",
        "format": f"chat and prompt formats are {_LATER}; plain text is read by text_key",
        "chat_template": f"chat formats are {_LATER}",
        "tags": f"named evaluation sets are {_LATER}; use validation_urls",
    }

    @model_validator(mode="after")
    def _check_urls(self) -> Self:
        takes_urls = bool(self.train_urls) if self.source is None else self.source.takes_urls
        if takes_urls and not self.train_urls:
            raise ValueError("this source needs train_urls")
        if not takes_urls and (self.train_urls or self.validation_urls):
            key = "train_urls" if self.train_urls else "validation_urls"
            hint = "remove one of the two" if self.source else "name your own train_urls too"
            raise ValueError(f"the embedded source brings its own text, so {key} does not fit; {hint}")
        return self

    @property
    def source_config(self) -> SourceConfig | None:
        """The source in use; None = each file by its name."""
        return self.source or (None if self.train_urls else Embedded())

    def shards(self, split: Split) -> list[Shard]:
        """The shards of one split; [] where there is none.

        Raises:
            UserError: if files are missing.
        """
        urls = self.train_urls if split == "train" else self.validation_urls
        source = self.source_config
        if source is None:
            return shards_of_urls(split, urls, self.text_key)
        if source.takes_urls and not urls:
            return []
        return source.shards(split, urls, self.text_key)


class DataConfig(SetConfig):
    """What to train on. Without any key: the text that Python itself carries, so that nothing needs a download."""

    tokenizer: str | AnyTokenizer | None = None
    """`bytes`, a directory with a `tokenizer.json`, a Hugging Face name, or a block with a `type`. If absent, a
    byte-level BPE of 4096 tokens is trained on the training text."""
    shuffle: bool | AnyShuffle = True
    """The order of training: `true` draws all windows at random, anew in every epoch, `false` in their order; or a
    block with a `type`."""
    on_bad_row: Literal["raise", "skip"] = "raise"
    """What to do with a row that is no text, such as broken UTF-8 or JSON: stop, or leave it out and count it."""
    max_bad_rows: float = Field(default=0.01, ge=0, le=1)
    """With `on_bad_row: skip`, the share of rows that may be bad before the build fails after all."""
    num_workers: int | None = Field(default=None, ge=0)
    """Processes that tokenise; 0 is none but this one. If absent, by the size of the source and the number of cores."""

    refused_keys: ClassVar[Mapping[str, str]] = {
        **SetConfig.refused_keys,
        "configs": f"mixtures are {_LATER}",
        "train_weights": f"mixtures are {_LATER}",
        "stop_strategy": f"mixtures are {_LATER}",
        "mixture_block_size": f"mixtures are {_LATER}, and will need no block size",
        "max_train_batches": f"limits for each set are {_LATER}",
        "num_validation_sequences": f"holding out training text is {_LATER}; use validation_urls",
        "experiment_budget": f"simulated epoching is {_LATER}",
        "target_budget": f"simulated epoching is {_LATER}",
        "permutation_type": "the permutation is always a Feistel network; remove the key",
        "enforce_eos": "every document is always ended by the end-of-document token; remove the key",
        "ignore_token_id": f"masking a token in the loss is {_LATER}",
        "auto_build_caches": "caches are always built when they are missing; remove the key",
        "cache_options": "caches need no tuning; num_workers sets the number of processes",
        "vocab_size": "the tokenizer decides; for one trained here set tokenizer.vocab_size",
    }

    @property
    def tokenizer_config(self) -> TokenizerConfig:
        return tokenizer_config(self.tokenizer)

    @property
    def shuffle_config(self) -> ShuffleConfig:
        if isinstance(self.shuffle, bool):
            return FullShuffle() if self.shuffle else NoShuffle()
        return self.shuffle
