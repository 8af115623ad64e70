"""Configuration of the norms and histograms that `lm_trainer/step/updates/norms.py` computes."""

from __future__ import annotations

from typing import Literal

from pydantic import NonNegativeInt, field_validator

from lm_trainer.core.config import Config

Target = Literal["grads", "params", "updates", "opt_state"]


class WatchConfig(Config):
    """Norms and histograms of gradients and state, which are logged with the loss and the gradient norm."""

    watch_targets: tuple[Target, ...] = ("grads", "params")
    """Quantities to watch. `grads`: gradient of the mean loss before clipping; `params`: parameters after the step;
    `updates`: change of the parameters in the step; `opt_state`: moments of the optimizer. A list, or a comma-separated
    string."""
    include_norms: bool = True
    """Log the total norm of each target: `grads/norm/total`."""
    include_per_parameter_norms: bool = True
    """Log the norm of each parameter: `grads/norm/NAME`."""
    include_histograms: bool = False
    """Log a histogram of each parameter with 64 bins: `grads/histogram/NAME`."""
    split_scan_layers: bool = True
    """Log each layer separately if layers are stacked in one parameter: `NAME/0`, `NAME/1`, ..."""
    interval: NonNegativeInt = 10
    """Number of steps between observations; 0 disables them."""

    @field_validator("watch_targets", mode="before")
    @classmethod
    def _split_at_commas(cls, value: object) -> object:
        return tuple(part.strip() for part in value.split(",") if part.strip()) if isinstance(value, str) else value

    @property
    def enabled(self) -> bool:
        """True if anything is logged."""
        logs = self.include_norms or self.include_per_parameter_norms or self.include_histograms
        return bool(self.interval and self.watch_targets and logs)
