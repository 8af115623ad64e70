"""The dialect of Levanter: the same keys as ours, except for keys that the loader renames with a note or rejects."""

from __future__ import annotations

from lm_trainer.config.imports.base import Dialect

LEVANTER = Dialect(
    "Levanter",
    frozenset({"trainer.train_batch_size", "trainer.num_train_steps", "trainer.mp", "trainer.checkpointer.base_path"}),
    # Every key keeps its name. Unknown keys are dropped with a reason when the result is checked.
    {"": lambda _, values: dict(values)},
)
