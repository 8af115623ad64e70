"""Areas of a learning-rate schedule, and windows of steps whose mean losses are compared.

Shape letters: S is the number of steps of a run, W the number of windows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.signal import lfilter

from lm_trainer.core.errors import UserError
from lm_trainer.run.config.run_config import RunConfig

NUM_WINDOWS = 100
"""Number of windows into which a run is divided."""
_FIRST_FRACTION = 0.05
"""Fraction of a run at its start without windows. There the loss follows another curve."""
MIN_WINDOWS = 20
"""Minimum number of windows of a curve."""


@dataclass(frozen=True)
class RatePlan:
    """Learning rate and batch of a run.

    The forward area is the sum of the learning rates, and the annealing area the sum of the momenta m_i = lambda m_i-1
    + (rate_i-1 - rate_i) (Tissue et al. 2024, arXiv 2408.11029, equation 1). Rates are relative to the peak, and the
    forward area is in tokens, so that runs of sizes with different peaks and batches share one law.
    """

    num_params: int
    """Number of parameters without the token embedding."""
    rates_S: np.ndarray
    """Learning rate of each step, relative to the peak (S,)."""
    batch_tokens: int
    """Number of tokens in a batch."""
    warmup: int
    """Number of steps of the first warm-up."""

    @property
    def steps(self) -> int:
        """Number of steps."""
        return len(self.rates_S)

    @property
    def tokens(self) -> int:
        """Number of tokens of the run."""
        return self.steps * self.batch_tokens

    @property
    def annealed(self) -> bool:
        """True if the learning rate falls during the run."""
        return bool((np.diff(self.rates_S) < 0).any())

    def forward_area(self) -> np.ndarray:
        """Returns the sum of the learning rates up to each step (S,), in tokens at the peak."""
        return np.cumsum(self.rates_S) * self.batch_tokens

    def annealing_area(self, horizon: float) -> np.ndarray:
        """Returns the annealing area up to each step (S,), in steps, for lambda = 1 - 1 / horizon."""
        # The rise of the first warm-up is no annealing; later rises undo annealing.
        rates_S = self.rates_S.copy()
        rates_S[: self.warmup] = rates_S[min(self.warmup, self.steps - 1)]
        falls_S = -np.diff(rates_S, prepend=rates_S[0])
        momentum_S: np.ndarray = np.asarray(lfilter([1.0], [1.0, 1 / horizon - 1], falls_S))
        return np.cumsum(momentum_S)

    def windows(self) -> Windows:
        """Returns windows of equal length that end with the run and begin after the warm-up.

        Raises:
            UserError: if the run is too short.
        """
        start = max(2 * self.warmup, round(_FIRST_FRACTION * self.steps))
        length = max(1, round(self.steps / NUM_WINDOWS))
        count = (self.steps - start) // length
        if count < MIN_WINDOWS:
            raise UserError(
                f"{self.steps} steps with {self.warmup} of warm-up leave {max(count, 0)} windows of {length} steps, "
                f"and a curve takes {MIN_WINDOWS}; shorten the warm-up, or train for more steps"
            )
        return Windows(length, self.steps - length * np.arange(count - 1, -1, -1))


@dataclass(frozen=True)
class Windows:
    """Consecutive windows of steps."""

    length: int
    """Number of steps in each window."""
    last_W: np.ndarray
    """Last step of each window, counted from 1 (W,)."""

    def mean(self, values_S: np.ndarray) -> np.ndarray:
        """Returns the mean of a value of each step over every window (W,)."""
        first = int(self.last_W[0]) - self.length
        return values_S[first : int(self.last_W[-1])].reshape(-1, self.length).mean(-1)


def plan_rates(config: RunConfig, num_params: int, name: str) -> RatePlan:
    """Returns the learning rates and the batch of a run.

    Args:
        config: configuration of the run.
        num_params: number of parameters without the token embedding.
        name: the run, for messages.

    Raises:
        UserError: if the form of the law cannot take the schedule.
    """
    sizes = config.trainer.batch_schedule.sizes.values
    if len(set(sizes)) > 1:
        raise UserError(
            f"{name}: trainer.train_batch_size changes from {sizes[0]} to {sizes[-1]} rows during the run, and the law "
            "of curves holds for one batch; give one number"
        )
    if config.trainer.initialize_from or config.initialize_from_hf or config.adapter is not None:
        raise UserError(
            f"{name}: the run starts from other weights, and the law of curves is of runs from the beginning; remove "
            "initialize_from, initialize_from_hf and adapter"
        )
    schedule = config.learning_rate()
    rates_S = np.array([schedule(step) for step in range(config.trainer.num_train_steps)]) / schedule.peak
    return RatePlan(num_params, rates_S, sizes[0] * config.model.seq_len, schedule.cycles[0].warmup)
