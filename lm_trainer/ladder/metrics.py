"""Reads the metrics of a ladder at its checkpoints from the directories of its runs."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lm_trainer.core.errors import UserError
from lm_trainer.core.files import AnyPath, local_path
from lm_trainer.ladder.checkpoints import find_checkpoints
from lm_trainer.ladder.config import LadderConfig
from lm_trainer.ladder.rungs import count_params, model_config, run_config, vocab_size_of
from lm_trainer.ladder.running import describe_changes
from lm_trainer.profile.flops import flops_per_token
from lm_trainer.run.config.recorded_keys import config_with_recorded_keys
from lm_trainer.run.config.run_config import numeric_identity
from lm_trainer.run.files.records import RUN, read_run_record, recorded_identity

if TYPE_CHECKING:
    import pandas

Row = dict[str, Any]

FORMATS = ("csv", "json", "parquet")
FACTS = ("ladder", "size", "seed", "name", "step", "tokens", "num_params", "flops")
"""Names of the columns that precede the metrics."""


def collect_rows(
    ladder: LadderConfig,
    size_spec: str,
    prefix: str | None = None,
    *,
    discover_all: bool = False,
    alternative_dirs: Sequence[AnyPath] | None = None,
) -> list[Row]:
    """Returns one row for each checkpoint step that has measurements, for every seed.

    A row has the columns `FACTS` and those metrics of exactly this step whose names begin with `prefix`. Metrics that
    were not measured at the step are absent.

    Args:
        ladder: the ladder.
        size_spec: the size.
        prefix: prefix of the metric names; None means all.
        discover_all: includes checkpoints on disk that the ladder does not need.
        alternative_dirs: directories with other copies of this ladder.

    Raises:
        UserError: if a directory contains a run of another ladder, or a damaged file.
    """
    num_params = count_params(ladder, size_spec)
    spec = model_config(ladder, size_spec).spec(vocab_size_of(ladder))
    flops = flops_per_token(spec, ladder.sequence_length)
    rows = []
    for seed in ladder.seeds:
        checkpoints = find_checkpoints(
            ladder, size_spec, seed=seed, discover_all=discover_all, alternative_dirs=alternative_dirs
        )
        # Checkpoints of one run share a metrics file, which may be long, so it is read and checked once.
        measured: dict[Path, dict[int, Row]] = {}
        for checkpoint in checkpoints:
            if checkpoint.metrics_path is None:
                continue
            if checkpoint.metrics_path not in measured:
                check_owner(ladder, size_spec, seed, checkpoint.metrics_path.parent)
                measured[checkpoint.metrics_path] = read_metrics_by_step(checkpoint.metrics_path)
            metrics = measured[checkpoint.metrics_path].get(checkpoint.step, {})
            metrics = {key: value for key, value in metrics.items() if key.startswith(prefix or "")}
            if not metrics:
                continue
            facts = (ladder.name, size_spec, seed, checkpoint.name, checkpoint.step, checkpoint.tokens, num_params)
            rows.append({**dict(zip(FACTS, (*facts, flops.training * checkpoint.tokens), strict=True)), **metrics})
    return rows


def check_owner(ladder: LadderConfig, size_spec: str, seed: int, folder: Path) -> None:
    """Refuses a directory that contains a run of another ladder, whose metrics would be mistaken for this run's."""
    if not (folder / RUN).is_file():
        raise UserError(f"{folder}: has metrics, but no {RUN} that says of which run")
    identity = recorded_identity(read_run_record(folder), folder)
    expected = config_with_recorded_keys(run_config(ladder, size_spec, seed), identity)
    if differences := describe_changes(identity, numeric_identity(expected), expected):
        raise UserError(
            f"{folder} holds a run of another ladder than {ladder.name}:\n  "
            + "\n  ".join(differences[:8])
            + "\nSet dir of the ladder to a directory of its own"
        )


def read_metrics_by_step(file: Path) -> dict[int, Row]:
    """Reads the numbers in a `metrics.jsonl` by step. Training and evaluation each write a line for the same step."""
    metrics: dict[int, Row] = {}
    for number, line in enumerate(file.read_text().splitlines(), 1):
        try:
            record = json.loads(line)
            step = record.pop("step", None)
        except (ValueError, AttributeError):
            raise UserError(f"{file}:{number}: not a line of metrics") from None
        if isinstance(step, int):
            # Strings, such as samples and fingerprints, do not become columns of a table.
            values = {key: value for key, value in record.items() if isinstance(value, int | float)}
            # Merge the lines of a step into one row.
            metrics.setdefault(step, {}).update(values)
    return metrics


def to_dataframe(rows: Sequence[Row]) -> pandas.DataFrame:
    """Converts the rows to a DataFrame.

    Raises:
        UserError: if pandas is not installed.
    """
    try:
        import pandas
    except ImportError:
        raise UserError("a DataFrame needs pandas: pip install 'lm_trainer[ladder]'") from None
    return pandas.DataFrame(list(rows), columns=column_names(rows))


def column_names(rows: Sequence[Row]) -> list[str]:
    """Returns the names of the columns: `FACTS`, then the metrics of all rows in alphabetical order."""
    return [*FACTS, *sorted({key for row in rows for key in row} - set(FACTS))]


def write_rows(rows: Sequence[Row], kind: str, path: AnyPath | None) -> str | None:
    """Writes rows to a file as CSV, JSON or Parquet. Without a path, returns CSV or JSON as text."""
    path = None if path is None else local_path(path)
    if kind == "parquet":
        if path is None:
            raise UserError("Parquet is not for the terminal; say where to write it with --out FILE.parquet")
        import pyarrow
        import pyarrow.parquet

        table = pyarrow.table({name: [row.get(name) for row in rows] for name in column_names(rows)})
        pyarrow.parquet.write_table(table, path)
        return None
    if kind == "json":
        text = json.dumps(list(rows), indent=1) + "\n"
    else:
        buffer = io.StringIO()
        writer = csv.DictWriter(buffer, column_names(rows), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        text = buffer.getvalue()
    if path is None:
        return text
    path.write_text(text)
    return None
