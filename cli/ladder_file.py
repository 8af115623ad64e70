"""Loads the YAML file of a ladder for the `lmt ladder` commands."""

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from cli.common import load_config

if TYPE_CHECKING:
    from lm_trainer.ladder import ModelLadder


def load_ladder(ctx: typer.Context, config: Path, overrides: list[str] | None) -> "ModelLadder":
    """Loads a ladder like `load_run_with_origins` loads a run."""
    from lm_trainer.ladder import ModelLadder

    return load_config(ctx, config, overrides, ModelLadder).config
