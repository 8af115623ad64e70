"""`ModelLadder`: a family of runs, from small to large, that are alike but for their size."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

from pydantic import Field, PositiveFloat, PositiveInt, field_validator, model_validator

from lm_trainer.core.config import Config, Seed
from lm_trainer.core.errors import UserError
from lm_trainer.data import DataConfig
from lm_trainer.data.config import SetConfig
from lm_trainer.data.tokenizer import AnyTokenizer, tokenizer_config
from lm_trainer.data.tokenizer.hf import Pretrained, load_pretrained
from lm_trainer.ladder.models import AnyModelConfigurator
from lm_trainer.ladder.recipe import AnyRunConfigurator
from lm_trainer.models.base import DecoderConfig
from lm_trainer.profile.flops import parameter_count
from lm_trainer.run.config import RunConfig
from lm_trainer.run.trainer_config import TrainerConfig
from lm_trainer.trackers.wandb import WandbConfig

if TYPE_CHECKING:
    import pandas

    from lm_trainer.ladder.checkpoints import RunCheckpointInfo
    from lm_trainer.ladder.plan import RungPlan
    from lm_trainer.run.train import Summary
    from lm_trainer.trackers import Progress

_NEAR = 0.1
_DECIDED = (
    *("id", "seed", "num_train_steps", "train_batch_size", "per_device_parallelism", "steps_per_eval", "log_dir"),
    "max_devices",
)
_DECIDED_OF_CHECKPOINTS = ("base_path", "keep", "append_run_id_to_base_path")


class Layout(NamedTuple):
    """The global batch of a run and how it is cut."""

    batch_size: int
    """Tokens."""
    microbatch: int
    """Tokens that a device computes at once."""
    shards: int
    """The most devices that can share it."""
    devices: int
    """Those that do."""


class InstanceSource(SetConfig):
    """One set of documents of the ladder."""

    label: str | None = None
    """What it is called in metrics; needed where there are several."""
    weight: PositiveFloat = 1.0
    """How much of training it makes up, beside the others."""


class ModelLadder(Config):
    """Runs of several sizes with one recipe, so that what the largest will do can be predicted."""

    refused_keys: ClassVar[Mapping[str, str]] = {
        "backend": "JAX brings its own collectives, so there is none to choose; remove the key",
    }

    name: str = Field(pattern=r"^[\w][\w.-]*$")
    """What the ladder is called."""
    dir: str
    """Where its runs lie, one directory for each size; of this ladder alone."""
    project: str | None = None
    """The project in trackers that have one; by default the name."""
    sizes: tuple[str, ...] = Field(min_length=1)
    """Which sizes there are, by their names in `model_configurator`."""
    max_devices: PositiveInt = 1
    """Devices that a run may have. The batch and all numbers are the same on any number of them."""
    device_type: str = "cpu"
    """What they are, as JAX names them (`NVIDIA H100 80GB HBM3`), for time and cost in `plan`."""
    model_configurator: AnyModelConfigurator
    run_configurator: AnyRunConfigurator
    data_loader: DataConfig = DataConfig()
    """How documents become rows: shuffle, packing, cache and the like."""
    instance_sources: tuple[InstanceSource, ...] = ()
    """What to train on; by default the text that Python itself carries."""
    sequence_length: PositiveInt = 8192
    """Tokens in a row."""
    tokenizer: str | AnyTokenizer | None = None
    """As `data.tokenizer` of a run."""
    seed: Seed = 42
    """Decides initial weights, data order and dropout of every run."""
    num_seeds: PositiveInt = 1
    """Runs of each size: with `seed`, `seed` + 1 and so on."""
    trainer: TrainerConfig = TrainerConfig()
    """The rest of every run: precision, trackers, sharding; what follows from the size cannot be set."""

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
        own = (SetConfig.model_fields.keys() - {"cache_dir"}) | {"configs", "train_weights", "tokenizer"}
        if found := sorted(own & value.changed_fields):
            where = "tokenizer" if found[0] == "tokenizer" else "instance_sources"
            raise ValueError(f"{found[0]} belongs to {where} of the ladder")
        return value

    @model_validator(mode="after")
    def _sizes_exist(self) -> ModelLadder:
        for size in self.sizes:
            try:
                self.model_configurator.check(size)
            except UserError as error:
                raise ValueError(f"sizes: {error}") from None
        if len(set(self.sizes)) < len(self.sizes):
            raise ValueError(f"sizes: {', '.join(self.sizes)} names one twice")
        labels = [source.label for source in self.instance_sources]
        if len(labels) > 1 and (None in labels or len(set(labels)) < len(labels)):
            raise ValueError("instance_sources: give each of several sources a label of its own")
        self.data_config()
        return self

    @property
    def seeds(self) -> range:
        """Of the runs of each size."""
        return range(self.seed, self.seed + self.num_seeds)

    def data_config(self) -> DataConfig:
        """The `data` section of every run."""
        data = self.data_loader.model_dump(mode="json", include=self.data_loader.changed_fields)
        tokenizer = self.tokenizer if isinstance(self.tokenizer, str | None) else self.tokenizer.model_dump(mode="json")
        return DataConfig.model_validate({**data, "tokenizer": tokenizer, **self._sources()})

    def _sources(self) -> dict[str, Any]:
        def plain(source: InstanceSource) -> dict[str, Any]:
            return source.model_dump(mode="json", include=source.changed_fields - {"label", "weight"})

        if len(self.instance_sources) <= 1:
            return plain(self.instance_sources[0]) if self.instance_sources else {}
        return {
            "configs": {str(source.label): plain(source) for source in self.instance_sources},
            "train_weights": {str(source.label): source.weight for source in self.instance_sources},
        }

    def vocab_size(self) -> int:
        """Rows of the token embedding.

        Raises:
            UserError: when the tokenizer cannot be reached to ask it.
        """
        config: Any = tokenizer_config(self.tokenizer)
        return _vocab_size(config)

    def get_model_config(self, size_spec: str) -> DecoderConfig:
        """The model of a size."""
        return self.model_configurator.configure_model(size_spec=size_spec, sequence_length=self.sequence_length)

    def get_num_params(self, size_spec: str, vocab_size: int | None = None) -> int:
        """Parameters without the token embedding; an output layer of its own counts, as in OLMo-core."""
        vocab_size = vocab_size or self.vocab_size()
        spec = self.get_model_config(size_spec).spec(vocab_size)
        return parameter_count(spec) - vocab_size * spec.hidden_dim

    def get_num_devices(self, size_spec: str) -> int:
        """Devices that a run uses: a power of two, as many as share its batch and are there."""
        return self.layout(size_spec).devices

    def get_batch_size(self, size_spec: str) -> int:
        """Tokens in a global batch; it does not depend on devices."""
        return self.layout(size_spec).batch_size

    def layout(self, size_spec: str, *, vocab_size: int | None = None, compat: Literal["olmo"] | None = None) -> Layout:
        """The batch and how it is cut: the most equal parts, up to `trainer.elastic_shards`, with which it is within a
        tenth of the target. With `compat="olmo"` it is what OLMo-core would make of this hardware.

        Raises:
            UserError: where OLMo-core knows nothing about the hardware.
        """
        target = self.run_configurator.configure_target_batch_size(self.get_num_params(size_spec, vocab_size))
        if compat == "olmo":
            return self._olmo_layout(size_spec, target)
        microbatch = self.model_configurator.rank_microbatch_size
        shards = 1 << (self.trainer.elastic_shards.bit_length() - 1)
        while True:
            unit = shards * (microbatch or self.sequence_length)
            batch = max(1, round(target / unit)) * unit
            if shards == 1 or abs(batch - target) <= _NEAR * target:
                break
            shards //= 2
        devices = min(1 << (self.max_devices.bit_length() - 1), shards)
        return Layout(batch, microbatch or batch // shards, shards, devices)

    def _olmo_layout(self, size_spec: str, target: int) -> Layout:
        """As `ModelLadder` of OLMo-core has it, whose batch depends on the devices."""
        configurator = self.model_configurator
        rank = configurator.configure_rank_microbatch_size(
            size_spec=size_spec, sequence_length=self.sequence_length, device_type=self.device_type
        )
        least = configurator.configure_minimal_device_mesh_spec(size_spec=size_spec)
        if self.max_devices < least.world_size:
            raise UserError(f"OLMo-core needs at least {least.world_size} devices for {size_spec}; raise max_devices")
        rank = min(rank, target)
        first = rank * (least.dp_world_size or least.world_size)
        batch = max(1, round(target / first)) * first
        copies = min(self.max_devices // least.world_size, batch // first)
        unit = first * copies
        devices = least.world_size * copies
        return Layout(max(1, round(batch / unit)) * unit, rank, devices, devices)

    def run_name(self, size_spec: str, seed: int | None = None) -> str:
        """Of the run of a size: the size, and its seed where that is not the first."""
        self.model_configurator.check(size_spec)
        return size_spec if seed in (None, self.seed) else f"{size_spec}-seed{seed}"

    def get_save_folder(self, size_spec: str, seed: int | None = None) -> str:
        """Where the run of a size lies."""
        return str(Path(self.dir) / self.run_name(size_spec, seed))

    def run_config(self, size_spec: str, seed: int | None = None, vocab_size: int | None = None) -> RunConfig:
        """The run of a size: an ordinary one, that `lmt train` could run as well."""
        num_params = self.get_num_params(size_spec, vocab_size)
        batch, _, shards, devices = self.layout(size_spec, vocab_size=vocab_size)
        recipe, folder = self.run_configurator, Path(self.get_save_folder(size_spec, seed))
        steps = [tokens // batch for tokens, _ in recipe.configure_checkpoint_intervals(num_params, batch)]
        rank = self.model_configurator.rank_microbatch_size
        checkpointer = {
            **self.trainer.checkpointer.model_dump(mode="json", include=self.trainer.checkpointer.changed_fields),
            "base_path": str(folder / "checkpoints"),
            "append_run_id_to_base_path": False,
            "keep": [{"every": step, "until": step} for step in dict.fromkeys(steps)],
        }
        trainer = {
            **self.trainer.model_dump(mode="json", include=self.trainer.changed_fields),
            "id": folder.name,
            "log_dir": str(folder.parent),
            "seed": self.seed if seed is None else seed,
            "num_train_steps": steps[-1],
            "train_batch_size": batch // self.sequence_length,
            "elastic_shards": shards,
            "max_devices": devices,
            "per_device_parallelism": -1 if rank is None else rank // self.sequence_length,
            "steps_per_eval": list(dict.fromkeys(steps)),
            "checkpointer": checkpointer,
            "tracker": [self._tracker(tracker).model_dump(mode="json") for tracker in self.trainer.trackers],
        }
        return RunConfig.model_validate(
            {
                "model": self.get_model_config(size_spec).model_dump(mode="json"),
                "data": self.data_config().model_dump(mode="json"),
                "trainer": trainer,
                "optimizer": recipe.configure_optimizer(num_params, batch).model_dump(mode="json"),
            }
        )

    def _tracker(self, tracker: Any) -> Any:
        if not isinstance(tracker, WandbConfig):
            return tracker
        given = tracker.changed_fields
        project = {} if "project" in given else {"project": self.project or self.name}
        return tracker.model_copy(update={**project, **({} if "group" in given else {"group": self.name})})

    def dry_run(self, size_spec: str, show_plot: bool = True, save_plot: Path | None = None) -> RungPlan:
        """Prints what a run would be, and draws its learning rate."""
        from rich.console import Console

        from lm_trainer.ladder.plan import plan_rung

        plan = plan_rung(self, size_spec)
        Console().print("\n".join(plan.lines()), highlight=False, markup=False)
        self.run_configurator.plot_lr_schedule(plan.num_params, plan.batch_size, show=show_plot, save_path=save_plot)
        return plan

    def run(self, size_spec: str, *, seed: int | None = None, progress: Progress | None = None) -> Summary:
        """Trains a size, or goes on where its run stopped; raises as `lm_trainer.run.train.train`."""
        from lm_trainer.ladder.running import run_rung

        return run_rung(self, size_spec, seed=seed, progress=progress)

    def run_benchmark(self, size_spec: str) -> dict[str, Any]:
        """Times the training step of a size, as `lmt bench mfu`; writes nothing."""
        from lm_trainer.ladder.running import benchmark_rung

        return benchmark_rung(self, size_spec)

    def get_checkpoints(
        self,
        size_spec: str,
        *,
        seed: int | None = None,
        discover_all: bool = False,
        alternative_dirs: Sequence[str | Path] = (),
    ) -> list[RunCheckpointInfo]:
        """The checkpoints of a size, in order, whether they exist or not; see `checkpoints.find`."""
        from lm_trainer.ladder.checkpoints import find

        return find(self, size_spec, seed=seed, discover_all=discover_all, alternative_dirs=alternative_dirs)

    def get_metrics(
        self,
        size_spec: str,
        prefix: str | None = None,
        *,
        discover_all: bool = False,
        alternative_dirs: Sequence[str | Path] = (),
    ) -> pandas.DataFrame | None:
        """One row for each checkpoint of a size (of all its seeds) that has metrics; None where there is none.

        Raises:
            UserError: without pandas, and when the directory holds metrics of another ladder.
        """
        from lm_trainer.ladder.metrics import frame, rows_of

        found = rows_of(self, size_spec, prefix, discover_all=discover_all, alternative_dirs=alternative_dirs)
        return frame(found) if found else None


@functools.cache
def _vocab_size(tokenizer: Any) -> int:
    if isinstance(tokenizer, Pretrained):
        return load_pretrained(tokenizer).vocab_size
    return tokenizer.vocab_size
