"""`lmt bench`: how fast a configuration trains on this machine."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cli import clean
from cli.common import OVERRIDES, ConfigArgument, OverridesArgument, load_resolved_config, load_run_config, path_option
from cli.config_file import is_shipped
from lm_trainer.core.errors import UserError

if TYPE_CHECKING:
    from lm_trainer.bench.session import BenchSession
    from lm_trainer.profile.mfu import MfuReport
    from lm_trainer.profile.timing import BenchResult
    from lm_trainer.run.config.run_config import RunConfig

app = typer.Typer(no_args_is_help=True, help="Measure how fast a configuration trains on this machine.")


_TRACED_STEPS = 3

RepeatsOption = Annotated[
    int, typer.Option("--repeats", metavar="N", min=1, help="Number of timings of each variant, interleaved.")
]
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
        int,
        typer.Option("--steps", metavar="N", min=1, help="Number of steps to time; short steps are timed in groups."),
    ] = 20,
    warmup: Annotated[
        int, typer.Option("--warmup", metavar="N", min=1, help="Untimed steps before, including compilation.")
    ] = 3,
    with_roofline: Annotated[
        bool,
        typer.Option(
            "--roofline", help="Report the roofline of the gradient's operations: minimum time of each, and its bound."
        ),
    ] = False,
    trace: Annotated[
        Path | None,
        path_option("--trace", metavar="DIR", help="Write a profile of 3 steps to DIR, for TensorBoard and Perfetto."),
    ] = None,
    share: Annotated[
        Path | None,
        path_option("--share", metavar="FILE", help="Write a small JSON file for others, without anything private."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Time training steps, and compare them with the datasheet's peak and the measured peak of a matrix product.

    Times the step of `lmt train` on random tokens, alternating with the matrix product. Writes no files unless --trace
    or --share is given. The documentation explains the figures under Reference, Throughput and MFU.

    The file of --share has the figures, the devices, versions, and the numbers of the configuration, but no paths and
    no names of machines, users, data or models.

    For example:

        lmt bench mfu configs/gpt2_nano.yaml

        lmt bench mfu configs/gpt2_nano.yaml trainer.mp=p=f32,c=bfloat16 --steps 50 --json

        lmt bench mfu gpt2_124m --share gpt2_124m.json
    """
    run = load_run_config(ctx, config, overrides)

    import jax

    from lm_trainer.bench.roofline import measure_roofline
    from lm_trainer.bench.session import open_bench_session
    from lm_trainer.profile.matmul import MatmulProbe
    from lm_trainer.profile.mfu import measure_mfu, report_rows
    from lm_trainer.profile.timing import BenchResult

    if trace is not None:
        _make_directory(trace)
    if share is not None and not share.absolute().parent.is_dir():
        raise UserError(f"--share {share}: there is no directory {share.parent}")
    _announce(run, "compiling and timing ...")
    with open_bench_session(run) as session:
        probe = MatmulProbe(jax.devices()[: session.device_count], session.dtype)
        report = measure_mfu(session, probe, samples=steps, warmup=warmup)
        rows, values = report_rows(report), report.as_dict()
        if with_roofline:
            bounds = measure_roofline(session, report)
            rows, values = [*rows, *bounds.rows], {**values, "roofline": bounds.values}
        if trace is not None:
            with jax.profiler.trace(str(trace)):
                for _ in range(_TRACED_STEPS):
                    session.run_step()
            clean.echo(f"wrote a profile to {trace}", err=True)
        if share is not None:
            _write_shared(share, session, report, config, overrides or [])
    _print_measured(BenchResult(rows, values), as_json)


@app.command(context_settings=OVERRIDES)
def data(
    ctx: typer.Context,
    config: ConfigArgument,
    overrides: OverridesArgument = None,
    batches: Annotated[
        int, typer.Option("--batches", metavar="N", min=1, help="Number of batches in each timing.")
    ] = 50,
    repeats: RepeatsOption = 3,
    as_json: JsonOption = False,
) -> None:
    """Time batch loading, by itself and during training, and the fraction of a step that waits for data.

    Text without a cache is first tokenised into the cache that `lmt train` uses.

    For example:

        lmt bench data configs/gpt2_nano.yaml
    """
    run = load_run_config(ctx, config, overrides)
    from lm_trainer.bench.data import measure_data

    clean.echo("loading, compiling and timing ...", err=True)
    measured = measure_data(run, batches=batches, repeats=repeats)
    _print_measured(measured, as_json)


