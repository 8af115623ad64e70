"""Configuration files by name: `gpt2_nano` for `configs/gpt2_nano.yaml`, here or in the source tree."""

from pathlib import Path

import typer

from cli import clean
from lm_trainer.core.errors import ConfigError

_SUFFIXES = ("", ".yaml", ".yml")


def config_file(ctx: typer.Context, given: Path) -> Path:
    """Finds the file of a configuration that an argument names.

    A file at the path itself comes first. A bare name is looked for in the working directory, in `configs/` below it,
    and in the configurations that come with the program, with and without `.yaml`. A file that is not at the path
    itself is named on stderr.

    Raises:
        ConfigError: when a bare name is found nowhere.
    """
    found = source_file(ctx, given)
    if not found.exists() and _is_bare(found):
        raise ConfigError([f"{given}: no such file {_where()}{_similar(given)}"])
    return found


def source_file(ctx: typer.Context, given: Path) -> Path:
    """Finds a file as `config_file`, for an argument that may be something else; what is not found stays as it is."""
    if given.is_file() or not _is_bare(given):
        return given
    names = [place / f"{given.name}{suffix}" for place in _places() for suffix in _SUFFIXES]
    found = next((path for path in names if path.is_file()), given)
    if found != given and not ctx.resilient_parsing:
        clean.secho(f"note: {given} is {found}", err=True, fg=typer.colors.YELLOW)
    return found


def _is_bare(path: Path) -> bool:
    """True for a name without directories that is no option."""
    return len(path.parts) == 1 and path.name not in ("", "..") and not path.name.startswith("-")


def _places() -> list[Path]:
    """The directories that are searched, in their order; the source tree's only where it is one."""
    source = Path(__file__).resolve().parents[1]
    # Beside this package: `configs` in the source tree, `_configs` in an installed one.
    owned = source / ("configs" if (source / "pyproject.toml").is_file() else "_configs")
    shipped = [owned] if owned.is_dir() else []
    return [Path(), Path("configs"), *(path for path in shipped if path != Path("configs").resolve())]


def _where() -> str:
    _, *others = _places()
    return f"here, in {' or in '.join(map(str, others))}"


def _similar(given: Path) -> str:
    from lm_trainer.config.document import nearest

    found = [path for place in _places() for path in sorted(place.glob("*.y*ml"))]
    # One in the working directory by its file name, the others by the name that finds them; the nearest place counts.
    names = {path.stem: path.name if path.parent == Path() else path.stem for path in reversed(found)}
    near = nearest(given.stem if given.suffix in _SUFFIXES else given.name, list(names))
    return f"; did you mean {' or '.join(names[stem] for stem in near)}?" if near else ""
