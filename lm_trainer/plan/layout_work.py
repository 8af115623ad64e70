"""Work of a training step on a layout, as the cost model needs it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from jax.sharding import NamedSharding

from lm_trainer.nn.spec import DecoderSpec
from lm_trainer.parallel.mesh import MODEL_PARALLEL_AXES, batch_shards
from lm_trainer.parallel.tree_sum import Shares
from lm_trainer.profile.flops import recomputed_product_flops
from lm_trainer.run.build.model import recomputes_layers
from lm_trainer.run.config.run_config import RunConfig
from lm_trainer.run.config.trainer_config import TrainerConfig
from lm_trainer.step.dispatch.microbatch_plan import MicrobatchPlan

if TYPE_CHECKING:
    from jax.sharding import AbstractMesh, Mesh

    from lm_trainer.step.state.model_def import ModelDef
    from lm_trainer.step.state.state_sharding import StateSharding

_FLOAT32 = 4


@dataclass(frozen=True)
class Recomputation:
    """Work that the backward pass repeats."""

    products: float = 0.0
    """FLOPs per token of products with weights, over all layers."""
    attention: float = 0.0
    """Share of the forward passes of attention kernels."""
    elementwise: float = 0.0
    """Share of the memory traffic of norms, rotary embeddings and activations in the forward pass."""

    @classmethod
    def of(cls, spec: DecoderSpec, trainer: TrainerConfig) -> Recomputation:
        """Returns the work that the rematerialisation of a model repeats.

        A kernel's backward pass needs more than its result, so every policy that recomputes anything repeats the
        kernel.
        """
        every_layer = recomputes_layers(trainer, spec)
        if spec.remat == "none" and not every_layer:
            return cls()
        return cls(recomputed_product_flops(spec, every_layer=every_layer), attention=1.0, elementwise=1.0)


@dataclass(frozen=True)
class LayoutWork:
    """Work of a step on a layout."""

    spec: DecoderSpec
    trainer: TrainerConfig
    seq_len: int
    plan: MicrobatchPlan
    """Division of the largest batch of the run."""
    sizes: dict[str, int]
    """Mesh axis -> number of devices."""
    shards: int
    """Number of shards of the rows of a batch."""
    gathers: int
    """Number of times that a layer is gathered per step, once per microbatch group; forward and backward count as
    one."""
    params: int
    """Number of parameters that one device computes with, gathered over the batch axes."""
    backend: str
    """Attention backend."""
    training_flops: int
    """Number of FLOPs per token of a training step."""
    recomputation: Recomputation
    measures_logits: bool = False
    """True if the largest logit of each head is measured: see `lm_trainer.nn.logit_clip`."""
    overlap: float = 1.0
    """Share of the exchanges of layers that may overlap with a computation; see `overlapped_share`."""
    head_shards: int = 1
    """Number of devices that share the output head. Tensor parallelism of this package does not shard it."""

    @property
    def group(self) -> int:
        """Number of devices that share the rows or positions of a microbatch."""
        return math.prod(self.sizes[axis] for axis in MODEL_PARALLEL_AXES)

    @property
    def tensor(self) -> int:
        return self.sizes["model"]

    @property
    def devices(self) -> int:
        return math.prod(self.sizes.values())

    @property
    def microbatches(self) -> int:
        """Number of microbatches of the busiest device."""
        return Shares(self.plan.count, self.shards).max_terms

    @property
    def even_microbatches(self) -> float:
        """Number of microbatches of a device, averaged over devices, as if microbatches were divisible."""
        return self.plan.count / self.shards

    @property
    def tokens(self) -> float:
        """Number of tokens of one microbatch that a device computes."""
        return self.plan.rows * self.seq_len / self.group

    @property
    def tokens_per_step(self) -> int:
        """Number of tokens of the largest batch."""
        return self.plan.batch_size * self.seq_len

    @property
    def layerwise(self) -> bool:
        return self.trainer.gathers_layers

    @property
    def recomputes(self) -> bool:
        return self.recomputation != Recomputation()

    @property
    def has_kernel(self) -> bool:
        """True if a kernel computes attention, without scores in memory and without masked blocks."""
        return self.backend not in ("xla", "ring")

    @property
    def itemsize(self) -> int:
        return self.trainer.mp.compute_dtype.itemsize

    @property
    def gradient_itemsize(self) -> int:
        """Size in bytes of a number of a microbatch's gradient. Not for `determinism: fast`."""
        return self.itemsize if self.layerwise else _FLOAT32

    @property
    def exchanged_itemsize(self) -> int:
        """Size in bytes of a number of the gradients that devices exchange: sums over microbatches are float32. Not for
        `determinism: fast`.
        """
        return self.gradient_itemsize if self.gathers == self.microbatches else _FLOAT32


@dataclass(frozen=True)
class PlannedModel:
    """Figures of a model that do not depend on the layout."""

    spec: DecoderSpec
    backend: str
    """Attention backend on the devices."""
    training_flops: int
    """Number of FLOPs per token of a training step."""


def describe_layout(
    config: RunConfig, model: PlannedModel, plan: MicrobatchPlan, mesh: Mesh | AbstractMesh, params: int
) -> LayoutWork:
    """Returns the work of a step of a run.

    Args:
        config: configuration of the run, with `trainer.gather` resolved.
        model: figures of the model.
        plan: division of the largest batch.
        mesh: the mesh of the devices.
        params: number of parameters that one device computes with; see `count_device_params`.
    """
    trainer = config.trainer
    microbatches = plan.divide_microbatches(mesh).max_terms
    group = plan.divide_microbatches(mesh, trainer.microbatches_per_gather)
    return LayoutWork(
        spec=model.spec,
        trainer=trainer,
        seq_len=config.model.seq_len,
        plan=plan,
        sizes=dict(mesh.shape),
        shards=batch_shards(mesh),
        gathers=-(-microbatches // group.max_terms),
        params=params,
        backend=model.backend,
        training_flops=model.training_flops,
        recomputation=Recomputation.of(model.spec, trainer),
        measures_logits=config.optimizer.logit_limit is not None,
    )


def count_device_params(model: ModelDef, sharding: StateSharding, mesh: Mesh | AbstractMesh) -> int:
    """Returns the number of parameters that a device computes with, after gathering."""
    shardings = {name: NamedSharding(mesh, specs.compute) for name, specs in sharding.params.items()}
    return sum(math.prod(shardings[name].shard_shape(x.shape)) for name, x in model.shapes.items())
