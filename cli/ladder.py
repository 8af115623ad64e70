"""`lmt ladder`: trains several model sizes with one recipe, and predicts larger runs."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cli import clean
from cli.common import OVERRIDES, LadderArgument, OverridesArgument, path_option
from cli.ladder_compare import add_compare_commands
from cli.ladder_file import load_ladder
from cli.ladder_fit import add_commands
from cli.ladder_mixture import add_mixture_command
from cli.ladder_rate import add_rate_command
from lm_trainer.core.errors import UserError

if TYPE_CHECKING:
    from lm_trainer.ladder import ModelLadder

app = typer.Typer(no_args_is_help=True, help="Train several model sizes with one recipe, and predict larger runs.")

SizesOption = Annotated[
    list[str] | None,
    typer.Option(
        "--size",
        metavar="SIZE",
        help="Only this size; any size the models define; repeatable.",
        show_default=False,
    ),
]


@app.callback()
def _prepare() -> None:
    from lm_trainer.core.runtime import prepare_process

    prepare_process()  # before a command imports jax


def _select_sizes(ladder: "ModelLadder", sizes: list[str] | None) -> list[str]:
    """Returns the named sizes, which may be any sizes that the models define, or by default the ladder's sizes."""
    for size in sizes or ():
        ladder.model_configurator.check(size)
    return list(sizes or ladder.sizes)


@app.command(context_settings=OVERRIDES)
def plan(
    ctx: typer.Context,
    config: LadderArgument,
    overrides: OverridesArgument = None,
    size: SizesOption = None,
    device: Annotated[
        str | None,
        typer.Option(
            "--device", help="Device name as JAX reports it, such as 'NVIDIA H100 80GB HBM3'. Default: device_type."
        ),
    ] = None,
    mfu: Annotated[
        float, typer.Option("--mfu", min=0.01, max=1, help="Assumed model FLOP utilisation, as a share of the peak.")
    ] = 0.4,
    price: Annotated[
        float | None, typer.Option("--price", min=0, help="Price per device-hour, in any currency.")
    ] = None,
    vocab_size: Annotated[
        int | None,
        typer.Option("--vocab-size", min=1, help="Vocabulary size to assume if the tokenizer is not available."),
    ] = None,
    compat: Annotated[
        str | None, typer.Option("--compat", help="`olmo`: choose batch size and devices as OLMo-core does.")
    ] = None,
    compiled: Annotated[
        bool,
        typer.Option(
            "--compile",
            help="Compile each size for a device of this machine and report XLA's memory, instead of an estimate.",
        ),
    ] = False,
    out: Annotated[
        Path | None, path_option("--out", metavar="DIR", help="Plot the learning-rate schedules to DIR/SIZE.png.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON in SI units.")] = False,
) -> None:
    """Report model, batch, memory, time and cost of every size, and plot its learning rate, without running anything.

    Examples:
        lmt ladder plan configs/ladder_nano.yaml

        lmt ladder plan configs/ladder_olmo3.yaml --vocab-size 100352 --price 2.5 --out plots
    """
    ladder = load_ladder(ctx, config, overrides)
    if compat not in (None, "olmo"):
        raise UserError(f"--compat {compat}: the only other way of choosing the batch is `olmo`")

    import json

    from lm_trainer.ladder.plan import Hardware, plan_rung
    from lm_trainer.ladder.tables import plan_table

    hardware = Hardware(device or ladder.device_type, mfu, price)
    plans = [
        plan_rung(ladder, name, hardware, vocab_size=vocab_size, compat=compat, compiled=compiled)  # pyright: ignore[reportArgumentType]
        for name in _select_sizes(ladder, size)
    ]
    for rung in plans if out else ():
        out.mkdir(parents=True, exist_ok=True)  # pyright: ignore[reportOptionalMemberAccess]
        ladder.run_configurator.plot_lr_schedule(
            rung.num_params,
            rung.batch_size,
            show=False,
            save_path=out / f"{rung.size}.png",  # pyright: ignore[reportOptionalOperand]
        )
    if as_json:
        clean.echo(json.dumps([rung.as_dict() for rung in plans], indent=1))
        return
    clean.echo(plan_table(plans))
    if len(plans) == 1:
        clean.echo("\n".join(plans[0].lines()))
        ladder.run_configurator.plot_lr_schedule(plans[0].num_params, plans[0].batch_size)


