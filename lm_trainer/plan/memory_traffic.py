"""Bytes that a step reads and writes in device memory, except inputs and outputs of products and attention kernels."""

from __future__ import annotations

from dataclasses import replace

from lm_trainer.nn.expert_spec import MoeSpec
from lm_trainer.nn.mixer_spec import DeltaSpec, LatentSpec, StateSpaceSpec, softmax_specs
from lm_trainer.nn.rope_spec import RopeSpec
from lm_trainer.nn.spec import AttentionSpec, BlockSpec
from lm_trainer.plan.gpu_target import compute_capability
from lm_trainer.plan.layout_work import LayoutWork
from lm_trainer.profile.devices import device_platform
from lm_trainer.profile.flops import parameter_count, ring_score_fraction
from lm_trainer.profile.mixer_flops import count_mixer

_SCORE_PASSES = 10
"""Number of passes of float32 scores through memory without a fused kernel: four in the forward pass (scores, two for
the softmax, the weighted sum) and six in the backward pass."""
_MEASURED_PASSES = 2
"""Number of passes of float32 scores through memory if their largest is measured: they are written and read."""
_LOGIT_PASSES = {"tpu": 3, "gpu": 11}
"""Number of passes of float32 logits through memory. On TPUs they are read for the loss; read and written, as their
gradient, in the backward pass. On GPUs XLA fuses less: its compiled loss moves this much for GPT-2."""
_WORKSPACE_BYTES = 6
"""Bytes for each pair and head that cuDNN's deterministic backward pass moves on Hopper: 2 bytes, three times."""
_UPDATE_PASSES = 8
"""Number of float32 values per parameter in an update by Adam: the parameter and two moments are read and written, the
gradient is read for its norm and for the update."""
_FLOAT32 = 4
_ADDITION_PASSES = 3
"""Number of times that an addition of two arrays passes through memory: both are read and the sum is written."""
_REDUCTION_PASSES = 5
"""Number of passes of the gradients through memory in a sum over devices: they are cut into slices (read and written)
and exchanged (read and written), and the received slices are read."""
_LAYER_GATHER_PASSES, _MODEL_GATHER_PASSES = 2, 3
"""Number of passes of the gathered parameters through memory: they are written, and rearranged if the divided dimension
is not the first. Parameters of a layer are cast before they are gathered."""
_HOPPER = 9


def microbatch_bytes(work: LayoutWork, kind: str) -> float:
    """Returns the bytes that a device of a kind reads and writes for one microbatch.

    With `exchange_bytes` and `update_bytes`, XLA counts 0.55 to 1.3 times as much for the steps in
    `benchmarks/results/compiled`, with a median near 1, if each operation counts with the time by which its memory
    traffic exceeds its FLOPs.
    """
    of_tokens = _token_bytes(work, device_platform(kind))
    scores = _score_bytes(work, kind) + _measured_score_bytes(work)
    return _gradient_bytes(work) + scores + work.tokens * of_tokens


def weight_bytes(work: LayoutWork) -> float:
    """Returns the bytes of weights that the products of a microbatch read, without recomputation."""
    # A pipeline processes rows one by one, and each of its steps reads the weights of the stage.
    return 3 * work.itemsize * (work.params + _pipeline_params(work))


def exchange_bytes(work: LayoutWork) -> float:
    """Returns the bytes that a device reads and writes to gather parameters and to sum gradients over the devices.

    0 with `determinism: fast`, where the compiler fuses these operations with others.
    """
    if not work.trainer.bitwise or work.shards == 1:
        return 0.0
    if work.layerwise:
        # The forward and the backward pass gather separately.
        gathered = 2 * work.gathers * _LAYER_GATHER_PASSES * work.itemsize
    else:
        # The groups of microbatches of a step share the gathered model.
        gathered = _MODEL_GATHER_PASSES * _FLOAT32
    reduced = work.gathers * _REDUCTION_PASSES * work.exchanged_itemsize
    return work.params * (gathered + reduced)


def update_bytes(work: LayoutWork) -> float:
    """Returns the bytes that a device reads and writes to update its shard of the parameters."""
    return _UPDATE_PASSES * _FLOAT32 * work.params / work.shards


def _gradient_bytes(work: LayoutWork) -> float:
    """Returns the bytes of gradients that products write and that are added, and of parameters that are cast."""
    if work.trainer.bitwise:
        # Without gathers of layers, each microbatch casts the float32 parameters.
        cast = 0 if work.layerwise else _FLOAT32 + work.itemsize
        passes = work.gradient_itemsize + cast + _addition_bytes(work)
    elif work.microbatches > 1:
        # The gradient is written and read, and the float32 sum is read and written.
        passes = 2 * work.itemsize + 2 * _FLOAT32
    else:
        passes = 2 * work.itemsize
    return (work.params + _pipeline_params(work)) * passes


