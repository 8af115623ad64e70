"""Progress of a tokenisation on the terminal."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from cli import clean
from lm_trainer.core.terminal import for_terminal

if TYPE_CHECKING:
    from lm_trainer.data.tokenize.progress import BuildProgress


@contextmanager
def build_progress() -> Iterator[Callable[["BuildProgress"], None]]:
    """Shows the progress of a build, if there is one: a bar with rate and time left, or lines without a terminal."""
    import time

    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

    console = Console(stderr=True)
    columns = (BarColumn(), TaskProgressColumn(), TextColumn("{task.description}", markup=False))
    last = {"name": "", "time": 0.0}

    # A line for each cache, and another one every half minute: a log file is read by eye.
    def line(at: "BuildProgress") -> None:
        if at.name != last["name"] or time.monotonic() - last["time"] > 30:
            last.update(name=at.name, time=time.monotonic())
            clean.echo(str(at), err=True)

    if not console.is_terminal:
        yield line
        return
    bar = Progress(*columns, console=console)
    task = bar.add_task("", total=1.0)

    def draw(at: "BuildProgress") -> None:
        # Only now, so that nothing is drawn where all is tokenised already.
        bar.start()
        bar.update(task, completed=at.share, description=for_terminal(str(at)))

    try:
        yield draw
    finally:
        bar.stop()
