"""The run that a registered loss curve is for."""

from __future__ import annotations

from typing import Any

from lm_trainer.core.config import Config
from lm_trainer.core.errors import UserError
from lm_trainer.health.alerts.predicted_curve import RegisteredCurve, read_curve
from lm_trainer.run.config.run_config import numeric_differences, numeric_identity

_SECTIONS = ("model", "data", "optimizer", "parametrization", "loss")
_TRAINER_KEYS = ("num_train_steps", "train_batch_size")
_MAX_SHOWN = 3
"""Maximum number of differences in a message."""


def identify_curve(config: Config) -> dict[str, Any]:
    """Returns the part of a run's identity that determines its loss curve, as plain data. The seed is no part of it."""
    identity = numeric_identity(config)
    trainer = identity["trainer"]
    return {
        **{name: identity[name] for name in _SECTIONS if name in identity},
        "trainer": {key: trainer[key] for key in _TRAINER_KEYS},
    }


def find_differences(registered: RegisteredCurve, config: Config) -> list[str]:
    """Returns a line for each key in which a run differs from the run that a curve was predicted for."""
    current = identify_curve(config)
    # A loop of your own has no section of the model or the data.
    recorded = {name: section for name, section in registered.identity.items() if name in current}
    return numeric_differences(recorded, {name: current[name] for name in recorded}, config)


def check_prediction(config: Config) -> None:
    """Checks that the prediction of `trainer.alerts.off_prediction` is for this run.

    Raises:
        UserError: if it is for another run, or cannot be read.
    """
    trainer: Any = getattr(config, "trainer")  # noqa: B009 - a section that not every `Config` has
    alert = trainer.alerts.off_prediction
    if alert is not None and (differences := find_differences(read_curve(alert.file), config)):
        raise UserError(f"trainer.alerts.off_prediction: {describe_other_run(alert.file, differences)}")


def describe_other_run(file: str, differences: list[str]) -> str:
    """Returns a sentence about a prediction of another run."""
    more = f"; and {len(differences) - _MAX_SHOWN} more" * (len(differences) > _MAX_SHOWN)
    return (
        f"{file} predicts another run ({'; '.join(differences[:_MAX_SHOWN])}{more}); register a prediction of this run "
        "with `lmt ladder register --curve`, or remove the key"
    )
