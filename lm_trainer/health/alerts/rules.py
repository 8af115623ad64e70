"""Stop rules: end a run when a metric exceeds a value for a number of steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from pydantic import PositiveInt

from lm_trainer.core.config import Config
from lm_trainer.core.errors import EXIT_NON_FINITE, UserError


class RuleStop(UserError):
    """Training was stopped by a rule of `trainer.alerts.stop`."""

    exit_code = EXIT_NON_FINITE


class Rule(Config):
    """Ends the run when a metric exceeds a value for a number of consecutive steps."""

    metric: str = "train/loss"
    """Name of a metric that is logged at every step. Throughput metrics are not allowed, because they differ between
    processes."""
    above: float
    """Threshold for the metric. NaN counts as above the threshold."""
    steps: PositiveInt = 1
    """Number of consecutive steps above the threshold."""


def build_rule_check(rules: Sequence[Rule]) -> Callable[[int, Mapping[str, float]], None]:
    """Returns a function to call with the number of a step and its metrics, which must be the same in all processes.

    The function raises `RuleStop` when a rule applies, and `UserError` if a rule refers to an unknown metric.
    """
    counts = [0] * len(rules)

    def check(step: int, metrics: Mapping[str, float]) -> None:
        for index, rule in enumerate(rules):
            if rule.metric not in metrics:
                raise UserError(f"trainer.alerts.stop: no metric {rule.metric!r}; there are: {', '.join(metrics)}")
            # Not `value > above`, which is False for NaN.
            counts[index] = 0 if metrics[rule.metric] <= rule.above else counts[index] + 1
            if counts[index] == rule.steps:
                raise RuleStop(
                    f"step {step}: {rule.metric} is {metrics[rule.metric]:.6g}, and has been above {rule.above:g} for "
                    f"{rule.steps} steps (trainer.alerts.stop). The checkpoints are those of before"
                )

    return check
