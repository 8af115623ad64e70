"""`lmt config`: shows, checks, compares, imports and plots configurations."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cli import clean
from cli.common import (
    OVERRIDES,
    ConfigArgument,
    JsonOption,
    OverridesArgument,
    load_resolved_config,
    load_run_config,
    load_run_with_origins,
    path_argument,
    path_option,
    resolve_model_section,
)
from cli.config_file import find_config_file
from cli.config_new import new
from lm_trainer.core.errors import ConfigError, UserError

if TYPE_CHECKING:
    from lm_trainer.config.document import KeyPath
    from lm_trainer.config.loader import LoadedConfig
    from lm_trainer.run.config.run_config import RunConfig

app = typer.Typer(no_args_is_help=True, help="Write, show, check, compare, import and plot configurations.")
app.command()(new)


@app.command(context_settings=OVERRIDES)
def show(
    ctx: typer.Context,
    config: ConfigArgument,
    overrides: OverridesArgument = None,
    origin: Annotated[
        bool, typer.Option("--origin", help="Annotate each value with its origin (file and line, override or default).")
    ] = False,
    decays: Annotated[bool, typer.Option("--decays", help="List the parameters with weight decay instead.")] = False,
    multipliers: Annotated[
        bool,
        typer.Option(
            "--multipliers",
            help="List the factors that `parametrization` gives the settings of each parameter instead.",
        ),
    ] = False,
) -> None:
    """Print the full configuration, with includes, overrides and defaults resolved.

    The output is an equivalent configuration, except that credentials in URLs and commands are blanked.
    """
    from lm_trainer.config.render import to_yaml

    loaded = load_run_with_origins(ctx, config, overrides)
    if decays:
        from lm_trainer.run.weights.parameters import weight_decay_mask

        for name, decaying in weight_decay_mask(loaded).items():
            clean.echo(f"{'decays' if decaying else '-':8}{name}")
        return
    if multipliers:
        from lm_trainer.run.weights.parameters import multiplier_table

        clean.echo("\n".join(multiplier_table(loaded)))
        return
    run = resolve_model_section(loaded.config, config)

    def comment(key: "KeyPath") -> str:
        source = loaded.origin(key)
        # A key that the user wrote keeps its own origin, even if the checkpoint has the same value.
        from_checkpoint = run.use_hf_model_config and key[0] == "model" and key[1] in run.model.model_fields_set
        return "config.json" if from_checkpoint and source == "default" else source

    clean.echo(to_yaml(run, comment if origin else None, redact=True), nl=False)


@app.command(context_settings=OVERRIDES)
def check(
    ctx: typer.Context,
    config: ConfigArgument,
    overrides: OverridesArgument = None,
    no_files: Annotated[
        bool,
        typer.Option("--no-files", help="Skip the checks that data files and the tokenizer exist."),
    ] = False,
) -> None:
    """Check a configuration: print every problem with its position, and exit with code 2 if there are any.

    Local files and globs must exist, and the tokenizer must be on this machine or on the hub. `lmt train --dry-run`
    also checks object storage, data sets on the hub, and the devices.
    """
    loaded = load_run_with_origins(ctx, config, overrides)
    # Checks of the built model would run code of the user.
    own_code = loaded.config.model.own_code
    if loaded.config.optimizer.weight_decay_modules and not own_code:
        from lm_trainer.run.weights.parameters import weight_decay_mask

        weight_decay_mask(loaded)
    platform = _KERNEL_PLATFORMS.get(loaded.config.model.attn_backend or "")
    if platform is not None and not own_code:
        from lm_trainer.parallel.target_platform import Target
        from lm_trainer.run.dry_run import check_attention_backend

        check_attention_backend(loaded.config, vocab_size=1, target=Target(platform))
    if not no_files:
        _check_files(loaded)
    clean.echo(f"{config}: ok")


_KERNEL_PLATFORMS = {"cudnn": "gpu", "splash": "tpu", "ring": "cpu"}
"""Platform that is assumed when a requested attention kernel is checked. The devices determine the actual one."""


def _check_files(loaded: "LoadedConfig[RunConfig]") -> None:
    from lm_trainer.data.missing_files import find_missing_data

    missing = [
        f"{loaded.origin(f'data.{key}')}: data.{key}: {reason}"
        for key, reason in find_missing_data(loaded.config.data, network=False)
    ]
    if missing:
        raise ConfigError(missing)


@app.command("import")
def import_config(
    file: Annotated[Path, path_argument(metavar="FILE", help="A YAML, JSON, TOML or Python file.", show_default=False)],
    framework: Annotated[
        str | None, typer.Option("--from", metavar="NAME", help="The framework of the file, if its keys are ambiguous.")
    ] = None,
    processes: Annotated[
        int | None,
        typer.Option("--processes", metavar="N", min=1, help="Number of GPUs of a TRL or Trainer run, for its batch."),
    ] = None,
    output: Annotated[
        Path | None, path_option("--output", "-o", metavar="FILE", help="Write to this file instead of stdout.")
    ] = None,
) -> None:
    """Convert a configuration of Levanter, nanoGPT, litgpt, axolotl, torchtitan or TRL.

    TRL's files are YAML or JSON with TrainingArguments, of any trainer of transformers or TRL, and may have the keys of
    accelerate's YAML.

    Keys without an equivalent are listed with the reason on stderr and at the top of the result. Python files are
    parsed, but not executed.

    Examples:
        lmt config import train_gpt2.py -o my.yaml

        lmt config import llama3_8b.toml --from torchtitan

        lmt config import sft.yaml --processes 8 -o my.yaml
    """
    from lm_trainer.config.imports.translate import translate
    from lm_trainer.run.config.run_config import RunConfig

    translation = translate(file, RunConfig, framework, processes=processes)
    for note in translation.notes:
        clean.secho(f"note: {note}", err=True, fg=typer.colors.YELLOW)
    text = translation.to_yaml(file.name)
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
        Path | None, path_option("--out", metavar="FILE", help="Write the plot to this file: .png, .svg or .pdf.")
    ] = None,
    terminal: Annotated[
        bool, typer.Option("--terminal", help="Plot in the terminal; the default without --out.")
    ] = False,
) -> None:
    """Plot learning rate, batch size and mixture weights over the steps of a run, without starting the run.

    The plot marks warm-ups, ends of cycles, and steps whose checkpoints are kept.
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
        Path | None,
        path_option("--output", "-o", metavar="FILE", help="Write the schema to this file instead of stdout."),
    ] = None,
) -> None:
    """Print the JSON schema, with which an editor can complete and check configurations.

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
    b: Annotated[
        str | None, path_argument(metavar="B", help="The configuration to compare with A.", show_default=False)
    ] = None,
    overrides: OverridesArgument = None,
    as_json: JsonOption = False,
) -> None:
    """Print the keys in which A differs from the defaults, or B from A; overrides apply to the last configuration.

    With --json, values are YAML, as in the text.
    """
    import json

    from lm_trainer.config.diff import differences, differences_from_defaults

    settings = list(overrides or [])
    # B is optional, so the next argument may be a setting.
    if b is not None and (b.startswith("--") or "=" in b):
        b, settings = None, [b, *settings]
    if b is None:
        changes = differences_from_defaults(load_run_config(ctx, _resolve_config_file(ctx, a), settings))
    else:
        old = load_run_config(ctx, _resolve_config_file(ctx, a), [])
        changes = differences(old, load_run_config(ctx, _resolve_config_file(ctx, Path(b)), settings))
    if as_json:
        clean.echo(json.dumps({"differences": [difference._asdict() for difference in changes]}))
        return
    for difference in changes:
        clean.echo(str(difference))
    if not changes:
        clean.echo("all defaults" if b is None else "no differences")


def _resolve_config_file(ctx: typer.Context, path: Path) -> Path:
    """Returns the configuration file at a path, or the one in a run directory."""
    return path / "config.yaml" if path.is_dir() else find_config_file(ctx, path)
