"""The preference losses as functions of a model and a microbatch.

Shape letters: B rows, S positions, D hidden dimension.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from lm_trainer.core.batch import Batch
from lm_trainer.nn.decoder import Decoder
from lm_trainer.nn.loss import add_router_terms, hidden_loss, hidden_nll
from lm_trainer.nn.reference import has_reference, name_in_reference, reference_model
from lm_trainer.nn.router import RouterStats
from lm_trainer.nn.stages import LossSums, StagedLoss, Stream, decoder_stages, frozen_stack
from lm_trainer.objectives.base import PreferenceLossConfig
from lm_trainer.objectives.frozen_values import RowShapes, read_frozen
from lm_trainer.objectives.mismatch import with_mismatched_answers
from lm_trainer.objectives.pairs import ends_of_pairs, sum_over_pairs

_LOGPS, _MISMATCHED_LOGPS = "logps", "mismatched_logps"
"""Names of precomputed log probabilities of the targets under the reference: in the rows of the data, and in the same
rows with mismatched answers."""


class PairLogps(NamedTuple):
    """Log probabilities of the targets, float32, without gradient."""

    policy_BS: jax.Array
    reference_BS: jax.Array | None = None
    drift_B1: jax.Array | None = None
    """As in `PairSums`."""


@dataclass(frozen=True)
class PreferenceLoss:
    """A preference loss for a `Decoder`, usable as a loss of the step: sums over pairs, and the number of pairs."""

    config: PreferenceLossConfig
    dtype: Any
    """Compute dtype. Log probabilities and the loss are float32."""
    block_size: int | None = None
    """Number of tokens that the head processes together; None: all."""

    def __call__(self, model: nnx.Module, batch: Batch, key: jax.Array | None) -> LossSums:
        """Returns the sum of the losses of all pairs, the number of pairs, and sums of the metrics of pairs.

        The gradient is computed in two passes through the head, and one through the layers. The first pass computes log
        probabilities, and so the derivative of the loss by each of them. In the second, the derivatives are the weights
        of a cross-entropy, whose gradient is computed block by block, so the logits of all tokens never exist together.
        """
        assert isinstance(model, Decoder)
        h_BSD, stats = model.batch_hidden_and_stats(batch, dtype=self.dtype, key=key)
        frozen = without_gradient(model)
        logps_BS = self._logps(frozen, batch, jax.lax.stop_gradient(h_BSD))
        reference = reference_model(frozen) if self._holds_reference else None
        reference_BS = self._read_precomputed(batch, _LOGPS) if reference is None else self._logps(reference, batch)
        drift_B1 = self._drift(frozen, reference, batch) if self.config.compares_mismatched else None
        return self._loss_of_logps(model, h_BSD, stats, batch, PairLogps(logps_BS, reference_BS, drift_B1))

    def split_into_stages(self, model: Decoder) -> StagedLoss:
        """Returns the same loss in stages; the layers of a reference run first. `model` may be abstract."""
        assert self.config.has_stages, "the configuration is checked first"

        def reference_head(reference: Decoder, h_BSD: jax.Array, stream: Stream, batch: Batch) -> jax.Array:
            del stream
            return self._logps(reference, batch, h_BSD)

        def head(model: Decoder, h_BSD: jax.Array, stream: Stream, batch: Batch) -> LossSums:
            logps_BS = jax.lax.stop_gradient(self._logps(model, batch, jax.lax.stop_gradient(h_BSD)))
            reference_BS = jax.lax.stop_gradient(stream.memory) if holds else self._read_precomputed(batch, _LOGPS)
            return self._loss_of_logps(model, h_BSD, stream.stats, batch, PairLogps(logps_BS, reference_BS))

        reference, holds = None, self._holds_reference
        if holds:
            prefix = name_in_reference("") if has_reference(model) else ""
            spec = reference_model(model).spec
            reference = frozen_stack("reference", prefix, reference_model, spec, self.dtype, reference_head)
        return decoder_stages(model.spec, self.dtype, head, reference)

    def frozen_values(self, frozen: Decoder, h_BSD: jax.Array, batch: Batch) -> dict[str, jax.Array]:
        """See `ReadsFrozenModel`. Returns log probabilities of the targets under the reference."""
        values = {_LOGPS: self._logps(frozen, batch, h_BSD)}
        if self.config.compares_mismatched:
            values[_MISMATCHED_LOGPS] = self._logps(frozen, with_mismatched_answers(batch))
        return values

    def frozen_shapes(self, seq_len: int, vocab_size: int) -> RowShapes:
        """See `ReadsFrozenModel`."""
        del vocab_size
        names = (_LOGPS, _MISMATCHED_LOGPS) if self.config.compares_mismatched else (_LOGPS,)
        return dict.fromkeys(names, ((seq_len,), np.dtype(np.float32)))

    def frozen_settings(self) -> Mapping[str, Any]:
        """See `ReadsFrozenModel`. Losses with the same names of values have the same values."""
        return {"content": self.config.content}

    @property
    def _holds_reference(self) -> bool:
        """True if the reference is computed in the step."""
        return self.config.has_reference and not self.config.precomputes

    def _read_precomputed(self, batch: Batch, name: str) -> jax.Array | None:
        return jnp.asarray(read_frozen(batch)[name]) if self.config.precomputes else None

    def _loss_of_logps(
        self, model: Decoder, h_BSD: jax.Array, stats: RouterStats | None, batch: Batch, logps: PairLogps
    ) -> LossSums:
        """Computes the loss from the inputs of the head and log probabilities without gradient."""
        ends_BS = ends_of_pairs(batch)

        def total(logps_BS: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
            sums = sum_over_pairs(logps_BS, logps.reference_BS, batch)._replace(drift=logps.drift_B1)
            losses_BS, metrics = self.config.losses(sums), self.config.metrics(sums)
            return _sum_where(ends_BS, losses_BS), {name: _sum_where(ends_BS, x) for name, x in metrics.items()}

        (loss, metrics), slopes_BS = jax.value_and_grad(total, has_aux=True)(logps.policy_BS)
        # The cross-entropy is the sum of weights * -log p.
        surrogate, _, _ = hidden_loss(
            model, h_BSD, None, batch._replace(weights=-slopes_BS), block_size=self.block_size
        )
        loss = loss + (surrogate - jax.lax.stop_gradient(surrogate))
        pairs = jnp.sum(ends_BS).astype(jnp.float32)
        loss, more = add_router_terms(model, loss, pairs, stats, batch)
        return loss, pairs, {**jax.lax.stop_gradient(metrics), **more}

    def _logps(self, model: Decoder, batch: Batch, h_BSD: jax.Array | None = None) -> jax.Array:
        """Returns the log probabilities of the targets, float32 [B, S], without dropout and gradient."""
        if h_BSD is None:
            h_BSD, _ = model.batch_hidden_and_stats(batch, dtype=self.dtype)
        metrics: Mapping[str, jax.Array] = hidden_nll(model, h_BSD, batch, block_size=self.block_size)[2]
        return -metrics["nll"]

    def _drift(self, policy: Decoder, reference: Decoder | None, batch: Batch) -> jax.Array:
        """Returns the mean log(pi / pi_ref) of the mismatched answers of each row, float32 [B, 1]."""
        mismatched = with_mismatched_answers(batch)
        logps_BS = self._logps(policy, mismatched)
        if reference is None:
            reference_BS = self._read_precomputed(batch, _MISMATCHED_LOGPS)
        else:
            reference_BS = self._logps(reference, mismatched)
        chosen_BS, rejected_BS = sum_over_pairs(logps_BS, reference_BS, mismatched).log_ratios
        ends_BS = ends_of_pairs(mismatched)
        ratios_BS = jnp.where(ends_BS, chosen_BS + rejected_BS, 0.0)
        count_B1 = jnp.maximum(jnp.sum(ends_BS, axis=1, keepdims=True), 1)
        return jnp.sum(ratios_BS, axis=1, keepdims=True) / count_B1.astype(jnp.float32)


def without_gradient(model: Decoder) -> Decoder:
    """Returns a copy of the model through which no gradient flows."""
    graphdef, state = nnx.split(model)
    return nnx.merge(graphdef, jax.tree.map(jax.lax.stop_gradient, state))


def _sum_where(selected_BS: jax.Array, x_BS: jax.Array) -> jax.Array:
    return jnp.sum(jnp.where(selected_BS, x_BS, 0.0))
