"""Levanter: the same keys as ours, up to those that are read with a note or refused when a configuration is loaded."""

from __future__ import annotations

from lm_trainer.config.imports.base import Dialect

LEVANTER = Dialect(
    "Levanter",
    frozenset({"trainer.train_batch_size", "trainer.num_train_steps", "trainer.mp", "trainer.checkpointer.base_path"}),
    # Every key keeps its name; what is none of ours falls out with its reason when the result is checked.
    {"": lambda _, values: dict(values)},
)
