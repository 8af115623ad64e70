"""The configuration of a ladder: its sizes, its recipe, its data, and all other settings of its runs."""

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

_KEYS_SET_BY_SIZE = (
    *("id", "seed", "num_train_steps", "train_batch_size", "per_device_parallelism", "steps_per_eval", "log_dir"),
    "max_devices",
)
"""Keys of `trainer` that the ladder sets itself, from the size."""
_CHECKPOINT_KEYS_SET_BY_SIZE = ("base_path", "keep", "append_run_id_to_base_path")
"""Keys of `trainer.checkpointer` that the ladder sets itself."""


class InstanceSource(SetConfig):
    """One data source of the ladder."""

    label: str | None = None
    """Name in metrics; required with several sources."""
    weight: PositiveFloat = 1.0
    """Relative sampling weight during training."""


class LadderConfig(Config):
    """Runs of several sizes with one recipe, to predict the result of the largest."""

    refused_keys: ClassVar[Mapping[str, str]] = {
        "backend": "JAX brings its own collectives, so there is none to choose; remove the key",
    }

    name: str = Field(pattern=r"^[\w][\w.-]*$")
    """Name of the ladder."""
    dir: LocalPath
    """Directory of the ladder's runs, one subdirectory per run; other ladders need other directories."""
    project: str | None = None
    """Project name in trackers with projects; by default the name of the ladder."""
    sizes: tuple[str, ...] = Field(min_length=1)
    """Sizes to run, by their names in `model_configurator`."""
    max_devices: PositiveInt = 1
    """Maximum number of devices of a run. The batch and all numbers are the same for any number of devices."""
    device_type: str = "cpu"
    """Kind of these devices in JAX's naming (`NVIDIA H100 80GB HBM3`), for time and cost in `plan`."""
    model_configurator: AnyModelConfigurator
    run_configurator: AnyRunConfigurator
    data_loader: DataConfig = DataConfig()
    """Data pipeline from documents to rows: shuffle, packing, cache and so on."""
    instance_sources: tuple[InstanceSource, ...] = ()
    """Training documents; by default the text that comes with Python."""
    sequence_length: PositiveInt = 8192
    """Tokens per row."""
    tokenizer: LocalPathOrHubName | AnyTokenizer | None = None
    """Same as `data.tokenizer` of a run."""
    seed: Seed = 42
    """Seed for initial weights, data order and dropout of every run."""
    num_seeds: PositiveInt = 1
    """Number of runs of each size, with seeds `seed`, `seed` + 1 and so on."""
    eval_harness: HarnessConfig | None = None
    """Tasks of lm-evaluation-harness to evaluate at the checkpoints of every run. `lmt ladder fit --task
    lm_eval/TASK/METRIC` predicts them from the loss."""
    trainer: TrainerConfig = TrainerConfig()
    """All other settings of the runs: precision, trackers, sharding; keys derived from the size cannot be set."""

    @field_validator("trainer")
    @classmethod
    def _reject_keys_set_by_size(cls, value: TrainerConfig) -> TrainerConfig:
        rejected = [key for key in _KEYS_SET_BY_SIZE if key in value.changed_fields]
        rejected += [
            f"checkpointer.{key}" for key in _CHECKPOINT_KEYS_SET_BY_SIZE if key in value.checkpointer.changed_fields
        ]
        if rejected:
            raise ValueError(f"{rejected[0]}: the ladder decides it; remove the key")
        if value.max_eval_batches is not None:
            raise ValueError(
                "max_eval_batches: batches grow with the size, so that each size would be measured on other text; "
                "remove the key, or name less text for validation"
            )
        return value

    @field_validator("data_loader")
    @classmethod
    def _reject_source_keys(cls, value: DataConfig) -> DataConfig:
        # A cache belongs to the making of rows as much as to a source, so it may be set in either section.
        source_keys = (SetConfig.model_fields.keys() - {"cache_dir"}) | {"configs", "train_weights", "tokenizer"}
        if rejected := sorted(source_keys & value.changed_fields):
            section = "tokenizer" if rejected[0] == "tokenizer" else "instance_sources"
            raise ValueError(f"{rejected[0]} belongs to {section} of the ladder")
        return value

    @model_validator(mode="after")
    def _check_sizes_exist(self) -> LadderConfig:
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
        # Built only for its checks, to report mistakes in the data section with all others of the file.
        self.data_config()
        return self

    @property
    def seeds(self) -> range:
        """Seeds of the runs of each size."""
        return range(self.seed, self.seed + self.num_seeds)

    def data_config(self) -> DataConfig:
        """The `data` section of every run."""
        # Dump and parse: the result then knows which keys were set, and defaults stay defaults.
        data = self.data_loader.model_dump(mode="json", include=self.data_loader.changed_fields)
        tokenizer = self.tokenizer if isinstance(self.tokenizer, str | None) else self.tokenizer.model_dump(mode="json")
        return DataConfig.model_validate({**data, "tokenizer": tokenizer, **self._sources_section()})

    def _sources_section(self) -> dict[str, Any]:
        def to_plain(source: InstanceSource) -> dict[str, Any]:
            return source.model_dump(mode="json", include=source.changed_fields - {"label", "weight"})

        # A single source is the data section itself, without the names and weights of a mixture.
        if len(self.instance_sources) <= 1:
            return to_plain(self.instance_sources[0]) if self.instance_sources else {}
        return {
            "configs": {str(source.label): to_plain(source) for source in self.instance_sources},
            "train_weights": {str(source.label): source.weight for source in self.instance_sources},
        }
