"""`lmt ladder compare | next`: compares two recipes, and proposes the next run."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli import clean
from cli.common import OVERRIDES, OverridesArgument, source_argument
from cli.ladder_file import load_ladder
from cli.ladder_fit import (
    SOURCES,
    ExtrapolateOption,
    FitOption,
    JsonOption,
    MaxOption,
    SourceArgument,
    UniqueOption,
    is_ladder,
    load_fit,
)
from lm_trainer.core.errors import UserError

if TYPE_CHECKING:
    from lm_trainer.ladder import ModelLadder
    from lm_trainer.ladder.fit.fitting import Fit
    from lm_trainer.ladder.fit.narrowing import Rung
    from lm_trainer.ladder.fit.narrowing_tables import Pricing

DeviceOption = Annotated[
    str | None,
    typer.Option(
        "--device",
        help="Device for hours and cost, as JAX reports it, such as 'NVIDIA H100 80GB HBM3'. Default: device_type.",
        show_default=False,
    ),
]
MfuOption = Annotated[
    float, typer.Option("--mfu", min=0.01, max=1, help="Assumed model FLOP utilisation, as a share of the peak.")
]
PriceOption = Annotated[
    float | None,
    typer.Option("--price", min=0, help="Price per device-hour, in any currency.", show_default=False),
]


def add_compare_commands(app: typer.Typer) -> None:
    """Adds the commands of this file to `lmt ladder`."""
    app.command()(compare)
    app.command("next", context_settings=OVERRIDES)(propose_next)


def _make_pricing(ladder: "ModelLadder | None", device: str | None, mfu: float, price: float | None) -> "Pricing":
    from lm_trainer.ladder.fit.possible_runs import price_of
    from lm_trainer.ladder.plan import Hardware
    from lm_trainer.run.config.trainer_config import TrainerConfig

    kind = device or (ladder.device_type if ladder else "cpu")
    if price is not None and kind.lower() == "cpu":
        raise UserError("--price: a CPU has no datasheet figures; name the device with --device")
    trainer = ladder.trainer if ladder else TrainerConfig.model_validate({"mp": "p=f32,c=bfloat16"})
    return lambda flops: price_of(flops, Hardware(kind, mfu, price), trainer)


def compare(
    ctx: typer.Context,
    a: Annotated[Path, source_argument(metavar="A", help=f"The recipe to compare with. {SOURCES}", show_default=False)],
    b: Annotated[Path, source_argument(metavar="B", help="The other recipe.", show_default=False)],
    flops: Annotated[
        list[float] | None,
        typer.Option(
            "--flops",
            metavar="C",
            help="Compute budget at which to compare; repeatable. Default: the range both cover.",
        ),
    ] = None,
    tokens_per_param: Annotated[
        float | None,
        typer.Option("--tokens-per-param", min=0.01, help="D / N of both. Default: the mean of all points."),
    ] = None,
    within: Annotated[
        float | None,
        typer.Option(
            "--within",
            metavar="W",
            help="Say how many rungs and seeds it takes to know the multiplier to within this share, such as 0.05.",
            show_default=False,
        ),
    ] = None,
    device: DeviceOption = None,
    mfu: MfuOption = 0.4,
    price: PriceOption = None,
    max_extrapolation: MaxOption = 100,
    extrapolate: ExtrapolateOption = False,
    as_json: JsonOption = False,
) -> None:
    """Estimate, with intervals, how much compute recipe B needs to reach the loss of recipe A.

    Examples:
        lmt ladder compare adamw.json muon.json

        lmt ladder compare base.csv new.csv --flops 1e21 --tokens-per-param 20

        lmt ladder compare base.csv new.csv --within 0.05 --device 'NVIDIA H100 80GB HBM3' --price 2.5
    """
    import json

    fits = load_fit(ctx, a), load_fit(ctx, b)
    ladders = [load_ladder(ctx, source, None) if is_ladder(source) else None for source in (a, b)]

    from lm_trainer.ladder.fit import compare as multipliers
    from lm_trainer.ladder.fit.same_conditions import check_same_measure

    if ladders[0] is not None and ladders[1] is not None:
        check_same_measure(ladders[0], ladders[1], fits[0].points.metric)

    comparisons = multipliers.compare(
        *fits,
        flops=flops or (),
        tokens_per_param=tokens_per_param,
        max_extrapolation=max_extrapolation,
        extrapolate=extrapolate,
    )
    if as_json and within is None:
        clean.echo(json.dumps([m.as_dict() for m in comparisons], indent=1))
        return
    if not as_json:
        clean.echo(f"{fits[0].points.metric}, A {a}, B {b}; compute is 6 N D of A")
        clean.echo(multipliers.format_comparison(comparisons, fits[0].settings.level))
    if within is None:
        return

    from lm_trainer.ladder.fit.comparison_plan import plan_comparison, present_width
    from lm_trainer.ladder.fit.narrowing_tables import comparison_plans_text

    pricing = _make_pricing(ladders[0], device, mfu, price)
    rungs = _present_rungs(fits[0], ladders[0]), _present_rungs(fits[1], ladders[1])
    # The last compute is the hardest of the compared ones, as it is the farthest from the rungs.
    target = comparisons[-1]
    plans = plan_comparison(fits, target, within, rungs)
    if as_json:
        needs = [{**plan.as_dict(), **_price_dict(pricing, plan.flops)} for plan in plans]
        clean.echo(json.dumps({"comparisons": [m.as_dict() for m in comparisons], "needs": needs}, indent=1))
        return
    present = present_width(target)
    clean.echo(comparison_plans_text(plans, flops=target.flops, within=within, present=present, pricing=pricing))


def _present_rungs(fit: "Fit", ladder: "ModelLadder | None") -> "list[Rung]":
    from lm_trainer.ladder.fit.narrowing import rungs_of_points
    from lm_trainer.ladder.fit.possible_runs import plan_rungs

    return rungs_of_points(fit.points) if ladder is None else plan_rungs(ladder, ladder.sizes)


def _price_dict(pricing: "Pricing", flops: float) -> dict[str, Any]:
    price = pricing(flops)
    return {} if price is None else price.as_dict()


def propose_next(
    ctx: typer.Context,
    source: SourceArgument,
    overrides: OverridesArgument = None,
    params: Annotated[
        float | None,
        typer.Option("--params", metavar="N", help="Number of parameters of the run to predict.", show_default=False),
    ] = None,
    tokens: Annotated[
        float | None,
        typer.Option("--tokens", metavar="D", help="Training tokens of the run to predict.", show_default=False),
    ] = None,
    unique_tokens: UniqueOption = None,
    fitted: FitOption = None,
    budget: Annotated[
        float | None,
        typer.Option(
            "--budget",
            metavar="C",
            help="Only runs of at most so many FLOPs, the one that narrows most first.",
            show_default=False,
        ),
    ] = None,
    device: DeviceOption = None,
    mfu: MfuOption = 0.4,
    price: PriceOption = None,
    max_extrapolation: MaxOption = 100,
    extrapolate: ExtrapolateOption = False,
    as_json: JsonOption = False,
) -> None:
    """Propose the run that narrows the interval of a prediction most for its compute.

    Examples:
        lmt ladder next configs/ladder_nano.yaml --params 1e6 --tokens 2e7

        lmt ladder next fit.json --params 7e9 --tokens 4e12 --budget 1e21
    """
    import json

    if params is None or tokens is None:
        raise UserError("next needs the run to predict: --params and --tokens")
    law_fit = load_fit(ctx, fitted or source, None if fitted else overrides)

    from lm_trainer.ladder.fit.narrowing import half_width, possible_rungs, propose, target_draws
    from lm_trainer.ladder.fit.narrowing_tables import proposals_text
    from lm_trainer.ladder.fit.possible_runs import possible_runs
    from lm_trainer.ladder.fit.predict import predict

    # Checks the target like a prediction of it.
    limits: dict[str, Any] = {"max_extrapolation": max_extrapolation, "extrapolate": extrapolate}
    prediction = predict(law_fit, params, tokens, unique_tokens=unique_tokens, **limits)
    ladder = load_ladder(ctx, source, overrides) if is_ladder(source) else None
    pricing = _make_pricing(ladder, device, mfu, price)
    target_R = target_draws(law_fit, params, tokens, unique_tokens)
    rungs = possible_rungs(law_fit.points) if ladder is None else possible_runs(ladder)
    # The run that is predicted is no way to predict it.
    rungs = [rung for rung in rungs if rung.num_params != params]
    proposals = propose(law_fit, target_R, rungs, budget=budget)
    within, level = half_width(target_R, law_fit.settings.level), law_fit.settings.level
    if as_json:
        runs = [{**proposal.as_dict(), **_price_dict(pricing, proposal.flops)} for proposal in proposals]
        plain = {"prediction": prediction.as_dict(), "within": within, "level": level, "runs": runs}
        clean.echo(json.dumps(plain, indent=1))
        return
    clean.echo(proposals_text(proposals, within, level, pricing))
