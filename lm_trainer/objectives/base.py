"""Base classes of losses, and the sums of log probabilities that preference losses are functions of."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from lm_trainer.core.config import Config, StorageLocation
from lm_trainer.core.data_content import DataContent

if TYPE_CHECKING:
    import jax


class PairSums(NamedTuple):
    """Sums over the counted tokens of the answers of each pair; float32 arrays of one shape, and one element per pair.

    The answer that a labelled example does not have has no tokens, and log probabilities of 0.
    """

    chosen: jax.Array
    """log pi(y_w | x) of the policy for the chosen answer, in nats."""
    rejected: jax.Array
    """log pi(y_l | x) of the policy for the rejected answer, in nats."""
    chosen_tokens: jax.Array
    """Number of counted tokens of the chosen answer, |y_w|."""
    rejected_tokens: jax.Array
    """Number of counted tokens of the rejected answer, |y_l|."""
    reference_chosen: jax.Array | None = None
    """log pi_ref(y_w | x) of the reference, in nats; None for a loss without a reference."""
    reference_rejected: jax.Array | None = None
    """log pi_ref(y_l | x) of the reference, in nats; None for a loss without a reference."""
    drift: jax.Array | None = None
    """Mean log(pi / pi_ref) of the answers of a row after the prompts of other examples, in nats, broadcastable to the
    other arrays; None unless the loss `compares_mismatched`."""

    @property
    def log_ratios(self) -> tuple[jax.Array, jax.Array]:
        """log(pi / pi_ref) of the chosen and of the rejected answer."""
        assert self.reference_chosen is not None
        assert self.reference_rejected is not None
        return self.chosen - self.reference_chosen, self.rejected - self.reference_rejected

    @property
    def averages(self) -> tuple[jax.Array, jax.Array]:
        """Mean log probability per token of the chosen and of the rejected answer."""
        return self.chosen / self.chosen_tokens, self.rejected / self.rejected_tokens


class LossConfig(Config):
    """Base of every member of the union of losses."""

    content: ClassVar[DataContent] = "documents"
    """Contents of the data sets that the loss can be computed on."""
    has_reference: ClassVar[bool] = False
    """True if the loss compares the trained model with a frozen reference."""
    has_stages: ClassVar[bool] = True
    """True if the loss can be computed with one layer gathered at a time."""
    extra_forward_passes: ClassVar[int] = 0
    """Number of forward passes of a step that have no backward pass, except for the passes of a frozen model."""
    frozen_forward_passes: ClassVar[int] = 0
    """Number of forward passes of a step through a frozen model of the same size as the trained model."""

    @property
    def precomputes(self) -> bool:
        """True if the values of a frozen model are computed once, before training."""
        return False

    @property
    def step_forward_passes(self) -> int:
        """Number of forward passes of a step that have no backward pass."""
        return self.extra_forward_passes + (0 if self.precomputes else self.frozen_forward_passes)


class PreferenceLossConfig(LossConfig):
    """Base of losses that are functions of the log probabilities of answers."""

    content: ClassVar[DataContent] = "pairs"
    compares_mismatched: ClassVar[bool] = False
    """True if the loss also needs the log probabilities of answers to other prompts."""

    @abstractmethod
    def losses(self, sums: PairSums) -> jax.Array:
        """Returns the loss of each pair, float32, in the shape of the arrays in `sums`."""

    @abstractmethod
    def metrics(self, sums: PairSums) -> dict[str, jax.Array]:
        """Returns reported values of each pair by name, whose means are logged."""


class FrozenModelLossConfig(LossConfig):
    """Base of losses that read the predictions of a frozen model."""

    precompute: bool = False
    """Compute the predictions of the frozen model (the reference or the teacher) once, before the first step, and keep
    them in a directory next to the token cache. Steps are faster, and devices do not hold the weights of the frozen
    model. Later runs with the same frozen model, data and batches use the same files. The last digits of results may
    differ from a run without the key, because another program computes a step."""

    @property
    def precomputes(self) -> bool:
        """See `LossConfig`."""
        return self.precompute


class ReferenceLossConfig(FrozenModelLossConfig, PreferenceLossConfig):
    """Base of losses that compare the trained model with a reference."""

    has_reference: ClassVar[bool] = True
    frozen_forward_passes: ClassVar[int] = 1

    reference: StorageLocation | None = None
    """A run or checkpoint to compare with, which must be the same kind of model. The default is the model at the start:
    with an adapter, its frozen base, which costs no memory; otherwise, a frozen copy of the initial weights."""


def pair_metrics(rewards: tuple[jax.Array, jax.Array], sums: PairSums) -> dict[str, jax.Array]:
    """Returns the metrics of losses on pairs.

    Args:
        rewards: implicit rewards of the chosen and of the rejected answer, as the loss defines them.
        sums: sums of log probabilities.
    """
    chosen, rejected = rewards
    return {
        "rewards/chosen": chosen,
        "rewards/rejected": rejected,
        "rewards/margin": chosen - rejected,
        "rewards/accuracy": (chosen > rejected).astype(chosen.dtype),
        "logps/chosen": sums.chosen,
        "logps/rejected": sums.rejected,
    }


def smoothed_logistic(logits: jax.Array, smoothing: float) -> jax.Array:
    """Returns -(1 - e) log sigmoid(logits) - e log sigmoid(-logits): the loss if a share e of the labels is wrong.

    Source: E. Mitchell, "A note on DPO with noisy preferences" (2023), equation 3.
    """
    import jax

    loss = -jax.nn.log_sigmoid(logits)
    return loss if not smoothing else (1.0 - smoothing) * loss - smoothing * jax.nn.log_sigmoid(-logits)
