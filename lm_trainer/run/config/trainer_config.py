"""The `trainer:` section: run length, batch sizes, parallelism, logging and checkpoints."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt, field_validator, model_validator

from lm_trainer.checkpoint.policy import CheckpointerConfig
from lm_trainer.core.config import Config, Name, PathType, Seed, StorageLocation
from lm_trainer.core.errors import UserError
from lm_trainer.core.piecewise import BatchSchedule, BatchSizes, Piecewise, to_piecewise
from lm_trainer.core.precision import Policy, PrecisionPolicy
from lm_trainer.core.result_keys import AffectsResults, Operational, affects_results_through
from lm_trainer.core.runtime import COMPILATION_CACHES, check_jax_settings
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
from lm_trainer.run.config.default_shards import MIN_MICROBATCHES, set_default_shards
from lm_trainer.run.config.recorded_keys import replace_old_spelling
from lm_trainer.run.config.refused_keys import ABSENT_TRAINER_ATTRIBUTES
from lm_trainer.run.config.result_parts import select_model_axis_rules, select_numeric_settings
from lm_trainer.run.config.run_id import explain_invalid_run_id
from lm_trainer.run.config.step_plan import StepPlan
from lm_trainer.step.check.settings import CrossCheckConfig
from lm_trainer.step.dispatch.microbatch_plan import MicrobatchPlan
from lm_trainer.step.updates.watch import WatchConfig
from lm_trainer.trackers import AnyTracker, TensorboardConfig

if TYPE_CHECKING:
    from jax.sharding import Mesh

Resources = dict[Name, str | tuple[str, ...]]
JsonValue = str | int | float | bool | None

_SHARDED_BY = {"layers": "pipeline", "experts": "expert"}
"""Mesh axes that shard logical axes of parameters without a rule, by logical axis."""
_RUN_DIRECTORY = (
    "The run directory lies on this machine; with a bucket as trainer.checkpointer.base_path a copy of it is kept "
    "beside the checkpoints, from which other machines read and go on"
)


class TrainerConfig(Config):
    """All settings of a run except for the model, the data and the optimizer."""

    renamed_keys: ClassVar[Mapping[str, str]] = {
        "per_device_train_parallelism": "per_device_parallelism",
        # A tracker without `type` is a wandb tracker.
        "wandb": "tracker",
    }
    replaced_keys: ClassVar[Mapping[str, tuple[str, ...]]] = {"wandb": ("tracker",)}
    respelt_keys: ClassVar[Mapping[str, Mapping[Any, tuple[str, Any]]]] = {
        "determinism": {"layerwise": ("gather", "layer")}
    }

    absent: ClassVar[Mapping[str, str]] = ABSENT_TRAINER_ATTRIBUTES

    seed: AffectsResults[Seed] = 0
    """Seed of the initial weights, the data order and dropout."""
    id: Operational[str | None] = None
    """Name of the run. Starting a run with the same name resumes it. The default is the environment variable RUN_ID,
    otherwise the name of the configuration file with a hash of all keys that affect the results, so that the same
    command resumes the run."""
    mp: AffectsResults[PrecisionPolicy] = Policy()
    """Mixed precision policy, such as `p=f32,c=bfloat16`: `p` is the dtype of parameters, gradients and optimizer
    state, and `c` the dtype of the computation. A single dtype, such as `f32`, sets both. Plain `bfloat16` also stores
    the weights in bfloat16, which loses small updates. There is no loss scaling for `float16`."""
    quantization: AffectsResults[AnyQuantization | None] = None
    """Compute matrix products in 8 bits. null uses the compute dtype of `mp`."""
    determinism: AffectsResults[Literal["elastic", "fast"]] = "elastic"
    """`elastic`: bit-identical results on any number of devices. `fast`: one program over all devices in which XLA
    chooses the order of sums. Results then depend on the devices, and with `per_device_parallelism: -1` each device
    computes all its rows in one microbatch. Use it to measure the cost of `elastic`."""
    gather: AffectsResults[Literal["auto", "model", "layer"]] = "auto"
    """Parameters that a device gathers at a time: `model` gathers the full model, and `layer` one layer, with the
    memory use of FSDP. Their results may differ in the last digits. `auto` chooses `layer` for layered models with at
    least 100 million parameters, otherwise `model`, which is faster for small models. The choice does not depend on the
    devices. `determinism: layerwise`, the former spelling of `layer`, is still accepted. With `determinism: fast`, XLA
    decides which parameters to gather."""
    microbatches_per_gather: Operational[PositiveInt | None] = None
    """Maximum number of microbatches that a device accumulates before the devices exchange sums. The results are
    bit-identical for any value. With `gather: layer`, these microbatches share the gathered parameters of a layer, so a
    smaller number stores fewer activations but gathers more often. With `gather: model`, a smaller number stores fewer
    gradients of the full model. The value is rounded to the next one that the fixed order of summation allows. null
    means all, or with `gather: layer` as many as fit into device memory, if its size is known (GPUs, TPUs)."""

    matrix_updates: AffectsResults[Literal["owned", "repeated"]] = "owned"
    """Division of the work of optimizers that need full, unsharded weights, such as muon, soap and kron. `owned`: one
    device updates each weight of each layer, so the devices share the work. `repeated`: every device computes the
    update of all weights. The results may differ in the last digits. Runs that were started before `owned` existed
    continue with `repeated` automatically."""

    cpu_threads: AffectsResults[PositiveInt | None] = None
    """Number of XLA threads on a CPU. It affects the results, because XLA splits products and sums by this number. The
    default is one per core, and a resumed run keeps its number. XLA uses at least as many threads as the process has
    (emulated) devices. Set it to N to get the same bits on 1 to N devices, with any number of cores."""

    num_train_steps: AffectsResults[PositiveInt] = 400_000
    """Total number of optimizer steps of the run."""
    train_batch_size: AffectsResults[BatchSizes] = 512
    """Number of rows in a global batch, or a schedule over steps, such as
    `[{start: 0, value: 64}, {start: 1000, value: 128}]`."""
    per_device_parallelism: AffectsResults[int] = -1
    """Number of rows in a microbatch; -1 means train_batch_size / elastic_shards. It determines the order of summation,
    so changing it changes the bits of the run. Changing the number of devices does not."""
    per_device_eval_parallelism: Operational[int] = -1
    """Number of rows in a microbatch in evaluations; -1 means the same number as in training."""
    elastic_shards: AffectsResults[PositiveInt] = MIN_MICROBATCHES
    """Number of microbatches per step with `per_device_parallelism: -1`. It is also the maximum number of devices that
    the run can use along the data axes. The default depends on the batch, not on the devices. It is the power of two
    that results in about 8,192 tokens per microbatch, but at least 8, or 1 for a batch with fewer than 2,048 tokens. If
    this does not divide every batch, it is the largest smaller power of two that does."""
    allow_nondivisible_batch_size: AffectsResults[bool] = False
    """Pad a batch that cannot be split into equal microbatches with rows of weight 0, instead of raising an error.
    Padding costs computation."""
    model_averaging: AffectsResults[AnyAveraging | None] = None
    """Also keep an average of the weights. It is evaluated in addition to the trained weights, and exported."""

    steps_per_eval: Operational[PositiveInt | tuple[PositiveInt, ...]] = 1000
    """Number of steps between evaluations, or a list of the steps after which to evaluate. There is also an evaluation
    after the last step."""
    max_eval_batches: Operational[PositiveInt | None] = None
    """Maximum number of batches to evaluate per validation set; null means all."""
    token_probabilities: Operational[NonNegativeInt] = 4
    """Number of documents of the first held-out set for which each evaluation writes the probability of every token to
    RUN_DIR/token-probabilities.jsonl and to an HTML page next to it. 0 turns this off."""
    steps_per_log: Operational[PositiveInt] = 1
    """Number of steps between logged lines of metrics."""
    sample_tokens: Operational[NonNegativeInt] = 128
    """Number of tokens of the sample that is printed after training; 0 turns it off."""
    sample_prompt: Operational[Annotated[str, Field(min_length=1)] | None] = None
    """Prompt of the sample. The default is the start of a held-out document. Speech models get a recording instead."""

    log_dir: Operational[Annotated[str, PathType(instead=_RUN_DIRECTORY)]] = "logs/"
    """Parent of the run directory `log_dir`/id, which contains the configuration, environment, metrics and log."""
    tracker: Operational[AnyTracker | tuple[AnyTracker, ...]] = (TensorboardConfig(),)
    """One tracker or a list, in addition to metrics.jsonl. A block without `type` configures wandb."""
    watch: Operational[WatchConfig] = WatchConfig()
    profiler: Operational[bool] = False
    """Record a trace of some steps for TensorBoard's profiler. To view it, run `tensorboard --logdir` on the run
    directory with the package tensorboard-plugin-profile."""
    profiler_start_step: Operational[NonNegativeInt] = 5
    """Number of completed steps before the trace begins. A few are needed so that it contains no compilation."""
    profiler_num_steps: Operational[PositiveInt] = 100
    """Number of steps to trace."""
    profiler_perfetto_link: Operational[bool] = False
    """After the trace, print a link to the Perfetto viewer and wait until it has been opened."""
    log_jaxprs: Operational[bool] = True
    """Write the jaxpr of the training step to RUN_DIR/artifacts, and pass it to the trackers."""
    log_xla_hlo: Operational[bool] = True
    """Write the compiled program (HLO) of the training step to RUN_DIR/artifacts, and pass it to the trackers."""
    crash_on_nan: Operational[bool] = True
    """Stop if the loss or the gradient is NaN. Such a step is never applied."""
    crash_on_inf: Operational[bool] = True
    """Stop if the loss or the gradient is infinite. Such a step is never applied."""
    watchdog: Operational[WatchdogConfig] = WatchdogConfig()
    alerts: Operational[AlertsConfig] = AlertsConfig()
    cross_check: Operational[CrossCheckConfig | None] = None
    """Check the hardware during the run. null makes no checks."""

    checkpointer: Operational[CheckpointerConfig] = CheckpointerConfig()
    load_checkpoint: Operational[bool | None] = None
    """Resume from the newest checkpoint of the run: null resumes if one exists, true requires one, false never does."""
    load_checkpoint_path: Operational[StorageLocation | None] = None
    """Checkpoint directory, or a step in it, to resume from if the run itself has no checkpoint."""
    initialize_from: AffectsResults[StorageLocation | None] = None
    """Checkpoint directory, run or step to take the initial weights from. Only the weights are loaded."""
    allow_partial_checkpoint: Operational[bool] = False
    """Initialize and report model parameters that are missing in a checkpoint, instead of raising an error."""

    batch_axis: Operational[str] = "batch"
    """Logical axis that is sharded over all devices for data parallelism."""
    fsdp_axis: Operational[str | tuple[str, ...] | None] = "embed"
    """Logical axes of parameters and optimizer state to shard over the data axis of the mesh between steps."""
    tensor_parallel_axes: AffectsResults[tuple[str, ...] | None] = None
    """Logical axes to shard over the model axis of the mesh (tensor parallelism)."""
    axis_resources: Annotated[Resources, affects_results_through(select_model_axis_rules)] = {}
    """Mapping from logical axis to mesh axis or axes, for both the stored state and computation."""
    parameter_axis_resources: Operational[Resources] = {}
    """Like axis_resources, for the stored state only."""
    compute_axis_resources: AffectsResults[Resources] = {}
    """Like axis_resources, for computation only."""
    model_axis_size: AffectsResults[PositiveInt] = 1
    """Number of devices that share one copy of the model (tensor parallelism)."""
    context_axis_size: AffectsResults[PositiveInt] = 1
    """Number of devices that share the positions of each row (context parallelism). Activations are sharded along the
    sequence. For attention, keys and values are gathered, or passed around with `model.attn_backend: ring`."""
    expert_axis_size: AffectsResults[PositiveInt] = 1
    """Number of devices that share the experts of each layer and the rows of a microbatch (expert parallelism)."""
    pipeline_axis_size: AffectsResults[PositiveInt] = 1
    """Number of pipeline stages, each of which has a contiguous range of layers on one device. The rows of a microbatch
    pass through the stages one after the other (GPipe, Huang et al. 2019)."""
    max_devices: Operational[PositiveInt | None] = None
    """Maximum number of devices to use, starting with the first; null means all. Several processes must use all."""
    replica_ici_axis_size: Operational[PositiveInt] = 1
    """Number of copies of the state within a slice. The data axis takes the remaining devices."""
    replica_dcn_axis_size: Operational[PositiveInt] = 1
    """Number of copies of the state across slices, which are connected by a slower network."""

    jax_config: Annotated[dict[str, JsonValue], affects_results_through(select_numeric_settings)] = {}
    """JAX settings by name, for example `jax_num_cpu_devices: 8` or `jax_debug_nans: true`."""
    jax_compilation_cache_dir: Operational[Annotated[str, PathType(schemes=COMPILATION_CACHES)] | None] = None
    """Directory of the persistent compilation cache, which may be a gs:// or s3:// URL with the package gcsfs or s3fs.
    The default is JAX_COMPILATION_CACHE_DIR, otherwise the user's cache directory."""
    keep_programs: Operational[bool | None] = None
    """Keep the compiled programs of the run in RUN_DIR/programs, and load them at its next start and in its other
    processes. null means true on GPUs and TPUs, whose compilers may not choose the same kernels a second time, and
    false on CPUs, where programs for several devices are compiled at every start in any case."""
    distributed: Operational[DistributedConfig] = DistributedConfig()
    ray: Operational[RayConfig] = RayConfig()
    require_accelerator: Operational[bool | None] = None
    """Raise an error if there is no accelerator; null means false."""
    shutdown_at_exit: Operational[bool | NonNegativeFloat] = False
    """Shut down the machine when the command ends for any reason. The value is `true` or a delay in seconds. Useful for
    rented machines that are billed while idle."""

    @field_validator("id")
    @classmethod
    def _id_is_a_file_name(cls, value: str | None) -> str | None:
        if value is not None and (problem := explain_invalid_run_id(value)):
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
        check_jax_settings(value)
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
    def _default_shards_divide_the_batch(self) -> TrainerConfig:
        # Also runs for a section that is already a part of another configuration, but then changes nothing.
        set_default_shards(self, self.elastic_shards)
        return self

    @model_validator(mode="after")
    def _batch_divides(self) -> TrainerConfig:
        _ = self.step_plan  # raises for an indivisible batch and for an invalid sharding rule
        if not self.bitwise:
            unused = {"microbatches_per_gather": None, "gather": "auto", "cross_check": None}
            if ineffective := [key for key, default in unused.items() if getattr(self, key) != default]:
                raise ValueError(f"{ineffective[0]} has no effect with determinism: fast; remove one of them")
        if self.load_checkpoint_path is not None and self.initialize_from is not None:
            raise ValueError("set load_checkpoint_path (to resume) or initialize_from (for the weights), not both")
        if self.load_checkpoint_path is not None and self.load_checkpoint is False:
            raise ValueError("load_checkpoint_path has no effect while load_checkpoint is false; remove one of them")
        for axis in self._sharded_axes():
            if axis in {**self.axis_resources, **self.parameter_axis_resources, **self.compute_axis_resources}:
                raise ValueError(
                    f"{_SHARDED_BY[axis]}_axis_size already says how {axis!r} is cut; remove it from the rules"
                )
        return self

    @model_validator(mode="before")
    @classmethod
    def _former_spelling(cls, data: Any) -> Any:
        return replace_old_spelling(data)

    @property
    def bitwise(self) -> bool:
        """True if results are bit-identical on any number of devices."""
        return self.determinism == "elastic"

    @property
    def gathers_by_size(self) -> bool:
        """True if the size of the model determines `gather`."""
        return self.gather == "auto" and self.bitwise

    @property
    def gathers_layers(self) -> bool:
        """True if a step gathers one layer at a time. Raises `RuntimeError` if `gather` has not been resolved yet."""
        if self.gathers_by_size:
            raise RuntimeError("trainer.gather is auto, and the size of the model has not been looked at")
        return self.gather == "layer"

    @property
    def batch_schedule(self) -> BatchSchedule:
        """Size of the global batch at each step."""
        return BatchSchedule(to_piecewise(self.train_batch_size))

    @cached_property
    def step_plan(self) -> StepPlan:
        """Resolved values of all keys that determine the structure of a step."""
        sizes = to_piecewise(self.train_batch_size)
        args = {"rows": self.per_device_parallelism, "elastic_shards": self.elastic_shards}
        plans = tuple(
            MicrobatchPlan.make(size, **args, pad=self.allow_nondivisible_batch_size) for size in sizes.values
        )
        # Evaluation has as many microbatches as the largest batch, so that every mesh that can train can evaluate.
        largest = max(plans, key=lambda plan: plan.count)
        rows = largest.rows if self.per_device_eval_parallelism == -1 else self.per_device_eval_parallelism
        # The squares of a parameter are summed over a grid that is common to all batches, see `plan_shardings`.
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
        """Number of rows in a microbatch at the first step. It does not depend on the number of devices."""
        return self.step_plan.microbatches.at(0).rows

    @property
    def eval_batch_size(self) -> int:
        """Number of rows in an evaluation batch."""
        return self.step_plan.evaluation.batch_size

    @property
    def compute_axis_mapping(self) -> AxisRules:
        """Mesh axes that shard each logical axis during computation."""
        return self._compute_rules()

    @property
    def parameter_axis_mapping(self) -> AxisRules:
        """Mesh axes that shard each logical axis of the stored state."""
        return self._param_rules()

    def devices(self) -> Sequence[Any]:
        """Returns the first `max_devices` of JAX's devices. Raises `UserError` if some processes would have none."""
        import jax

        devices = jax.devices()
        if self.max_devices is not None and self.max_devices < len(devices) and jax.process_count() > 1:
            raise UserError(
                f"trainer.max_devices: {self.max_devices} of {len(devices)} devices would leave processes idle; start "
                f"fewer processes"
            )
        return devices[: self.max_devices]

    @property
    def device_mesh(self) -> Mesh:
        """The mesh of the devices of the run. Raises `UserError` if it cannot be built."""
        return self.step_plan.mesh(self.devices())

    @property
    def data_axis_size(self) -> int:
        """Number of shards into which the rows of a batch are divided."""
        return batch_shards(self.device_mesh)

    @property
    def replica_axis_size(self) -> int:
        """Number of copies of the state."""
        return self.replica_ici_axis_size * self.replica_dcn_axis_size

    @property
    def trackers(self) -> tuple[Any, ...]:
        """`tracker` as a tuple."""
        return self.tracker if isinstance(self.tracker, tuple) else (self.tracker,)

    def _mesh_shape(self) -> MeshShape:
        """Returns the configured sizes of the mesh axes."""
        return MeshShape(
            replica_dcn=self.replica_dcn_axis_size,
            replica=self.replica_ici_axis_size,
            pipeline=self.pipeline_axis_size,
            context=self.context_axis_size,
            expert=self.expert_axis_size,
            model=self.model_axis_size,
        )

    def _sharded_axes(self) -> dict[str, tuple[str, ...]]:
        """Returns the mesh axes of the logical axes that `pipeline_axis_size` and `expert_axis_size` shard."""
        return {logical: (axis,) for logical, axis in _SHARDED_BY.items() if getattr(self._mesh_shape(), axis) > 1}

    def _tensor_parallel_rules(self) -> dict[str, tuple[str, ...]]:
        """Returns `tensor_parallel_axes` as sharding rules. There are no rules for a single device."""
        return dict.fromkeys(self.tensor_parallel_axes or (), ("model",)) if self.model_axis_size > 1 else {}

    def _compute_rules(self) -> dict[str, tuple[str, ...]]:
        """Returns the mesh axes that shard each logical axis during computation."""
        tensor = self._tensor_parallel_rules()
        shared = parse_rules(self.axis_resources, key="axis_resources")
        specific = parse_rules(self.compute_axis_resources, key="compute_axis_resources")
        # Later entries take precedence: rules only for computation override rules for both.
        return {**tensor, **shared, **specific, **self._sharded_axes(), "batch": BATCH_AXES}

    def _param_rules(self) -> dict[str, tuple[str, ...]]:
        """Returns the mesh axes that shard each logical axis of the stored state."""
        tensor = self._tensor_parallel_rules()
        shared = parse_rules(self.axis_resources, key="axis_resources")
        specific = parse_rules(self.parameter_axis_resources, key="parameter_axis_resources", options=MESH_AXES)
        axes = (self.fsdp_axis,) if isinstance(self.fsdp_axis, str) else self.fsdp_axis or ()
        return {**tensor, **shared, **dict.fromkeys(axes, ("data",)), **specific, **self._sharded_axes()}
