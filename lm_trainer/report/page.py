"""Builds the page of `lmt report`, a self-contained HTML file."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict
from importlib import resources
from typing import Any

import numpy as np

from lm_trainer.core.errors import UserError
from lm_trainer.core.html_page import render_page
from lm_trainer.report.comparison import compare_runs_in_table
from lm_trainer.report.difference import compute_loss_difference
from lm_trainer.report.downsample import downsample
from lm_trainer.report.run import ReportedRun, format_utc_now
from lm_trainer.report.saved import compute_token_savings
from lm_trainer.reproduce.compare import compare_runs
from lm_trainer.reproduce.record import RunRecord
from lm_trainer.run.config.run_config import changed_keys
from lm_trainer.trackers.token_page import render_token_page

POINTS = 2000
"""Approximate maximum number of points of a curve on the page."""

GROUPS = (
    ("Loss", r"train/loss|eval/(.+/)?(micro_|macro_)?loss"),
    ("Evaluations", r"eval/.*"),
    ("Tasks", r"lm_eval/.*"),
    ("Schedules", r"optim/(learning_rate|momentum)|data/loss_tokens"),
    ("Norms", r"optim/grad_norm|(grads|params|updates|opt_state)/norm/total|optim/.*skip.*"),
    ("Throughput", r"throughput/.*|memory/.*|goodput.*"),
    ("Everything else", r"(?!.*/\d+$)(?!(grads|params|updates|opt_state)/norm/.*/).*"),
)
"""Headings of the groups and patterns of the metrics in each group. The first group that matches is used. Norms of
single layers are not shown; they are in metrics.jsonl."""


def build_report_page(runs: Sequence[ReportedRun]) -> str:
    """Builds the HTML page of one or several runs."""
    data = {
        "written": format_utc_now(),
        "runs": [_run_content(run) for run in runs],
        "groups": _chart_groups(runs),
        "comparison": _comparison(runs) if len(runs) > 1 else None,
        "pairs": [_compare_pair(runs[0], other) for other in runs[1:]],
        "tokens": _token_page(runs),
    }
    uplot = resources.files("lm_trainer.report") / "uplot"
    return render_page(
        "lm_trainer.report",
        "page.html",
        title=", ".join(run.name for run in runs),
        uplot_css=(uplot / "uPlot.min.css").read_text("utf-8"),
        uplot_js=(uplot / "uPlot.iife.min.js").read_text("utf-8"),
        data=data,
    )


def report_facts(runs: Sequence[ReportedRun]) -> dict[str, Any]:
    """Returns the figures of the page as JSON values, without its curves and token probabilities."""
    return {
        "runs": [_run_content(run) for run in runs],
        "comparison": compare_runs_in_table(runs).as_dict() if len(runs) > 1 else None,
        "pairs": [_compare_pair(runs[0], other) for other in runs[1:]],
    }


def _comparison(runs: Sequence[ReportedRun]) -> dict[str, Any]:
    """Returns the table of all runs, and the means of settings with several seeds."""
    compared = compare_runs_in_table(runs)
    seeds = compared.seed_groups()
    keys = [key for key in compared.keys if key != "trainer.seed"]
    return {
        "keys": list(compared.keys),
        "metrics": list(compared.metrics),
        "rows": [[list(values), list(losses)] for _, values, losses in compared.rows],
        "best": list(compared.best),
        "seeds": {
            "heads": [*keys, "seeds", *compared.metrics],
            "rows": [
                [*values, count, *("" if x is None else f"{x[0]:.5g} ± {x[1]:.2g}" for x in losses)]
                for values, count, losses in seeds
            ],
        },
    }


def _run_content(run: ReportedRun) -> dict[str, Any]:
    last = {
        name: float(values[-1]) for name, (_, values) in run.metrics.items() if name.startswith(("eval/", "lm_eval/"))
    }
    return {
        "name": run.name,
        "state": run.state,
        "step": run.step,
        "steps": run.steps,
        "path": str(run.path),
        "branch": None if run.branch is None else f"branch of {run.branch.parent}, from step {run.branch.step}",
        "changes": {key: json.dumps(value, ensure_ascii=False) for key, value in run.changes.items()},
        "attempts": list(run.attempts),
        "alerts": [{"step": a.step, "kind": a.kind, "message": a.message} for a in run.alerts],
        "fingerprint": list(run.fingerprints[-1]) if run.fingerprints else None,
        "verifications": list(run.verifications),
        "gaps": list(run.gaps),
        "prediction": _describe_prediction(run),
        "parameters": run.facts.get("parameters"),
        "data": _data_rows(run),
        "throughput": _throughput_rows(run),
        "samples": [list(sample) for sample in run.samples],
        "last": {
            name: value if value == value and abs(value) != float("inf") else None for name, value in last.items()
        },
    }


def _describe_prediction(run: ReportedRun) -> dict[str, Any] | None:
    """Returns the registered prediction of a run and its score, or None."""
    score = run.score_prediction()
    if run.prediction is None or score is None:
        return None
    return {
        "text": score.describe(run.prediction),
        "sha256": run.prediction.sha256,
        "written": run.prediction.written,
        **score.as_dict(),
    }


def _data_rows(run: ReportedRun) -> list[list[Any]]:
    """Returns the rows of the table of data sets: name of the set, number of tokens, remark."""
    data = run.facts.get("data", {})
    rows = [
        [name, cache["tokens"], "" if cache["complete"] else "so far"] for name, cache in data.get("caches", {}).items()
    ]
    trained = run.metrics.get("throughput/total_tokens")
    if trained is not None and data.get("train_tokens"):
        tokens = int(trained[1][-1])
        rows.append(["trained on", tokens, f"{tokens / data['train_tokens']:.2f} times the text"])
    return rows


def _throughput_rows(run: ReportedRun) -> list[list[Any]]:
    """Returns the rows of the throughput table, each with a title and a value.

    The values are medians over the steps, totals of all attempts, and peak memory.
    """
    medians = {
        name: float(np.median(values[np.isfinite(values)]))
        for name, (_, values) in run.metrics.items()
        if name.startswith(("throughput/", "memory/")) and np.isfinite(values).any()
    }
    speed, mfu = medians.get("throughput/tokens_per_second"), medians.get("throughput/mfu")
    rows: list[list[Any]] = []
    if speed is not None:
        rows.append(["tokens per second, median", speed])
    if speed is not None and mfu:
        rows += [["MFU, median, %", mfu], ["tokens per second at the datasheet's peak", 100 * speed / mfu]]
    named = {
        "throughput/step_time": "seconds per step, median",
        "throughput/data_wait": "share waiting for data, median",
    }
    rows += [[title, medians[name]] for name, title in named.items() if name in medians]
    last = {"throughput/goodput": "goodput of all attempts", "throughput/wall_time": "seconds of all attempts"}
    rows += [[title, float(run.metrics[name][1][-1])] for name, title in last.items() if name in run.metrics]
    peak_titles = {
        "memory/host": "memory of the host, GiB, most",
        "memory/device_peak": "memory of a device, GiB, most",
    }
    rows += [
        [title, float(np.nanmax(run.metrics[name][1]))] for name, title in peak_titles.items() if name in run.metrics
    ]
    return rows


def _chart_groups(runs: Sequence[ReportedRun]) -> list[dict[str, Any]]:
    names = list(dict.fromkeys(name for run in runs for name in run.metrics))
    groups: dict[str, list[dict[str, Any]]] = {title: [] for title, _ in GROUPS}
    for name in sorted(names):
        title = next((title for title, pattern in GROUPS if re.fullmatch(pattern, name)), None)
        if title is None:
            continue
        curves = []
        for index, run in enumerate(runs):
            if name in run.metrics:
                x, y = downsample(*run.metrics[name], POINTS)
                # Seven digits are more than a plot can show.
                curves.append({"run": index, "x": x.tolist(), "y": [float(f"{value:.7g}") for value in y]})
        if any(curve["x"] for curve in curves):
            groups[title].append({"name": name, "curves": curves, "bands": _bands(runs, name)})
    # The training loss comes first.
    groups["Loss"].sort(key=lambda chart: chart["name"] != "train/loss")
    return [{"title": title, "charts": charts} for title, charts in groups.items() if charts]


def _bands(runs: Sequence[ReportedRun], metric: str) -> list[dict[str, Any]]:
    """Returns the bands of the runs' predictions of a metric, with the predicted values."""
    return [
        {
            "run": index,
            "x": list(curve.last_steps),
            "y": list(curve.value),
            "low": list(curve.low),
            "high": list(curve.high),
        }
        for index, curve in ((i, run.prediction.curve) for i, run in enumerate(runs) if run.prediction is not None)
        if curve.metric == metric
    ]


