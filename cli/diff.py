"""`lmt diff`: the first step at which two runs diverge, and why."""

from typing import TYPE_CHECKING, Annotated

import typer

from cli import clean
from cli.common import JsonOption, storage_argument

if TYPE_CHECKING:
    from lm_trainer.reproduce.compare import Comparison

_NAMED = 4
"""Maximum number of parameters that are listed by name. Further parameters are only counted."""
# The field was renamed, but the JSON keeps the old key for existing scripts.
_JSON_NAMES = {"divergence": "parting"}


def diff(
    run_a: Annotated[str, storage_argument(metavar="RUN_A", help="A run id, directory or URL.", show_default=False)],
    run_b: Annotated[str, storage_argument(metavar="RUN_B", help="The run to compare it with.", show_default=False)],
    as_json: JsonOption = False,
) -> None:
    """Find the first step at which two runs diverge, and why.

    Compares configuration, data, code, packages and devices, and also parameters if both runs have a checkpoint of the
    same step. For a branch, also compares the steps that it shares with its parent. Reads only the run directories.
    Exit codes: 0 if all common steps are equal, otherwise 1.

    For example:

        lmt diff my-run logs/my-run-on-four-devices
    """
    import json
    from dataclasses import asdict

    from lm_trainer.reproduce.compare import compare_runs
    from lm_trainer.reproduce.record import RunRecord
    from lm_trainer.trackers.jsonl import encode_non_finite

    comparison = compare_runs(RunRecord.read(run_a), RunRecord.read(run_b))
    if as_json:
        content = {_JSON_NAMES.get(name, name): value for name, value in asdict(comparison).items()}
        clean.echo(json.dumps(encode_non_finite(content)))
    else:
        clean.echo("\n".join(_comparison_lines(comparison)))
    if comparison.divergence:
        raise typer.Exit(1)


def _comparison_lines(comparison: "Comparison") -> list[str]:
    lines = [f"{comparison.a} and {comparison.b}: {comparison.common} steps in common, up to step {comparison.last}"]
    divergence = comparison.divergence
    if comparison.shared is not None:
        lines.append(f"steps up to {comparison.shared} are shared: one run is a branch of the other or of its past")
    if divergence is None:
        lines.append("equal, bit for bit")
    else:
        location = f"step {divergence.step}"
        if divergence.after is not None and divergence.after < divergence.step - 1:
            location = f"between steps {divergence.after} and {divergence.step}"
        elif divergence.after is not None:
            location += f", equal up to step {divergence.after}"
        lines.append(f"first difference: {location}")
        if comparison.shared is not None and divergence.after is not None:
            changes = [cause for causes in comparison.causes.values() for cause in causes]
            lines.append(f"equal up to {divergence.after}, then: {'; '.join(changes[:_NAMED]) or 'no recorded change'}")
        lines += [f"  {name}: {a!r} -> {b!r}" for name, (a, b) in divergence.values.items()]
    if comparison.parameters:
        more = f" and {len(comparison.parameters) - _NAMED} more" if len(comparison.parameters) > _NAMED else ""
        named = ", ".join(comparison.parameters[:_NAMED])
        lines.append(
            f"parameters that differ at step {comparison.checkpoint}: {named}{more}; {comparison.unchanged} are equal"
        )
    if divergence and not comparison.causes:
        lines.append("nothing that the runs have written down explains it: same configuration, data, code and devices")
    for kind, causes in comparison.causes.items():
        lines.append(kind if divergence else f"{kind} (made no difference)")
        lines += [f"  {cause}" for cause in causes]
    if comparison.harmless:
        lines += ["decides no number", *(f"  {line}" for line in comparison.harmless)]
    return lines
