"""Progress as a person sees it: plain lines in a file, a bar on a terminal."""

from __future__ import annotations

import io
import logging
import re
from typing import Any

import pytest

from lm_trainer.trackers import Progress
from lm_trainer.trackers.console import format_long_duration, format_metrics

METRICS = {
    "train/loss": 2.34567,
    "optim/learning_rate": 6e-4,
    "optim/grad_norm": 0.5,
    "throughput/step_time": 0.25,
    "throughput/tokens_per_second": 12345.6,
    "throughput/total_tokens": 10**9,
}


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def step_numbers(text: str) -> list[int]:
    return [int(n) for n in re.findall(r"^step (\d+)/", text, re.MULTILINE)]


def test_a_plain_line_says_it_all():
    out, clock = io.StringIO(), Clock()
    with Progress(200, stream=out, line_steps=1, clock=clock) as progress:
        progress.log(99, METRICS)
        clock.now = 2.0
        progress.log(100, METRICS | {"throughput/mfu": 41.27})
    first, second = out.getvalue().splitlines()
    assert first == (
        "step 99/200 (49.5%) | loss 2.3457 | lr 0.0006 | grad_norm 0.5 | 250 ms/step | 12,346 tok/s | eta ?"
    )
    assert second.endswith("| mfu 41.3% | eta 3m20s")


def test_what_modules_choose_by_themselves_is_shown_once(caplog):
    out, logger = io.StringIO(), logging.getLogger("lm_trainer.nn.attention_dispatch")
    logger.info("before")
    with Progress(10, stream=out):
        logger.info("attention is computed by %s", "xla")
    logger.info("after")
    assert out.getvalue().splitlines() == ["attention is computed by xla"]
    assert not caplog.records
    assert logger.propagate
    assert not logger.isEnabledFor(logging.INFO)


def test_a_warning_of_the_library_is_a_line_of_the_console_and_is_marked_for_other_handlers(caplog):
    out = io.StringIO()
    with Progress(10, stream=out):
        logging.getLogger("lm_trainer.parallel.sharding").warning("not sharded: %s", "a.weight")
        logging.getLogger("lm_trainer.parallel.sharding").info("unimportant")
    assert out.getvalue() == "warning: not sharded: a.weight\n"
    assert [record.shown for record in caplog.records] == [True]


def test_a_learning_rate_of_zero_is_explained():
    assert format_metrics({"optim/learning_rate": 0.0}, first=True) == ["lr 0 (warm-up)"]
    # As it is at the end of a decay to nothing.
    assert format_metrics({"optim/learning_rate": 0.0}) == ["lr 0"]


@pytest.mark.parametrize(("total", "every"), [(10, 1), (100, 2), (1000, 20), (400_000, 1000)])
def test_a_run_makes_a_readable_number_of_lines(total, every):
    out = io.StringIO()
    with Progress(total, stream=out, clock=Clock()) as progress:
        for step in range(1, min(total, 5000) + 1):
            progress.log(step, METRICS)
    shown = step_numbers(out.getvalue())
    assert shown == sorted({1, *range(every, min(total, 5000) + 1, every)})


def test_a_line_comes_at_least_every_minute_and_at_the_end():
    out, clock = io.StringIO(), Clock()
    with Progress(7, stream=out, line_steps=100, clock=clock) as progress:
        for step in range(1, 8):
            clock.now += 25.0
            progress.log(step, METRICS)
    assert step_numbers(out.getvalue()) == [1, 4, 7]


def test_every_line_is_written_through():
    class Unflushed(io.StringIO):
        flushed = ""

        def flush(self) -> None:
            self.flushed = self.getvalue()

    out = Unflushed()
    progress = Progress(10, stream=out)
    progress.note("a [bold]note[/bold]")
    assert out.flushed == "a [bold]note[/bold]\n"


def test_a_phase_is_said_once_and_again_after_a_minute():
    out, clock = io.StringIO(), Clock()
    with Progress(10, stream=out, clock=clock) as progress:
        for second in range(0, 100, 10):
            clock.now = float(second)
            progress.phase(f"tokenizing train: {second * 10:,} of 1,000 MB")
        progress.phase("compiling the training step")
        progress.log(1, METRICS)
        progress.phase("compiling the training step")
    lines = [line for line in out.getvalue().splitlines() if not line.startswith("step")]
    assert lines == [
        "tokenizing train: 0 of 1,000 MB ...",
        "tokenizing train: 600 of 1,000 MB ...",
        "compiling the training step ...",
        "compiling the training step ...",
    ]


def test_a_terminal_gets_a_bar(monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("LMT_PROGRESS", raising=False)
    out, clock = Terminal(), Clock()
    with Progress(20, stream=out, clock=clock) as progress:
        progress.note("run [x] in logs/x")
        progress.phase("compiling the training step")
        progress.log(1, METRICS)
        clock.now = 1.0
        progress.log(3, METRICS)
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", out.getvalue())
    assert "run [x] in logs/x\n" in text
    last = text.rstrip().splitlines()[-1]
    assert last.startswith("training ")
    assert "3/20 loss 2.3457 | 12,346 tok/s | eta 8s" in last
    assert not step_numbers(text)
    assert "\x1b[?25h" in out.getvalue(), "the cursor is not shown again"


@pytest.mark.parametrize("environment", [{"LMT_PROGRESS": "plain"}, {"TERM": "dumb"}], ids=str)
def test_a_terminal_that_wants_plain_lines_gets_them(monkeypatch, environment):
    for name, value in ({"TERM": "xterm"} | environment).items():
        monkeypatch.setenv(name, value)
    out = Terminal()
    with Progress(20, stream=out) as progress:
        progress.log(20, METRICS)
    assert step_numbers(out.getvalue()) == [20]


def broken_pipe() -> Any:
    class Broken(io.StringIO):
        def write(self, text: str, /) -> int:
            raise BrokenPipeError

    return Broken()


def make_closed_stream() -> Any:
    out = io.StringIO()
    out.close()
    return out


@pytest.mark.parametrize("make", [broken_pipe, make_closed_stream])
@pytest.mark.parametrize("live", [False, True])
def test_an_output_that_breaks_never_stops_a_run(make, live):
    stream = make()
    with Progress(10, stream=stream, live=live) as progress:
        progress.note("hello")
        progress.phase("compiling")
        progress.log(10, METRICS)


def test_text_that_the_output_cannot_encode_is_escaped():
    raw = io.BytesIO()
    out = io.TextIOWrapper(raw, encoding="ascii", write_through=True)
    with Progress(10, stream=out) as progress:
        progress.note("sample: ä")
    assert raw.getvalue() == b"sample: \\xe4\n"


def test_nothing_is_shown_after_the_end():
    out = io.StringIO()
    progress = Progress(10, stream=out)
    progress.close()
    progress.close()
    progress.note("late")
    assert out.getvalue() == ""


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "?"),
        (float("inf"), "?"),
        (0.4, "0s"),
        (59.6, "1m00s"),
        (187, "3m07s"),
        (3600 * 2 + 300, "2h05m"),
        (86400 * 1.125, "1d03h"),
    ],
)
def test_durations_are_short(seconds, text):
    assert format_long_duration(seconds) == text


def test_a_loss_that_is_not_finite_is_shown_as_it_is():
    assert format_metrics({"train/loss": float("nan")})[0] == "loss nan"
