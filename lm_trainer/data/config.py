"""The `data` section of a configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, NonNegativeInt, PositiveInt, model_validator

from lm_trainer.core.config import Config, IgnoredKey, LocalPathOrHubName
from lm_trainer.core.errors import UserError
from lm_trainer.core.result_keys import AffectsResults, Operational
from lm_trainer.data.cache.kvstore import CachePath
from lm_trainer.data.formats import AnyFormat, TextFormat
from lm_trainer.data.formats.default_packing import Packing, choose_default_packing
from lm_trainer.data.formats.too_long import ConversationFormat, TooLong
from lm_trainer.data.mixture import check_known_sets, check_set_names, check_steps, cycle_counts
from lm_trainer.data.shuffle import AnyShuffle, EraShuffle, FullShuffle, NoShuffle, ShuffleConfig
from lm_trainer.data.sources import AnySource, Shard, SourceConfig, Split, list_shards, list_source_shards
from lm_trainer.data.sources.embedded import Embedded
from lm_trainer.data.sources.fields import is_template, parse_template
from lm_trainer.data.sources.grain_pipeline import GrainPipeline
from lm_trainer.data.sources.hub import HuggingFace
from lm_trainer.data.sources.prebuilt import PrebuiltCache
from lm_trainer.data.tokenizer import AnyTokenizer, TokenizerConfig, tokenizer_config
from lm_trainer.data.tokenizer.fast import Backend
from lm_trainer.data.without import DocumentLists, WithoutConfig


def _as_list(value: object) -> object:
    return [value] if isinstance(value, str) else value


Urls = Annotated[list[str], BeforeValidator(_as_list, json_schema_input_type=str | list[str])]

SINGLE_SET = "train"
"""Name of the only set in a configuration without `configs`."""

_HUB_KEYS = {"name", "revision", "stream", "splits"}
"""Keys of a set that apply only to data sets of the Hugging Face hub."""

_NOT_AVAILABLE = "not available yet"

_NO_FILES = "train_urls is an empty list; name files, or leave the key out (or null) for the embedded corpus"


class SetConfig(Config):
    """One set of documents, with its sources and the way to read them."""

    train_urls: AffectsResults[Urls | None] = None
    """Paths or fsspec URLs of the files to train on. Globs, `{1..128}` and `{a,b}` are expanded, and `.gz`, `.bz2`,
    `.xz`, `.lzma`, `.zst`, `.zstd` and `.zip` files are unpacked. `.jsonl` and `.parquet` files hold one document per
    line or row, in the field `text_key`. `.txt`, `.md`, `.py` and similar files hold one document each."""
    validation_urls: AffectsResults[Urls] = []
    """Files to evaluate on, in the same form as `train_urls`. If absent or empty, no text of `train_urls` is held out
    and evaluation is skipped."""
    id: AffectsResults[str | None] = None
    """A data set of the Hugging Face hub, such as `org/dataset`, which is used instead of `train_urls`."""
    name: AffectsResults[str | None] = None
    """Configuration (subset) of the data set `id`. If absent, its default configuration is used."""
    revision: AffectsResults[str | None] = None
    """Branch, tag or commit of the data set `id`. If absent, `main` is used."""
    stream: Operational[bool] = True
    """Reads the data set `id` over the network while tokenising; `false` first downloads its files to the hub cache."""
    splits: AffectsResults[list[str]] = Field(default=["train", "validation"], min_length=1, max_length=2)
    """The splits of the data set `id`: the training split and, optionally, the evaluation split."""
    source: AffectsResults[AnySource | None] = None
    """Reader of the documents. If absent, it is chosen by file name, or is `embedded` if there are no `train_urls`."""
    text_key: AffectsResults[str] = "text"
    """The field of a record (a JSON line or a Parquet row) that holds the document; `a.b.c` names a nested field."""
    text_template: AffectsResults[str | None] = None
    """A template that builds the text from several fields, used instead of `text_key`: `"{title}\\n\\n{body}"`. `{{` is
    a literal brace."""
    format: AffectsResults[AnyFormat] = TextFormat()
    """Format that turns a row into tokens with a loss mask: plain text, or the format named by a block's `type`."""
    cache_dir: Operational[CachePath | None] = None
    """Directory of tokenised text, with `tokenizer/`, `train/` and `validation/`. If absent, every combination of
    source and tokenizer has its own directory below `cache/`. If a directory is named here, using it with another
    source or tokenizer is an error. May be a `gs://` or `s3://` URL."""

    tags: Operational[list[str]] = []
    """Evaluation groups of the set, such as `code` or `web/forums`. In addition to the metrics of every set,
    evaluations report averages over the sets of each group, and of each group of groups."""
    refused_keys: ClassVar[Mapping[str, str]] = {
        "plaintext": "files whose names end in .txt are read as text; or set source.type: text",
        "chat_template": "the template belongs to the format: format: {type: chat, chat_template: ...}",
        "train_split": "splits names both: splits: [TRAIN, VALIDATION]",
        "validation_split": "splits names both: splits: [TRAIN, VALIDATION]",
    }
    replaced_keys: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "id": ("train_urls", "validation_urls"),
        "train_urls": ("id", *sorted(_HUB_KEYS)),
    }

    @model_validator(mode="after")
    def _check_prebuilt(self) -> Self:
        if isinstance(self.source, PrebuiltCache):
            for key in ("cache_dir", "format", "text_key", "text_template"):
                if key in self.model_fields_set:
                    raise ValueError(f"{key} has no effect on a cache that is already built; remove it")
        return self

    @model_validator(mode="after")
    def _check_format(self) -> Self:
        if "text_key" in self.changed_fields and (self.format.fields() or getattr(self.format, "text_key", None)):
            raise ValueError(
                f"text_key has no effect beside format: {self.format.type}, which names its fields; remove it"
            )
        return self

    @model_validator(mode="after")
    def _check_template(self) -> Self:
        if is_template(self.text_key):
            raise ValueError(f"text_key: {self.text_key!r} is no field; a text of several is text_template")
        if self.text_template is None:
            return self
        if self.format.fields() or getattr(self.format, "text_key", None) or "text_key" in self.changed_fields:
            raise ValueError(
                "text_template has no effect beside text_key, or a format that names its fields; remove one"
            )
        try:
            parse_template(self.text_template)
        except ValueError as error:
            raise ValueError(f"text_template: {error}") from None
        return self

    @model_validator(mode="after")
    def _check_source(self) -> Self:
        # The order matters, since each check assumes that the earlier ones passed.
        if not self._only_evaluated():
            if self.train_urls == [] and not (self.source or self.id):
                raise ValueError(_NO_FILES)
            self._check_hub_keys()
            self._check_urls()
        return self

    def _check_hub_keys(self) -> None:
        if self.id is not None and (self.source or self.train_urls or self.validation_urls):
            raise ValueError("id names a data set of the hub; remove it, or source, train_urls and validation_urls")
        if self.id is None and (unused := _HUB_KEYS & self.changed_fields):
            raise ValueError(f"{', '.join(sorted(unused))} can only be set with id, a data set of the hub")

    def _check_urls(self) -> None:
        takes_urls = bool(self.train_urls) if self.source is None else self.source.takes_urls
        if takes_urls and not self.train_urls:
            raise ValueError("this source needs train_urls")
        if not takes_urls and (self.train_urls or self.validation_urls):
            key = "train_urls" if self.train_urls else "validation_urls"
            hint = "remove one of the two" if self.source else "name your own train_urls too"
            kind = self.source.type if self.source else "embedded"
            raise ValueError(f"the {kind} source brings its own text, so {key} does not fit; {hint}")

    def _only_evaluated(self) -> bool:
        """Returns True if the set has only validation text."""
        return not (self.source or self.id or self.train_urls) and bool(self.validation_urls)

    @property
    def source_config(self) -> SourceConfig | None:
        """The source in use; None means that the source of each file is chosen by its name."""
        if self.id is not None:
            # Only changed keys, because the source treats a split named by the user differently from a default one.
            keys = ({"id"} | _HUB_KEYS) & self.changed_fields
            return HuggingFace(**{key: getattr(self, key) for key in keys})
        return self.source or (None if self.train_urls or self.validation_urls else Embedded())

    @property
    def names_text(self) -> bool:
        """False if the configuration names no text, so that the embedded text is used."""
        return self.source is not None or not isinstance(self.source_config, Embedded)

    @property
    def gives_rows(self) -> bool:
        """True if the source yields ready-made rows to train on instead of text."""
        return isinstance(self.source, GrainPipeline) and self.source.elements == "rows"

    @property
    def has_documents_of_text(self) -> bool:
        return not (self.gives_rows or self.format.is_paired or self.format.features_shape)

    def shards(self, split: Split) -> list[Shard]:
        """Lists the shards of one split; [] if the set does not have this split.

        Raises:
            UserError: if files are missing.
        """
        urls = (self.train_urls or []) if split == "train" else self.validation_urls
        source, fields = self.source_config, self.format.fields()
        text_key = self.text_template or getattr(self.format, "text_key", None) or self.text_key
        if source is None:
            return list_shards(split, urls, text_key, fields)
        if source.takes_urls and not urls:
            return []
        return list_source_shards(source, split, urls, text_key, fields)


