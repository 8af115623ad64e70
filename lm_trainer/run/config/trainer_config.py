"""The `trainer:` section: how long, how large, on which devices, and what is recorded."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt, field_validator, model_validator

from lm_trainer.checkpoint.policy import CheckpointerConfig
from lm_trainer.core.config import Config, Name, PlacePath, Seed, Takes
from lm_trainer.core.errors import UserError
from lm_trainer.core.piecewise import BatchSchedule, BatchSizes, Piecewise, piecewise_int
from lm_trainer.core.precision import Policy, PrecisionPolicy
from lm_trainer.core.result_keys import AffectsResults, Operational, result_part
from lm_trainer.core.runtime import COMPILATION_CACHES, check_settings
from lm_trainer.data.tokenize.ray_config import RayConfig
from lm_trainer.health.alerts import AlertsConfig
from lm_trainer.health.watchdog import WatchdogConfig
from lm_trainer.nn.quantize import AnyQuantization
from lm_trainer.optim.averaging import AnyAveraging
from lm_trainer.parallel.distributed import DistributedConfig
from lm_trainer.parallel.mesh import (
    BATCH_AXES,
    MESH_AXES,
    RULE_AXES,
    AxisRules,
    MeshShape,
    batch_shards,
    check_logical_axis,
    parse_rules,
)
from lm_trainer.run.config.earlier_runs import in_present_spelling
from lm_trainer.run.config.result_parts import over_model_axis, result_settings
from lm_trainer.run.config.run_id import run_id_problem
from lm_trainer.run.config.step_plan import StepPlan
from lm_trainer.step.dispatch.microbatch_plan import MicrobatchPlan
from lm_trainer.step.updates.watch import WatchConfig
from lm_trainer.trackers import AnyTracker, TensorboardConfig

if TYPE_CHECKING:
    from jax.sharding import Mesh

Resources = dict[Name, str | tuple[str, ...]]
JsonValue = str | int | float | bool | None

_CUT_BY = {"layers": "pipeline", "experts": "expert"}
"""The logical axes of parameters that a mesh axis cuts without a rule."""
_RUN_DIRECTORY = (
    "The run directory lies on this machine; with a bucket as trainer.checkpointer.base_path a copy of it is kept "
    "beside the checkpoints, from which other machines read and go on"
)


class TrainerConfig(Config):
    """Everything about a run that is neither the model, nor the data, nor the optimizer."""

    renamed_keys: ClassVar[Mapping[str, str]] = {
        "per_device_train_parallelism": "per_device_parallelism",
        # A tracker without `type` is one of W&B.
        "wandb": "tracker",
    }
    replaced_keys: ClassVar[Mapping[str, tuple[str, ...]]] = {"wandb": ("tracker",)}
    respelt_keys: ClassVar[Mapping[str, Mapping[Any, tuple[str, Any]]]] = {
        "determinism": {"layerwise": ("gather", "layer")}
    }

    absent: ClassVar[Mapping[str, str]] = {
        "TrainBatch": "axes have no objects; use batch_schedule.at(step)",
        "EvalBatch": "axes have no objects; use eval_batch_size",
        "batch_axis_at_step": "axes have no objects; use batch_schedule.at(step)",
        "initialize": "use `with Trainer(config, optimizer, loss) as trainer:`, which does it",
        "use_device_mesh": "shardings name their mesh; use jax.set_mesh(config.device_mesh) for code of yours",
        "num_slices": "it is not asked for; copies of the state over slices: use replica_dcn_axis_size",
        "num_devices_per_slice": "for each copy over slices use device_mesh.size // replica_dcn_axis_size",
        "data_ici_axis_size": "there is one data axis, inside and across slices; use device_mesh.shape['data']",
        "data_dcn_axis_size": "there is one data axis, inside and across slices; use device_mesh.shape['data']",
    }

    seed: AffectsResults[Seed] = 0
    """Decides initial weights, data order and dropout."""
    id: Operational[str | None] = None
    """Name of the run; the same name again resumes it. Default: the environment's RUN_ID, else the name of the
    configuration file and a hash of all that decides the run's numbers, so that the same command resumes."""
    mp: AffectsResults[PrecisionPolicy] = Policy()
    """Mixed precision: parts as in `p=f32,c=bfloat16` (parameters with gradients and optimizer state, computation), or
    one dtype for both: `f32`. `bfloat16` alone keeps weights in bfloat16 too, which loses small updates; with `float16`
    no loss is scaled."""
    quantization: AffectsResults[AnyQuantization | None] = None
    """Compute matrix products in 8 bits; null: as `mp` says."""
    determinism: AffectsResults[Literal["elastic", "fast"]] = "elastic"
    """`elastic`: the same bits on any number of devices. `fast`: one program for all devices, in which XLA adds in an
    order of its own; bits then depend on the devices, and with per_device_parallelism -1 a device computes all its rows
    at once. It is there to measure what `elastic` costs."""
    gather: AffectsResults[Literal["auto", "model", "layer"]] = "auto"
    """The parameters that a device holds whole at a time while it computes: `model`: all of them; `layer`: those of one
    layer, with the memory of FSDP. The bits of the two may differ in the last digits. `auto`: `layer` for a model of
    100 million parameters or more that has layers to compute one at a time, else `model`, which is quicker for small
    ones; it is the same on any devices. Before there was this key, `determinism: layerwise` meant `layer`, and is read
    so. With `determinism: fast` XLA gathers what it reads."""
    microbatches_per_gather: Operational[PositiveInt | None] = None
    """The most microbatches of a device that are added up before the devices exchange sums, with the same bits. With
    `gather: layer` they share the gathered parameters of a layer: fewer keep fewer activations and gather more often;
    with `gather: model` fewer keep fewer gradients of the whole model. The next number that the fixed order of
    additions allows is taken; null: all, and with `gather: layer` as many as fit into the memory of the devices, where
    they say how much that is (GPUs, TPUs)."""

    matrix_updates: AffectsResults[Literal["owned", "repeated"]] = "owned"
    """The update by an optimizer that computes with whole weights, as muon, soap and kron do. `owned`: each weight of
    each layer belongs to one device, which updates it, so that the devices share the work; `repeated`: every device
    computes the update of all weights. Runs that were begun before there was `owned` go on with `repeated` by
    themselves. The bits of the two may differ in the last digits."""

    cpu_threads: AffectsResults[PositiveInt | None] = None
    """Threads that XLA computes with on a CPU. They decide bits, since it cuts products and sums by their number.
    Unset: one for each core, and when the run is resumed, as many as before. XLA has no fewer than a process has
    (emulated) devices: write that number to get the same bits on 1 to so many of them, on any number of cores."""

    num_train_steps: AffectsResults[PositiveInt] = 400_000
    """Optimizer steps of the whole run."""
    train_batch_size: AffectsResults[BatchSizes] = 512
    """Rows in a global batch: a number, or how it changes over steps, as `[{start: 0, value: 64}, {start: 1000,
    value: 128}]`."""
    per_device_parallelism: AffectsResults[int] = -1
    """Rows in a microbatch, the unit of computation; -1: train_batch_size / elastic_shards. It decides the order of
    additions, so changing it changes the run's bits; changing the number of devices does not."""
    per_device_eval_parallelism: Operational[int] = -1
    """Rows that a device evaluates at once; -1: as in training."""
    elastic_shards: AffectsResults[PositiveInt] = 8
    """With per_device_parallelism -1, the number of microbatches in a step: the most devices along the data axes
    that the run can ever use. Unset, and a batch is no multiple of 8: the largest power of two that divides it."""
    allow_nondivisible_batch_size: AffectsResults[bool] = False
    """Fill up a batch that cannot be split into equal microbatches with rows that count for nothing, instead of
    refusing it. They cost computation."""
    model_averaging: AffectsResults[AnyAveraging | None] = None
    """Keep an average of the weights as well, which is evaluated beside them and exported."""

    steps_per_eval: Operational[PositiveInt | tuple[PositiveInt, ...]] = 1000
    """Steps between evaluations, or a list of the steps after which to evaluate; there is one after the last step as
    well."""
    max_eval_batches: Operational[PositiveInt | None] = None
    """Evaluate at most so many batches of each validation set; null: all."""
    token_probabilities: Operational[NonNegativeInt] = 4
    """Documents of the first held-out set of which each evaluation writes the probability of every token, to
    RUN_DIR/token-probabilities.jsonl and to a page beside it; 0: none."""
    steps_per_log: Operational[PositiveInt] = 1
    """Steps between lines of metrics."""
    sample_tokens: Operational[NonNegativeInt] = 128
    """After training, print a sample of so many tokens; 0: none."""
    sample_prompt: Operational[Annotated[str, Field(min_length=1)] | None] = None
    """Text that the sample goes on from; the start of a held-out document, if absent. Models that hear are
    given a recording."""

    log_dir: Operational[Annotated[str, Takes(instead=_RUN_DIRECTORY)]] = "logs/"
    """The run directory is `log_dir`/id: configuration, environment, metrics, log."""
    tracker: Operational[AnyTracker | tuple[AnyTracker, ...]] = (TensorboardConfig(),)
    """Trackers besides metrics.jsonl: one or a list. A block without `type` is one of wandb."""
    watch: Operational[WatchConfig] = WatchConfig()
    profiler: Operational[bool] = False
    """Record a trace of some steps, for TensorBoard's profiler: `tensorboard --logdir` on the run directory shows it
    with the package tensorboard-plugin-profile."""
    profiler_start_step: Operational[NonNegativeInt] = 5
    """Steps that are done when the trace begins; a few, so that nothing is compiled in it."""
    profiler_num_steps: Operational[PositiveInt] = 100
    """Steps that are traced."""
    profiler_perfetto_link: Operational[bool] = False
    """After the trace, print a link to the Perfetto viewer and wait until it has been opened."""
    log_jaxprs: Operational[bool] = True
    """Write what was traced of the training step to RUN_DIR/artifacts, and hand it to the trackers."""
    log_xla_hlo: Operational[bool] = True
    """Write the compiled program of the training step to RUN_DIR/artifacts, and hand it to the trackers."""
    crash_on_nan: Operational[bool] = True
    """Stop when the loss or the gradient is NaN. The step is not applied in any case."""
    crash_on_inf: Operational[bool] = True
    """Stop when the loss or the gradient is infinite. The step is not applied in any case."""
    watchdog: Operational[WatchdogConfig] = WatchdogConfig()
    alerts: Operational[AlertsConfig] = AlertsConfig()

    checkpointer: Operational[CheckpointerConfig] = CheckpointerConfig()
    load_checkpoint: Operational[bool | None] = None
    """Resume from the run's newest checkpoint: null: if there is one; true: there must be one; false: never."""
    load_checkpoint_path: Operational[PlacePath | None] = None
    """A checkpoint directory, or one step in it, to resume from when the run has none of its own."""
    initialize_from: AffectsResults[PlacePath | None] = None
    """Start from the weights (only) of this checkpoint directory, run or step."""
    allow_partial_checkpoint: Operational[bool] = False
    """Start parameters of the model that a checkpoint lacks afresh and name them, instead of refusing it."""

    batch_axis: Operational[str] = "batch"
    """The logical axis that is sharded over all devices for data parallelism."""
    fsdp_axis: Operational[str | tuple[str, ...] | None] = "embed"
    """Logical axes along which parameters and optimizer state are sharded over the data axis of the mesh between
    steps."""
    tensor_parallel_axes: AffectsResults[tuple[str, ...] | None] = None
    """Logical axes that are sharded over the model axis of the mesh."""
    axis_resources: Annotated[Resources, result_part(over_model_axis)] = {}
    """Logical axis to mesh axis or axes, for the state at rest and for computation."""
    parameter_axis_resources: Operational[Resources] = {}
    """Like axis_resources, for the state at rest only."""
    compute_axis_resources: AffectsResults[Resources] = {}
    """Like axis_resources, for computation only."""
    model_axis_size: AffectsResults[PositiveInt] = 1
    """Devices that share one copy of the model by tensor parallelism."""
    context_axis_size: AffectsResults[PositiveInt] = 1
    """Devices that share the positions of each row: sequence length and activations are sharded, keys and values are
    gathered for attention, or passed on with `model.attn_backend: ring`."""
    expert_axis_size: AffectsResults[PositiveInt] = 1
    """Devices that share the experts of each layer, and the rows of a microbatch."""
    pipeline_axis_size: AffectsResults[PositiveInt] = 1
    """Devices that share the layers, each a run of them; the rows of a microbatch flow through them one after the other
    (GPipe, Huang et al. 2019)."""
    max_devices: Operational[PositiveInt | None] = None
    """Use no more devices than these, the first of those that are there; null: all. Several processes use all."""
    replica_ici_axis_size: Operational[PositiveInt] = 1
    """Copies of the state inside a slice; the data axis takes the devices that remain."""
    replica_dcn_axis_size: Operational[PositiveInt] = 1
    """Copies of the state over slices that a slower network connects."""

    jax_config: Annotated[dict[str, JsonValue], result_part(result_settings)] = {}
    """Settings of JAX by name, for example `jax_num_cpu_devices: 8` or `jax_debug_nans: true`."""
    jax_compilation_cache_dir: Operational[Annotated[str, Takes(schemes=COMPILATION_CACHES)] | None] = None
    """Directory in which compiled programs are kept between runs; with the package gcsfs or s3fs it may be a gs:// or
    s3:// URL. Default: JAX_COMPILATION_CACHE_DIR, else the user's cache directory."""
    distributed: Operational[DistributedConfig] = DistributedConfig()
    ray: Operational[RayConfig] = RayConfig()
    require_accelerator: Operational[bool | None] = None
    """Refuse to run on a CPU; null: no."""
    shutdown_at_exit: Operational[bool | NonNegativeFloat] = False
    """Shut the machine down when the command ends, however it ends: `true`, or after so many seconds. For rented
    machines that cost while they are idle."""

    @field_validator("id")
    @classmethod
    def _id_is_a_file_name(cls, value: str | None) -> str | None:
        if value is not None and (problem := run_id_problem(value)):
            raise ValueError(problem)
        return value

    @field_validator("replica_dcn_axis_size", mode="before")
    @classmethod
    def _slices_are_counted(cls, value: Any) -> Any:
        if value == -1:
            raise ValueError("-1, for as many as there are slices, is not found out; write their number")
        return value

    @field_validator("jax_config")
    @classmethod
    def _settings_exist(cls, value: dict[str, JsonValue]) -> dict[str, JsonValue]:
        check_settings(value)
        return value

    @field_validator("per_device_parallelism", "per_device_eval_parallelism")
    @classmethod
    def _positive_or_minus_one(cls, value: int) -> int:
        if value < 1 and value != -1:
            raise ValueError(f"expected a positive number, or -1 for the default, got {value}")
        return value

    @field_validator("axis_resources", "parameter_axis_resources", "compute_axis_resources")
    @classmethod
    def _axes_exist(cls, value: Resources, info: Any) -> Resources:
        options = MESH_AXES if info.field_name == "parameter_axis_resources" else RULE_AXES
        rules = parse_rules(value, key=info.field_name, options=options)
        if not {*rules.get("batch", ())} <= {*BATCH_AXES}:
            raise ValueError(f"{info.field_name}: the batch is always cut over {', '.join(BATCH_AXES)}; remove 'batch'")
        return value

    @field_validator("batch_axis")
    @classmethod
    def _batch_axis_is_batch(cls, value: str) -> str:
        if value != "batch":
            raise ValueError(f"the only batch axis is 'batch', got {value!r}")
        return value

    @field_validator("fsdp_axis", "tensor_parallel_axes")
    @classmethod
    def _named_axes_exist(cls, value: Any, info: Any) -> Any:
        for name in (value,) if isinstance(value, str) else value or ():
            check_logical_axis(name, key=info.field_name)
        return value

    @model_validator(mode="after")
    def _shards_divide_the_batch(self) -> TrainerConfig:
        chosen = "elastic_shards" in self.model_fields_set or self.allow_nondivisible_batch_size
        if not chosen and self.per_device_parallelism == -1:
            shards = math.gcd(self.elastic_shards, *piecewise_int(self.train_batch_size).values)
            # The configuration is frozen from here on.
            object.__setattr__(self, "elastic_shards", shards)
        return self

    @model_validator(mode="after")
    def _batch_divides(self) -> TrainerConfig:
        _ = self.step_plan  # raises for a batch that cannot be cut, and for a rule that is none
        if not self.bitwise:
            unused = {"microbatches_per_gather": None, "gather": "auto"}
            if found := [key for key, default in unused.items() if getattr(self, key) != default]:
                raise ValueError(f"{found[0]} has no effect with determinism: fast; remove one of them")
        if self.load_checkpoint_path is not None and self.initialize_from is not None:
            raise ValueError("set load_checkpoint_path (to resume) or initialize_from (for the weights), not both")
        if self.load_checkpoint_path is not None and self.load_checkpoint is False:
            raise ValueError("load_checkpoint_path has no effect while load_checkpoint is false; remove one of them")
        for axis in self._cut_axes():
            if axis in {**self.axis_resources, **self.parameter_axis_resources, **self.compute_axis_resources}:
                raise ValueError(
                    f"{_CUT_BY[axis]}_axis_size already says how {axis!r} is cut; remove it from the rules"
                )
        return self

    @model_validator(mode="before")
    @classmethod
    def _former_spelling(cls, data: Any) -> Any:
        return in_present_spelling(data)

    @property
    def bitwise(self) -> bool:
        """True if bits are the same on any number of devices."""
        return self.determinism == "elastic"

    @property
    def gathers_by_size(self) -> bool:
        """True if the size of the model is to decide what a step gathers at a time."""
        return self.gather == "auto" and self.bitwise

    @property
    def gathers_layers(self) -> bool:
        """True if a step gathers one layer at a time; raises `RuntimeError` before `choose_gather` chose."""
        if self.gathers_by_size:
            raise RuntimeError("trainer.gather is auto, and the size of the model has not been looked at")
        return self.gather == "layer"

    @property
    def batch_schedule(self) -> BatchSchedule:
        """The size of the global batch at each step."""
        return BatchSchedule(piecewise_int(self.train_batch_size))

    @cached_property
    def step_plan(self) -> StepPlan:
        """The keys that decide the shape of a step, resolved into one value."""
        sizes = piecewise_int(self.train_batch_size)
        cut = {"rows": self.per_device_parallelism, "elastic_shards": self.elastic_shards}
        plans = tuple(MicrobatchPlan.make(size, **cut, pad=self.allow_nondivisible_batch_size) for size in sizes.values)
        # Evaluation has as many microbatches as the largest batch, so that every mesh that can train can evaluate.
        largest = max(plans, key=lambda plan: plan.count)
        rows = largest.rows if self.per_device_eval_parallelism == -1 else self.per_device_eval_parallelism
        # The squares of a parameter are added up in a grid that no batch's division is finer than: `plan_shardings`.
        common = math.gcd(*(plan.count for plan in plans))
        return StepPlan(
            batch_schedule=BatchSchedule(sizes),
            microbatches=Piecewise(sizes.starts, plans),
            evaluation=MicrobatchPlan(rows * largest.count, largest.count, rows),
            mesh_shape=self._mesh_shape(),
            state_parts=common & -common if self.bitwise else None,
            param_rules=self._param_rules(),
            compute_rules=self._compute_rules(),
            policy=self.mp,
        )

    @property
    def microbatch_size(self) -> int:
        """Rows in a microbatch at the first step, on however many devices."""
        return self.step_plan.microbatches.at(0).rows

    @property
    def eval_batch_size(self) -> int:
        """Rows in a batch of evaluation."""
        return self.step_plan.evaluation.batch_size

    @property
    def compute_axis_mapping(self) -> AxisRules:
        """Logical axis to mesh axes during computation."""
        return self._compute_rules()

    @property
    def parameter_axis_mapping(self) -> AxisRules:
        """Logical axis to mesh axes for the state in storage."""
        return self._param_rules()

    def devices(self) -> Sequence[Any]:
        """The devices of the run: the first `max_devices` of those that JAX has.

        Raises:
            UserError: when some processes would have none.
        """
        import jax

        found = jax.devices()
        if self.max_devices is not None and self.max_devices < len(found) and jax.process_count() > 1:
            raise UserError(
                f"trainer.max_devices: {self.max_devices} of {len(found)} devices would leave processes idle; start "
                f"fewer processes"
            )
        return found[: self.max_devices]

    @property
    def device_mesh(self) -> Mesh:
        """The devices of the run, laid out; raises `UserError` where they cannot be."""
        return self.step_plan.mesh(self.devices())

    @property
    def data_axis_size(self) -> int:
        """Shards of the rows of a batch."""
        return batch_shards(self.device_mesh)

    @property
    def replica_axis_size(self) -> int:
        """Copies of the state."""
        return self.replica_ici_axis_size * self.replica_dcn_axis_size

    @property
    def trackers(self) -> tuple[Any, ...]:
        """`tracker` as a tuple."""
        return self.tracker if isinstance(self.tracker, tuple) else (self.tracker,)

    def _mesh_shape(self) -> MeshShape:
        """The mesh axes whose sizes are set here."""
        return MeshShape(
            replica_dcn=self.replica_dcn_axis_size,
            replica=self.replica_ici_axis_size,
            pipeline=self.pipeline_axis_size,
            context=self.context_axis_size,
            expert=self.expert_axis_size,
            model=self.model_axis_size,
        )

    def _cut_axes(self) -> dict[str, tuple[str, ...]]:
        """The logical axes that `pipeline_axis_size` and `expert_axis_size` shard, with their mesh axes."""
        return {logical: (axis,) for logical, axis in _CUT_BY.items() if getattr(self._mesh_shape(), axis) > 1}

    def _tensor_parallel_rules(self) -> dict[str, tuple[str, ...]]:
        """`tensor_parallel_axes` as rules; none over a single device."""
        return dict.fromkeys(self.tensor_parallel_axes or (), ("model",)) if self.model_axis_size > 1 else {}

    def _compute_rules(self) -> dict[str, tuple[str, ...]]:
        """Logical axis to mesh axes during computation."""
        tensor = self._tensor_parallel_rules()
        shared = parse_rules(self.axis_resources, key="axis_resources")
        own = parse_rules(self.compute_axis_resources, key="compute_axis_resources")
        # Later entries win: what is said of computation alone overrides what is said of both.
        return {**tensor, **shared, **own, **self._cut_axes(), "batch": BATCH_AXES}

    def _param_rules(self) -> dict[str, tuple[str, ...]]:
        """Logical axis to mesh axes for the state in storage."""
        tensor = self._tensor_parallel_rules()
        shared = parse_rules(self.axis_resources, key="axis_resources")
        own = parse_rules(self.parameter_axis_resources, key="parameter_axis_resources", options=MESH_AXES)
        axes = (self.fsdp_axis,) if isinstance(self.fsdp_axis, str) else self.fsdp_axis or ()
        return {**tensor, **shared, **dict.fromkeys(axes, ("data",)), **own, **self._cut_axes()}
