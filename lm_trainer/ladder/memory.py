"""The memory of a device that a run of a ladder takes."""

from __future__ import annotations

from lm_trainer.core.errors import UserError
from lm_trainer.ladder.ladder import ModelLadder


def state_bytes(ladder: ModelLadder, size_spec: str, vocab_size: int, devices: int) -> int:
    """Parameters and optimizer state, cut over the devices, and two whole copies to compute with: of the parameters,
    and of the gradients that a device adds up.
    """
    import jax

    from lm_trainer.optim import Param
    from lm_trainer.run.model import trace_model

    config = ladder.run_config(size_spec, vocab_size=vocab_size)
    model = trace_model(config, vocab_size)
    tx = config.optimizer.build({name: Param(name, x.shape, model.axes[name]) for name, x in model.shapes.items()})
    params = sum(x.size * x.dtype.itemsize for x in model.shapes.values())
    moments = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(jax.eval_shape(tx.init, dict(model.shapes))))
    return (params + moments) // devices + 2 * params


def activation_bytes(ladder: ModelLadder, size_spec: str, vocab_size: int, microbatch: int) -> int:
    """An estimate for a microbatch of so many tokens: the input of every block, the inside of one, and the logits with
    their gradient.

    Beside XLA's own figure it is 5 to 7 % too high for the sizes of configs/ladder_nano.yaml. Where attention holds all
    its scores in float32 (CPU, sequences of 8192) it is 7 to 8 times too low.
    """
    model = ladder.get_model_config(size_spec)
    spec = model.spec(vocab_size)
    width = ladder.trainer.mp.compute_dtype.itemsize
    attention = spec.blocks[0].attention
    inside = 8 * spec.hidden_dim + 3 * spec.blocks[0].mlp.hidden_dim + 4 * attention.num_heads * attention.head_dim
    kept = len(spec.blocks) * spec.hidden_dim if model.remat == "full" else len(spec.blocks) * inside
    scores = 2 * attention.num_heads * ladder.sequence_length
    logits = 2 * 4 * min(microbatch, model.cross_entropy_block_size or microbatch) * vocab_size
    return microbatch * width * (kept + inside + scores) + logits


def compiled_bytes(ladder: ModelLadder, size_spec: str, vocab_size: int, microbatch: int) -> int:
    """What XLA allocates beside its arguments for a microbatch of so many tokens, on a device of this machine.

    Raises:
        UserError: when the backend does not tell.
    """
    import jax

    from lm_trainer.profile.workload import random_batch
    from lm_trainer.run.program import build_program

    program = build_program(ladder.run_config(size_spec, vocab_size=vocab_size), vocab_size, jax.local_devices()[:1])
    rows = microbatch // ladder.sequence_length
    memory = program.step.compile(random_batch(rows, ladder.sequence_length, vocab_size)).memory()
    if memory is None:
        raise UserError(f"--compile: XLA does not say how much memory a program takes on {jax.default_backend()}")
    return memory.temp_size_in_bytes
