"""`lmt golden`: the exact numbers of a configuration's first steps as a file, for tests of other code."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli import clean
from cli.common import (
    OVERRIDES,
    ConfigArgument,
    JsonOption,
    OverridesArgument,
    load_run_config,
    path_argument,
    path_option,
)
from cli.config_file import find_config_file, is_shipped
from lm_trainer.core.errors import UserError

if TYPE_CHECKING:
    from lm_trainer.reproduce.golden import Golden, StepDifference
    from lm_trainer.reproduce.golden_steps import CheckedDevices

app = typer.Typer(
    no_args_is_help=True, help="Record the exact numbers of a configuration's first steps, and check them later."
)

_COLUMNS = "{:<8}{:>7}  {}"
_NAMED = 4
"""Maximum number of parameters that are listed by name. Further parameters are only counted."""


@app.callback()
def _prepare() -> None:
    from lm_trainer.core.runtime import prepare_process

    # Called before jax is imported, because it configures jax's allocator and threads.
    prepare_process()


@app.command(context_settings=OVERRIDES)
def record(
    ctx: typer.Context,
    config: ConfigArgument,
    overrides: OverridesArgument = None,
    steps: Annotated[int, typer.Option("--steps", metavar="N", min=1, help="Number of steps.")] = 20,
    devices: Annotated[
        str, typer.Option("--devices", metavar="N,N", help="Numbers of devices that must give the same bits.")
    ] = "1,2,4",
    output: Annotated[
        Path | None,
        path_option("--output", "-o", metavar="FILE", help="The golden file.", show_default="CONFIG.golden.json"),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Train the first steps of a configuration in a temporary directory, and write their exact numbers to a file.

    The file has the losses, gradient norms and other metrics of every step, digests of its rows and of every parameter,
    the configuration, and the versions. It is written only if all numbers of devices give the same bits; on a CPU the
    devices are emulated. Exit codes: 0 if the file was written, 1 if the devices differ.

    Examples:
        lmt golden record configs/gpt2_nano.yaml --steps 20 --devices 1,2,4

        lmt golden record my.yaml trainer.train_batch_size=16 -o golden/my.json
    """
    counts = _parse_devices(devices)
    run = load_run_config(ctx, config, overrides)
    _check_no_credentials(overrides or [])
    import sys

    from lm_trainer.core.files import ensure_writable_directory
    from lm_trainer.reproduce.golden import Golden, write_golden
    from lm_trainer.reproduce.golden_steps import check_first_steps, compute_first_steps, configure_devices
    from lm_trainer.reproduce.rerun import QuietProgress
    from lm_trainer.run.config.run_config import numeric_identity
    from lm_trainer.run.files.environment import describe_code, describe_numeric_environment

    file = output or Path(f"{config.stem}.golden.json")
    ensure_writable_directory(file.absolute().parent, "--output")
    prepared = configure_devices(run, counts, None, steps)
    if not as_json:
        clean.echo(f"{config}: {steps} steps\n{_COLUMNS.format('devices', 'steps', 'result')}")
    with QuietProgress(steps, stream=sys.stderr) as progress:
        first = compute_first_steps(prepared, counts[0], steps, progress)
        if not as_json:
            clean.echo(_COLUMNS.format(counts[0], steps, "recorded"))
        for count in counts[1:]:
            checked = check_first_steps(prepared, first.steps, count, progress)
            _print_checked(checked, as_json)
            if checked.difference is not None:
                _print_record_failure(checked, counts[0], as_json)
                raise typer.Exit(1)
    golden = Golden(
        _name_config(config, file),
        overrides or [],
        counts,
        describe_numeric_environment(),
        describe_code(),
        first.program,
        numeric_identity(run),
        first.steps,
    )
    size = write_golden(file, golden)
    fingerprint = first.steps[-1].values["fingerprint"]
    if as_json:
        _print_json({"file": str(file), "steps": steps, "devices": counts, "equal": True, "fingerprint": fingerprint})
    else:
        clean.echo(f"wrote {file}: {size / 1000:.3g} kB, fingerprint {fingerprint} at step {steps}")


