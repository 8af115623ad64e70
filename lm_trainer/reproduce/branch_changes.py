"""Changes that a branch may not make: each rule returns the reason why a change makes no sense after some steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from lm_trainer.run.build.model import trace_model
from lm_trainer.run.config.run_config import RunConfig
from lm_trainer.run.weights.vocabulary import find_vocabulary


class Change(NamedTuple):
    """The configurations of a run before and after the step at which it branches."""

    old: RunConfig
    new: RunConfig
    step: int
    """Number of completed steps at the change."""
    keys: Mapping[str, tuple[Any, Any]]
    """Dotted keys that affect the results and have changed, with both values."""

    def first_key(self, *prefixes: str) -> str | None:
        """Returns the first changed key with one of the prefixes."""
        return next((key for key in self.keys if key.startswith(prefixes)), None)


Rule = Callable[[Change], str | None]


def changes_optimizer(change: Change) -> bool:
    """Returns True if the optimizer is another one, which cannot read the state of the old one."""
    return change.old.optimizer.type != change.new.optimizer.type


def changes_measurements(change: Change) -> bool:
    """Returns True if only one of the runs measures the largest attention logits."""
    return (change.old.optimizer.logit_limit is None) != (change.new.optimizer.logit_limit is None)


def changes_data(change: Change) -> bool:
    """Returns True if the branch reads other rows than its parent would."""
    return change.first_key("data.", "model.seq_len", "trainer.seed") is not None


def _other_tokenizer(change: Change) -> str | None:
    key = change.first_key("data.tokenizer")
    if key is None:
        return None
    return f"{key}: the weights know the tokens of one tokenizer only; train a new run, with a trainer.id of its own"


def _other_start(change: Change) -> str | None:
    key = change.first_key("trainer.initialize_from", "initialize_from_hf")
    if key is None:
        return None
    return f"{key}: it decides the weights before step 1, which a branch takes from its parent; remove it"


def _other_past(change: Change) -> str | None:
    old, new = (config.trainer.batch_schedule for config in (change.old, change.new))
    if all(old.at(step) == new.at(step) for step in (0, change.step - 1)) and (
        old.rows_before(change.step) == new.rows_before(change.step)
    ):
        return None
    stages = [{"start": 0, "value": old.at(0)}, {"start": change.step, "value": new.at(change.step)}]
    written = ", ".join(f"{{start: {stage['start']}, value: {stage['value']}}}" for stage in stages)
    return (
        f"trainer.train_batch_size: rows are numbered from step 0, so the steps before must keep their size; write "
        f"trainer.train_batch_size='[{written}]'"
    )


def _no_steps_left(change: Change) -> str | None:
    total = change.new.trainer.num_train_steps
    if total > change.step:
        return None
    return f"trainer.num_train_steps is {total}: nothing is left after step {change.step}; set a larger number"


def _other_shapes(change: Change) -> str | None:
    if change.first_key("model.", "adapter", "loss", "trainer.mp", "trainer.quantization") is None:
        return None
    rows = find_vocabulary(change.old).rows
    old, new = (
        {name: f"{x.dtype}{[*x.shape]}" for name, x in trace_model(config, rows).shapes.items()}
        for config in (change.old, change.new)
    )
    lines = [
        f"{name}: {old.get(name, 'nothing')} in the run, {new.get(name, 'nothing')} in the branch"
        for name in {**old, **new}
        if old.get(name) != new.get(name)
    ]
    if not lines:
        return None
    more = f"\n  and {len(lines) - 4} more" if len(lines) > 4 else ""
    return (
        "these changes make another model, whose weights the run does not have:\n  "
        + "\n  ".join(lines[:4])
        + more
        + "\nTrain a new run"
    )


RULES: tuple[Rule, ...] = (_other_tokenizer, _other_start, _other_past, _no_steps_left, _other_shapes)
"""The rules in the order in which they are checked, the cheapest first."""


def find_refusal(change: Change) -> str | None:
    """Returns the reason why a branch cannot make a change; None if it can."""
    reasons = (rule(change) for rule in RULES)
    return next((reason for reason in reasons if reason is not None), None)
