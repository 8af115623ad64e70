"""`lmt bench`: how fast a configuration trains on this machine."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cli import clean
from cli.common import OVERRIDES, ConfigArgument, OverridesArgument, load_resolved_config, load_run_config, path_option
from lm_trainer.core.errors import UserError

if TYPE_CHECKING:
    from lm_trainer.profile.timing import Measured
    from lm_trainer.run.config.run_config import RunConfig

app = typer.Typer(no_args_is_help=True, help="Measure how fast a configuration trains on this machine.")


_TRACED_STEPS = 3

RepeatsOption = Annotated[int, typer.Option("--repeats", metavar="N", min=1, help="Timings of each, in turn.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object in SI units.")]


@app.callback()
def _prepare() -> None:
    from lm_trainer.core.runtime import prepare_process

    prepare_process()  # before a command imports jax


@app.command(context_settings=OVERRIDES)
def mfu(
    ctx: typer.Context,
    config: ConfigArgument,
    overrides: OverridesArgument = None,
    steps: Annotated[
        int, typer.Option("--steps", metavar="N", min=1, help="Number of steps to time; short ones in groups.")
    ] = 20,
    warmup: Annotated[
        int, typer.Option("--warmup", metavar="N", min=1, help="Steps before that, compilation included.")
    ] = 3,
    with_roofline: Annotated[
        bool, typer.Option("--roofline", help="Say what the gradient's operations take at least, and what bounds them.")
    ] = False,
    trace: Annotated[
        Path | None,
        path_option("--trace", metavar="DIR", help="Write a profile of 3 steps there, for TensorBoard and Perfetto."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Time training steps and compare with two peaks: the datasheet's and that of a matrix product timed in turn.

    The step is that of `lmt train`, on made-up tokens. Only --trace writes anything. The documentation explains the
    figures under Reference, Throughput and MFU.

    For example:

        lmt bench mfu configs/gpt2_nano.yaml

        lmt bench mfu configs/gpt2_nano.yaml trainer.mp=p=f32,c=bfloat16 --steps 50 --json
    """
    run = load_run_config(ctx, config, overrides)

    import jax

    from lm_trainer.bench.roofline import roofline
    from lm_trainer.bench.session import bench_session
    from lm_trainer.profile.matmul import MatmulProbe
    from lm_trainer.profile.mfu import measure, table
    from lm_trainer.profile.timing import Measured

    if trace is not None:
        _make_directory(trace)
    _begin(run, "compiling and timing ...")
    with bench_session(run) as session:
        probe = MatmulProbe(jax.devices()[: session.device_count], session.dtype)
        report = measure(session, probe, samples=steps, warmup=warmup)
        rows, values = table(report), report.as_dict()
        if with_roofline:
            found = roofline(session, report)
            rows, values = [*rows, *found.rows], {**values, "roofline": found.values}
        if trace is not None:
            with jax.profiler.trace(str(trace)):
                for _ in range(_TRACED_STEPS):
                    session.run_step()
            clean.echo(f"wrote a profile to {trace}", err=True)
    _show(Measured(rows, values), as_json)


@app.command(context_settings=OVERRIDES)
def data(
    ctx: typer.Context,
    config: ConfigArgument,
    overrides: OverridesArgument = None,
    batches: Annotated[int, typer.Option("--batches", metavar="N", min=1, help="Number of batches in each turn.")] = 50,
    repeats: RepeatsOption = 3,
    as_json: JsonOption = False,
) -> None:
    """Time the loading of batches, alone and while a model trains on them, and the share of a step that waits.

    Text that is not tokenised yet is tokenised first, into the cache that `lmt train` uses.

    For example:

        lmt bench data configs/gpt2_nano.yaml
    """
    run = load_run_config(ctx, config, overrides)
    from lm_trainer.bench.data import measure_data

    clean.echo("loading, compiling and timing ...", err=True)
    found = measure_data(run, batches=batches, repeats=repeats)
    _show(found, as_json)


