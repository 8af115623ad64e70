"""Values of a frozen model that a loss reads, computed before training and kept with the rows.

Shape letters: B rows, S positions, D hidden dimension, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from lm_trainer.core.batch import Array, Batch
from lm_trainer.core.errors import UserError
from lm_trainer.nn.decoder import Decoder
from lm_trainer.nn.stages import LossSums, StagedLoss, Stream, decoder_stages

RowShapes = Mapping[str, tuple[tuple[int, ...], np.dtype]]
"""Name -> shape [S, ...] and dtype of the values of a row."""


class ReadsFrozenModel(Protocol):
    """A loss that reads values of a frozen model."""

    @property
    def dtype(self) -> Any:
        """Compute dtype of the frozen model."""
        ...

    def frozen_values(self, frozen: Decoder, h_BSD: jax.Array, batch: Batch) -> dict[str, jax.Array]:
        """Computes the values at each position, by name: [B, S, ...].

        Args:
            frozen: the frozen model.
            h_BSD: inputs of the head of the frozen model.
            batch: the rows.
        """
        ...

    def frozen_shapes(self, seq_len: int, vocab_size: int) -> RowShapes:
        """Returns the shapes and dtypes of the values of a row."""
        ...

    def frozen_settings(self) -> Mapping[str, Any]:
        """Returns the settings of the loss that affect the values, as plain data."""
        ...


@dataclass(frozen=True)
class FrozenValues:
    """The values of a frozen model as metrics of a loss, usable for evaluation. The loss itself is 0."""

    reader: ReadsFrozenModel

    def __call__(self, model: nnx.Module, batch: Batch, key: jax.Array | None) -> LossSums:
        """Returns the values of the rows of `batch`, without dropout."""
        del key
        assert isinstance(model, Decoder)
        h_BSD, _ = model.batch_hidden_and_stats(batch, dtype=self.reader.dtype)
        return self._as_metrics(model, h_BSD, batch)

    def split_into_stages(self, model: Decoder) -> StagedLoss:
        """Returns the same loss in stages. `model` may be abstract."""

        def head(model: Decoder, h_BSD: jax.Array, stream: Stream, batch: Batch) -> LossSums:
            del stream
            return self._as_metrics(model, h_BSD, batch)

        return decoder_stages(model.spec, self.reader.dtype, head)

    def _as_metrics(self, model: Decoder, h_BSD: jax.Array, batch: Batch) -> LossSums:
        zero = jnp.zeros((), jnp.float32)
        return zero, zero, self.reader.frozen_values(model, h_BSD, batch)


def read_frozen(batch: Batch) -> dict[str, Array]:
    """Returns the values of the frozen model at the positions of a batch.

    Raises:
        UserError: if they have not been computed.
    """
    if batch.frozen is None:
        raise UserError(
            "loss.precompute: the rows come without the predictions of the frozen model; use `lmt train`, or set "
            "loss.precompute to false"
        )
    return batch.frozen
