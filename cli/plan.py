"""`lmt plan`: memory, time and cost of a run on devices that need not be there."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli import clean
from cli.common import ConfigArgument, OverridesArgument, load_resolved_config
from cli.config_file import config_file, source_file
from lm_trainer.core.errors import UserError

if TYPE_CHECKING:
    from lm_trainer.plan import DeviceGroup, RunPlan
    from lm_trainer.run.config.run_config import RunConfig

_COMPILED = 3
"""Layouts that a search compiles."""
_REASON = 400
"""Characters of what a compiler says when it ends the process."""


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
            help="Number and kind, such as 8xH100, 64xv5p or 1xcpu, or a slice of TPUs, such as v5p:4x4x4. Again for "
            "each further kind.",
            show_default=False,
        ),
    ],
    mfu: Annotated[float, typer.Option("--mfu", min=0.01, max=1, help="Share of its peak that is reached.")] = 0.4,
    price: Annotated[
        list[str] | None,
        typer.Option(
            "--price",
            metavar="[KIND=]PRICE",
            help="Price of a device for an hour, in any currency; of one kind: H100=2.5.",
            show_default=False,
        ),
    ] = None,
    memory: Annotated[
        str | None, typer.Option("--memory", help="Memory of each device, such as 80GiB. Default: by datasheet.")
    ] = None,
    vocab_size: Annotated[
        int | None, typer.Option("--vocab-size", min=1, help="Rows of the embedding, in place of the tokenizer's.")
    ] = None,
    own_compiler: Annotated[
        bool,
        typer.Option("--compile", help="Compile by the devices' own compiler (libtpu, or JAX's CUDA plug-in)."),
    ] = False,
    search: Annotated[
        bool,
        typer.Option("--search", help="Look for the fastest layout that fits; with --compile, compile the best 3."),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON in SI units.")] = False,
) -> None:
    """Predict the memory of each device, the time and the cost of a run, without any accelerator; nothing is run.

    XLA compiles the programs of a training step for emulated devices and says what memory they take. The documentation
    says how far that is from what training takes, under Scale, Plan a run. With --compile, the compiler of the devices
    says it, and also what the programs compute, move and send; the devices themselves are not needed.

    Further configurations may follow the first one, and --devices may be given again: then there is one table.

    With --search mesh axes, microbatches, what is gathered and recomputed and attention are chosen: the fastest layouts
    that fit, and their settings as `lmt train` takes them. It says which of them change the numbers of the run.

    For example:

        lmt plan configs/gpt2_nano.yaml --devices 1xcpu --memory 8GiB

        lmt plan my.yaml trainer.mp=p=f32,c=bfloat16 --devices 8xH100 --price 2.5 --json

        lmt plan my.yaml --devices v5e:4x4 --compile

        lmt plan a.yaml b.yaml --devices 8xH100 --devices v5p:4x4x4 --price H100=2.5 --price v5p=4.2

        lmt plan my.yaml --devices 8xH100 --search
    """
    from lm_trainer.core.runtime import prepare_process

    prepare_process()  # before anything imports jax
    files, settings = _files(ctx, config, overrides or [])
    runs = {str(file): load_resolved_config(ctx, file, settings) for file in files}

    from lm_trainer.plan import Assumptions, emulate_devices, parse_bytes, parse_devices, plan_run
    from lm_trainer.plan.comparison import Planned, comparison_lines, price_of, prices
    from lm_trainer.plan.table import lines

    groups = {text: parse_devices(text) for text in devices}
    given = prices(price or [])
    room = None if memory is None else parse_bytes(memory)
    assumed = {text: Assumptions(mfu, price_of(groups[text], text, given), room, vocab_size) for text in groups}
    if len({json.dumps(run.trainer.jax_config, sort_keys=True) for run in runs.values()}) > 1:
        raise UserError(
            "the configurations have different trainer.jax_config, which is of the process: plan one by one"
        )
    # Before anything asks JAX for its devices: their number cannot change afterwards.
    emulated = emulate_devices(next(iter(runs.values())).trainer, max(group.count for group in groups.values()))
    pairs = [(name, text) for name in runs for text in groups]

    def planned(name: str, text: str) -> "RunPlan":
        places = _places(groups[text], emulated, own_compiler=own_compiler)
        return plan_run(runs[name], groups[text], places, assumed[text], own_compiler=own_compiler)

    if search:
        options = [] if memory is None else ["--memory", memory]
        options += [] if vocab_size is None else ["--vocab-size", str(vocab_size)]
        found = []
        for name, text in pairs:
            compile_one = _compiler(name, settings, text, options) if own_compiler else None
            found.append(_search(runs[name], groups[text], assumed[text], compile_one, as_json=as_json))
        if as_json:
            clean.echo(json.dumps(found[0] if len(found) == 1 else {"searches": found}, indent=1))
        return
    # On stderr, since stdout may be JSON for another program.
    clean.echo("compiling ...", err=True)
    if len(pairs) == 1:
        only = planned(*pairs[0])
        clean.echo(json.dumps(only.as_dict(), indent=1) if as_json else "\n".join(lines(only)))
        return
    table = []
    for name, text in pairs:
        try:
            table.append(Planned(name, text, planned(name, text)))
        except UserError as error:
            table.append(Planned(name, text, None, str(error)))
    plans = {"plans": [each.as_dict() for each in table]}
    clean.echo(json.dumps(plans, indent=1) if as_json else "\n".join(comparison_lines(table)))


def _files(ctx: typer.Context, first: Path, words: list[str]) -> tuple[list[Path], list[str]]:
    """The configurations, which come first, and the settings behind them."""
    files = [first]
    for word in words:
        if "=" in word or word.startswith("-"):
            break
        found = source_file(ctx, Path(word))
        if not found.is_file():
            # It may be a setting without its value, of which the loader knows more.
            if not word.endswith((".yaml", ".yml")):
                break
            found = config_file(ctx, found)
        files.append(found)
    return files, words[len(files) - 1 :]


def _places(group: "DeviceGroup", emulated: Any, *, own_compiler: bool) -> Any:
    if not own_compiler or group.kind == "cpu":
        return emulated[: group.count]
    from lm_trainer.plan.target import target_devices

    return target_devices(group)


def _search(
    run: "RunConfig", group: "DeviceGroup", assumptions: Any, compile_one: Callable[..., Any] | None, *, as_json: bool
) -> dict[str, Any]:
    """Prints a search, unless it is wanted as JSON, and returns it as plain data."""
    from lm_trainer.plan import search_layouts
    from lm_trainer.plan.search_table import search_lines

    clean.echo("searching ...", err=True)
    best = None if compile_one is None else (_COMPILED, compile_one)
    found = search_layouts(run, group, assumptions, compile_best=best)
    if not as_json:
        clean.echo("\n".join(search_lines(found)))
    return found.as_dict()


def _compiler(config: str, settings: list[str], devices: str, options: list[str]) -> Callable[..., Any]:
    """Compiles a layout in a process of its own, which a compiler may end when a program does not please it."""
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
            raise UserError(_reason(done.stderr))
        return CompiledLayout.from_json(json.loads(done.stdout))

    return compile_one


def _reason(stderr: str) -> str:
    """One line that says why a command failed: its own error, else that of the compiler that ended the process."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    if (own := next((line for line in lines if line.startswith("error: ")), None)) is not None:
        return own.removeprefix("error: ")
    marks = ("Check failed", "Error")
    found = next((line for mark in marks for line in lines if mark in line), lines[-1] if lines else "no output")
    # Without the time, the thread and the place in the source that a log of a compiler begins its lines with.
    return f"the compiler ends the process: {found.partition('] ')[2] or found}"[:_REASON]
