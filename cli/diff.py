"""`lmt diff`: where two runs part, and why."""

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from lm_trainer.reproduce.compare import Comparison

_NAMED = 4


def diff(
    run_a: Annotated[str, typer.Argument(metavar="RUN_A", help="A run id or a run directory.", show_default=False)],
    run_b: Annotated[str, typer.Argument(metavar="RUN_B", help="Another one.", show_default=False)],
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
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
        typer.echo(json.dumps(encode(asdict(found))))
    else:
        typer.echo("\n".join(_lines(found)))
    if found.parting:
        raise typer.Exit(1)


def _lines(found: "Comparison") -> list[str]:
    lines = [f"{found.a} and {found.b}: {found.common} steps in common, up to step {found.last}"]
    parting = found.parting
    if parting is None:
        lines.append("equal, bit for bit")
    else:
        where = f"step {parting.step}"
        if parting.after is not None and parting.after < parting.step - 1:
            where = f"between steps {parting.after} and {parting.step}"
        elif parting.after is not None:
            where += f", equal up to step {parting.after}"
        lines.append(f"first difference: {where}")
        lines += [f"  {name}: {a!r} -> {b!r}" for name, (a, b) in parting.values.items()]
    if found.parameters:
        more = f" and {len(found.parameters) - _NAMED} more" if len(found.parameters) > _NAMED else ""
        named = ", ".join(found.parameters[:_NAMED])
        lines.append(f"parameters that differ at step {found.checkpoint}: {named}{more}; {found.unchanged} are equal")
    if parting and not found.causes:
        lines.append("nothing that the runs have written down explains it: same configuration, data, code and devices")
    for kind, causes in found.causes.items():
        lines.append(kind if parting else f"{kind} (made no difference)")
        lines += [f"  {cause}" for cause in causes]
    if found.harmless:
        lines += ["decides no number", *(f"  {line}" for line in found.harmless)]
    return lines
