"""Keys of the norms and histograms that `lm_trainer/step/updates/norms.py` computes."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import NonNegativeInt, field_validator

from lm_trainer.core.config import Config

Target = Literal["grads", "params", "updates", "opt_state"]


class WatchConfig(Config):
    """Norms and histograms of the inside of a step, logged beside the loss and the norm of the gradient."""

    watch_targets: tuple[Target, ...] = ("grads", "params")
    """`grads`: the gradient of the mean loss, before clipping; `params`: the parameters after the step; `updates`: what
    the step added to them; `opt_state`: the moments of the optimizer. A list, or one text with commas."""
    include_norms: bool = True
    """Log the norm of each target as a whole: `grads/norm/total`."""
    include_per_parameter_norms: bool = True
    """Log the norm of each parameter: `grads/norm/NAME`."""
    include_histograms: bool = False
    """Log a histogram of each parameter, 64 bins: `grads/histogram/NAME`."""
    split_scan_layers: bool = True
    """Log each layer apart where those of all layers are one parameter: `NAME/0`, `NAME/1`, ..."""
    interval: NonNegativeInt = 10
    """Steps between two looks; 0: never."""

    @field_validator("watch_targets", mode="before")
    @classmethod
    def _split_at_commas(cls, value: Any) -> Any:
        return tuple(part.strip() for part in value.split(",") if part.strip()) if isinstance(value, str) else value

    @property
    def enabled(self) -> bool:
        """True if there is anything to log."""
        wanted = self.include_norms or self.include_per_parameter_norms or self.include_histograms
        return bool(self.interval and self.watch_targets and wanted)
