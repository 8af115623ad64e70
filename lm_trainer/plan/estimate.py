"""The memory of a step without compiling it: from shapes, shardings and a formula, and without any device.

Only the phase of the microbatches is estimated, which is the largest of most runs. Its parts are those that
`lm_trainer.step.elastic.ElasticStep.phases` gives and `lm_trainer.plan.memory` adds up; the other phases hold nothing
that grows with the microbatch.
"""

from __future__ import annotations

import jax

from lm_trainer.models.base import DecoderConfig
from lm_trainer.parallel.mesh import batch_shards, build_abstract_mesh
from lm_trainer.plan.devices import DeviceGroup
from lm_trainer.plan.memory import PhaseBytes, ProgramBytes, bytes_per_device, state_bytes
from lm_trainer.profile.devices import device_platform
from lm_trainer.profile.workload import random_batch
from lm_trainer.run.config import RunConfig
from lm_trainer.run.model import trace_model
from lm_trainer.run.program import build_program, shard_state
from lm_trainer.step.groups import compute_shardings
from lm_trainer.step.microbatch_plan import MicrobatchPlan
from lm_trainer.step.microbatch_sum import programs_and_results
from lm_trainer.step.state import abstract_state


def estimate_microbatches(
    config: RunConfig, vocab_size: int, group: DeviceGroup, plan: MicrobatchPlan, temporary: int
) -> PhaseBytes:
    """The phase in which a device computes its microbatches, as of `determinism: elastic`.

    Args:
        config: of the run, with a whole model section.
        vocab_size: rows of the token embedding.
        group: the devices of the run, which need not be there.
        plan: of the batch.
        temporary: bytes that the program of one microbatch takes while it runs.

    Raises:
        UserError: when the devices cannot be divided as the mesh is configured, or a sharding rule does not fit.
    """
    trainer, model = config.trainer.resolve(), trace_model(config, vocab_size)
    mesh = build_abstract_mesh(trainer.mesh_shape, group.count)
    tx, sharding = shard_state(trainer, config.optimizer, model, mesh)
    averaged = config.trainer.model_averaging is not None
    compute = compute_shardings(sharding)
    shardings = sharding.storage if compute is None else compute
    whole = {n: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=shardings[n]) for n, x in model.shapes.items()}
    per_shard = plan.count // batch_shards(mesh)
    running, results = programs_and_results(per_shard, mesh, device_platform(group.kind))
    row = sum(x.nbytes for x in random_batch(1, config.model.seq_len, vocab_size))
    parts = {
        "state": sum(state_bytes(abstract_state(model.shapes, tx, sharding, averaged=averaged)).values()),
        # All microbatches of a device are sent to it before the first is computed.
        "batch": per_shard * plan.rows * row,
        "gathered parameters": 0 if compute is None else bytes_per_device(whole),
        "gradients": results * bytes_per_device({name: whole[name] for name in model.trainable}),
        "temporary": running * temporary,
    }
    return PhaseBytes("microbatch", parts)


def estimate_temporary(model: DecoderConfig, vocab_size: int, itemsize: int, tokens: int) -> int:
    """Bytes that the gradient of a microbatch takes while it runs: the input of every block, the inside of one, and the
    logits with their gradient.

    Beside XLA's own figure it is 5 to 7 % too high for the sizes of configs/ladder_nano.yaml. Where attention holds all
    its scores in float32 (CPU, sequences of 8192) it is 7 to 8 times too low.

    Args:
        model: of one kind of block.
        vocab_size: rows of the token embedding.
        itemsize: bytes of a number in the precision of the computation.
        tokens: in the microbatch.
    """
    spec = model.spec(vocab_size)
    attention = spec.blocks[0].attention
    # For each token of a block: eight arrays as wide as the model (residuals, norms, what goes into and comes out of
    # attention and MLP), three as wide as the MLP (gate, up, their product), and query, key, value and output.
    inside = 8 * spec.hidden_dim + 3 * spec.blocks[0].mlp.hidden_dim + 4 * attention.num_heads * attention.head_dim
    # Full recomputation keeps the input of each block alone; otherwise the inside of all blocks waits for the backward
    # pass.
    kept = len(spec.blocks) * spec.hidden_dim if model.remat == "full" else len(spec.blocks) * inside
    # Scores before and after the softmax, of the one block that is computed.
    scores = 2 * attention.num_heads * model.seq_len
    # Logits and their gradient are float32, and exist for one block of tokens at a time.
    logits = 2 * 4 * min(tokens, model.cross_entropy_block_size or tokens) * vocab_size
    return tokens * itemsize * (kept + inside + scores) + logits


def compile_temporary(config: RunConfig, vocab_size: int) -> int:
    """As `estimate_temporary`, from XLA, which compiles the microbatch of a run for a device of this machine.

    Raises:
        UserError: when the backend does not tell.
    """
    # One device is enough: the program of a microbatch is the same on every mesh.
    program = build_program(config, vocab_size, jax.local_devices()[:1])
    batch = random_batch(1, config.model.seq_len, vocab_size)
    return ProgramBytes.of(program.step.compile(batch)).temporary