def _compare_pair(first: ReportedRun, other: ReportedRun) -> dict[str, Any]:
    """Compares two runs: configurations, first step with different bits, and numbers of tokens for the same loss."""
    differences = changed_keys(first.identity, other.identity)
    content: dict[str, Any] = {
        "names": [first.name, other.name],
        "configuration": [
            [key, json.dumps(a, ensure_ascii=False), json.dumps(b, ensure_ascii=False)]
            for key, (a, b) in differences.items()
        ],
    }
    try:
        comparison = compare_runs(RunRecord.read(str(first.path)), RunRecord.read(str(other.path)))
        parting = comparison.divergence
        content["bits"] = (
            f"equal in all {comparison.common} steps that both have"
            if parting is None
            else f"part at step {parting.step}"
        )
        if comparison.shared is not None:
            content["bits"] += f"; steps up to {comparison.shared} are shared"
            content["difference"] = _describe_difference(first, other, comparison.shared)
        content["causes"] = [
            line for kind, lines in comparison.causes.items() if kind != "configuration" for line in lines
        ]
    except UserError as error:
        content["bits"] = str(error)
    if saved := compute_token_savings(other, first):
        content["saved"] = {
            "loss": saved.loss,
            "ratio": saved.ratio,
            "compute": saved.compute,
            "interval": list(saved.interval),
        }
    return content


def _describe_difference(first: ReportedRun, other: ReportedRun, shared: int) -> dict[str, Any] | None:
    """Returns the difference of the training losses after the shared steps; None with too few points."""
    difference = compute_loss_difference(other, first, shared)
    return None if difference is None else asdict(difference)


def _token_page(runs: Sequence[ReportedRun]) -> dict[str, str] | None:
    """Returns the page with token probabilities of at most the first two runs, and a note if a run was left out."""
    histories = {run.name: run.tokens for run in runs[:2] if run.tokens is not None}
    if not histories:
        return None
    try:
        return {"page": render_token_page(histories), "note": ""}
    except UserError as error:
        name, history = next(iter(histories.items()))
        return {"page": render_token_page({name: history}), "note": f"Of {name} alone: {error}."}
