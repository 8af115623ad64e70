"""The `data` section of a configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, NonNegativeInt, PositiveInt, model_validator

from lm_trainer.core.config import Config, Ignored, LocalPath, LocalPathOrHubName
from lm_trainer.core.errors import UserError
from lm_trainer.core.result_keys import AffectsResults, Operational
from lm_trainer.data.cache.kvstore import CachePath
from lm_trainer.data.formats import AnyFormat, TextFormat
from lm_trainer.data.formats.usual_packing import Packing, usual_packing
from lm_trainer.data.mixture import check_known, check_set_names, check_steps, shares
from lm_trainer.data.shuffle import AnyShuffle, EraShuffle, FullShuffle, NoShuffle, ShuffleConfig
from lm_trainer.data.sources import AnySource, Shard, SourceConfig, Split, checked_shards, shards_of_urls
from lm_trainer.data.sources.embedded import Embedded
from lm_trainer.data.sources.fields import is_template, template_parts
from lm_trainer.data.sources.grain_pipeline import GrainPipeline
from lm_trainer.data.sources.hub import HuggingFace
from lm_trainer.data.sources.prebuilt import PrebuiltCache
from lm_trainer.data.tokenizer import AnyTokenizer, TokenizerConfig, tokenizer_config
from lm_trainer.data.tokenizer.fast import Backend


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


Urls = Annotated[list[str], BeforeValidator(_as_list, json_schema_input_type=str | list[str])]

Lists = Annotated[list[LocalPath], BeforeValidator(_as_list, json_schema_input_type=LocalPath | list[LocalPath])]

SINGLE_SET = "train"
"""The name of the only set of a configuration without `configs`."""

_HUB_KEYS = {"name", "revision", "stream", "splits"}
"""Keys of a set that belong to a data set of the Hugging Face hub."""

_LATER = "not available yet"

_NO_FILES = "train_urls is an empty list; name files, or leave the key out (or null) for the embedded corpus"


class SetConfig(Config):
    """One set of documents: its sources, and how they are read."""

    train_urls: AffectsResults[Urls | None] = None
    """Files to train on: paths or fsspec URLs; globs, `{1..128}` and `{a,b}` are expanded, `.gz`, `.bz2`, `.xz`,
    `.lzma`, `.zst`, `.zstd` and `.zip` are unpacked. `.jsonl` and `.parquet` files hold one document per line or row
    under `text_key`, `.txt`, `.md`, `.py` and the like hold one."""
    validation_urls: AffectsResults[Urls] = []
    """Files to evaluate on, like `train_urls`. If absent or empty, nothing is held out from `train_urls` and evaluation
    is left out."""
    id: AffectsResults[str | None] = None
    """A data set of the Hugging Face hub, such as `org/dataset`, in place of `train_urls`."""
    name: AffectsResults[str | None] = None
    """Configuration (subset) of the data set `id`; its default one, if absent."""
    revision: AffectsResults[str | None] = None
    """Branch, tag or commit of the data set `id`; `main`, if absent."""
    stream: Operational[bool] = True
    """Reads the data set `id` over the network while tokenising; `false` first keeps a copy of its files."""
    splits: AffectsResults[list[str]] = Field(default=["train", "validation"], min_length=1, max_length=2)
    """The splits of the data set `id`: that to train on and, if any, that to evaluate on."""
    source: AffectsResults[AnySource | None] = None
    """Reader of documents: by the names of the files, if absent; `embedded` where there are no `train_urls`."""
    text_key: AffectsResults[str] = "text"
    """The field of a record (a JSON line, a Parquet row) that holds the document; `a.b.c` for one inside of others."""
    text_template: AffectsResults[str | None] = None
    """A text of several fields, in place of `text_key`: `"{title}\\n\\n{body}"`; `{{` stands for a brace."""
    format: AffectsResults[AnyFormat] = TextFormat()
    """Format by which a row becomes tokens with a loss mask: plain text, or a block with a `type`."""
    cache_dir: Operational[CachePath | None] = None
    """Directory of tokenised text: `tokenizer/`, `train/` and `validation/` below it. If absent, a directory of its
    own below `cache/` for every combination of source and tokenizer. With a directory named here, another source or
    tokenizer is refused. May be a `gs://` or `s3://` URL."""

    tags: Operational[list[str]] = []
    """Groups that the set belongs to in evaluation, such as `code` or `web/forums`: besides the figures of every set,
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
            template_parts(self.text_template)
        except ValueError as error:
            raise ValueError(f"text_template: {error}") from None
        return self

    @model_validator(mode="after")
    def _check_source(self) -> Self:
        # In this order: each check takes for granted that those before it found nothing.
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
        """Tells if there is validation text and nothing else."""
        return not (self.source or self.id or self.train_urls) and bool(self.validation_urls)

    @property
    def source_config(self) -> SourceConfig | None:
        """The source in use; None = each file by the source that its name tells."""
        if self.id is not None:
            # Only keys that were changed: the source tells a split that was named from one by default.
            keys = ({"id"} | _HUB_KEYS) & self.changed_fields
            return HuggingFace(**{key: getattr(self, key) for key in keys})
        return self.source or (None if self.train_urls or self.validation_urls else Embedded())

    @property
    def names_text(self) -> bool:
        """False if nothing says where the text comes from, so that it is the embedded one."""
        return self.source is not None or not isinstance(self.source_config, Embedded)

    @property
    def gives_rows(self) -> bool:
        """True if the source gives rows to train on, and no text."""
        return isinstance(self.source, GrainPipeline) and self.source.elements == "rows"

    def shards(self, split: Split) -> list[Shard]:
        """Lists the shards of one split; [] where there is none.

        Raises:
            UserError: if files are missing.
        """
        urls = (self.train_urls or []) if split == "train" else self.validation_urls
        source, fields = self.source_config, self.format.fields()
        text_key = self.text_template or getattr(self.format, "text_key", None) or self.text_key
        if source is None:
            return shards_of_urls(split, urls, text_key, fields)
        if source.takes_urls and not urls:
            return []
        return checked_shards(source, split, urls, text_key, fields)