def _addition_bytes(work: LayoutWork) -> float:
    """Returns the bytes per parameter and microbatch of the tree of additions over the microbatches of a device."""
    added = work.microbatches / work.gathers
    pairs, later = added // 2, added - 1 - added // 2
    return (pairs * (2 * work.gradient_itemsize + _FLOAT32) + later * _ADDITION_PASSES * _FLOAT32) / added


def _pipeline_params(work: LayoutWork) -> float:
    """Returns the parameters that a pipeline reads in addition, because it processes rows one by one."""
    stages = work.sizes["pipeline"]
    if stages == 1:
        return 0.0
    layers = parameter_count(work.spec) - parameter_count(replace(work.spec, blocks=()))
    return (work.plan.rows + stages - 2) * layers / (stages * work.tensor)


def _count_scores(work: LayoutWork) -> float:
    heads = sum(spec.num_heads for spec in softmax_specs(work.spec.all_blocks)) / work.tensor
    return work.tokens * work.seq_len * heads


def _measured_score_bytes(work: LayoutWork) -> float:
    return _MEASURED_PASSES * _FLOAT32 * _count_scores(work) if work.measures_logits else 0.0


def _score_bytes(work: LayoutWork, kind: str) -> float:
    pairs = _count_scores(work)
    if work.backend == "cudnn":
        return _WORKSPACE_BYTES * pairs if work.trainer.bitwise and compute_capability(kind) == _HOPPER else 0.0
    if work.has_kernel:
        return 0.0
    share = ring_score_fraction(work.spec, work.seq_len, work.sizes["context"]) if work.backend == "ring" else 1.0
    return _SCORE_PASSES * _FLOAT32 * share * pairs


def _token_bytes(work: LayoutWork, platform: str) -> float:
    """Returns the bytes per token of norms, residuals, rotary embeddings, activations and the loss."""
    repeated = 1 + work.recomputation.elementwise
    blocks = work.spec.all_blocks
    layers = sum(repeated * _forward_values(block, work) + _backward_values(block, work) for block in blocks)
    heads = 1 + len(work.spec.later_blocks)
    loss = heads * _LOGIT_PASSES[platform] * _FLOAT32 * work.spec.vocab_size / work.head_shards
    return layers * work.itemsize / work.sizes["pipeline"] + loss


def _forward_values(block: BlockSpec, work: LayoutWork) -> float:
    # Twice, a fused operation reads the stream and the result of the last sublayer, and writes their sum and its norm.
    return 8 * work.spec.hidden_dim + _rotary_values(block, work) + _activation_values(block, work, of_gradient=False)


def _backward_values(block: BlockSpec, work: LayoutWork) -> float:
    # Twice, a fused operation reads the stream and the gradients of norm and residual, and writes its gradient.
    return 8 * work.spec.hidden_dim + _rotary_values(block, work) + _activation_values(block, work, of_gradient=True)


def _rotary_values(block: BlockSpec, work: LayoutWork) -> float:
    """Queries and keys, read and written; for recurrences, all that is neither a norm nor an MLP."""
    match block.mixer:
        case AttentionSpec(positions=RopeSpec()) as spec:
            return 2 * (spec.num_heads + spec.kv_heads) * spec.head_dim / work.tensor
        case LatentSpec() as spec:
            # Queries and keys of all heads are joined of two parts.
            return 2 * 2 * spec.num_heads * spec.head_dim / work.tensor
        case StateSpaceSpec() | DeltaSpec() as spec:
            return _recurrence_values(spec, work)
    return 0.0


def _recurrence_values(spec: StateSpaceSpec | DeltaSpec, work: LayoutWork) -> float:
    """Values of convolutions, norm and gate, each read and written about twice, half of them in float32, and the
    float32 decays and weights of the pairs of a chunk.
    """
    width = count_mixer(spec, 1, 1).inputs / 2
    pairs = min(spec.chunk_size, work.seq_len) * spec.num_heads
    return (6 * width + 4 * pairs * _FLOAT32 / work.itemsize) / work.tensor


def _activation_values(block: BlockSpec, work: LayoutWork, *, of_gradient: bool) -> float:
    """Values that the activation of an MLP reads and writes: its inputs and its result, or also their gradients."""
    mlp = block.mlp
    if mlp is None:
        return 0.0
    inputs = 2 if isinstance(mlp, MoeSpec) or mlp.gated else 1
    # The backward pass reads the inputs and a gradient, and writes the gradients and, for a product, the activation.
    passes = 2 * inputs + 2 if of_gradient else inputs + 1
    if isinstance(mlp, MoeSpec):
        # Each selected expert also reads a copy of the token and writes a part of the sum.
        values = mlp.top_k * (passes * mlp.hidden_dim + 4 * work.spec.hidden_dim)
        return (values + (0 if mlp.shared is None else passes * mlp.shared.hidden_dim)) / work.tensor
    return passes * mlp.hidden_dim / work.tensor