@app.command(context_settings=OVERRIDES)
def decode(
    ctx: typer.Context,
    config: ConfigArgument,
    overrides: OverridesArgument = None,
    rows: Annotated[int, typer.Option("--rows", metavar="N", min=1, help="Prompts that are continued together.")] = 1,
    prompt: Annotated[int, typer.Option("--prompt", metavar="N", min=1, help="Tokens of each prompt.")] = 32,
    new: Annotated[int, typer.Option("--new", metavar="N", min=2, help="Tokens written to each.")] = 64,
    repeats: RepeatsOption = 10,
    as_json: JsonOption = False,
) -> None:
    """Time how fast the model reads prompts and writes text, beside the rate at which its weights can be read at all.

    The weights are random, and the likeliest token is taken: neither changes the time.

    For example:

        lmt bench decode configs/gpt2_nano.yaml --rows 8
    """
    run = load_run_config(ctx, config, overrides)
    from lm_trainer.bench.decode import measure_decode

    _begin(run, "compiling and timing ...")
    found = measure_decode(run, rows=rows, prompt=prompt, new=new, repeats=repeats)
    _show(found, as_json)


@app.command(context_settings=OVERRIDES)
def compile(
    ctx: typer.Context,
    config: ConfigArgument,
    overrides: OverridesArgument = None,
    repeats: RepeatsOption = 3,
    as_json: JsonOption = False,
) -> None:
    """Time the way from nothing to the first finished step, with an empty compilation cache and with a filled one.

    Every start is a process of its own, and the cache a directory that is removed at the end.

    For example:

        lmt bench compile configs/gpt2_nano.yaml
    """
    run = load_resolved_config(ctx, config, overrides)
    from lm_trainer.bench.start import measure_starts

    _begin(run, "starting ...")
    found = measure_starts(run, repeats=repeats)
    _show(found, as_json)


@app.command(context_settings=OVERRIDES)
def memory(
    ctx: typer.Context,
    config: ConfigArgument,
    overrides: OverridesArgument = None,
    repeats: RepeatsOption = 5,
    as_json: JsonOption = False,
) -> None:
    """Say what a training step holds, and time what gradient checkpointing and blocks of the loss would save of it.

    Memory beside the weights is what XLA says of the compiled gradient; `lmt plan` says what other devices would hold.

    For example:

        lmt bench memory configs/gpt2_nano.yaml
    """
    run = load_run_config(ctx, config, overrides)
    from lm_trainer.bench.memory import measure_memory

    _begin(run, "compiling and timing ...")
    found = measure_memory(run, repeats=repeats)
    _show(found, as_json)


@app.command(context_settings=OVERRIDES)
def checkpoint(
    ctx: typer.Context,
    config: ConfigArgument,
    overrides: OverridesArgument = None,
    steps: Annotated[int, typer.Option("--steps", metavar="N", min=1, help="Training steps beside each save.")] = 10,
    repeats: RepeatsOption = 5,
    as_json: JsonOption = False,
) -> None:
    """Time saving and restoring the state of the run, what it costs the steps beside it, and a plain write.

    Writes to a directory beside the run's checkpoints (trainer.checkpointer.base_path), and removes it at the end.

    For example:

        lmt bench checkpoint configs/gpt2_nano.yaml
    """
    run = load_run_config(ctx, config, overrides)
    from lm_trainer.bench.checkpoint import measure_checkpoints

    _begin(run, "compiling, saving and timing ...")
    found = measure_checkpoints(run, repeats=repeats, steps=steps)
    _show(found, as_json)


def _begin(run: "RunConfig", text: str) -> None:
    """Says on stderr what is done now, and what is assumed for it."""
    from lm_trainer.run.weights.vocabulary import find_vocabulary

    note = find_vocabulary(run).note
    if note is not None:
        clean.secho(f"note: {note}", err=True, fg=typer.colors.YELLOW)
    clean.echo(text, err=True)


def _make_directory(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--trace {path}: {error.strerror}") from None


def _show(found: "Measured", as_json: bool) -> None:
    """One row a line, or all values as JSON."""
    import json

    from lm_trainer.profile.timing import aligned

    clean.echo(json.dumps(found.values, indent=1) if as_json else "\n".join(aligned(found.rows)))
