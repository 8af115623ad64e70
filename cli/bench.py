"""`lmt bench`: how fast a configuration trains on this machine."""

from typing import Annotated

import typer

from cli.common import OVERRIDES, ConfigArgument, OverridesArgument, load_run_config

app = typer.Typer(no_args_is_help=True, help="Measure how fast a configuration trains on this machine.")


@app.callback()
def _bench() -> None:
    """Makes `mfu` a command of its own while it is the only one."""


@app.command(context_settings=OVERRIDES)
def mfu(
    ctx: typer.Context,
    config: ConfigArgument,
    overrides: OverridesArgument = None,
    steps: Annotated[
        int, typer.Option("--steps", metavar="N", min=1, help="How often the step is timed; short ones in groups.")
    ] = 20,
    warmup: Annotated[
        int, typer.Option("--warmup", metavar="N", min=1, help="Steps before that, compilation included.")
    ] = 3,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object in SI units.")] = False,
) -> None:
    """Time training steps and compare with two peaks: the datasheet's and that of a matrix product timed in turn.

    The step is that of `lmt train`, on made-up tokens. Nothing is written. What the figures mean stands in the
    documentation under Reference, Throughput and MFU.

    For example:

        lmt bench mfu configs/gpt2_nano.yaml

        lmt bench mfu configs/gpt2_nano.yaml trainer.mp=bfloat16 --steps 50 --json
    """
    from lm_trainer.core.runtime import prepare_process

    prepare_process()  # before anything imports jax
    run = load_run_config(ctx, config, overrides)

    import json

    import jax

    from lm_trainer.bench import bench_session
    from lm_trainer.profile.matmul import MatmulProbe
    from lm_trainer.profile.mfu import measure, table

    with bench_session(run) as session:
        typer.echo("compiling and timing ...", err=True)
        probe = MatmulProbe(jax.devices()[: session.device_count], session.dtype)
        report = measure(session, probe, samples=steps, warmup=warmup)
    if as_json:
        typer.echo(json.dumps(report.as_dict(), indent=1))
    else:
        rows = table(report)
        width = max(len(name) for name, _ in rows)
        for name, value in rows:
            typer.echo(f"{name:<{width}}  {value}")
