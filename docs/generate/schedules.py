"""Plots of the schedules in a YAML block."""

import re
import tempfile
from pathlib import Path

_MARKED = re.compile(r"(```yaml\n((?:(?!```).)*)```\n\n)<!-- generated: plot -->", re.DOTALL)


def with_plots(markdown: str) -> str:
    """Draws the schedules of each marked YAML block below it."""
    return _MARKED.sub(lambda match: f"{match[1]}```text\n{schedule_plot(match[2])}```", markdown)


def schedule_plot(text: str) -> str:
    """The plot of `lmt config plot` for a configuration."""
    from lm_trainer.config.loader import load
    from lm_trainer.plot import plot_schedules, to_text
    from lm_trainer.run.config.run_config import RunConfig

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.yaml"
        path.write_text(text, encoding="utf-8")
        return to_text(plot_schedules(load(path, [], RunConfig).config), width=72, height=8)