@app.command(context_settings=OVERRIDES)
def run(
    ctx: typer.Context,
    config: LadderArgument,
    overrides: OverridesArgument = None,
    size: SizesOption = None,
    seed: Annotated[
        int | None, typer.Option("--seed", min=0, help="Train only the runs with this seed.", show_default=False)
    ] = None,
) -> None:
    """Train every size, smallest first; repeat the command to resume where it stopped.

    If chinchilla_multiple is raised, finished runs continue to the new length.

    Examples:
        lmt ladder run configs/ladder_nano.yaml

        lmt ladder run configs/ladder_nano.yaml --size 273k
    """
    ladder = load_ladder(ctx, config, overrides)

    from lm_trainer.trackers import Progress

    if seed is not None and seed not in ladder.seeds:
        raise UserError(f"--seed {seed}: the ladder has {', '.join(map(str, ladder.seeds))}; raise num_seeds")
    for name in sorted(_select_sizes(ladder, size), key=ladder.get_num_params):
        for number in ladder.seeds if seed is None else (seed,):
            checkpoints = ladder.get_checkpoints(name, seed=number)
            if checkpoints[-1].exists:
                clean.echo(f"{ladder.run_name(name, number)}: complete, after step {checkpoints[-1].step:,}")
                continue
            with Progress(checkpoints[-1].step) as progress:
                summary = ladder.run(name, seed=number, progress=progress)
            clean.echo(summary.lines()[0])
    clean.echo(f"metrics: lmt ladder metrics {config}")


@app.command(context_settings=OVERRIDES)
def status(
    ctx: typer.Context,
    config: LadderArgument,
    overrides: OverridesArgument = None,
    size: SizesOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show which checkpoints of each size exist, and score registered predictions."""
    ladder = load_ladder(ctx, config, overrides)

    import json

    from lm_trainer.ladder.curve.register import score_curves
    from lm_trainer.ladder.fit.register import score_registrations

    runs = {
        ladder.run_name(name, seed): ladder.get_checkpoints(name, seed=seed)
        for name in _select_sizes(ladder, size)
        for seed in ladder.seeds
    }
    if as_json:
        plain = {
            run: [{"name": c.name, "step": c.step, "tokens": c.tokens, "exists": c.exists} for c in checkpoints]
            for run, checkpoints in runs.items()
        }
        if predictions := score_registrations(ladder):
            plain["predictions"] = [score.as_dict() for score in predictions]
        if curves := score_curves(ladder):
            plain["curves"] = [
                {"name": curve.name, "written": curve.written, "sha256": curve.sha256, **score.as_dict()}
                for curve, score in curves
            ]
        clean.echo(json.dumps(plain, indent=1))
        return
    for run_name, checkpoints in runs.items():
        clean.echo(run_name)
        for checkpoint in checkpoints:
            clean.echo(f"  {checkpoint.display()}")
    for score in score_registrations(ladder):
        clean.echo(score.line())
    for registered, curve_score in score_curves(ladder):
        clean.echo(curve_score.describe(registered))


@app.command(context_settings=OVERRIDES)
def metrics(
    ctx: typer.Context,
    config: LadderArgument,
    overrides: OverridesArgument = None,
    size: SizesOption = None,
    prefix: Annotated[
        str | None, typer.Option("--prefix", help="Only metrics with this prefix, such as eval/.")
    ] = None,
    kind: Annotated[
        str | None,
        typer.Option("--format", help="csv, json or parquet. Default: by the ending of --out, else a table."),
    ] = None,
    out: Annotated[
        Path | None, path_option("--out", metavar="FILE", help="Write to this file instead of stdout.")
    ] = None,
    discover_all: Annotated[
        bool, typer.Option("--discover-all", help="Include checkpoints that are not part of the ladder's schedule.")
    ] = False,
    alternative_dir: Annotated[
        list[Path] | None, path_option("--alternative-dir", help="Another directory to search for missing checkpoints.")
    ] = None,
) -> None:
    """Collect the metrics at the checkpoints of all sizes from the run directories.

    Examples:
        lmt ladder metrics configs/ladder_nano.yaml

        lmt ladder metrics configs/ladder_nano.yaml --out points.csv
    """
    ladder = load_ladder(ctx, config, overrides)

    from lm_trainer.ladder.metrics import FORMATS, collect_rows, write_rows
    from lm_trainer.ladder.tables import metrics_table

    kind = kind or (out.suffix.lstrip(".") if out else None)
    if kind is not None and kind not in FORMATS:
        raise UserError(f"{kind!r} is no format of metrics; there are {', '.join(FORMATS)}")
    rows = [
        row
        for name in _select_sizes(ladder, size)
        for row in collect_rows(
            ladder, name, prefix, discover_all=discover_all, alternative_dirs=tuple(alternative_dir or ())
        )
    ]
    if not rows:
        raise UserError(f"{ladder.dir} has no metrics of this ladder yet; start it with: lmt ladder run {config}")
    text = metrics_table(rows) if kind is None else write_rows(rows, kind, out)
    if text is not None:
        clean.echo(text, nl=False)


add_commands(app)
add_compare_commands(app)
add_mixture_command(app)
add_rate_command(app)
