"""Makes the pictures of the documentation: runs the commands in their captions, and draws the results.

    python -m docs.generate.pictures [NAME...]

Each picture is written to docs/pictures/ twice, for light and dark pages. Outputs of the commands stay in .pictures/
below the working directory and are reused; remove it to rerun them, which takes about five minutes on two cores.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from docs.generate.repository import ROOT, table_rows

PICTURES = ROOT / "docs/pictures"
WORK = Path(".pictures").resolve()

THEMES = {
    "light": {"ink": "#37474f", "grid": "#cfd8dc", "paper": "#ffffff"},
    "dark": {"ink": "#cfd8e3", "grid": "#4a5568", "paper": "#1e2129"},
}
COLORS = ("#56b4e9", "#e69f00", "#009e73", "#d55e00", "#cc79a7")
"""Distinguishable with all kinds of colour vision (Okabe and Ito 2008), on light and dark backgrounds."""

STEPS = 200
SETTINGS = (
    "model.seq_len=64",
    "model.hidden_dim=64",
    "model.num_layers=2",
    "data.tokenizer.vocab_size=1024",
    "trainer.train_batch_size=16",
    f"trainer.num_train_steps={STEPS}",
    "trainer.steps_per_eval=20",
    "trainer.max_eval_batches=2",
    "trainer.checkpointer.save_interval=2s",
)
"""The run of the curves: configs/gpt2_nano.yaml, smaller."""
DEVICES = (1, 2, 4, 8)
KILLED_AT = (50, 100, 150)
SHOWN = 48
"""Tokens of the heat map."""


def lmt(*arguments: str) -> str:
    """Runs `lmt` in the folder of the pictures.

    Returns:
        The standard output.

    Raises:
        subprocess.CalledProcessError: when it fails.
    """
    command = [sys.executable, "-m", "cli", *arguments]
    return subprocess.run(command, cwd=WORK, env=_environment(), capture_output=True, text=True, check=True).stdout


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}


def _train(name: str, devices: int, *settings: str) -> list[str]:
    more = (f"trainer.id={name}", f"trainer.jax_config.jax_num_cpu_devices={devices}")
    return ["train", str(ROOT / "configs/gpt2_nano.yaml"), *SETTINGS, *more, *settings]


def finished(name: str, devices: int, *settings: str) -> dict[int, float]:
    """The losses of a run by step; trains the run if it is not finished."""
    if max(losses(name), default=0) < STEPS:
        lmt(*_train(name, devices, *settings))
    return losses(name)


def killed() -> dict[int, float]:
    """The losses of a run that is killed by SIGKILL at each step of `KILLED_AT` and restarted on other devices."""
    name = "killed"
    if max(losses(name), default=0) < STEPS:
        for step, devices in zip(KILLED_AT, (1, 8, 2), strict=True):
            command = [sys.executable, "-m", "cli", *_train(name, devices)]
            process = subprocess.Popen(command, cwd=WORK, env=_environment(), stdout=subprocess.DEVNULL)
            while process.poll() is None and max(losses(name), default=0) < step:
                time.sleep(0.1)
            process.send_signal(signal.SIGKILL)
            process.wait()
        lmt(*_train(name, 4))
    return losses(name)


def losses(name: str) -> dict[int, float]:
    """Step -> training loss of a run, from its last attempt if several computed it."""
    path = WORK / "logs" / name / "metrics.jsonl"
    if not path.exists():
        return {}
    found: dict[int, float] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        if "train/loss" in record:
            found[record["step"]] = record["train/loss"]
    return found


Draw = Callable[[Any, Any, dict[str, str]], None]
"""Draws on a figure and its axes, with the colours of a theme."""


def save(name: str, draw: Draw, size: tuple[float, float] = (7.2, 3.4), *, columns: int = 1) -> None:
    """Draws a picture for each theme, and writes it without the date, so that the same data give the same file.

    With several columns, `draw` gets an array of axes with a common y axis.
    """
    import matplotlib
    from matplotlib.figure import Figure

    for theme, colors in THEMES.items():
        ink = colors["ink"]
        style: dict[Any, Any] = {
            "svg.hashsalt": name,
            "svg.fonttype": "none",
            "font.family": "sans-serif",
            "font.sans-serif": ["Helvetica", "Arial", "DejaVu Sans"],
            **dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "ytick.color"), ink),
            "axes.edgecolor": colors["grid"],
            "axes.spines.top": False,
            "axes.spines.right": False,
            "grid.color": colors["grid"],
            "legend.frameon": False,
        }
        with matplotlib.rc_context(style):
            figure = Figure(figsize=size, layout="constrained")
            draw(figure, figure.subplots(1, columns, sharey=True), colors)
            PICTURES.mkdir(exist_ok=True)
            path = PICTURES / f"{name}-{theme}.svg"
            figure.savefig(path, transparent=True, metadata={"Date": None})
            path.write_text(re.sub(r"[ \t]+\n", "\n", path.read_text(encoding="utf-8")), encoding="utf-8")


def curves() -> None:
    """One line that is five: runs on 1, 2, 4 and 8 devices, and one that is killed three times on changing devices."""
    runs = {f"{count} device{'s' * (count > 1)}": finished(f"devices-{count}", count) for count in DEVICES}
    runs["3 kills, on 1, 8, 2, 4"] = killed()
    reference = next(iter(runs.values()))
    for name, found in runs.items():
        if found != reference:
            raise ValueError(f"the losses of the run with {name} differ; the picture would not be true")

    def draw(figure: Any, axis: Any, colors: dict[str, str]) -> None:
        for index, (name, found) in enumerate(runs.items()):
            width = 11 - 2.4 * index
            axis.plot(list(found), list(found.values()), color=COLORS[index], linewidth=width, label=name)
        top = max(reference.values())
        for step in KILLED_AT:
            axis.axvline(step, color=colors["ink"], linewidth=0.8, linestyle=(0, (3, 3)))
            axis.annotate("kill -9", (step, top), xytext=(4, -4), textcoords="offset points", size=8)
        axis.set(xlabel="step", ylabel="training loss", xlim=(1, STEPS))
        axis.grid(alpha=0.4)
        figure.legend(loc="outside upper center", ncols=len(runs), fontsize=9, columnspacing=1.2)

    save("curves", draw)


def tokens() -> None:
    """A heat map: the probability of each token of a held-out text, at each evaluation of the run."""
    from matplotlib.colors import PowerNorm

    from lm_trainer.trackers.token_page import TokenHistory

    finished("devices-1", 1)
    history = TokenHistory.read(WORK / "logs/devices-1")
    # Only the first token is not predicted.
    tables = [
        np.asarray([np.exp(np.asarray(scored[document].nll_S[:SHOWN]) / -100) for scored in history.steps.values()])
        for document in range(len(history.documents))
    ]
    best = max(range(len(tables)), key=lambda document: tables[document][-1].mean())
    table, texts = tables[best], [history.tokens[index] for index in history.documents[best][1 : 1 + SHOWN]]

    def draw(figure: Any, axis: Any, _: dict[str, str]) -> None:
        image = axis.imshow(table, aspect="auto", cmap="viridis", norm=PowerNorm(0.5, 0, 1))
        visible = [text.replace("\n", "\u21b5").replace(" ", "\u00b7") for text in texts]
        axis.set_xticks(range(len(visible)), visible, rotation=90, fontsize=8, family="monospace")
        axis.set_yticks(range(len(history.steps)), history.steps, fontsize=8)
        axis.set_ylabel("step")
        figure.colorbar(image, ax=axis, label="probability", fraction=0.03, pad=0.01).outline.set_visible(False)

    save("tokens", draw, (8.4, 3.2))


def ladder() -> None:
    """The losses of a ladder, and the predictions for a larger size made before its run, with intervals."""
    rows = {name: cells for name, *cells in table_rows(ROOT / "benchmarks/results/2-core-epyc/ladder_nano.md")}
    measured = {name: [float(x) for x in cells] for name, cells in rows.items() if re.fullmatch(r"\d+k", name)}
    larger = [float(x) for x in rows["273k, measured"]]
    predicted = [[float(x) for x in re.findall(r"\d\.\d+", cell)] for cell in rows["273k, registered"]]
    lengths = (0.5, 1.0, 2.0)

    def compute(size: str) -> list[float]:
        parameters = 1000 * float(size.rstrip("k"))
        return [6 * parameters * 20 * length * parameters for length in lengths]

    def draw(_: Any, axis: Any, colors: dict[str, str]) -> None:
        for index, (name, found) in enumerate(measured.items()):
            axis.plot(compute(name), found, "o-", color=COLORS[index], markersize=5, label=f"{name}, measured")
        x = np.asarray(compute("273k"))
        middle, low, high = np.asarray(predicted).T
        errors = (middle - low, high - middle)
        label = "273k, predicted before it was run (90 %)"
        axis.errorbar(x, middle, errors, fmt="none", ecolor=colors["ink"], capsize=5, linewidth=1.5, label=label)
        axis.plot(x, larger, "D", color=COLORS[4], markersize=6, label="273k, measured")
        axis.set(xscale="log", xlabel="training compute, 6 N D (FLOP)", ylabel="validation loss (nats per token)")
        axis.grid(alpha=0.4, which="both")
        axis.legend(fontsize=8)

    save("ladder", draw)


def transfer() -> None:
    """Losses against learning rates for four widths, with the parametrizations `standard` and `completep`."""
    from benchmarks.transfer_sweep import BASE, KINDS, RATES, WIDTHS

    path = ROOT / "benchmarks/results/2-core-xeon/transfer_sweep.json"
    results = json.loads(path.read_text(encoding="utf-8"))["results"]

    def draw(_: Any, axes: Any, colors: dict[str, str]) -> None:
        for axis, kind in zip(axes, KINDS, strict=True):
            for color, width in zip(COLORS, WIDTHS, strict=False):
                values = results[f"{kind}, width x{width}, depth x1"]
                best = int(np.argmin(values))
                axis.plot(RATES, values, "o-", color=color, markersize=4, label=f"{BASE['hidden_dim'] * width} wide")
                axis.plot(RATES[best], values[best], "D", color=colors["ink"], markersize=6)
            axis.set(title=kind, xlabel="peak learning rate")
            axis.set_xscale("log", base=2)
            axis.grid(alpha=0.4)
        axes[0].set_ylabel("loss on held-out text (nats per byte)")
        axes[0].legend(fontsize=8)

    save("transfer", draw, columns=len(KINDS))


def roofline() -> None:
    """The parts of a training step below the limits of this machine, as `lmt bench mfu --roofline` measures them."""
    path = WORK / "roofline.json"
    if not path.exists():
        path.write_text(lmt("bench", "mfu", str(ROOT / "configs/gpt2_nano.yaml"), "--roofline", "--json"))
    found = json.loads(path.read_text(encoding="utf-8"))["roofline"]
    peak, bandwidth = found["flops_per_second"], found["bytes_per_second"]

    def draw(_: Any, axis: Any, colors: dict[str, str]) -> None:
        ridge = peak / bandwidth
        intensity = np.geomspace(ridge / 20, ridge * 20, 200)
        axis.plot(intensity, np.minimum(peak, intensity * bandwidth) / 1e9, color=colors["ink"], linewidth=2)
        axis.axvline(ridge, color=colors["ink"], linewidth=0.8, linestyle=(0, (3, 3)))
        for text, x, align in (("bound by memory", ridge / 1.1, "right"), ("bound by products", ridge * 1.1, "left")):
            axis.annotate(text, (x, peak / 5e9), ha=align, size=9)
        for index, part in enumerate(part for part in found["parts"] if part["flops"] > 0):
            x = part["flops"] / part["num_bytes"]
            y = min(peak, x * bandwidth) / 1e9
            color = COLORS[index % len(COLORS)]
            axis.plot(x, y, "o", markersize=9, color=color, label=f"{part['name']}: {x:.0f} operations a byte")
        axis.set(xscale="log", yscale="log", xlabel="operations per byte", ylabel="GFLOP/s at most")
        axis.grid(alpha=0.4)
        axis.legend(loc="lower right", fontsize=8)

    save("roofline", draw)


def peers() -> None:
    """Speeds of a training step in lm_trainer and other frameworks, relative to PyTorch compiled."""
    from docs.generate.peers import KINDS, SHAPES, read_peers

    shown = ("lmt", "lmt fast", "jax twin", "levanter", "torch eager", "torch compile+alloc")
    results = {label: read_peers(shape).milliseconds for shape, label in SHAPES.items()}

    def draw(figure: Any, axis: Any, colors: dict[str, str]) -> None:
        width = 0.8 / len(shown)
        palette = dict(zip(shown, (*COLORS[:4], colors["grid"], colors["ink"]), strict=True))
        for index, kind in enumerate(shown):
            speeds = [times["torch compile"] / times[kind] if kind in times else 0 for times in results.values()]
            positions = np.arange(len(results)) + (index - len(shown) / 2 + 0.5) * width
            axis.bar(positions, speeds, width, color=palette[kind], label=KINDS[kind].replace("`", ""))
        axis.axhline(1, color=colors["ink"], linewidth=0.8, linestyle=(0, (3, 3)))
        axis.set_xticks(range(len(results)), [label.replace(", ", "\n", 1) for label in results], fontsize=9)
        axis.set_ylabel("speed, PyTorch compiled = 1")
        axis.grid(axis="y", alpha=0.4)
        axis.set_axisbelow(True)
        figure.legend(loc="outside upper center", ncols=3, fontsize=9, columnspacing=1.2)

    save("peers", draw)


def diff() -> None:
    """The losses of two runs whose learning rates differ by a thousandth, and the step at which their bits diverge."""
    first = finished("devices-1", 1)
    second = finished("other-rate", 1, "optimizer.learning_rate=8.008e-3")
    steps = sorted(first.keys() & second.keys())
    apart = [abs(first[step] - second[step]) for step in steps]
    parted = next(step for step, difference in zip(steps, apart, strict=True) if difference)

    def draw(_: Any, axis: Any, colors: dict[str, str]) -> None:
        axis.plot(steps, [difference or np.nan for difference in apart], color=COLORS[3], linewidth=1.5)
        axis.axvline(parted, color=colors["ink"], linewidth=0.8, linestyle=(0, (3, 3)))
        text = f"step {parted}: the first bits that differ"
        axis.annotate(text, (parted, 1e-2), xytext=(6, 0), textcoords="offset points", size=9)
        axis.set(yscale="log", xlabel="step", ylabel="difference of the losses", xlim=(1, STEPS), ylim=(1e-7, 3e-2))
        axis.grid(alpha=0.4)

    save("diff", draw, (7.2, 2.8))


_TOLD = re.compile(r"run |compiled|step (1|\d*[05]0)/|step \d+:")


def home() -> None:
    """The output of the twelve lines on the home page: the lines of every 50th step, evaluations, and the end."""
    page = (ROOT / "docs/index.md").read_text(encoding="utf-8")
    block = re.search(r"```yaml\n(.*?)```", page, re.DOTALL)
    assert block is not None
    folder = WORK / "home"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    (folder / "my.yaml").write_text(block[1], encoding="utf-8")
    command = [sys.executable, "-m", "cli", "train", "my.yaml"]
    result = subprocess.run(
        command, cwd=folder, env=_environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=True
    )
    lines = [line.rstrip() for line in result.stdout.splitlines()]
    end = next(number for number, line in enumerate(lines) if line.startswith("done:"))
    kept = [number for number, line in enumerate(lines) if number >= end or _TOLD.match(line)]
    lines = [lines[number] for number in kept]
    (PICTURES / "home.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")


DRAWN = {function.__name__: function for function in (home, curves, tokens, ladder, transfer, roofline, peers, diff)}


def main(names: Sequence[str]) -> None:
    """Makes the named pictures, or all of them.

    Raises:
        KeyError: for a name that is none.
    """
    WORK.mkdir(exist_ok=True)
    for name in names or DRAWN:
        DRAWN[name]()
        sys.stderr.write(f"made {name}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