@app.command(context_settings=OVERRIDES)
def decode(
    ctx: typer.Context,
    config: ConfigArgument,
    overrides: OverridesArgument = None,
    rows: Annotated[int, typer.Option("--rows", metavar="N", min=1, help="Prompts in a batch.")] = 1,
    prompt: Annotated[int, typer.Option("--prompt", metavar="N", min=1, help="Tokens in each prompt.")] = 32,
    new: Annotated[int, typer.Option("--new", metavar="N", min=2, help="Tokens to generate for each prompt.")] = 64,
    repeats: RepeatsOption = 10,
    as_json: JsonOption = False,
) -> None:
    """Time prefill and decoding, and compare with the rate at which the weights can be read from memory.

    Uses random weights and greedy decoding, which do not affect the time.

    For example:

        lmt bench decode configs/gpt2_nano.yaml --rows 8
    """
    run = load_run_config(ctx, config, overrides)
    from lm_trainer.bench.decode import measure_decode

    _announce(run, "compiling and timing ...")
    measured = measure_decode(run, rows=rows, prompt=prompt, new=new, repeats=repeats)
    _print_measured(measured, as_json)


@app.command(context_settings=OVERRIDES)
def compile(
    ctx: typer.Context,
    config: ConfigArgument,
    overrides: OverridesArgument = None,
    repeats: RepeatsOption = 3,
    as_json: JsonOption = False,
) -> None:
    """Time from process start to the end of the first step, with an empty and with a warm compilation cache.

    Every start is a separate process. The cache is a temporary directory that is removed at the end.

    For example:

        lmt bench compile configs/gpt2_nano.yaml
    """
    run = load_resolved_config(ctx, config, overrides)
    from lm_trainer.bench.start import measure_starts

    _announce(run, "starting ...")
    measured = measure_starts(run, repeats=repeats)
    _print_measured(measured, as_json)


@app.command(context_settings=OVERRIDES)
def memory(
    ctx: typer.Context,
    config: ConfigArgument,
    overrides: OverridesArgument = None,
    repeats: RepeatsOption = 5,
    as_json: JsonOption = False,
) -> None:
    """Report the memory of a training step, and how much gradient checkpointing and a blockwise loss save and cost.

    Memory besides the weights is the figure that XLA reports for the compiled gradient. For other devices, see `lmt
    plan`.

    For example:

        lmt bench memory configs/gpt2_nano.yaml
    """
    run = load_run_config(ctx, config, overrides)
    from lm_trainer.bench.memory import measure_memory

    _announce(run, "compiling and timing ...")
    measured = measure_memory(run, repeats=repeats)
    _print_measured(measured, as_json)


@app.command(context_settings=OVERRIDES)
def checkpoint(
    ctx: typer.Context,
    config: ConfigArgument,
    overrides: OverridesArgument = None,
    steps: Annotated[int, typer.Option("--steps", metavar="N", min=1, help="Training steps during each save.")] = 10,
    repeats: RepeatsOption = 5,
    as_json: JsonOption = False,
) -> None:
    """Time saving and restoring the state of a run, the slowdown of steps during a save, and a plain file write.

    Writes to a temporary directory next to the run's checkpoints (trainer.checkpointer.base_path), and removes it at
    the end.

    For example:

        lmt bench checkpoint configs/gpt2_nano.yaml
    """
    run = load_run_config(ctx, config, overrides)
    from lm_trainer.bench.checkpoint import measure_checkpoints

    _announce(run, "compiling, saving and timing ...")
    measured = measure_checkpoints(run, repeats=repeats, steps=steps)
    _print_measured(measured, as_json)


@app.command(context_settings=OVERRIDES)
def dispatch(
    ctx: typer.Context,
    config: ConfigArgument,
    overrides: OverridesArgument = None,
    steps: Annotated[int, typer.Option("--steps", metavar="N", min=1, help="Number of steps to time.")] = 20,
    as_json: JsonOption = False,
) -> None:
    """Time how long the host takes to dispatch the programs of a step, and compare it with the time of the step.

    The host prepares the next programs while the devices compute, so its time adds nothing to a step until it is close
    to the step's time. On a CPU the figure is too high, because the runtime computes small programs in the same thread.

    For example:

        lmt bench dispatch configs/gpt2_nano.yaml
    """
    run = load_run_config(ctx, config, overrides)
    from lm_trainer.bench.dispatch import measure_dispatch
    from lm_trainer.bench.session import open_bench_session

    _announce(run, "compiling and timing ...")
    with open_bench_session(run) as session:
        measured = measure_dispatch(session, steps=steps)
    _print_measured(measured, as_json)