@app.command(context_settings=OVERRIDES)
def check(
    ctx: typer.Context,
    file: Annotated[Path, path_argument(metavar="FILE", help="A file of `lmt golden record`.", show_default=False)],
    overrides: OverridesArgument = None,
    config: Annotated[
        Path | None,
        path_option("--config", metavar="CONFIG", help="Another configuration.", show_default="the recorded one"),
    ] = None,
    devices: Annotated[
        str | None,
        typer.Option("--devices", metavar="N,N", help="Numbers of devices to compute on.", show_default="as recorded"),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Compute the steps of a golden file again, and compare all bits.

    The first difference is reported with its step, its quantity, both values and the number of devices. Differences in
    versions and in the kind of device are listed first, because bits are promised only without such differences.
    Settings are added to the recorded ones. Exit codes: 0 if all bits are equal, 1 at the first difference.

    Examples:
        lmt golden check gpt2_nano.golden.json

        lmt golden check golden/my.json --devices 1,8 --json
    """
    import sys

    from lm_trainer.reproduce.golden import read_golden
    from lm_trainer.reproduce.golden_steps import check_first_steps, configure_devices
    from lm_trainer.reproduce.rerun import QuietProgress
    from lm_trainer.run.config.run_config import changed_keys, numeric_identity
    from lm_trainer.run.files.environment import describe_numeric_environment, environment_differences

    golden = read_golden(file)
    counts = _parse_devices(devices) if devices else list(golden.devices)
    path = find_config_file(ctx, config or _find_recorded_config(golden, file))
    run = load_run_config(ctx, path, [*golden.overrides, *(overrides or [])])
    prepared = configure_devices(run, counts, golden.environment.get("cpu_threads"), golden.last)
    changes = environment_differences(golden.environment, describe_numeric_environment())
    changed = changed_keys(golden.identity, numeric_identity(run), run)
    configuration = [f"{key}: {old!r} -> {new!r}" for key, (old, new) in changed.items()]
    if not as_json:
        _print_header(file, golden, changes, configuration)
    results: list[CheckedDevices] = []
    with QuietProgress(golden.last, stream=sys.stderr) as progress:
        for count in counts:
            results.append(check_first_steps(prepared, golden.steps, count, progress))
            _print_checked(results[-1], as_json)
            if results[-1].difference is not None:
                break
    notes = _describe_code(golden, results[-1])
    if as_json:
        _print_json(_result_as_json(results, changes, configuration, notes))
    elif results[-1].difference is None:
        clean.echo(f"equal, bit for bit: {golden.last} steps on {_list_devices(counts)}")
    else:
        clean.echo("\n".join(["", *_difference_lines(results[-1].difference, results[-1].devices), *notes]))
    if results[-1].difference is not None:
        raise typer.Exit(1)


def _parse_devices(text: str) -> list[int]:
    """Parses numbers of devices such as `1,2,4`."""
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() and int(word) for word in words):
        raise UserError(f"--devices {text}: expected numbers of devices, such as 1,2,4")
    return list(dict.fromkeys(map(int, words)))


def _check_no_credentials(overrides: list[str]) -> None:
    from lm_trainer.core.credentials import without_credentials

    if without_credentials(overrides) != overrides:
        raise UserError(
            "a setting on the command line has a credential, which the file would keep; write it into the "
            "configuration as a variable of the environment"
        )


def _name_config(config: Path, file: Path) -> str:
    """Returns a name of the configuration that stays valid on other machines."""
    return config.stem if is_shipped(config) else os.path.relpath(config, file.absolute().parent)


def _find_recorded_config(golden: "Golden", file: Path) -> Path:
    """Returns the path of the recorded configuration, or its name if it ships with lm_trainer."""
    path = Path(golden.config)
    near = file.parent / path
    return near if near.is_file() or len(path.parts) > 1 or path.suffix else path


def _print_header(file: Path, golden: "Golden", changes: list[str], configuration: list[str]) -> None:
    clean.echo(f"{file}: {golden.config}, {golden.last} steps, recorded on {_list_devices(golden.devices)}")
    if changes:
        clean.echo("what runs here is not what the file was recorded with, so bits may differ:")
        for change in changes:
            clean.echo(f"  {change}")
    if configuration:
        clean.echo("the configuration has changed:")
        for line in configuration:
            clean.echo(f"  {line}")
    clean.echo(_COLUMNS.format("devices", "steps", "result"))


def _print_checked(checked: "CheckedDevices", as_json: bool) -> None:
    if not as_json:
        result = "equal" if checked.difference is None else "differs"
        clean.echo(_COLUMNS.format(checked.devices, checked.steps, result))


def _list_devices(counts: Any) -> str:
    *others, last = map(str, counts)
    return f"{', '.join(others)} and {last} devices" if others else f"{last} device{'s' * (last != '1')}"


def _difference_lines(difference: "StepDifference", devices: int) -> list[str]:
    name = difference.quantity
    if name == "weights":
        name = f"weights of {difference.parameters[0]}"
    lines = [
        f"first difference: step {difference.step}, {name}, on {_list_devices([devices])}",
        f"  recorded {difference.recorded!r}\n  now      {difference.now!r}",
    ]
    if difference.step:
        lines.append(f"equal before: {_describe_equal_part(difference)}")
    if difference.others:
        lines.append(f"also different at this step: {', '.join(difference.others)}")
    if difference.parameters:
        more = f" and {len(difference.parameters) - _NAMED} more" if len(difference.parameters) > _NAMED else ""
        lines.append(f"parameters that differ after this step: {', '.join(difference.parameters[:_NAMED])}{more}")
    return lines


def _describe_equal_part(difference: "StepDifference") -> str:
    earlier = ["the initial weights"]
    if difference.step > 1:
        earlier.append(f"steps 1 to {difference.step - 1}" if difference.step > 2 else "step 1")
    if difference.equal:
        earlier.append(f"and in step {difference.step} {', '.join(difference.equal)}")
    return ", ".join(earlier)


def _describe_code(golden: "Golden", checked: "CheckedDevices") -> list[str]:
    """Returns notes on the code and the program, if the results differ."""
    if checked.difference is None:
        return []
    from lm_trainer.run.files.environment import describe_code

    notes, now = [], describe_code()
    if golden.code.get("code") != now["code"]:
        notes.append(f"the code of lm_trainer has changed since commit {golden.code.get('git')}")
    if None not in (golden.program, checked.program) and golden.program != checked.program:
        notes.append(f"the program of the step was {golden.program}, and is {checked.program} here")
    return notes


def _print_record_failure(checked: "CheckedDevices", first: int, as_json: bool) -> None:
    if as_json:
        _print_json(_result_as_json([checked], [], [], []))
        return
    if checked.difference is not None:
        clean.echo("\n".join(["", *_difference_lines(checked.difference, checked.devices)]))
    clean.echo(f"nothing was written, because {_list_devices([first])} and {_list_devices([checked.devices])} differ")


def _result_as_json(
    results: "list[CheckedDevices]", changes: list[str], configuration: list[str], notes: list[str]
) -> dict[str, Any]:
    from dataclasses import asdict

    last = results[-1]
    difference = None if last.difference is None else {"devices": last.devices, **asdict(last.difference)}
    rows = [{"devices": r.devices, "steps": r.steps, "equal": r.difference is None} for r in results]
    return {
        "equal": difference is None,
        "changes": changes,
        "configuration": configuration,
        "results": rows,
        "difference": difference,
        "notes": notes,
    }


def _print_json(content: dict[str, Any]) -> None:
    import json

    from lm_trainer.trackers.jsonl import encode_non_finite

    clean.echo(json.dumps(encode_non_finite(content)))
