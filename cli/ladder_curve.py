"""`lmt ladder predict --curve | register --curve`: the loss of a run by step."""

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from cli import clean
from cli.ladder_file import load_ladder
from lm_trainer.core.errors import UserError

if TYPE_CHECKING:
    from lm_trainer.ladder import ModelLadder
    from lm_trainer.ladder.curve.fitting import CurveFit
    from lm_trainer.ladder.curve.predict import CurvePrediction
    from lm_trainer.run.config.run_config import RunConfig


def load_curve_ladder(ctx: typer.Context, source: Path, overrides: list[str] | None) -> "ModelLadder":
    """Loads the ladder whose runs have the curves."""
    if source.suffix not in (".yaml", ".yml"):
        raise UserError(
            f"--curve: {source} has points, and curves are in the directories of runs; give the ladder's YAML file"
        )
    return load_ladder(ctx, source, overrides)


def predict_one_curve(
    ladder: "ModelLadder",
    *,
    size: str | None,
    run: Path | None,
    level: float,
    max_extrapolation: float,
    extrapolate: bool,
    registers: bool,
) -> "tuple[CurveFit, CurvePrediction]":
    """Fits the curves of a ladder and predicts the curve of a size, or of a run with a configuration of its own.

    With `registers`, refuses a run that has started.
    """
    if (size is None) == (run is None):
        raise UserError("--curve needs --size SIZE of the ladder, or --run CONFIG of a run")

    from lm_trainer.ladder.curve.fitting import fit_curves
    from lm_trainer.ladder.curve.predict import predict_curve, run_to_predict, size_to_predict
    from lm_trainer.ladder.curve.register import refuse_started_run
    from lm_trainer.ladder.curve.rungs import read_curves

    if run is not None:
        config = _load_run(run)
        configs, target = [config], run_to_predict(ladder, config, config.trainer.id or run.stem)
    else:
        assert size is not None
        configs = [ladder.run_config(size, seed) for seed in ladder.seeds]
        target = size_to_predict(ladder, size)
    if registers:
        for config in configs:
            refuse_started_run(config)
    # The run that is predicted is no rung, even if it has begun.
    curves, notes = read_curves(ladder, without=[size] if size in ladder.sizes else [])
    fit = fit_curves(curves, notes, level=level)
    prediction = predict_curve(fit, target, max_extrapolation=max_extrapolation, extrapolate=extrapolate)
    for note in notes:
        clean.secho(f"note: {note}", err=True, fg=typer.colors.YELLOW)
    return fit, prediction


def _load_run(config: Path) -> "RunConfig":
    from lm_trainer.config.loader import load
    from lm_trainer.run.config.run_config import RunConfig

    return load(config, [], RunConfig).config


def print_prediction(fit: "CurveFit", prediction: "CurvePrediction", *, as_json: bool) -> None:
    """Prints a predicted curve."""
    import json

    from lm_trainer.ladder.curve.predict import curve_lines

    plain = {**prediction.as_dict(), "fit": fit.as_dict()}
    clean.echo(json.dumps(plain, indent=1) if as_json else "\n".join(curve_lines(fit, prediction)))


def register_curve(
    ladder: "ModelLadder", fit: "CurveFit", prediction: "CurvePrediction", *, size: str | None, out: Path | None
) -> None:
    """Writes a predicted curve and prints how the run uses it."""
    from lm_trainer.ladder.curve.register import curve_path, write_curve

    if out is None and size is None:
        raise UserError("--run: say where to write the prediction with --out FILE")
    out = out or curve_path(ladder, size or "")
    digest = write_curve(out, fit, prediction)
    curve = prediction.curve
    clean.echo(
        f"{prediction.run.name}: {curve.metric} {curve.value[-1]:.4f} ({curve.low[-1]:.4f} to {curve.high[-1]:.4f}) at "
        f"step {curve.last_steps[-1]:,}, and {len(curve.last_steps) - 1} earlier windows"
    )
    for warning in prediction.warnings:
        clean.echo(warning)
    clean.echo(f"{out}: registered, sha256 {digest}")
    clean.echo(f"an alert outside the band: trainer.alerts.off_prediction.file={out}")
