"""Translates other frameworks' configurations. Each dialect has a file, and an entry in `DIALECTS`."""

from __future__ import annotations

from lm_trainer.config.imports.axolotl import AXOLOTL
from lm_trainer.config.imports.base import Dialect
from lm_trainer.config.imports.levanter import LEVANTER
from lm_trainer.config.imports.litgpt import LITGPT
from lm_trainer.config.imports.nanogpt import NANOGPT
from lm_trainer.config.imports.torchtitan import TORCHTITAN
from lm_trainer.config.imports.trl import TRL

DIALECTS: tuple[Dialect, ...] = (NANOGPT, TORCHTITAN, LITGPT, AXOLOTL, TRL, LEVANTER)

__all__ = ["DIALECTS", "Dialect"]
