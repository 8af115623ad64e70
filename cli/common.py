"""Arguments and helpers that several commands share: `CONFIG [KEY=VALUE]...`, `RUN`, `MODEL`, `--json`."""

import re
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli import clean
from cli.config_file import find_config_file, find_source_file
from lm_trainer.core.errors import UserError
from lm_trainer.core.files import HUB_NAME, expand_home, path_problem

if TYPE_CHECKING:
    from lm_trainer.config.loader import LoadedConfig
    from lm_trainer.export.huggingface import TextModel
    from lm_trainer.run.config.run_config import RunConfig

OVERRIDES = {"allow_extra_args": True, "ignore_unknown_options": True}
"""`context_settings` of a command that takes overrides. `-1` is a value, so no short option may be a digit."""
_SETTING = re.compile(r"(?:--)?([a-z_]+)(?:\.\w+)*=")


def _complete_key(incomplete: str) -> Iterator[str]:
    """Yields keys for shell completion from a cache file, because importing the config classes takes seconds."""
    from cli.completion import config_keys

    dashes = "--" if incomplete.startswith("--") else ""
    for key in config_keys():
        shown = f"{dashes}{key}" if dashes else f"{key}="
        if shown.startswith(incomplete):
            yield shown


def _complete_config(incomplete: str) -> Iterator[str]:
    """Yields names of configurations for shell completion."""
    from cli.config_file import names_for_completion

    yield from names_for_completion(incomplete)


def _check_local(param: typer.CallbackParam, value: Any) -> Any:
    return _check_paths(param, value)


def _check_local_or_hub(param: typer.CallbackParam, value: Any) -> Any:
    return _check_paths(param, value, name=HUB_NAME)


def _check_local_or_bucket(param: typer.CallbackParam, value: Any) -> Any:
    from lm_trainer.core.bucket import STORAGE_SCHEMES

    return _check_paths(param, value, schemes=STORAGE_SCHEMES)


def _find_config(ctx: typer.Context, param: typer.CallbackParam, value: Any) -> Any:
    return find_config_file(ctx, _check_paths(param, value))


def _find_source(ctx: typer.Context, param: typer.CallbackParam, value: Any) -> Any:
    return find_source_file(ctx, _check_paths(param, value))


def _check_paths(param: typer.CallbackParam, value: Any, name: str = "", schemes: Sequence[str] = ()) -> Any:
    """Checks one or several paths, and expands `~`, which not every shell does after `--out=`.

    Raises:
        UserError: for a path or URL that the argument does not support.
    """
    if isinstance(value, list | tuple):
        return type(value)(_check_paths(param, path, name, schemes) for path in value)
    if value is None:
        return None
    if problem := path_problem(value, schemes, name):
        shown = param.opts[0] if param.opts[0].startswith("-") else param.metavar
        raise UserError(f"{shown}: {problem}")
    return type(value)(expand_home(value))


path_argument = partial(typer.Argument, callback=_check_local)
"""An argument that takes a path. Every such argument uses it, so that no argument mistakes a URL for a directory."""
storage_argument = partial(typer.Argument, callback=_check_local_or_bucket)
"""An argument that takes a path or an object storage URL."""
place_option = partial(typer.Option, callback=_check_local_or_bucket)
"""An option that takes a path or an object storage URL; otherwise like `path_argument`."""
path_option = partial(typer.Option, callback=_check_local)
"""An option that takes a path; otherwise like `path_argument`."""
config_argument = partial(typer.Argument, callback=_find_config, autocompletion=_complete_config)
"""An argument that takes the path or name of a configuration file; otherwise like `path_argument`."""
source_argument = partial(typer.Argument, callback=_find_source, autocompletion=_complete_config)
"""An argument that takes the path or name of a configuration file, or another file, like `path_argument`."""
hub_argument = partial(typer.Argument, callback=_check_local_or_hub)
"""An argument that takes a path or a name on the Hugging Face hub; otherwise like `path_argument`."""

# One Annotated type per argument, so that all commands describe the argument in the same way.
_FILE_HELP = "A YAML file, or the name of one in configs/."
ConfigArgument = Annotated[Path, config_argument(metavar="CONFIG", help=_FILE_HELP, show_default=False)]
LadderArgument = Annotated[Path, config_argument(metavar="LADDER", help=_FILE_HELP, show_default=False)]
OverridesArgument = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="KEY=VALUE",
        help="Settings that override the file: trainer.seed=1, or --trainer.seed 1.",
        autocompletion=_complete_key,
        show_default=False,
    ),
]


