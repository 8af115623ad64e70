"""Expected and measured speeds: `python -m docs.generate.speed` estimates the cases again, in about a minute.

The estimates are kept in `benchmarks/results/estimates.json`, from which the page is made; tests compare them with the
program.
Results that were sent are the files in `benchmarks/results/shared/`.
"""

import json
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from docs.generate.repository import ROOT

ESTIMATES = ROOT / "benchmarks/results/estimates.json"
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


CASES = (
    Case("1xRTX4090", "tinystories", 4096),
    Case("1xRTX4090", "gpt2_124m", 50257, ("trainer.train_batch_size=64", "trainer.microbatches_per_gather=1")),
    Case("1xRTX4090", "smollm2_chat", 49152, ("trainer.train_batch_size=8",)),
    Case("1xH100", "gpt2_124m", 50257, ("trainer.train_batch_size=128", "trainer.microbatches_per_gather=4")),
    Case("1xH100", "qwen3_continued", 151936, ("trainer.train_batch_size=16",)),
    Case("8xH100", "gpt2_124m", 50257, ("trainer.microbatches_per_gather=4",)),
    Case("8xH100", "llama_1b", 128256),
    Case("8xH100", "llama_8b", 128256, ("trainer.train_batch_size=64",)),
    Case("v5e:2x4", "gpt2_124m", 50257, ("trainer.microbatches_per_gather=1",)),
    Case("v5e:2x4", "llama_1b", 128256, ("trainer.train_batch_size=64",)),
    Case("v5p:2x4x4", "llama_8b", 128256, ("trainer.train_batch_size=128",)),
    Case("v5p:2x4x4", "olmo2_7b", 100352, ("trainer.train_batch_size=256",)),
)


def estimate(case: Case) -> dict[str, float]:
    """Returns the figures of a case in SI units, with three digits, by the formulas of `lmt plan`."""
    from lm_trainer.config.loader import load
    from lm_trainer.plan.devices import parse_devices
    from lm_trainer.plan.run import Assumptions
    from lm_trainer.plan.search import estimate_run
    from lm_trainer.run.config.run_config import RunConfig

    config = load(ROOT / f"configs/{case.recipe}.yaml", case.settings, RunConfig).config
    estimated = estimate_run(config, parse_devices(case.devices), Assumptions(vocab_size=case.vocabulary))
    candidate, seconds = estimated.candidate, estimated.candidate.cost.seconds
    assert candidate.limit is not None
    faster = seconds / estimated.bound_seconds
    figures = {
        "memory_bytes": candidate.memory.bytes,
        "limit_bytes": candidate.limit,
        "step_seconds": seconds,
        "bound_seconds": estimated.bound_seconds,
        "tokens_per_second_per_device": estimated.tokens_per_second,
        "bound_tokens_per_second_per_device": estimated.tokens_per_second * faster,
        "mfu": estimated.mfu,
        "bound_mfu": estimated.mfu * faster,
    }
    return {name: float(f"{value:.3g}") for name, value in figures.items()}


def read_estimates() -> dict[str, dict[str, float]]:
    """Returns the recorded estimates by the key of their case."""
    return json.loads(ESTIMATES.read_text(encoding="utf-8"))


def speed_table() -> str:
    """Returns the table of expected speeds, with the measured one where somebody has sent it."""
    return "\n".join(_speed_rows(read_estimates()))


def _speed_rows(estimates: dict[str, dict[str, float]]) -> Iterator[str]:
    heads = ("devices", "recipe, settings", "memory", "tokens/s a device: bound", "expected", "measured", "MFU: bound")
    yield f"| {' | '.join([*heads, 'expected'])} |"
    yield "|---|---|---:|---:|---:|---:|---:|---:|"
    for case in CASES:
        figures = estimates[case.key]
        settings = "".join(f"<br>`{setting}`" for setting in case.settings)
        cells = [
            case.devices,
            f"`{case.recipe}`{settings}",
            f"{figures['memory_bytes'] / 2**30:.1f} of {figures['limit_bytes'] / 2**30:.0f} GiB",
            f"{figures['bound_tokens_per_second_per_device']:,.0f}",
            f"{figures['tokens_per_second_per_device']:,.0f}",
            _measured_rate(case),
            f"{figures['bound_mfu']:.0%}",
            f"{figures['mfu']:.0%}",
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
    estimates = {case.key: estimate(case) for case in CASES}
    ESTIMATES.write_text(json.dumps(estimates, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
