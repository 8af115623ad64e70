"""`lmt diff`: the first step where two runs differ, and why."""

from typing import TYPE_CHECKING, Annotated

import typer

from cli import clean
from cli.common import JsonOption, place_argument

if TYPE_CHECKING:
    from lm_trainer.reproduce.compare import Comparison

_NAMED = 4
"""Parameters that are named; the rest is counted."""
# The key of the JSON output is older than the name of the field, and scripts read it.
_JSON_NAMES = {"divergence": "parting"}


def diff(
    run_a: Annotated[str, place_argument(metavar="RUN_A", help="A run id, directory or URL.", show_default=False)],
    run_b: Annotated[str, place_argument(metavar="RUN_B", help="Another one.", show_default=False)],
    as_json: JsonOption = False,
) -> None:
    """Find the first step where two runs part, and why.

    Configurations, data, code, packages and devices are compared, and, where checkpoints tell, parameters. Reads the
    run directories alone, and computes nothing. Exit codes: 0 equal in all steps that both have, 1 not.

    For example:

        lmt diff my-run logs/my-run-on-four-devices
    """
    import json
    from dataclasses import asdict

    from lm_trainer.reproduce.compare import compare
    from lm_trainer.reproduce.record import RunRecord
    from lm_trainer.trackers.jsonl import encode

    found = compare(RunRecord.read(run_a), RunRecord.read(run_b))
    if as_json:
        content = {_JSON_NAMES.get(name, name): value for name, value in asdict(found).items()}
        clean.echo(json.dumps(encode(content)))
    else:
        clean.echo("\n".join(_lines(found)))
    if found.divergence:
        raise typer.Exit(1)


def _lines(found: "Comparison") -> list[str]:
    lines = [f"{found.a} and {found.b}: {found.common} steps in common, up to step {found.last}"]
    divergence = found.divergence
    if divergence is None:
        lines.append("equal, bit for bit")
    else:
        where = f"step {divergence.step}"
        if divergence.after is not None and divergence.after < divergence.step - 1:
            where = f"between steps {divergence.after} and {divergence.step}"
        elif divergence.after is not None:
            where += f", equal up to step {divergence.after}"
        lines.append(f"first difference: {where}")
        lines += [f"  {name}: {a!r} -> {b!r}" for name, (a, b) in divergence.values.items()]
    if found.parameters:
        more = f" and {len(found.parameters) - _NAMED} more" if len(found.parameters) > _NAMED else ""
        named = ", ".join(found.parameters[:_NAMED])
        lines.append(f"parameters that differ at step {found.checkpoint}: {named}{more}; {found.unchanged} are equal")
    if divergence and not found.causes:
        lines.append("nothing that the runs have written down explains it: same configuration, data, code and devices")
    for kind, causes in found.causes.items():
        lines.append(kind if divergence else f"{kind} (made no difference)")
        lines += [f"  {cause}" for cause in causes]
    if found.harmless:
        lines += ["decides no number", *(f"  {line}" for line in found.harmless)]
    return lines