RunArgument = Annotated[
    str,
    storage_argument(
        metavar="RUN", help="A run id, a run directory, or the URL of its checkpoints in a bucket.", show_default=False
    ),
]
_MODEL_HELP = "A run id, a run or checkpoint directory, a Hugging Face directory, or the bucket URL of one."
ModelArgument = Annotated[str, storage_argument(metavar="MODEL", help=_MODEL_HELP, show_default=False)]
ExportedArgument = Annotated[str, storage_argument(metavar="RUN", help=_MODEL_HELP, show_default=False)]
CheckpointOption = Annotated[
    int | None, typer.Option("--step", metavar="N", help="Step of the checkpoint to use.", show_default="newest")
]
CharsOption = Annotated[
    int, typer.Option("--chars", metavar="N", min=0, help="Characters to show of each text; 0 means all.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


def load_run_with_origins(ctx: typer.Context, config: Path, overrides: list[str] | None) -> "LoadedConfig[RunConfig]":
    """Loads a run's configuration, and prints notes on side effects of the overrides to stderr.

    Raises:
        ConfigError: if the configuration has problems; lists all of them.
    """
    from lm_trainer.run.config.run_config import RunConfig

    return load_config(ctx, config, overrides, RunConfig)


def load_config(ctx: typer.Context, config: Path, overrides: list[str] | None, root: Any) -> "LoadedConfig[Any]":
    """Loads a configuration of class `root`; otherwise like `load_run_with_origins`."""
    # Unknown options are passed through as overrides, so an option may arrive as the file argument.
    if str(config).startswith("-"):
        raise UserError(f"{config}: no such option; a configuration file comes first, then settings (KEY=VALUE)")

    if config.suffix in (".py", ".toml"):
        raise UserError(
            f"{config}: no YAML; `lmt config import {config} -o my.yaml` turns it into a configuration of ours"
        )

    from lm_trainer.config.loader import load
    from lm_trainer.core.errors import ConfigError

    refuse_settings_as_values(ctx, root)
    options = [name for parameter in ctx.command.params for name in parameter.opts if name.startswith("--")]
    try:
        loaded = load(config, overrides or [], root, options=[*options, "--help"], foreign=_foreign_settings)
    except ConfigError as error:
        from lm_trainer.config.imports.translate import detect_framework

        if config.is_file() and (framework := detect_framework(config, root)) is not None:
            raise UserError(
                f"{config}: a configuration of {framework}; `lmt config import {config} -o my.yaml` turns it into one "
                "of ours"
            ) from error
        raise
    for note in loaded.notes:
        clean.secho(f"note: {note}", err=True, fg=typer.colors.YELLOW)
    return loaded


def _foreign_settings(flag: str) -> str | list[str]:
    # Imported lazily, because it is needed only for a message.
    from lm_trainer.config.imports.translate import explain_foreign_flag

    return explain_foreign_flag(flag)


def refuse_settings_as_values(ctx: typer.Context, root: Any = None) -> None:
    """Raises UserError for an option without a value that took the setting after it as its value.

    `root` is the class of the configuration: `RunConfig` if it is None.
    """
    if root is None:
        from lm_trainer.run.config.run_config import RunConfig as root

    for parameter in ctx.command.params:
        value = ctx.params.get(parameter.name or "")
        # Some options, such as --env, take values of the form NAME=VALUE.
        if not parameter.opts[0].startswith("-") or "=" in (parameter.metavar or ""):
            continue
        for text in map(str, value if isinstance(value, list | tuple) else [value]):
            setting = _SETTING.match(text)
            if setting is not None and setting[1] in root.model_fields:
                raise UserError(f"{parameter.opts[0]} has no value: {text} behind it is a setting of the configuration")


def load_run_config(ctx: typer.Context, config: Path, overrides: list[str] | None) -> "RunConfig":
    """Loads a run's configuration like `load_run_with_origins`, but without the origins of the values."""
    return load_run_with_origins(ctx, config, overrides).config


def check_is_run(ctx: typer.Context, run: str) -> None:
    """Raises UserError if an option is given where a run is expected, or a setting where the value of an option is."""
    if run.startswith("-"):
        raise UserError(f"{run}: no such option; a run comes first, then settings (KEY=VALUE)")
    refuse_settings_as_values(ctx)


def load_resolved_config(ctx: typer.Context, config: Path, overrides: list[str] | None) -> "RunConfig":
    """Loads a run's configuration, with the model section that training takes from a Hugging Face checkpoint."""
    return resolve_model_section(load_run_config(ctx, config, overrides), config)


def resolve_model_section(run: "RunConfig", config: Path) -> "RunConfig":
    """Returns the configuration with the model sections that training takes from a checkpoint or a teacher."""
    if run.loss.type == "distillation":
        from lm_trainer.run.weights.teacher import resolve_teacher

        run = resolve_teacher(run)
    if not run.use_hf_model_config:
        return run
    # Imported lazily, because it imports JAX.
    from lm_trainer.run.weights.pretrained import resolve_model

    return resolve_model(run, config.stem)


def print_generation_note(model: "TextModel") -> None:
    """Prints a note on stderr about generation settings of a model that are not computed here, if there are any."""
    if model.generation_note:
        clean.secho(f"note: {model.generation_note}", err=True, fg=typer.colors.YELLOW)


def print_error(error: UserError) -> int:
    """Prints a user error on stderr and returns the exit code."""
    from lm_trainer.core.errors import ConfigError, Preempted

    # Keeps the order of stdout and stderr if both go to the same file.
    sys.stdout.flush()
    lines = error.problems if isinstance(error, ConfigError) else [str(error)]
    for line in lines:
        # This is not an error: everything is saved, and the user asked for the stop.
        if not isinstance(error, Preempted):
            clean.secho("error: ", err=True, nl=False, fg=typer.colors.RED, bold=True)
        clean.echo(line, err=True)
    if isinstance(error, ConfigError):
        count = len(lines)
        clean.echo(f"{count} problem{'s' * (count != 1)}; nothing was started.", err=True)
    return error.exit_code
