"""The distillation loss as a function of a model and a microbatch.

Shape letters: B rows, S positions, N tokens (B x S), C tokens of one block, D hidden dimension, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from lm_trainer.core.batch import Batch
from lm_trainer.core.errors import UserError
from lm_trainer.core.jax_types import PyTree
from lm_trainer.nn.decoder import Decoder
from lm_trainer.nn.loss import add_router_terms
from lm_trainer.nn.reference import has_reference, name_in_reference, reference_model
from lm_trainer.nn.router import RouterStats
from lm_trainer.nn.stages import LossSums, StagedLoss, Stream, decoder_stages, frozen_stack
from lm_trainer.objectives.distillation import DistillationConfig
from lm_trainer.objectives.frozen_values import RowShapes, read_frozen
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
        self._check_teacher(model)
        h_BSD, stats = model.batch_hidden_and_stats(batch, dtype=self.dtype, key=key)
        if self.config.precomputes:
            return self._loss_of_hidden(model, h_BSD, stats, batch, self._precomputed_teacher(batch))
        teacher = without_gradient(reference_model(model))
        teacher_h_BSD, _ = teacher.batch_hidden_and_stats(batch, dtype=self.dtype)
        computed = self._computed_teacher(teacher, jax.lax.stop_gradient(teacher_h_BSD))
        return self._loss_of_hidden(model, h_BSD, stats, batch, computed)

    def split_into_stages(self, model: Decoder) -> StagedLoss:
        """Returns the same loss in stages; the layers of the teacher run first. `model` may be abstract."""
        self._check_teacher(model)

        def teacher_head(teacher: Decoder, h_BSD: jax.Array, stream: Stream, batch: Batch) -> jax.Array:
            del teacher, stream, batch
            return h_BSD

        def head(model: Decoder, h_BSD: jax.Array, stream: Stream, batch: Batch) -> LossSums:
            if self.config.precomputes:
                teacher = self._precomputed_teacher(batch)
            else:
                teacher = self._computed_teacher(reference_model(model), jax.lax.stop_gradient(stream.memory))
            return self._loss_of_hidden(model, h_BSD, stream.stats, batch, teacher)

        if self.config.precomputes:
            return decoder_stages(model.spec, self.dtype, head)
        spec, prefix = reference_model(model).spec, name_in_reference("")
        stack = frozen_stack("teacher", prefix, reference_model, spec, self.dtype, teacher_head)
        return decoder_stages(model.spec, self.dtype, head, stack)

    def frozen_values(self, frozen: Decoder, h_BSD: jax.Array, batch: Batch) -> dict[str, jax.Array]:
        """See `ReadsFrozenModel`. Returns the predictions of the teacher."""
        del batch
        blocks = _Blocks.of(h_BSD, self.block_size)

        def predict_block(carry: tuple[()], h_CD: jax.Array) -> tuple[tuple[()], dict[str, jax.Array]]:
            return carry, self.config.teacher_predictions(_logits(frozen, h_CD))

        return jax.tree.map(blocks.join, jax.lax.scan(predict_block, (), blocks.split(h_BSD))[1])

    def frozen_shapes(self, seq_len: int, vocab_size: int) -> RowShapes:
        """See `ReadsFrozenModel`."""
        count = self.config.num_compared(vocab_size)
        logps = (seq_len, vocab_size if count is None else count + 1)
        ids: RowShapes = {} if count is None else {"ids": ((seq_len, count), np.dtype(np.int32))}
        return {**ids, "logps": (logps, np.dtype(np.float32))}

    def frozen_settings(self) -> Mapping[str, Any]:
        """See `ReadsFrozenModel`."""
        return {"temperature": self.config.temperature, "top_k": self.config.top_k}

    def _computed_teacher(self, teacher: Decoder, h_BSD: jax.Array) -> _Teacher:
        """Returns a teacher whose logits are computed from the inputs of its head."""
        return _Teacher(h_BSD, lambda h_CD: _logits(teacher, h_CD), self.config.divergences)

    def _precomputed_teacher(self, batch: Batch) -> _Teacher:
        """Returns a teacher whose predictions were computed before training."""
        values = {name: jnp.asarray(x) for name, x in read_frozen(batch).items()}
        return _Teacher(values, lambda block: block, self.config.divergences_from)

    def _loss_of_hidden(
        self, model: Decoder, h_BSD: jax.Array, stats: RouterStats | None, batch: Batch, teacher: _Teacher
    ) -> LossSums:
        """Computes the loss from the inputs of the head. The teacher has no gradient."""
        nll, kl = self._sum_tokens(model, h_BSD, teacher, batch)
        share = self.config.weight
        mixed = (1.0 - share) * nll + (share * self.config.temperature**2) * kl
        weight = jnp.sum(jnp.asarray(batch.weights).astype(jnp.float32))
        loss, more = add_router_terms(model, nll if self.evaluates else mixed, weight, stats, batch)
        return loss, weight, {**jax.lax.stop_gradient({"nll": nll, "kl": kl}), **more}

    def _sum_tokens(
        self, model: Decoder, h_BSD: jax.Array, teacher: _Teacher, batch: Batch
    ) -> tuple[jax.Array, jax.Array]:
        """Returns the weighted sums of the cross-entropies and of the divergences, in nats."""
        weights_BS = jnp.asarray(batch.weights).astype(jnp.float32)
        # Padding has the weight 0.
        split = _Blocks.of(h_BSD, self.block_size).split
        blocks = jax.tree.map(split, (h_BSD, teacher.values, jnp.asarray(batch.targets), weights_BS))

        # Recomputed in the backward pass, so that the logits of all tokens never exist together.
        @jax.checkpoint
        def add_block(
            sums: tuple[jax.Array, jax.Array], block: tuple[jax.Array, PyTree, jax.Array, jax.Array]
        ) -> tuple[tuple[jax.Array, jax.Array], None]:
            h_CD, values, targets_C, weights_C = block
            logits_CV, predictions = _logits(model, h_CD), teacher.predict(values)
            # A target past the vocabulary makes the loss NaN, which is noticed.
            logp_C1 = jnp.take_along_axis(jax.nn.log_softmax(logits_CV), targets_C[:, None], axis=-1, mode="fill")
            kl_C = teacher.divergences(logits_CV, predictions)
            nll, kl = sums
            return (nll - jnp.sum(weights_C * logp_C1[:, 0]), kl + jnp.sum(weights_C * kl_C)), None

        zero = (jnp.zeros((), jnp.float32), jnp.zeros((), jnp.float32))
        return jax.lax.scan(add_block, zero, blocks)[0]

    def _check_teacher(self, model: Decoder) -> None:
        if not (self.config.precomputes or has_reference(model)):
            raise UserError("loss: distillation cannot be computed here, because the teacher has not been loaded")


class _Teacher(NamedTuple):
    """The predictions of a teacher, block by block."""

    values: PyTree
    """Arrays [B, S, ...] that determine the predictions."""
    predict: Callable[[PyTree], PyTree]
    """Maps the values of a block, [C, ...], to the predictions."""
    divergences: Callable[[jax.Array, PyTree], jax.Array]
    """Maps the logits of the student, [C, V], and the predictions to the divergence of each token, [C]."""


class _Blocks(NamedTuple):
    """Division of the tokens of a microbatch into blocks."""

    rows: int
    length: int
    size: int
    """Number of tokens of a block."""

    @classmethod
    def of(cls, h_BSD: jax.Array, block_size: int | None) -> _Blocks:
        """Returns the division of tokens with the inputs `h_BSD` of a head; a `block_size` of None makes one block."""
        rows, length = h_BSD.shape[:2]
        return cls(rows, length, min(block_size or rows * length, rows * length))

    def split(self, x_BS: jax.Array) -> jax.Array:
        """Returns an array [B, S, ...] as [number of blocks, C, ...]. The last block is padded with zeros."""
        tokens = self.rows * self.length
        count = -(-tokens // self.size)
        flat = x_BS.reshape(tokens, *x_BS.shape[2:])
        return jnp.pad(flat, [(0, count * self.size - tokens)] + [(0, 0)] * (flat.ndim - 1)).reshape(
            count, self.size, *flat.shape[1:]
        )

    def join(self, x: jax.Array) -> jax.Array:
        """Returns an array [number of blocks, C, ...] as [B, S, ...]; the inverse of `split`."""
        flat = x.reshape(-1, *x.shape[2:])[: self.rows * self.length]
        return flat.reshape(self.rows, self.length, *flat.shape[1:])


def _logits(model: Decoder, h_CD: jax.Array) -> jax.Array:
    """Returns the logits of hidden states, float32 [C, V]."""
    w_VD = model.head_weight().astype(h_CD.dtype)
    logits_CV = jnp.matmul(h_CD, w_VD.T, preferred_element_type=jnp.float32)
    softcap = model.spec.head.softcap
    return logits_CV if softcap is None else softcap * jnp.tanh(logits_CV * (1.0 / softcap))