Weight = Annotated[float, Field(ge=0)]
Stage = tuple[NonNegativeInt, dict[str, Weight]]
PerSet = PositiveInt | dict[str, PositiveInt]


class DataConfig(SetConfig):
    """Data to train on. Without any key: the text that Python itself carries, so that nothing needs a download."""

    tokenizer: AffectsResults[LocalPathOrHubName | AnyTokenizer | None] = None
    """`bytes`, a directory with a `tokenizer.json`, a Hugging Face name, or a block with a `type`. If absent, a
    byte-level BPE of 4096 tokens is trained on the training text."""
    tokenizer_backend: Operational[Backend] = "auto"
    """Package that runs the tokenizer: `tokenizers`, or `fastokens`, which is several times as fast. `auto` takes
    `fastokens` for a new cache where it is installed and gives the same ids for a sample of every source."""
    shuffle: AffectsResults[bool | PositiveInt | AnyShuffle] = True
    """The order of training: `true` draws all rows at random, anew in every epoch, `false` in their order; a number
    draws at random within eras of so many rows, one era after the other; or a block with a `type`."""
    on_bad_row: AffectsResults[Literal["raise", "skip"]] = "raise"
    """Treatment of a row that is no text, such as broken UTF-8 or JSON: stop, or leave it out and count it."""
    max_bad_rows: AffectsResults[float] = Field(default=0.01, ge=0, le=1)
    """With `on_bad_row: skip`, the share of rows that may be bad before the build fails after all."""
    num_workers: Operational[int | None] = Field(default=None, ge=0)
    """Processes that tokenise; 0 is none but this one. If absent, by the size of the source and the number of cores."""

    packing: AffectsResults[Packing | dict[str, Packing]] = "concat"
    """Way in which documents fill rows; for all sets, or by name. `concat` lays them end to end and cuts the whole into
    rows, through documents. `best_fit` cuts only documents longer than a row, and leaves a little padding. In both,
    attention stays within a document, and held-out text fills rows in the same way. If absent, `best_fit` for sets
    whose `format` is `chat` or `supervised`, so that an answer has its prompt in view, and `concat` for others."""
    configs: AffectsResults[dict[str, SetConfig]] = {}
    """A mixture: several sets by name, each with files, cache and validation text of its own, in place of those of this
    block. A set without a `cache_dir` has its cache in `cache_dir/NAME`."""
    train_weights: AffectsResults[dict[str, Weight] | list[Stage] | None] = None
    """Share of training that each set of `configs` makes up, in rows: `{wiki: 0.7, code: 0.3}`; weights need not sum
    to 1, and a set of weight 0 is only evaluated. Or weights that change at given steps, counted from 0:
    `[[0, {wiki: 0.7, code: 0.3}], [10000, {wiki: 1}]]`. Proportions are exact to one row at any time between changes,
    as far as parts of 1/65536 can express them."""
    stop_strategy: AffectsResults[Literal["restart", "first_exhausted", "all_exhausted"]] = "restart"
    """Meaning of the end of a set: `restart` begins it anew, in another order, for as long as training goes on. With
    `first_exhausted` the data end when a set would begin anew, with `all_exhausted` when every set has come to its end
    once; a run of more steps is refused, and told how many there are."""
    epochs: AffectsResults[PerSet | None] = None
    """Passes after which a set counts as exhausted by `stop_strategy`; for all sets, or by name. 1, if absent."""
    max_train_batches: AffectsResults[PerSet | None] = None
    """Trains on the first rows of a set alone: as many as make so many batches of the first step's size; for all sets,
    or by name."""
    exclude: AffectsResults[Lists] = []
    """Lists of documents of the training text to leave out, as `lmt data dedup` and `lmt data overlap` write them: the
    run is that of text without these documents, and nothing is tokenised again."""
    num_validation_sequences: AffectsResults[PerSet | None] = None
    """Holds the last rows of the training text out, so many, as validation text; for all sets, or by name."""

    ignored_keys: ClassVar[Mapping[str, Ignored]] = {
        "mixture_block_size": Ignored("the proportions of a mixture hold after any number of rows, without blocks"),
        "permutation_type": Ignored("the permutation is always a Feistel network", ("feistel",)),
        "enforce_eos": Ignored("every document ends with the end-of-document token", (True,)),
        "ignore_token_id": Ignored("it is no token, and nothing else is masked by its id", (-100,)),
        "auto_build_caches": Ignored("caches that are missing are always built", (True,)),
        "cache_options": Ignored("caches need no tuning; num_workers sets the number of processes"),
        "vocab_size": Ignored("the tokenizer decides; of one that is trained here, data.tokenizer.vocab_size"),
    }
    refused_keys: ClassVar[Mapping[str, str]] = {
        **SetConfig.refused_keys,
        "experiment_budget": f"simulated epoching is {_LATER}",
        "target_budget": f"simulated epoching is {_LATER}",
        "permutation_type": "the permutation is always a Feistel network; remove the key",
        "enforce_eos": "every document is always ended by the end-of-document token; remove the key",
        "ignore_token_id": f"masking a token in the loss is {_LATER}",
        "auto_build_caches": "caches are always built when they are missing; remove the key",
        "shuffle_buffer_size": "use `shuffle` with a number: rows are drawn at random within eras of so many",
    }

    @model_validator(mode="after")
    def _check_mixture(self) -> Self:
        if self.configs:
            # In this order: each check takes for granted that those before it found nothing.
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
        if here := sorted((self.changed_fields & SetConfig.model_fields.keys()) - {"cache_dir"}):
            raise ValueError(f"{here[0]} belongs to a single set; with configs, write it below configs.NAME")
        check_set_names(self.configs)

    def _check_stages(self) -> None:
        if self.train_weights is None:
            raise ValueError("configs needs train_weights: how much of training each set makes up")
        check_steps([step for step, _ in self._weights()])
        for step, weights in self._weights():
            self._check_names("train_weights", weights)
            try:
                shares(list(weights.values()))
            except ValueError as error:
                raise ValueError(f"train_weights from step {step} on: {error}") from None

    def _check_trained(self) -> None:
        named = {name for _, weights in self._weights() for name in weights}
        for name, found in self.configs.items():
            if name not in named and not found._only_evaluated():
                raise ValueError(f"train_weights says nothing about {name}; give it 0 to evaluate on it only")
            if name in self.trained and found._only_evaluated():
                raise ValueError(f"train_weights trains on {name}, which has no train_urls; give it the weight 0")

    def _check_names(self, key: str, value: Mapping[str, Any]) -> None:
        check_known(key, value, self.sets)

    @model_validator(mode="after")
    def _check_audio(self) -> Self:
        shapes = {name: found.format.features_shape for name, found in self.sets.items()}
        if len(set(shapes.values())) > 1:
            described = ", ".join(f"{name}: {shape or 'text alone'}" for name, shape in shapes.items())
            raise ValueError(f"configs: all sets of a mixture need features of one shape, but they have {described}")
        if self.features_shape is not None and self.exclude:
            raise ValueError("exclude leaves out documents of text; of recordings, leave them out of data.train_urls")
        if self.exclude and all(found.gives_rows for found in self.sets.values()):
            raise ValueError("exclude leaves out documents, but a pipeline of Grain makes rows; leave them out there")
        if self.features_shape is not None and any(self.packing_of(name) == "best_fit" for name in self.sets):
            raise ValueError("packing has no effect beside format: {type: audio}, of which every row is a document")
        return self

    @model_validator(mode="after")
    def _choose_packing(self) -> Self:
        if "packing" not in self.model_fields_set:
            packing = usual_packing({name: found.format for name, found in self.sets.items()})
            # The configuration is frozen from here on.
            object.__setattr__(self, "packing", packing)
        return self

    def packing_of(self, name: str) -> Packing:
        """Returns the way in which the documents of one set fill rows."""
        return self.packing.get(name, "concat") if isinstance(self.packing, dict) else self.packing

    @property
    def packed(self) -> bool:
        """True if the rows of every set that is trained on come from a plan of all of its documents."""
        return all(self.packing_of(name) == "best_fit" for name in self.trained)

    @property
    def features_shape(self) -> tuple[int, int] | None:
        """Frames and channels of what a model hears in each row; None: rows are text alone."""
        return next(iter(self.sets.values())).format.features_shape

    def need_documents(self) -> None:
        """Makes sure that every set is documents.

        Raises:
            UserError: naming one that is rows.
        """
        for name, found in self.sets.items():
            if found.gives_rows:
                which = f"the set {name} is" if self.configs else "the data are"
                raise UserError(
                    f"{which} rows that a pipeline of Grain makes (data.source.elements: rows): there are no documents "
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
        """The sets of the mixture; without one, this block itself as `train`."""
        return dict(self.configs) or {SINGLE_SET: self}

    @property
    def stages(self) -> list[tuple[int, tuple[int, ...]]]:
        """(First step, shares of the sets that are trained on) for each change of the weights."""
        return [(step, shares([weights.get(name, 0) for name in self.trained])) for step, weights in self._weights()]

    @property
    def trained(self) -> list[str]:
        """Names of the sets that have a weight at some step."""
        weighted = {name for _, weights in self._weights() for name, weight in weights.items() if weight}
        return [name for name in self.sets if name in weighted]

    def _weights(self) -> list[Stage]:
        if not self.configs or self.train_weights is None:
            return [(0, {SINGLE_SET: 1.0})]
        return [(0, self.train_weights)] if isinstance(self.train_weights, dict) else self.train_weights

    def of_set(self, value: PerSet | None, name: str) -> int | None:
        """Returns the value for one set of a setting that may differ by set."""
        return value.get(name) if isinstance(value, dict) else value