@app.command(context_settings=OVERRIDES)
def hardware(
    ctx: typer.Context,
    config: ConfigArgument,
    overrides: OverridesArgument = None,
    minutes: Annotated[float, typer.Option("--minutes", metavar="M", min=0, help="Duration.")] = 5.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Check the devices: all compute the gradients of the same random tokens, and every bit must be equal.

    Uses the programs of the configuration, and names the device that differs from the others. A single device is
    compared with itself, which finds only errors that do not repeat. Use it as a burn-in before a run; for checks
    during a run see `trainer.cross_check`. Exit codes: 0 if all bits are equal, 77 if devices differ.

    For example:

        lmt bench hardware configs/gpt2_nano.yaml --minutes 10
    """
    import json
    import sys

    from lm_trainer.core.errors import EXIT_HARDWARE

    run = load_run_config(ctx, config, overrides)
    from lm_trainer.bench.hardware import compare_hardware
    from lm_trainer.trackers import Progress

    _announce(run, "compiling and comparing ...")
    with Progress(1, stream=sys.stderr) as progress:
        report = compare_hardware(
            run, minutes * 60, on_progress=lambda rounds: progress.phase(f"{rounds} microbatches compared")
        )
    if as_json:
        clean.echo(json.dumps(report.as_dict()))
    else:
        clean.echo(f"{len(report.devices)} devices, {report.rounds} microbatches on each, {report.seconds:.0f} s")
        for mismatch in report.mismatches:
            clean.echo(f"microbatch {mismatch.step}: differs on {'; '.join(mismatch.wrong_names())}")
        clean.echo(f"wrong: {'; '.join(report.wrong)}" if report.mismatches else "equal, bit for bit")
        if report.groups == 1 and not report.mismatches:
            clean.echo("one group of devices was compared with itself: errors that repeat are not found")
    if report.mismatches:
        raise typer.Exit(EXIT_HARDWARE)


@app.command(context_settings=OVERRIDES)
def coordinates(
    ctx: typer.Context,
    config: ConfigArgument,
    overrides: OverridesArgument = None,
    widths: Annotated[str, typer.Option("--widths", metavar="N,N", help="Multiples of the base's sizes.")] = "1,2,4,8",
    depths: Annotated[str, typer.Option("--depths", metavar="N,N", help="Multiples of the base's layers.")] = "1",
    steps: Annotated[int, typer.Option("--steps", metavar="N", min=1, help="Training steps of each model.")] = 4,
    standard: Annotated[
        bool, typer.Option("--standard", help="Also train the same models under parametrization: standard.")
    ] = False,
    out: Annotated[
        Path | None, path_option("--out", metavar="FILE", help="Draw the changes to a PNG, SVG or PDF file.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Check that a few steps change activations equally at all widths and depths.

    Trains models of several multiples of `parametrization.base` for a few steps on one batch of random tokens, and fits
    the change of activations as a power of width and depth. Exponents near 0 mean that hyperparameters of the base suit
    all sizes. Writes no files unless --out is given.

    For example:

        lmt bench coordinates configs/transfer_nano.yaml --widths 1,2,4 --depths 1,2 --standard --out coordinates.svg
    """
    run = load_run_config(ctx, config, overrides)
    sizes = {name: _parse_multiples(name, text) for name, text in (("widths", widths), ("depths", depths))}
    from lm_trainer.bench.coordinates import (
        describe_coordinates,
        draw_coordinates,
        measure_coordinates,
    )

    _announce(run, "training models of all sizes ...")
    results = [
        measure_coordinates(run, widths=sizes["widths"], depths=sizes["depths"], steps=steps, standard=kind)
        for kind in ((False, True) if standard else (False,))
    ]
    described = [describe_coordinates(result) for result in results]
    if as_json:
        import json

        clean.echo(json.dumps([measured.values for measured in described], indent=1))
    else:
        for measured in described:
            _print_measured(measured, as_json=False)
    if out is not None:
        draw_coordinates(results, out)


def _parse_multiples(name: str, text: str) -> list[int]:
    try:
        values = [int(part) for part in text.split(",")]
    except ValueError:
        values = []
    if not values or min(values) < 1 or len(set(values)) < len(values):
        raise UserError(f"--{name} {text}: expected different whole numbers above 0, such as 1,2,4")
    return values


def _announce(run: "RunConfig", text: str) -> None:
    """Announces a benchmark and its assumptions on stderr."""
    from lm_trainer.run.weights.vocabulary import find_vocabulary

    note = find_vocabulary(run).note
    if note is not None:
        clean.secho(f"note: {note}", err=True, fg=typer.colors.YELLOW)
    clean.echo(text, err=True)


def _write_shared(path: Path, session: "BenchSession", report: "MfuReport", config: Path, settings: list[str]) -> None:
    import jax

    from lm_trainer.bench.share import shared_result, write_shared_result

    recipe = config.stem if is_shipped(config) else None
    processes = jax.process_count()
    result = shared_result(session.config, report, session.mesh, processes=processes, recipe=recipe, settings=settings)
    if jax.process_index() == 0:
        size = write_shared_result(result, path)
        clean.echo(f"wrote {size:,} bytes to {path}; read them before you send them", err=True)


def _make_directory(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--trace {path}: {error.strerror}") from None


def _print_measured(measured: "BenchResult", as_json: bool) -> None:
    """Prints one row per line, or all values as JSON."""
    import json

    from lm_trainer.profile.timing import align_rows

    clean.echo(json.dumps(measured.values, indent=1) if as_json else "\n".join(align_rows(measured.rows)))
