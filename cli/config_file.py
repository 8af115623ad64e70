"""Finds configuration files by name, such as `gpt2_nano` for `configs/gpt2_nano.yaml`."""

from collections.abc import Iterator
from pathlib import Path

import typer

from cli import clean
from lm_trainer.core.errors import ConfigError

_SUFFIXES = ("", ".yaml", ".yml")


def find_config_file(ctx: typer.Context, requested: Path) -> Path:
    """Finds the configuration file that an argument names.

    The argument is first tried as a path. A bare name is then searched, with and without `.yaml`, in the working
    directory, in its `configs/`, and in the configurations shipped with the program. A file found by name is reported
    on stderr.

    Raises:
        ConfigError: if no file has the name.
    """
    file = find_source_file(ctx, requested)
    if not file.exists() and _is_bare(file):
        raise ConfigError([f"{requested}: no such file {_describe_search()}{_suggest_similar(requested)}"])
    return file


def find_source_file(ctx: typer.Context, requested: Path) -> Path:
    """Finds a file like `find_config_file`. Returns the argument itself if there is no such file."""
    if requested.is_file() or not _is_bare(requested):
        return requested
    names = [directory / f"{requested.name}{suffix}" for directory in _search_directories() for suffix in _SUFFIXES]
    file = next((path for path in names if path.is_file()), requested)
    if file != requested and not ctx.resilient_parsing:
        clean.secho(f"note: {requested} is {file}", err=True, fg=typer.colors.YELLOW)
    return file


def names_for_completion(incomplete: str) -> Iterator[str]:
    """Yields YAML files in the working directory, and names of configurations that ship with the program or are in
    `configs/`. Yields nothing for a path: the shell then completes files by itself.
    """
    names = {path.name for suffix in _SUFFIXES[1:] for path in Path().glob(f"*{suffix}")}
    names |= {path.stem for folder in _search_directories()[1:] for path in folder.glob("*.y*ml")}
    yield from sorted(name for name in names if name.startswith(incomplete))


def is_shipped(file: Path) -> bool:
    """Returns True for a configuration of an installed package, whose path is different on every machine."""
    return file.absolute().parent.name == "_configs" and file.absolute().is_relative_to(_source_directory())


def _is_bare(path: Path) -> bool:
    """Returns True for a name without directories that is not an option."""
    return len(path.parts) == 1 and path.name not in ("", "..") and not path.name.startswith("-")


def _search_directories() -> list[Path]:
    """Lists the directories to search, in order. Includes the source tree only if the program runs from it."""
    source = _source_directory()
    # Next to this package: `configs` in the source tree, or `_configs` if the package is installed.
    source_configs = source / ("configs" if (source / "pyproject.toml").is_file() else "_configs")
    shipped = [source_configs] if source_configs.is_dir() else []
    return [Path(), Path("configs"), *(path for path in shipped if path != Path("configs").resolve())]


def _source_directory() -> Path:
    return Path(__file__).resolve().parents[1]


def _describe_search() -> str:
    _, *directories = _search_directories()
    return f"here, in {' or in '.join(map(str, directories))}"


def _suggest_similar(requested: Path) -> str:
    from lm_trainer.config.document import find_similar

    files = [path for directory in _search_directories() for path in sorted(directory.glob("*.y*ml"))]
    # Files in the working directory are listed by file name, others by bare name. The nearest directory wins.
    names = {path.stem: path.name if path.parent == Path() else path.stem for path in reversed(files)}
    near = find_similar(requested.stem if requested.suffix in _SUFFIXES else requested.name, list(names))
    return f"; did you mean {' or '.join(names[stem] for stem in near)}?" if near else ""
