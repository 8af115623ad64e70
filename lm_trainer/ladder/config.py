"""The configuration of a ladder: its sizes, its recipe, its data, and the rest of every run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import Field, PositiveFloat, PositiveInt, field_validator, model_validator

from lm_trainer.core.config import Config, LocalPath, LocalPathOrHubName, Seed
from lm_trainer.core.errors import UserError
from lm_trainer.data import DataConfig
from lm_trainer.data.config import SetConfig
from lm_trainer.data.tokenizer import AnyTokenizer
from lm_trainer.harness.config import HarnessConfig
from lm_trainer.ladder.models import AnyModelConfigurator
from lm_trainer.ladder.recipe import AnyRunConfigurator
from lm_trainer.run.config.trainer_config import TrainerConfig

_DECIDED = (
    *("id", "seed", "num_train_steps", "train_batch_size", "per_device_parallelism", "steps_per_eval", "log_dir"),
    "max_devices",
)
"""Keys of `trainer` that follow from the size."""
_DECIDED_OF_CHECKPOINTS = ("base_path", "keep", "append_run_id_to_base_path")
"""Keys of `trainer.checkpointer` that do."""


class InstanceSource(SetConfig):
    """One set of documents of the ladder."""

    label: str | None = None
    """Name in metrics; needed for several sources."""
    weight: PositiveFloat = 1.0
    """Share of training, relative to the weights of the others."""


class LadderConfig(Config):
    """Runs of several sizes with one recipe, so that what the largest will do can be predicted."""

    refused_keys: ClassVar[Mapping[str, str]] = {
        "backend": "JAX brings its own collectives, so there is none to choose; remove the key",
    }

    name: str = Field(pattern=r"^[\w][\w.-]*$")
    """Name of the ladder."""
    dir: LocalPath
    """Directory of its runs, with one directory for each size; of this ladder alone."""
    project: str | None = None
    """The project in trackers that have one; by default the name."""
    sizes: tuple[str, ...] = Field(min_length=1)
    """Sizes to run, by their names in `model_configurator`."""
    max_devices: PositiveInt = 1
    """Devices that a run may have. The batch and all numbers are the same on any number of them."""
    device_type: str = "cpu"
    """Kind of these devices, as JAX names them (`NVIDIA H100 80GB HBM3`), for time and cost in `plan`."""
    model_configurator: AnyModelConfigurator
    run_configurator: AnyRunConfigurator
    data_loader: DataConfig = DataConfig()
    """Way from documents to rows: shuffle, packing, cache and the like."""
    instance_sources: tuple[InstanceSource, ...] = ()
    """Documents to train on; by default the text that Python itself carries."""
    sequence_length: PositiveInt = 8192
    """Tokens in a row."""
    tokenizer: LocalPathOrHubName | AnyTokenizer | None = None
    """As `data.tokenizer` of a run."""
    seed: Seed = 42
    """Decides initial weights, data order and dropout of every run."""
    num_seeds: PositiveInt = 1
    """Runs of each size: with `seed`, `seed` + 1 and so on."""
    eval_harness: HarnessConfig | None = None
    """Tasks of lm-evaluation-harness that every run is asked at its checkpoints: `lmt ladder fit --task
    lm_eval/TASK/METRIC` goes on from the loss to them."""
    trainer: TrainerConfig = TrainerConfig()
    """The rest of every run: precision, trackers, sharding; keys that follow from the size cannot be set."""

    @field_validator("trainer")
    @classmethod
    def _leaves_the_size_alone(cls, value: TrainerConfig) -> TrainerConfig:
        found = [key for key in _DECIDED if key in value.changed_fields]
        found += [f"checkpointer.{key}" for key in _DECIDED_OF_CHECKPOINTS if key in value.checkpointer.changed_fields]
        if found:
            raise ValueError(f"{found[0]}: the ladder decides it; remove the key")
        if value.max_eval_batches is not None:
            raise ValueError(
                "max_eval_batches: batches grow with the size, so that each size would be measured on other text; "
                "remove the key, or name less text for validation"
            )
        return value

    @field_validator("data_loader")
    @classmethod
    def _leaves_the_sources_alone(cls, value: DataConfig) -> DataConfig:
        # A cache belongs to the way rows are made as much as to a source, and may stand in either place.
        own = (SetConfig.model_fields.keys() - {"cache_dir"}) | {"configs", "train_weights", "tokenizer"}
        if found := sorted(own & value.changed_fields):
            where = "tokenizer" if found[0] == "tokenizer" else "instance_sources"
            raise ValueError(f"{found[0]} belongs to {where} of the ladder")
        return value

    @model_validator(mode="after")
    def _sizes_exist(self) -> LadderConfig:
        for size in self.sizes:
            try:
                self.model_configurator.configure_model(
                    size_spec=size,
                    sequence_length=self.sequence_length,
                    tokenizer=self.tokenizer,
                    device_type=self.device_type,
                )
            except UserError as error:
                raise ValueError(f"sizes: {error}") from None
        if len(set(self.sizes)) < len(self.sizes):
            raise ValueError(f"sizes: {', '.join(self.sizes)} names one twice")
        labels = [source.label for source in self.instance_sources]
        if len(labels) > 1 and (None in labels or len(set(labels)) < len(labels)):
            raise ValueError("instance_sources: give each of several sources a label of its own")
        # Built for its checks alone: a mistake in the data is then found with the others of the file.
        self.data_config()
        return self

    @property
    def seeds(self) -> range:
        """Seeds of the runs of each size."""
        return range(self.seed, self.seed + self.num_seeds)

    def data_config(self) -> DataConfig:
        """The `data` section of every run."""
        # Written out and read again, so that the result knows which keys were set, and defaults stay defaults.
        data = self.data_loader.model_dump(mode="json", include=self.data_loader.changed_fields)
        tokenizer = self.tokenizer if isinstance(self.tokenizer, str | None) else self.tokenizer.model_dump(mode="json")
        return DataConfig.model_validate({**data, "tokenizer": tokenizer, **self._sources()})

    def _sources(self) -> dict[str, Any]:
        def plain(source: InstanceSource) -> dict[str, Any]:
            return source.model_dump(mode="json", include=source.changed_fields - {"label", "weight"})

        # One source alone is the data section itself, without the names and weights of a mixture.
        if len(self.instance_sources) <= 1:
            return plain(self.instance_sources[0]) if self.instance_sources else {}
        return {
            "configs": {str(source.label): plain(source) for source in self.instance_sources},
            "train_weights": {str(source.label): source.weight for source in self.instance_sources},
        }
