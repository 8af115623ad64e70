"""Estimates of the diagonal of the loss's Hessian, for optimizers that scale the step of each parameter by its
curvature.

Both functions return sums over microbatches, and both need a separate key for each microbatch. With L the sum of the
weighted losses of the full batch and W the sum of the weights, the training loss is L / W, and

- the sum of `hutchinson` is an unbiased estimate of diag(H) of L: divide it by W;
- the sum of `gauss_newton_bartlett` is a gradient g of L: the estimate is g * g / W.

Shape letters: B rows, S positions, N tokens (B x S), C tokens of one block, D hidden dimension, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from lm_trainer.core.batch import Batch
from lm_trainer.nn.attention_kernel import differentiating_twice
from lm_trainer.nn.decoder import Decoder
from lm_trainer.nn.stages import LossSums, StagedLoss, Stream, hidden_after_layers

Loss = Callable[[Any, Batch, jax.Array | None], tuple[Any, ...]]
"""`loss(model, batch, key)`: its first result is the sum of the weighted losses, a float32 scalar; the key is for
dropout."""

# Folded into the key, so that dropout and sampling are independent.
_DROPOUT, _SAMPLING = 0, 1


def hutchinson(loss: Loss, model: nnx.Module, batch: Batch, key: jax.Array) -> Any:
    """Computes U * (H u) for random signs u: Sophia-H's estimate (Liu et al. 2023, arXiv 2305.14342, algorithm 1).

    Random signs have the same expectation as normal numbers and a smaller variance (Hutchinson 1990). Costs the time
    and memory of about two gradients.

    Returns:
        A nested dict with the structure and dtypes of the model's parameters.

    Raises:
        UserError: as `jvp_of_gradient`.
    """
    objective, params = _loss_of_params(loss, model, batch, jax.random.fold_in(key, _DROPOUT))
    leaves, structure = jax.tree.flatten(params)
    keys = sign_keys(key, len(leaves))
    signs = jax.tree.unflatten(
        structure, [jax.random.rademacher(k, x.shape, x.dtype) for k, x in zip(keys, leaves, strict=True)]
    )
    # Forward mode over reverse mode: one pass through the gradient gives H u, and no values are saved for a further
    # pass.
    _, product = jvp_of_gradient(jax.grad(objective), (params,), (signs,))
    return jax.tree.map(jnp.multiply, signs, product)


def jvp_of_gradient(gradient: Callable[..., Any], primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> Any:
    """Computes `jax.jvp` of a function that contains a gradient.

    Raises:
        UserError: if the model requires an attention kernel whose gradient has no derivative.
    """
    with differentiating_twice():
        return jax.jvp(gradient, primals, tangents)


def sign_keys(key: jax.Array, count: int) -> jax.Array:
    """Derives, from the key of a microbatch, the keys from which `hutchinson` draws the signs of `count` parameters."""
    return jax.random.split(jax.random.fold_in(key, _SAMPLING), count)


def gauss_newton_bartlett(
    loss: Loss,
    model: Decoder,
    batch: Batch,
    key: jax.Array,
    *,
    dtype: DTypeLike = jnp.float32,
    block_size: int | None = None,
) -> Any:
    """Returns the gradient of the loss on targets sampled from the model: Sophia-G's estimate, before squaring (Liu et
    al. 2023, arXiv 2305.14342, algorithm 2). Costs a gradient and a forward pass.

    Args:
        loss: cross-entropy of the targets, possibly weighted.
        model: the decoder.
        batch: the rows; their targets are ignored.
        key: for sampling and for dropout.
        dtype: compute dtype of the forward pass for sampling.
        block_size: number of tokens whose logits are held at a time during sampling; None: all tokens.

    Returns:
        A nested dict with the structure and dtypes of the model's parameters.
    """
    dropout_key = jax.random.fold_in(key, _DROPOUT)
    h_BSD, _ = model.batch_hidden_and_stats(batch, dtype=dtype, key=dropout_key)
    targets_BS = _sample_targets(model, h_BSD, jax.random.fold_in(key, _SAMPLING), block_size)
    # The same dropout as for sampling, so the differentiated model is the one that the targets were sampled from.
    # Targets are integers, so no gradient flows through sampling.
    objective, params = _loss_of_params(loss, model, batch._replace(targets=targets_BS), dropout_key)
    return jax.grad(objective)(params)


def with_dropout_key(loss: StagedLoss) -> StagedLoss:
    """Makes `loss` derive its dropout key from the key of an estimate, because sampling uses that key too."""

    def fold(function: Callable[..., Any]) -> Callable[..., Any]:
        def with_folded_key(*args: Any) -> Any:
            *others, key = args
            return function(*others, None if key is None else jax.random.fold_in(key, _DROPOUT))

        return with_folded_key

    memory = loss.memory
    if memory is not None:
        memory = replace(memory, embed=fold(memory.embed), layer=fold(memory.layer), finish=fold(memory.finish))
    return replace(loss, embed=fold(loss.embed), layer=fold(loss.layer), head=fold(loss.head), memory=memory)


def staged_gauss_newton_bartlett(loss: StagedLoss, *, block_size: int | None = None) -> StagedLoss:
    """Returns a staged loss on sampled targets; its gradient is `gauss_newton_bartlett`.

    Args:
        loss: cross-entropy of the targets.
        block_size: as for `gauss_newton_bartlett`.
    """
    loss_with_dropout_key = with_dropout_key(loss)

    def head(model: Decoder, stream: Stream, batch: Batch, key: jax.Array) -> LossSums:
        h_BSD = hidden_after_layers(model, stream, batch, jax.random.fold_in(key, _DROPOUT))
        targets_BS = _sample_targets(model, h_BSD, jax.random.fold_in(key, _SAMPLING), block_size)
        return loss_with_dropout_key.head(model, stream, batch._replace(targets=targets_BS), key)

    return replace(loss_with_dropout_key, head=head)


def _loss_of_params(
    loss: Loss, model: nnx.Module, batch: Batch, key: jax.Array
) -> tuple[Callable[[Any], jax.Array], Any]:
    graphdef, state = nnx.split(model, nnx.Param)
    return lambda params: loss(nnx.merge(graphdef, params), batch, key)[0], nnx.to_pure_dict(state)


def _sample_targets(model: Decoder, h_BSD: jax.Array, key: jax.Array, block_size: int | None) -> jax.Array:
    """Samples one token for each position from the distribution that the model predicts; returns int32 [B, S]."""
    h_ND = h_BSD.reshape(-1, h_BSD.shape[-1])
    # As many blocks as needed, all of the same size; the last block may therefore need padding.
    count = -(-h_ND.shape[0] // (block_size or h_ND.shape[0]))
    size = -(-h_ND.shape[0] // count)
    padded = jnp.pad(h_ND, [(0, count * size - h_ND.shape[0]), (0, 0)])

    def sample_block(block: tuple[jax.Array, jax.Array]) -> jax.Array:
        h_CD, block_key = block
        return jax.random.categorical(block_key, model.logits(h_CD[None])[0]).astype(jnp.int32)

    sampled = jax.lax.map(sample_block, (padded.reshape(count, size, -1), jax.random.split(key, count)))
    return sampled.reshape(-1)[: h_ND.shape[0]].reshape(h_BSD.shape[:-1])
