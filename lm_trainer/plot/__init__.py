"""Plots of the schedules of a run: learning rate, batch size and mixture weights."""

from __future__ import annotations

from lm_trainer.plot.curves import Curve, Marks, Panel, SchedulePlot, plot_schedules
from lm_trainer.plot.image import save_image
from lm_trainer.plot.terminal import to_text

__all__ = ["Curve", "Marks", "Panel", "SchedulePlot", "plot_schedules", "save_image", "to_text"]
