"""Shows the progress of tokenisation on the terminal."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from cli import clean
from lm_trainer.core.terminal import escape_for_terminal

if TYPE_CHECKING:
    from lm_trainer.data.tokenize.progress import BuildProgress


@contextmanager
def build_progress() -> Iterator[Callable[["BuildProgress"], None]]:
    """Shows the progress of a build: a bar with rate and remaining time on a terminal, otherwise lines."""
    import time

    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

    console = Console(stderr=True)
    columns = (BarColumn(), TaskProgressColumn(), TextColumn("{task.description}", markup=False))
    last = {"name": "", "time": 0.0}

    # One line when a cache starts, then one every half minute, because people read log files.
    def line(progress: "BuildProgress") -> None:
        if progress.name != last["name"] or time.monotonic() - last["time"] > 30:
            last.update(name=progress.name, time=time.monotonic())
            clean.echo(str(progress), err=True)

    if not console.is_terminal:
        yield line
        return
    bar = Progress(*columns, console=console)
    task = bar.add_task("", total=1.0)

    def draw(progress: "BuildProgress") -> None:
        # Started late, so that no bar appears if everything is already tokenised.
        bar.start()
        bar.update(task, completed=progress.share, description=escape_for_terminal(str(progress)))

    try:
        yield draw
    finally:
        bar.stop()
