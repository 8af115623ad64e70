"""`lmt config`: shows, checks, compares, describes and draws configurations."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cli import clean
from cli.common import (
    OVERRIDES,
    ConfigArgument,
    OverridesArgument,
    load_resolved_config,
    load_run,
    load_run_config,
    path_argument,
    path_option,
    resolve,
)
from cli.config_file import config_file
from lm_trainer.core.errors import ConfigError, UserError

if TYPE_CHECKING:
    from lm_trainer.config.document import KeyPath
    from lm_trainer.config.loader import Loaded
    from lm_trainer.run.config.run_config import RunConfig

app = typer.Typer(no_args_is_help=True, help="Show, check, compare and draw configurations.")


@app.command(context_settings=OVERRIDES)
def show(
    ctx: typer.Context,
    config: ConfigArgument,
    overrides: OverridesArgument = None,
    origin: Annotated[bool, typer.Option("--origin", help="Say of each value where it comes from.")] = False,
    decays: Annotated[bool, typer.Option("--decays", help="List instead which parameters decay.")] = False,
) -> None:
    """Print the whole configuration, with includes, settings and defaults resolved.

    The output is a configuration that means the same, but for the credentials in URLs and commands, which are blanked.
    """
    from lm_trainer.config.render import to_yaml

    loaded = load_run(ctx, config, overrides)
    if decays:
        from lm_trainer.run.weights.parameters import weight_decay

        for name, decaying in weight_decay(loaded).items():
            clean.echo(f"{'decays' if decaying else '-':8}{name}")
        return
    run = resolve(loaded.config, config)

    def where(key: "KeyPath") -> str:
        found = loaded.origin(key)
        # A key that was written keeps its own origin, even if the checkpoint says the same.
        taken = run.use_hf_model_config and key[0] == "model" and key[1] in run.model.model_fields_set
        return "config.json" if taken and found == "default" else found

    clean.echo(to_yaml(run, where if origin else None, shown=True), nl=False)


@app.command(context_settings=OVERRIDES)
def check(
    ctx: typer.Context,
    config: ConfigArgument,
    overrides: OverridesArgument = None,
    no_files: Annotated[
        bool,
        typer.Option(
            "--no-files", help="Do not look for the files and the tokenizer that it names: they are elsewhere."
        ),
    ] = False,
) -> None:
    """Check a configuration; exits with 2 and all problems, each with its position, if there are any.

    Files and globs of this machine must be there, and the tokenizer here or on the hub. What is in object storage or a
    data set of the hub is looked for by `lmt train --dry-run`, which also asks the devices.
    """
    loaded = load_run(ctx, config, overrides)
    if loaded.config.optimizer.weight_decay_modules:
        from lm_trainer.run.weights.parameters import weight_decay

        weight_decay(loaded)
    if (platform := _KERNEL_PLATFORMS.get(loaded.config.model.attn_backend or "")) is not None:
        from lm_trainer.run.dry_run import check_attention

        check_attention(loaded.config, vocab_size=1, platform=platform)
    if not no_files:
        _check_files(loaded)
    clean.echo(f"{config}: ok")


_KERNEL_PLATFORMS = {"cudnn": "gpu", "splash": "tpu", "ring": "cpu"}
"""Platforms on which the demanded attention is looked at; only the devices themselves tell where it will run."""


def _check_files(loaded: "Loaded[RunConfig]") -> None:
    from lm_trainer.data.missing_files import missing_data

    missing = [
        f"{loaded.origin(f'data.{key}')}: data.{key}: {reason}"
        for key, reason in missing_data(loaded.config.data, network=False)
    ]
    if missing:
        raise ConfigError(missing)


@app.command("import")
def import_config(
    file: Annotated[Path, path_argument(metavar="FILE", help="A YAML, JSON, TOML or Python file.", show_default=False)],
    framework: Annotated[
        str | None, typer.Option("--from", metavar="NAME", help="The framework it is of, where its keys do not tell.")
    ] = None,
    output: Annotated[
        Path | None, path_option("--output", "-o", metavar="FILE", help="Write it here, not to the terminal.")
    ] = None,
) -> None:
    """Turn a configuration of Levanter, nanoGPT, litgpt, axolotl or torchtitan into one of ours.

    What has no equal here is listed with the reason, on stderr and at the top of the result. Python files are read and
    not run.

    Examples:
        lmt config import train_gpt2.py -o my.yaml

        lmt config import llama3_8b.toml --from torchtitan
    """
    from lm_trainer.config.imports.translate import translate
    from lm_trainer.run.config.run_config import RunConfig

    found = translate(file, RunConfig, framework)
    for note in found.notes:
        clean.secho(f"note: {note}", err=True, fg=typer.colors.YELLOW)
    text = found.to_yaml(file.name)
    if output is None:
        clean.echo(text, nl=False)
        return
    try:
        output.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"{output}: cannot be written: {error.strerror}") from None
    clean.echo(f"{output}: written; lmt config check {output} checks it, lmt train {output} trains", err=True)


@app.command(context_settings=OVERRIDES)
def plot(
    ctx: typer.Context,
    config: ConfigArgument,
    overrides: OverridesArgument = None,
    out: Annotated[
        Path | None, path_option("--out", metavar="FILE", help="Draw into this file: .png, .svg or .pdf.")
    ] = None,
    terminal: Annotated[
        bool, typer.Option("--terminal", help="Draw in the terminal, which is the default without --out.")
    ] = False,
) -> None:
    """Draw learning rate, batch size and mixture weights over the steps of a run; starts nothing.

    Warm-ups, the ends of cycles and the steps whose checkpoints are kept are marked.
    """
    from shutil import get_terminal_size

    from lm_trainer.plot import plot_schedules, save_image, to_text

    schedules = plot_schedules(load_resolved_config(ctx, config, overrides))
    if out is not None:
        save_image(schedules, out)
        clean.echo(f"{out}: written", err=True)
    if terminal or out is None:
        clean.echo(to_text(schedules, width=get_terminal_size().columns), nl=False)


@app.command()
def schema(
    output: Annotated[
        Path | None, path_option("--output", "-o", metavar="FILE", help="Write the schema here, not to the terminal.")
    ] = None,
) -> None:
    """Print the JSON schema, with which an editor completes and checks configurations.

    Put `# yaml-language-server: $schema=FILE` at the top of a configuration.
    """
    import json

    from lm_trainer.config.schema import json_schema
    from lm_trainer.run.config.run_config import RunConfig

    text = json.dumps(json_schema(RunConfig), indent=2, ensure_ascii=False) + "\n"
    if output is None:
        clean.echo(text, nl=False)
        return
    try:
        output.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"{output}: cannot be written: {error.strerror}") from None


@app.command(context_settings=OVERRIDES)
def diff(
    ctx: typer.Context,
    a: Annotated[Path, path_argument(metavar="A", help="A YAML file or a run directory.", show_default=False)],
    b: Annotated[str | None, path_argument(metavar="B", help="Another one.", show_default=False)] = None,
    overrides: OverridesArgument = None,
) -> None:
    """Print the keys in which A differs from the defaults, or B from A. Settings are for the last one named."""
    from lm_trainer.config.diff import differences, differences_from_defaults

    settings = list(overrides or [])
    # B is optional, so that a setting may stand in its place.
    if b is not None and (b.startswith("--") or "=" in b):
        b, settings = None, [b, *settings]
    if b is None:
        found = differences_from_defaults(load_run_config(ctx, _file(ctx, a), settings))
    else:
        old = load_run_config(ctx, _file(ctx, a), [])
        found = differences(old, load_run_config(ctx, _file(ctx, Path(b)), settings))
    for difference in found:
        clean.echo(str(difference))
    if not found:
        clean.echo("all defaults" if b is None else "no differences")


def _file(ctx: typer.Context, path: Path) -> Path:
    """A configuration file, or that of a run directory."""
    return path / "config.yaml" if path.is_dir() else config_file(ctx, path)
