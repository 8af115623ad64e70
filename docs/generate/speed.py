"""Expected and measured speeds: `python -m docs.generate.speed` plans the cases again, in about ten minutes of CPU time.

The plans are kept in `benchmarks/results/plans.json`, from which the page is made; tests compare them with the program.
Results that were sent are the files in `benchmarks/results/shared/`.
"""

import json
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from docs.generate.repository import ROOT

PLANS = ROOT / "benchmarks/results/plans.json"
SHARED = ROOT / "benchmarks/results/shared"


@dataclass(frozen=True)
class Case:
    """A configuration on devices that people have."""

    devices: str
    recipe: str
    vocabulary: int
    settings: tuple[str, ...] = ()
    """Settings that make it fit, or a step short enough to be measured within minutes."""
    steps: int = 10
    """Number of steps to measure."""

    @property
    def key(self) -> str:
        return f"{self.devices} {self.recipe}"

    @property
    def plan(self) -> list[str]:
        """Arguments of `lmt` that plan it."""
        size = ["--vocab-size", str(self.vocabulary)]
        return ["plan", self.recipe, *self.settings, "--devices", self.devices, *size]

    @property
    def bench(self) -> list[str]:
        """Arguments of `lmt` that measure it."""
        name = f"{self.devices}-{self.recipe}.json".replace(":", "-")
        return ["bench", "mfu", self.recipe, *self.settings, "--steps", str(self.steps), "--share", name]


_LAYERWISE = "trainer.gather=layer"
CASES = (
    Case("1xRTX4090", "tinystories", 4096),
    Case("1xRTX4090", "gpt2_124m", 50257, ("trainer.train_batch_size=64",)),
    Case("1xRTX4090", "smollm2_chat", 49152, ("trainer.train_batch_size=8",)),
    Case("1xH100", "gpt2_124m", 50257, ("trainer.train_batch_size=128",)),
    Case("1xH100", "qwen3_continued", 151936, ("trainer.train_batch_size=16",)),
    Case("8xH100", "gpt2_124m", 50257),
    Case("8xH100", "llama_1b", 128256, ("trainer.train_batch_size=128",)),
    Case("8xH100", "llama_8b", 128256, ("trainer.train_batch_size=64",)),
    Case("v5e:2x4", "gpt2_124m", 50257),
    Case("v5e:2x4", "llama_1b", 128256, ("trainer.train_batch_size=64",)),
    Case("v5p:2x4x4", "llama_8b", 128256, ("trainer.train_batch_size=128",)),
    Case("v5p:2x4x4", "olmo2_7b", 100352, ("trainer.train_batch_size=256",)),
)


def run_plan(case: Case) -> dict[str, Any]:
    """Plans a case in a process of its own, and returns the figures of the page, in SI units."""
    command = [sys.executable, "-m", "lm_trainer", *case.plan, "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"lmt {shlex.join(case.plan)}: {done.stderr}")
    return figures_of(json.loads(done.stdout))


def figures_of(plan: dict[str, Any]) -> dict[str, Any]:
    """Returns the figures of the page from the output of `lmt plan --json`, with three digits."""
    time, memory = plan["time"], plan["memory"]
    rate, bound = time["tokens_per_second_per_device"], time["bound_seconds"]
    figures = {
        "peak_bytes": memory["peak_bytes"],
        "budget_bytes": plan["budget"]["bytes"],
        "step_seconds": time["step_seconds"],
        "bound_seconds": bound,
        "tokens_per_second_per_device": rate,
        "bound_tokens_per_second_per_device": rate * time["step_seconds"] / bound,
        "mfu": time["mfu"],
        "bound_mfu": time["mfu"] * time["step_seconds"] / bound,
    }
    return {name: float(f"{value:.3g}") for name, value in figures.items()}


def read_plans() -> dict[str, dict[str, Any]]:
    """Returns the recorded plans by the key of their case."""
    return json.loads(PLANS.read_text(encoding="utf-8"))


def speed_table() -> str:
    """Returns the table of expected speeds, with the measured one where somebody has sent it."""
    return "\n".join(_speed_rows(read_plans()))


def _speed_rows(plans: dict[str, dict[str, Any]]) -> Iterator[str]:
    yield "| devices | recipe, settings | memory | tokens/s a device: bound | expected | measured | MFU: bound | expected |"
    yield "|---|---|---:|---:|---:|---:|---:|---:|"
    for case in CASES:
        plan = plans[case.key]
        settings = "".join(f"<br>`{setting}`" for setting in case.settings)
        cells = [
            case.devices,
            f"`{case.recipe}`{settings}",
            f"{plan['peak_bytes'] / 2**30:.1f} of {plan['budget_bytes'] / 2**30:.0f} GiB",
            f"{plan['bound_tokens_per_second_per_device']:,.0f}",
            f"{plan['tokens_per_second_per_device']:,.0f}",
            _measured_rate(case),
            f"{plan['bound_mfu']:.0%}",
            f"{plan['mfu']:.0%}",
        ]
        yield f"| {' | '.join(cells)} |"


def _measured_rate(case: Case) -> str:
    """Returns the rate of the newest result of a case that was sent, in tokens per second and device."""
    path = SHARED / case.bench[-1]
    if not path.is_file():
        return "not sent yet"
    from lm_trainer.bench.share import read_shared_result

    result = read_shared_result(path)
    return f"{result.figures.tokens_per_second / result.devices.count:,.0f}"


def shared_table(directory: Path = SHARED) -> str:
    """Returns the table of all results that were sent."""
    from lm_trainer.bench.share import read_shared_result

    rows = [
        "| devices | model | rows x positions | determinism | tokens/s a device | MFU | of a matrix product | jax |",
        "|---|---|---|---|---:|---:|---:|---|",
    ]
    for path in sorted(directory.glob("*.json")):
        result = read_shared_result(path)
        devices, step, figures = result.devices, result.step, result.figures
        cells = [
            f"{devices.count} x {devices.kind}",
            f"{step.recipe or step.model['type']}, {step.parameters / 1e6:,.0f} million parameters",
            f"{step.rows} x {step.seq_len}",
            step.determinism,
            f"{figures.tokens_per_second / devices.count:,.0f}",
            "n/a" if figures.mfu is None else f"{figures.mfu:.1%}",
            f"{figures.of_matmul:.1%}",
            result.packages.get("jax", "n/a"),
        ]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows) if len(rows) > 2 else "Nobody has sent a result yet."


def measuring_commands() -> str:
    """Returns the commands that measure the cases, as a block of Markdown."""
    lines = [f"lmt {shlex.join(case.bench)}" for case in CASES]
    return "\n".join(["```bash", *lines, "```"])


def main() -> None:
    plans = {}
    for case in CASES:
        print(f"lmt {shlex.join(case.plan)}", flush=True)  # noqa: T201
        plans[case.key] = run_plan(case)
    PLANS.write_text(json.dumps(plans, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
