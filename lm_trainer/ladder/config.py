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
from lm_trainer.run.config.parametrization import AnyParametrization, StandardConfig
from lm_trainer.run.config.trainer_config import TrainerConfig

_KEYS_SET_BY_SIZE = (
    *("id", "seed", "num_train_steps", "train_batch_size", "per_device_parallelism", "steps_per_eval", "log_dir"),
    "max_devices",
)
"""Keys of `trainer` that the ladder sets itself, depending on the size."""
_CHECKPOINT_KEYS_SET_BY_SIZE = ("base_path", "keep", "append_run_id_to_base_path")
"""Keys of `trainer.checkpointer` that the ladder sets itself."""


class InstanceSource(SetConfig):
    """One source of training data of the ladder."""

    label: str | None = None
    """Name of the source in metrics; required if there are several sources."""
    weight: PositiveFloat = 1.0
    """Relative sampling weight during training."""


class LadderConfig(Config):
    """Runs of several model sizes with one recipe, to predict the result of larger sizes."""

    refused_keys: ClassVar[Mapping[str, str]] = {
        "backend": "JAX brings its own collectives, so there is none to choose; remove the key",
    }

    name: str = Field(pattern=r"^[\w][\w.-]*$")
    """Name of the ladder."""
    dir: LocalPath
    """Directory of the ladder's runs, with one subdirectory per run. Each ladder needs its own directory."""
    project: str | None = None
    """Project name in trackers with projects; by default the name of the ladder."""
    sizes: tuple[str, ...] = Field(min_length=1)
    """Names of the sizes to run, as in `model_configurator`."""
    max_devices: PositiveInt = 1
    """Maximum number of devices per run. The batch and all results are the same for any number of devices."""
    device_type: str = "cpu"
    """Kind of device as JAX names it (`NVIDIA H100 80GB HBM3`), for time and cost in `plan`."""
    model_configurator: AnyModelConfigurator
    run_configurator: AnyRunConfigurator
    parametrization: AnyParametrization = StandardConfig()
    """Same as `parametrization` of a run. Under `mup` and `completep`, all sizes have the learning rate of the base."""
    data_loader: DataConfig = DataConfig()
    """Settings of the data pipeline from documents to rows, such as shuffling, packing and cache."""
    instance_sources: tuple[InstanceSource, ...] = ()
    """Sources of training documents; by default the text that is included with Python."""
    sequence_length: PositiveInt = 8192
    """Number of tokens per row."""
    tokenizer: LocalPathOrHubName | AnyTokenizer | None = None
    """Same as `data.tokenizer` of a run."""
    seed: Seed = 42
    """Seed of the first run of each size, for initial weights, data order and dropout."""
    num_seeds: PositiveInt = 1
    """Number of runs of each size. Their seeds are `seed`, `seed` + 1 and so on."""
    eval_harness: HarnessConfig | None = None
    """Tasks of lm-evaluation-harness that are evaluated at the checkpoints of every run. `lmt ladder fit --task
    lm_eval/TASK/METRIC` predicts them from the loss."""
    trainer: TrainerConfig = TrainerConfig()
    """All other settings of the runs, such as precision and trackers. Keys that depend on the size cannot be set."""

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
        # A cache concerns both how rows are made and a source, so it may be set in either section.
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
        # Built only for its checks, so that errors in the data section are reported together with all others in the
        # file.
        self.data_config()
        return self

    @property
    def seeds(self) -> range:
        """Seeds of the runs of one size."""
        return range(self.seed, self.seed + self.num_seeds)

    def data_config(self) -> DataConfig:
        """The `data` section of every run."""
        # Dumped and parsed, so that the result knows which keys were set, and defaults stay defaults.
        data = self.data_loader.model_dump(mode="json", include=self.data_loader.changed_fields)
        tokenizer = self.tokenizer if isinstance(self.tokenizer, str | None) else self.tokenizer.model_dump(mode="json")
        return DataConfig.model_validate({**data, "tokenizer": tokenizer, **self._sources_section()})

    def _sources_section(self) -> dict[str, Any]:
        def to_plain(source: InstanceSource) -> dict[str, Any]:
            return source.model_dump(mode="json", include=source.changed_fields - {"label", "weight"})

        # A single source becomes the data section itself, without the name and weight of a mixture component.
        if len(self.instance_sources) <= 1:
            return to_plain(self.instance_sources[0]) if self.instance_sources else {}
        return {
            "configs": {str(source.label): to_plain(source) for source in self.instance_sources},
            "train_weights": {str(source.label): source.weight for source in self.instance_sources},
        }
