"""`lmt plan`: predicts memory, time and cost of a run on devices that need not be present."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli import clean
from cli.common import ConfigArgument, OverridesArgument, load_resolved_config
from cli.config_file import find_config_file, find_source_file
from lm_trainer.core.errors import UserError

if TYPE_CHECKING:
    from lm_trainer.plan import DeviceGroup, RunPlan
    from lm_trainer.run.config.run_config import RunConfig

_COMPILED = 3
"""Number of layouts that a search compiles."""
_REASON = 400
"""Maximum number of characters that are shown of a compiler's last message."""


def plan(
    ctx: typer.Context,
    config: ConfigArgument,
    overrides: OverridesArgument = None,
    *,
    devices: Annotated[
        list[str],
        typer.Option(
            "--devices",
            metavar="COUNTxKIND",
            help="Number and kind, such as 8xH100, 64xv5p or 1xcpu, or a TPU slice, such as v5p:4x4x4; repeatable.",
            show_default=False,
        ),
    ],
    mfu: Annotated[
        float | None,
        typer.Option(
            "--mfu",
            min=0.01,
            max=1,
            help="Model FLOP utilisation, as a share of the peak, instead of the expected one.",
            show_default=False,
        ),
    ] = None,
    price: Annotated[
        list[str] | None,
        typer.Option(
            "--price",
            metavar="[KIND=]PRICE",
            help="Price per device-hour, in any currency; for one kind: H100=2.5.",
            show_default=False,
        ),
    ] = None,
    memory: Annotated[
        str | None, typer.Option("--memory", help="Memory per device, such as 80GiB. Default: from the datasheet.")
    ] = None,
    vocab_size: Annotated[
        int | None, typer.Option("--vocab-size", min=1, help="Vocabulary size, instead of the tokenizer's.")
    ] = None,
    own_compiler: Annotated[
        bool,
        typer.Option("--compile", help="Compile with the devices' own compiler (libtpu, or JAX's CUDA plug-in)."),
    ] = False,
    search: Annotated[
        bool,
        typer.Option("--search", help="Search for the fastest layout that fits; with --compile, compile the best 3."),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON in SI units.")] = False,
) -> None:
    """Predict memory per device, time and cost of a run, without an accelerator and without running it.

    XLA compiles the programs of a training step for emulated devices and reports their memory. The documentation
    compares these figures with real runs under Scale, Plan a run. With --compile, the compiler for the target devices
    reports memory, and also FLOPs, memory traffic and communication. The devices themselves are not needed.

    With several configurations or several --devices, one table compares all of them.

    --search optimises mesh axes, microbatches, gathering, rematerialisation and attention. It prints the fastest
    layouts that fit, their settings for `lmt train`, and which of these settings change the results of the run.

    For example:

        lmt plan configs/gpt2_nano.yaml --devices 1xcpu --memory 8GiB

        lmt plan my.yaml trainer.mp=p=f32,c=bfloat16 --devices 8xH100 --price 2.5 --json

        lmt plan my.yaml --devices v5e:4x4 --compile

        lmt plan a.yaml b.yaml --devices 8xH100 --devices v5p:4x4x4 --price H100=2.5 --price v5p=4.2

        lmt plan my.yaml --devices 8xH100 --search
    """
    from lm_trainer.core.runtime import prepare_process
    from lm_trainer.core.xla_flags import set_cpu_flags

    prepare_process(cpu_flags=False)  # before anything imports jax
    files, settings = _split_files_and_settings(ctx, config, overrides or [])
    runs = {str(file): load_resolved_config(ctx, file, settings) for file in files}

    from lm_trainer.plan import Assumptions, emulate_devices, parse_bytes, parse_devices, plan_run
    from lm_trainer.plan.comparison import PlannedConfig, comparison_lines, find_price, parse_prices
    from lm_trainer.plan.table import plan_lines

    groups = {text: parse_devices(text) for text in devices}
    if all(group.kind == "cpu" for group in groups.values()):
        # Estimates for accelerators are calibrated to the default order of operations.
        set_cpu_flags()
    price_list = parse_prices(price or [])
    room = None if memory is None else parse_bytes(memory)
    assumptions_by_devices = {
        text: Assumptions(mfu, find_price(groups[text], text, price_list), room, vocab_size) for text in groups
    }
    if len({json.dumps(run.trainer.jax_config, sort_keys=True) for run in runs.values()}) > 1:
        raise UserError(
            "the configurations have different trainer.jax_config, which is of the process: plan one by one"
        )
    # Before the first use of JAX's devices, because their number cannot change afterwards.
    emulated = emulate_devices(next(iter(runs.values())).trainer, max(group.count for group in groups.values()))
    pairs = [(name, text) for name in runs for text in groups]

    def plan_on_devices(name: str, text: str) -> "RunPlan":
        devices_of_plan = _target_devices(groups[text], emulated, own_compiler=own_compiler)
        return plan_run(
            runs[name], groups[text], devices_of_plan, assumptions_by_devices[text], own_compiler=own_compiler
        )

    if search:
        options = [] if memory is None else ["--memory", memory]
        options += [] if vocab_size is None else ["--vocab-size", str(vocab_size)]
        searches = []
        for name, text in pairs:
            compile_one = _make_compile_function(name, settings, text, options) if own_compiler else None
            searches.append(
                _search_and_print(runs[name], groups[text], assumptions_by_devices[text], compile_one, as_json=as_json)
            )
        if as_json:
            clean.echo(json.dumps(searches[0] if len(searches) == 1 else {"searches": searches}, indent=1))
        return
    # On stderr, because stdout may be JSON for another program.
    clean.echo("compiling ...", err=True)
    if len(pairs) == 1:
        only = plan_on_devices(*pairs[0])
        clean.echo(json.dumps(only.as_dict(), indent=1) if as_json else "\n".join(plan_lines(only)))
        return
    table = []
    for name, text in pairs:
        try:
            table.append(PlannedConfig(name, text, plan_on_devices(name, text)))
        except UserError as error:
            table.append(PlannedConfig(name, text, None, str(error)))
    plans = {"plans": [planned_run.as_dict() for planned_run in table]}
    clean.echo(json.dumps(plans, indent=1) if as_json else "\n".join(comparison_lines(table)))


def _split_files_and_settings(ctx: typer.Context, first: Path, words: list[str]) -> tuple[list[Path], list[str]]:
    """Splits the arguments into configuration files, which come first, and settings."""
    files = [first]
    for word in words:
        if "=" in word or word.startswith("-"):
            break
        file = find_source_file(ctx, Path(word))
        if not file.is_file():
            # Possibly a setting without a value, for which the loader has a better message.
            if not word.endswith((".yaml", ".yml")):
                break
            file = find_config_file(ctx, file)
        files.append(file)
    return files, words[len(files) - 1 :]


def _target_devices(group: "DeviceGroup", emulated: Any, *, own_compiler: bool) -> Any:
    if not own_compiler or group.kind == "cpu":
        return emulated[: group.count]
    from lm_trainer.plan.target import target_devices

    return target_devices(group)


def _search_and_print(
    run: "RunConfig", group: "DeviceGroup", assumptions: Any, compile_one: Callable[..., Any] | None, *, as_json: bool
) -> dict[str, Any]:
    """Runs a search, prints the result unless JSON is requested, and returns it as plain data."""
    from lm_trainer.plan import search_layouts
    from lm_trainer.plan.search_table import search_lines

    clean.echo("searching ...", err=True)
    best = None if compile_one is None else (_COMPILED, compile_one)
    result = search_layouts(run, group, assumptions, compile_best=best)
    if not as_json:
        clean.echo("\n".join(search_lines(result)))
    return result.as_dict()


def _make_compile_function(config: str, settings: list[str], devices: str, options: list[str]) -> Callable[..., Any]:
    """Returns a function that compiles a layout in a separate process, because a compiler may abort the process."""
    import subprocess
    import sys

    from lm_trainer.plan.search import CompiledLayout

    def compile_one(overrides: tuple[str, ...]) -> CompiledLayout:
        clean.echo(f"compiling with {' '.join(overrides) or 'the configuration as it is'} ...", err=True)
        command = [
            sys.executable,
            "-m",
            "lm_trainer",
            "plan",
            config,
            *settings,
            *overrides,
            "--devices",
            devices,
            *options,
        ]
        done = subprocess.run([*command, "--compile", "--json"], capture_output=True, text=True, check=False)
        if done.returncode:
            raise UserError(_failure_reason(done.stderr))
        return CompiledLayout.from_json(json.loads(done.stdout))

    return compile_one


def _failure_reason(stderr: str) -> str:
    """Returns the reason for a failure in one line: the command's error, or the last message of an aborted compiler."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    if (error := next((line for line in lines if line.startswith("error: ")), None)) is not None:
        return error.removeprefix("error: ")
    marks = ("Check failed", "Error")
    message = next((line for mark in marks for line in lines if mark in line), lines[-1] if lines else "no output")
    # Strips the time, thread and source location at the beginning of compiler log lines.
    return f"the compiler ends the process: {message.partition('] ')[2] or message}"[:_REASON]