Weight = Annotated[float, Field(ge=0)]
Stage = tuple[NonNegativeInt, dict[str, Weight]]
PerSet = PositiveInt | dict[str, PositiveInt]


class DataConfig(SetConfig):
    """Data to train on. Without any key, the text that Python itself includes is used, so no download is needed."""

    tokenizer: AffectsResults[LocalPathOrHubName | AnyTokenizer | None] = None
    """`bytes`, a directory with a `tokenizer.json`, a Hugging Face name, or a block with a `type`. If absent, a
    byte-level BPE of 4096 tokens is trained on the training text."""
    tokenizer_backend: Operational[Backend] = "auto"
    """Package that runs the tokenizer: `tokenizers`, or `fastokens`, which is several times as fast. `auto` uses
    `fastokens` for a new cache if it is installed and gives the same ids for a sample of every source."""
    shuffle: AffectsResults[bool | PositiveInt | AnyShuffle] = True
    """Training order. `true` shuffles all rows, in a different order every epoch. `false` keeps their order. A number
    shuffles within consecutive eras of that many rows. A block has a `type`."""
    on_bad_row: AffectsResults[Literal["raise", "skip"]] = "raise"
    """Treatment of an invalid row, such as broken UTF-8 or JSON: `raise` stops with an error, and `skip` skips and
    counts the row."""
    max_bad_rows: AffectsResults[float] = Field(default=0.01, ge=0, le=1)
    """Fraction of bad rows above which the build fails with `on_bad_row: skip`."""
    num_workers: Operational[int | None] = Field(default=None, ge=0)
    """Number of processes that tokenise; 0 uses only the main process. If absent, it is chosen by the size of the
    source and the number of cores."""

    packing: AffectsResults[Packing | dict[str, Packing]] = "concat"
    """Method of filling rows with documents, for all sets or by name. `concat` concatenates documents and splits the
    stream into rows, which may split documents. `best_fit` splits only documents longer than a row, unless
    `format.on_too_long` treats them otherwise, and adds a little padding. With both, attention stays within a
    document, and held-out text fills rows in the same way. If absent, sets with prompts and answers (`format` `chat`,
    `supervised`, `preference` and `unpaired_preference`) use `best_fit`, so that an answer has its prompt in context,
    and others use `concat`."""
    configs: AffectsResults[dict[str, SetConfig]] = {}
    """The sets of a mixture by name, each with its own files, cache and validation text. They replace the files of this
    block. A set without a `cache_dir` has its cache in `cache_dir/NAME`."""
    train_weights: AffectsResults[dict[str, Weight] | list[Stage] | None] = None
    """Share of training rows from each set of `configs`: `{wiki: 0.7, code: 0.3}`. Weights need not sum to 1, and a set
    of weight 0 is only evaluated. Weights may also change at given steps, counted from 0: `[[0, {wiki: 0.7, code:
    0.3}], [10000, {wiki: 1}]]`. Between changes, proportions are exact to one row at any time, up to a resolution of
    1/65536."""
    stop_strategy: AffectsResults[Literal["restart", "first_exhausted", "all_exhausted"]] = "restart"
    """Behaviour at the end of a set. `restart` repeats the set in a new order until training ends. With
    `first_exhausted`, the data end when the first set would repeat; with `all_exhausted`, they end once every set has
    been exhausted. A run with more steps is refused, with a message that gives the number of available steps."""
    epochs: AffectsResults[PerSet | None] = None
    """Number of epochs after which `stop_strategy` considers a set exhausted, for all sets or by name. 1 by default."""
    max_train_batches: AffectsResults[PerSet | None] = None
    """Trains only on the first rows of a set, as many as fill this number of batches of the first step's size. Set for
    all sets or by name."""
    exclude: AffectsResults[DocumentLists] = []
    """Lists of training documents to leave out, as written by `lmt data dedup` and `lmt data overlap`. The run is the
    same as with text that lacks these documents, and no text is tokenised a second time."""
    without: AffectsResults[WithoutConfig | None] = None
    """Documents that never count, as for `lmt without`: unlike with `exclude`, all rows keep their places. A document
    is padding in its rows, and the loss is the mean over the other tokens."""
    num_validation_sequences: AffectsResults[PerSet | None] = None
    """Number of rows to hold out at the end of the training text as validation text, for all sets or by name."""

    ignored_keys: ClassVar[Mapping[str, IgnoredKey]] = {
        "mixture_block_size": IgnoredKey("the proportions of a mixture hold after any number of rows, without blocks"),
        "permutation_type": IgnoredKey("the permutation is always a Feistel network", ("feistel",)),
        "enforce_eos": IgnoredKey("every document ends with the end-of-document token", (True,)),
        "ignore_token_id": IgnoredKey("it is no token, and nothing else is masked by its id", (-100,)),
        "auto_build_caches": IgnoredKey("caches that are missing are always built", (True,)),
        "cache_options": IgnoredKey("caches need no tuning; num_workers sets the number of processes"),
        "vocab_size": IgnoredKey("the tokenizer decides; of one that is trained here, data.tokenizer.vocab_size"),
    }
    refused_keys: ClassVar[Mapping[str, str]] = {
        **SetConfig.refused_keys,
        "experiment_budget": f"simulated epoching is {_NOT_AVAILABLE}",
        "target_budget": f"simulated epoching is {_NOT_AVAILABLE}",
        "permutation_type": "the permutation is always a Feistel network; remove the key",
        "enforce_eos": "every document is always ended by the end-of-document token; remove the key",
        "ignore_token_id": f"masking a token in the loss is {_NOT_AVAILABLE}",
        "auto_build_caches": "caches are always built when they are missing; remove the key",
        "shuffle_buffer_size": "use `shuffle` with a number: rows are drawn at random within eras of so many",
    }

    @model_validator(mode="after")
    def _check_mixture(self) -> Self:
        if self.configs:
            # The order matters, since each check assumes that the earlier ones passed.
            self._check_set_names()
            self._check_stages()
            self._check_trained()
        else:
            self._check_single_set()
        if self.epochs is not None and self.stop_strategy == "restart":
            raise ValueError("epochs only means something with stop_strategy: first_exhausted or all_exhausted")
        for key in ("epochs", "max_train_batches", "num_validation_sequences", "packing"):
            value = getattr(self, key)
            self._check_names(key, value if isinstance(value, dict) else {})
        if self.without is not None:
            text = {name: x.has_documents_of_text for name, x in self.sets.items()}
            self.without.check(text, mixture=bool(self.configs))
        return self

    def _check_single_set(self) -> None:
        if self.train_weights is not None:
            raise ValueError("train_weights needs configs: the sets that it weighs, by name")
        if self._only_evaluated() and self.train_urls == []:
            raise ValueError(_NO_FILES)
        if self._only_evaluated():
            raise ValueError(
                "the embedded source brings its own text, so validation_urls does not fit; name your own train_urls too"
            )

    def _check_set_names(self) -> None:
        if set_keys := sorted((self.changed_fields & SetConfig.model_fields.keys()) - {"cache_dir"}):
            raise ValueError(f"{set_keys[0]} belongs to a single set; with configs, write it below configs.NAME")
        check_set_names(self.configs)

    def _check_stages(self) -> None:
        if self.train_weights is None:
            raise ValueError("configs needs train_weights: how much of training each set makes up")
        check_steps([step for step, _ in self._weight_stages()])
        for step, weights in self._weight_stages():
            self._check_names("train_weights", weights)
            try:
                cycle_counts(list(weights.values()))
            except ValueError as error:
                raise ValueError(f"train_weights from step {step} on: {error}") from None

    def _check_trained(self) -> None:
        named = {name for _, weights in self._weight_stages() for name in weights}
        for name, set_config in self.configs.items():
            if name not in named and not set_config._only_evaluated():
                raise ValueError(f"train_weights says nothing about {name}; give it 0 to evaluate on it only")
            if name in self.trained and set_config._only_evaluated():
                raise ValueError(f"train_weights trains on {name}, which has no train_urls; give it the weight 0")

    def _check_names(self, key: str, value: Mapping[str, object]) -> None:
        check_known_sets(key, value, self.sets)

    @model_validator(mode="after")
    def _check_audio(self) -> Self:
        shapes = {name: set_config.format.features_shape for name, set_config in self.sets.items()}
        if len(set(shapes.values())) > 1:
            described = ", ".join(f"{name}: {shape or 'text alone'}" for name, shape in shapes.items())
            raise ValueError(f"configs: all sets of a mixture need features of one shape, but they have {described}")
        if self.features_shape is not None and self.exclude:
            raise ValueError("exclude leaves out documents of text; of recordings, leave them out of data.train_urls")
        if self.exclude and all(set_config.gives_rows for set_config in self.sets.values()):
            raise ValueError("exclude leaves out documents, but a pipeline of Grain makes rows; leave them out there")
        if self.features_shape is not None and any(self.packing_of(name) == "best_fit" for name in self.sets):
            raise ValueError("packing has no effect beside format: {type: audio}, of which every row is a document")
        return self

    @model_validator(mode="after")
    def _check_pairs(self) -> Self:
        for name, set_config in self.sets.items():
            if not set_config.format.is_paired:
                continue
            kind = f"format: {set_config.format.type}"
            if "packing" in self.model_fields_set and self.packing_of(name) != "best_fit":
                raise ValueError(f"packing: {kind} is packed by best_fit, so that no answer is cut; remove packing")
            if self.exclude:
                raise ValueError(f"exclude leaves out documents, but {kind} has pairs; leave them out of the files")
            if self.value_for_set(self.num_validation_sequences, name) is not None:
                raise ValueError(f"num_validation_sequences might cut a pair of {kind}; name validation_urls instead")
        return self

    @model_validator(mode="after")
    def _choose_packing(self) -> Self:
        if "packing" not in self.model_fields_set:
            packing = choose_default_packing({name: set_config.format for name, set_config in self.sets.items()})
            # The configuration is already frozen.
            object.__setattr__(self, "packing", packing)
        for name, set_config in self.sets.items():
            too_long = getattr(set_config.format, "on_too_long", "split")
            changed = "on_too_long" in set_config.format.changed_fields and too_long != "split"
            if changed and self.packing_of(name) == "concat":
                raise ValueError(
                    f"format.on_too_long: {too_long} has no effect with packing: concat, which splits documents "
                    f"anywhere; write packing: best_fit"
                )
        return self

    def packing_of(self, name: str) -> Packing:
        """Returns the method by which the documents of one set fill rows."""
        return self.packing.get(name, "concat") if isinstance(self.packing, dict) else self.packing

    def too_long_of(self, name: str) -> TooLong:
        """Returns the treatment of the documents of one set that are longer than a row."""
        format = self.sets[name].format
        if isinstance(format, ConversationFormat) and self.packing_of(name) == "best_fit":
            return format.on_too_long
        return "split"

    @property
    def packed(self) -> bool:
        """True if the rows of every trained set come from a packing plan over all of its documents."""
        return all(self.packing_of(name) == "best_fit" for name in self.trained)

    @property
    def features_shape(self) -> tuple[int, int] | None:
        """Number of frames and channels of each row's audio features; None if there is only text."""
        return next(iter(self.sets.values())).format.features_shape

    def require_documents(self) -> None:
        """Checks that every set consists of documents.

        Raises:
            UserError: if a set consists of ready-made rows; names the set.
        """
        for name, set_config in self.sets.items():
            if set_config.gives_rows:
                label = f"the set {name} is" if self.configs else "the data are"
                raise UserError(
                    f"{label} rows that a pipeline of Grain makes (data.source.elements: rows): there are no documents "
                    "in them, and no text. Leave them out of data.configs, or let the pipeline give records"
                )

    @property
    def tokenizer_config(self) -> TokenizerConfig:
        return tokenizer_config(self.tokenizer)

    @property
    def shuffle_config(self) -> ShuffleConfig:
        if isinstance(self.shuffle, bool):
            return FullShuffle() if self.shuffle else NoShuffle()
        if isinstance(self.shuffle, int):
            return EraShuffle(first=self.shuffle, growth=1, largest=self.shuffle)
        return self.shuffle

    @property
    def sets(self) -> dict[str, SetConfig]:
        """The sets of the mixture. Without a mixture, this block itself is the set `train`."""
        return dict(self.configs) or {SINGLE_SET: self}

    @property
    def stages(self) -> list[tuple[int, tuple[int, ...]]]:
        """The first step and the shares of the sets to train on, for each change of the weights."""
        return [
            (step, cycle_counts([weights.get(name, 0) for name in self.trained]))
            for step, weights in self._weight_stages()
        ]

    @property
    def trained(self) -> list[str]:
        """Names of the sets that have a nonzero weight at any step."""
        weighted = {name for _, weights in self._weight_stages() for name, weight in weights.items() if weight}
        return [name for name in self.sets if name in weighted]

    def _weight_stages(self) -> list[Stage]:
        if not self.configs or self.train_weights is None:
            return [(0, {SINGLE_SET: 1.0})]
        return [(0, self.train_weights)] if isinstance(self.train_weights, dict) else self.train_weights

    def value_for_set(self, value: PerSet | None, name: str) -> int | None:
        """Returns the value that a setting, which may differ between sets, has for one set."""
        return value.get(name) if isinstance(value, dict) else value
