"""`lmt plan`: memory, time and cost of a run on devices that need not be there."""

from typing import Annotated

import typer

from cli.common import ConfigArgument, OverridesArgument, load_resolved_config


def plan(
    ctx: typer.Context,
    config: ConfigArgument,
    overrides: OverridesArgument = None,
    *,
    devices: Annotated[
        str,
        typer.Option(
            "--devices",
            metavar="COUNTxKIND",
            help="Number and kind, such as 8xH100, 64xv5p or 1xcpu, or a slice of TPUs, such as v5p:4x4x4.",
            show_default=False,
        ),
    ],
    mfu: Annotated[float, typer.Option("--mfu", min=0.01, max=1, help="Share of its peak that is reached.")] = 0.4,
    price: Annotated[
        float | None, typer.Option("--price", min=0, help="Price of a device for an hour, in any currency.")
    ] = None,
    memory: Annotated[
        str | None, typer.Option("--memory", help="Memory of each device, such as 80GiB. Default: by datasheet.")
    ] = None,
    vocab_size: Annotated[
        int | None, typer.Option("--vocab-size", min=1, help="Rows of the embedding, in place of the tokenizer's.")
    ] = None,
    own_compiler: Annotated[
        bool,
        typer.Option("--compile", help="Compile by the devices' own compiler (for TPUs: libtpu)."),
    ] = False,
    search: Annotated[
        bool,
        typer.Option("--search", help="Look for the fastest layout that fits; with --compile, compile the best 3."),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON in SI units.")] = False,
) -> None:
    """Predict the memory of each device, the time and the cost of a run, without any accelerator; nothing is run.

    XLA compiles the programs of a training step for emulated devices and says what memory they take. How far that is
    from what training takes stands in the documentation under How-to, Plan a run. With --compile the compiler of the
    devices says it, and what the programs compute, move and send; no such device need be there.

    With --search mesh axes, microbatches, what is recomputed, determinism and attention are chosen: the fastest layouts
    that fit, and their settings as `lmt train` takes them. It says which of them change the numbers of the run.

    For example:

        lmt plan configs/gpt2_nano.yaml --devices 1xcpu --memory 8GiB

        lmt plan my.yaml trainer.mp=p=f32,c=bfloat16 --devices 8xH100 --price 2.5 --json

        lmt plan my.yaml --devices v5e:4x4 --compile

        lmt plan my.yaml --devices 8xH100 --search
    """
    from lm_trainer.core.runtime import prepare_process

    prepare_process()  # before anything imports jax
    run = load_resolved_config(ctx, config, overrides)

    import json

    from lm_trainer.plan import Assumptions, emulate_devices, parse_bytes, parse_devices, plan_run, search_layouts
    from lm_trainer.plan.search_table import search_lines
    from lm_trainer.plan.table import lines
    from lm_trainer.plan.target import target_devices

    group = parse_devices(devices)
    assumptions = Assumptions(mfu, price, None if memory is None else parse_bytes(memory), vocab_size)
    # Before anything asks JAX for its devices: their number cannot change afterwards.
    places = emulate_devices(run.trainer, group.count)
    if own_compiler and group.kind != "cpu":
        places = target_devices(group)
    if search:
        best = 3, lambda layout: plan_run(layout, group, places, assumptions, own_compiler=True)
        typer.echo("searching ...", err=True)
        ranking = search_layouts(run, group, assumptions, compile_best=best if own_compiler else None)
        typer.echo(json.dumps(ranking.as_dict(), indent=1) if as_json else "\n".join(search_lines(ranking)))
        return
    # On stderr, since stdout may be JSON for another program.
    typer.echo("compiling ...", err=True)
    found = plan_run(run, group, places, assumptions, own_compiler=own_compiler)
    typer.echo(json.dumps(found.as_dict(), indent=1) if as_json else "\n".join(lines(found)))
