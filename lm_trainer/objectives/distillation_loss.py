"""The distillation loss as a function of a model and a microbatch.

Shape letters: B rows, S positions, N tokens (B x S), C tokens of one block, D hidden dimension, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from lm_trainer.core.batch import Batch
from lm_trainer.core.errors import UserError
from lm_trainer.nn.decoder import Decoder
from lm_trainer.nn.loss import add_router_terms
from lm_trainer.nn.reference import has_reference, name_in_reference, reference_model
from lm_trainer.nn.router import RouterStats
from lm_trainer.nn.stages import LossSums, StagedLoss, Stream, decoder_stages, frozen_stack
from lm_trainer.objectives.distillation import DistillationConfig
from lm_trainer.objectives.preference import without_gradient


@dataclass(frozen=True)
class DistillationLoss:
    """A distillation loss for a `Decoder` with an attached teacher, usable as a loss of the step."""

    config: DistillationConfig
    dtype: Any
    """Compute dtype. Logits and the loss are float32."""
    block_size: int | None = None
    """Number of tokens whose logits exist together; None: all."""
    evaluates: bool = False
    """True to return the cross-entropy as the loss, so that held-out losses can be compared with other runs."""

    def __call__(self, model: nnx.Module, batch: Batch, key: jax.Array | None) -> LossSums:
        """Returns the weighted sum of the losses of all tokens, the sum of the weights, and sums of the metrics.

        The metrics are `nll`, the cross-entropy, and `kl`, the divergence at the temperature of the configuration.
        """
        assert isinstance(model, Decoder)
        _check_teacher(model)
        h_BSD, stats = model.batch_hidden_and_stats(batch, dtype=self.dtype, key=key)
        teacher = without_gradient(reference_model(model))
        teacher_h_BSD, _ = teacher.batch_hidden_and_stats(batch, dtype=self.dtype)
        return self._loss_of_hidden(model, h_BSD, stats, batch, teacher, jax.lax.stop_gradient(teacher_h_BSD))

    def split_into_stages(self, model: Decoder) -> StagedLoss:
        """Returns the same loss in stages; the layers of the teacher run first. `model` may be abstract."""
        _check_teacher(model)

        def teacher_head(teacher: Decoder, h_BSD: jax.Array, stream: Stream, batch: Batch) -> jax.Array:
            del teacher, stream, batch
            return h_BSD

        def head(model: Decoder, h_BSD: jax.Array, stream: Stream, batch: Batch) -> LossSums:
            teacher_h_BSD = jax.lax.stop_gradient(stream.memory)
            return self._loss_of_hidden(model, h_BSD, stream.stats, batch, reference_model(model), teacher_h_BSD)

        spec, prefix = reference_model(model).spec, name_in_reference("")
        teacher = frozen_stack("teacher", prefix, reference_model, spec, self.dtype, teacher_head)
        return decoder_stages(model.spec, self.dtype, head, teacher)

    def _loss_of_hidden(
        self,
        model: Decoder,
        h_BSD: jax.Array,
        stats: RouterStats | None,
        batch: Batch,
        teacher: Decoder,
        teacher_h_BSD: jax.Array,
    ) -> LossSums:
        """Computes the loss from the inputs of both heads. The teacher and `teacher_h_BSD` have no gradient."""
        nll, kl = self._sum_tokens(model, h_BSD, teacher, teacher_h_BSD, batch)
        share = self.config.weight
        mixed = (1.0 - share) * nll + (share * self.config.temperature**2) * kl
        weight = jnp.sum(jnp.asarray(batch.weights).astype(jnp.float32))
        loss, more = add_router_terms(model, nll if self.evaluates else mixed, weight, stats, batch)
        return loss, weight, {**jax.lax.stop_gradient({"nll": nll, "kl": kl}), **more}

    def _sum_tokens(
        self, model: Decoder, h_BSD: jax.Array, teacher: Decoder, teacher_h_BSD: jax.Array, batch: Batch
    ) -> tuple[jax.Array, jax.Array]:
        """Returns the weighted sums of the cross-entropies and of the divergences, in nats."""
        tokens = h_BSD.shape[0] * h_BSD.shape[1]
        size = min(self.block_size or tokens, tokens)
        count = -(-tokens // size)

        def split(x: jax.Array) -> jax.Array:
            flat = x.reshape(tokens, *x.shape[2:])
            # Padding has the weight 0.
            return jnp.pad(flat, [(0, count * size - tokens)] + [(0, 0)] * (flat.ndim - 1)).reshape(
                count, size, *flat.shape[1:]
            )

        weights_BS = jnp.asarray(batch.weights).astype(jnp.float32)
        blocks = tuple(map(split, (h_BSD, teacher_h_BSD, jnp.asarray(batch.targets), weights_BS)))

        # Recomputed in the backward pass, so that the logits of all tokens never exist together.
        @jax.checkpoint
        def add_block(
            sums: tuple[jax.Array, jax.Array], block: tuple[jax.Array, ...]
        ) -> tuple[tuple[jax.Array, jax.Array], None]:
            h_CD, teacher_h_CD, targets_C, weights_C = block
            logits_CV, teacher_CV = _logits(model, h_CD), _logits(teacher, teacher_h_CD)
            # A target past the vocabulary makes the loss NaN, which is noticed.
            logp_C1 = jnp.take_along_axis(jax.nn.log_softmax(logits_CV), targets_C[:, None], axis=-1, mode="fill")
            kl_C = self.config.divergences(logits_CV, teacher_CV)
            nll, kl = sums
            return (nll - jnp.sum(weights_C * logp_C1[:, 0]), kl + jnp.sum(weights_C * kl_C)), None

        zero = (jnp.zeros((), jnp.float32), jnp.zeros((), jnp.float32))
        return jax.lax.scan(add_block, zero, blocks)[0]


def _check_teacher(model: Decoder) -> None:
    if not has_reference(model):
        raise UserError("loss: distillation cannot be computed here, because the teacher has not been loaded")


def _logits(model: Decoder, h_CD: jax.Array) -> jax.Array:
    """Returns the logits of hidden states, float32 [C, V]."""
    w_VD = model.head_weight().astype(h_CD.dtype)
    logits_CV = jnp.matmul(h_CD, w_VD.T, preferred_element_type=jnp.float32)
    softcap = model.spec.head.softcap
    return logits_CV if softcap is None else softcap * jnp.tanh(logits_CV * (1.0 / softcap))
