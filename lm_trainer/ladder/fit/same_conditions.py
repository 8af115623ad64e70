"""Checks that measurements can be compared: rungs by the code that trained them, ladders by their validation text."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from lm_trainer.core.errors import UserError
from lm_trainer.ladder.config import InstanceSource, LadderConfig
from lm_trainer.ladder.rungs import run_folder, run_name
from lm_trainer.run.files.records import read_attempts

_SHOWN = 12
"""Number of digits of a hash that are shown."""


def code_notes(ladder: LadderConfig) -> tuple[str, ...]:
    """Returns one sentence if the last attempts of the ladder's runs had different code; otherwise nothing.

    Raises:
        MachineError: if a record is damaged.
    """
    runs: dict[str, list[str]] = defaultdict(list)
    for size in ladder.sizes:
        for seed in ladder.seeds:
            attempts = read_attempts(run_folder(ladder, size, seed))
            if attempts and (code := _code_of(attempts[-1])):
                runs[code].append(run_name(ladder, size, seed))
    if len(runs) < 2:
        return ()
    shown = "; ".join(f"{', '.join(names)} by {code[:_SHOWN]}" for code, names in runs.items())
    return (
        f"rungs were trained by different code ({shown}), whose losses may differ without any effect of size; it is "
        "enough to train one of them again and compare (lmt diff), or to take a ladder of one commit",
    )


def _code_of(attempt: Mapping[str, Any]) -> str | None:
    # The hash of the source files, as two commits may have the same code, and a changed checkout has no commit.
    code = attempt.get("code") or attempt.get("git")
    return code if isinstance(code, str) else None


def check_same_measure(a: LadderConfig, b: LadderConfig, metric: str) -> None:
    """Checks that the losses of two ladders are of the same text in the same unit.

    Raises:
        UserError: if the validation text differs, or the tokenizer of a loss per token.
    """
    texts = [{_validation_text(source) for source in ladder.instance_sources} - {None} for ladder in (a, b)]
    if texts[0] != texts[1]:
        raise UserError(
            f"ladders {a.name} and {b.name} are measured on different validation text, so that their losses cannot be "
            "compared; name the same validation_urls in both and evaluate them again"
        )
    if a.tokenizer != b.tokenizer and not metric.endswith("bpb"):
        raise UserError(
            f"ladders {a.name} and {b.name} have different tokenizers, so that {metric}, a loss per token, cannot be "
            "compared; fit both with --metric eval/bpb --out FIT.json and compare these fits"
        )


def _validation_text(source: InstanceSource) -> str | None:
    """Identifies the validation text of a source; None if it has none."""
    if source.validation_urls:
        return f"{source.validation_urls} {source.text_key} {source.text_template} {source.format}"
    # The second split of a data set on the hub is its validation text.
    if source.id is None or len(source.splits) < 2:
        return None
    return f"{source.id} {source.name} {source.revision} {source.splits[1]} {source.text_key} {source.text_template}"
