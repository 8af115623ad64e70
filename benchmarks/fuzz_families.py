"""Compares random configurations of all model families with `transformers`.

    python -m benchmarks.fuzz_families --count 300 --seed 0

Each case is a tiny model with random weights, norms and biases, made by transformers on torch and written to files. Its
logits must equal ours within 1e-4, in one forward pass and in two calls with a cache; what is imported must be exported
with the same bits; config.json must have the same meaning after an export. A configuration that is refused with a
reason counts as refused, not as a defect. Every defect is printed with the command that repeats it.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.fuzz_configs import FAMILIES
from benchmarks.fuzz_draw import LENGTH, Draw, Fields
from benchmarks.setting import describe_load, describe_setting, markdown_table
from lm_trainer.core.errors import UserError
from lm_trainer.core.runtime import prepare_process

TOLERANCE = 1e-4
ROWS = 2
CASES_PER_CACHE = 20
"""Number of cases after which compiled programs are dropped."""


class Case(NamedTuple):
    """A random configuration of a family."""

    seed: int
    number: int

    @property
    def family(self) -> str:
        """Name of the family; the cases of one seed go through all families in turn."""
        return list(FAMILIES)[self.number % len(FAMILIES)]

    @property
    def command(self) -> str:
        """Command that repeats the case."""
        return f"python -m benchmarks.fuzz_families --seed {self.seed} --only {self.number}"

    def draw(self) -> tuple[Fields, bool]:
        """Returns the configuration, and true if our layers run as a loop."""
        draw = Draw(f"{self.seed} {self.number}")
        fields = FAMILIES[self.family].draw(draw)
        return fields, draw.one(False, True, True)


class Outcome(NamedTuple):
    """Comparison of one case."""

    case: Case
    difference: float = 0.0
    """Largest difference of a logit."""
    refused: str = ""
    """Reason for which the configuration was refused."""
    defect: str = ""


def compare(case: Case) -> Outcome:
    """Compares a random configuration with transformers."""
    fields, scan = case.draw()
    with tempfile.TemporaryDirectory() as directory:
        try:
            ids, expected = write_checkpoint(Path(directory), case, fields)
        except Exception as error:
            return Outcome(case, refused=f"transformers: {error}")
        raw, tensors = read_checkpoint(Path(directory))
    try:
        return _compare_checkpoint(case, raw, tensors, ids, expected, scan=scan)
    except UserError as error:
        return Outcome(case, refused=str(error))
    except Exception:
        return Outcome(case, defect=traceback.format_exc(limit=-3))


def write_checkpoint(directory: Path, case: Case, fields: Fields) -> tuple[np.ndarray, np.ndarray]:
    """Writes a checkpoint of transformers. Returns token ids [R, S] and its float32 logits [R, S, V]."""
    import torch
    import transformers

    family = FAMILIES[case.family]
    torch.manual_seed(case.number)
    config = getattr(transformers, family.config_class)(**fields)
    config._attn_implementation = "eager"
    model = getattr(transformers, family.model_class)(config).float().eval()
    with torch.no_grad():
        # A new model has ones and zeros in its norms and biases, which hides mistakes.
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.2 * torch.randn(parameter.shape))
        saved = model.state_dict()
        for name, buffer in model.named_buffers():
            if name in saved and buffer.ndim == 1:
                buffer.add_(0.2 * torch.randn(buffer.shape))
        ids = torch.randint(0, config.vocab_size, (ROWS, LENGTH))
        logits = model(input_ids=ids, use_cache=False).logits.float()
    model.save_pretrained(directory)
    return ids.numpy(), logits.numpy()


def read_checkpoint(directory: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Returns the content of config.json, and the tensors."""
    from safetensors.numpy import load_file

    raw = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    return raw, load_file(directory / "model.safetensors")


def _compare_checkpoint(
    case: Case,
    raw: dict[str, Any],
    tensors: dict[str, np.ndarray],
    ids: np.ndarray,
    expected: np.ndarray,
    *,
    scan: bool,
) -> Outcome:
    from lm_trainer.models import hf

    config, vocab_size = hf.config_from_hf(raw)
    config = config.fit_to_files(tensors.keys())
    params = hf.params_from_hf(config, vocab_size, tensors)
    runnable = config.model_copy(update={"scan_layers": scan, "gradient_checkpointing": False})
    results = dict(zip(("logits", "cache"), compute_logits(runnable, vocab_size, params, ids), strict=True))
    differences = {name: float(np.abs(logits - expected).max()) for name, logits in results.items()}
    defects = [f"{name} differ by {value:.3g}" for name, value in differences.items() if not value <= TOLERANCE]
    exported = hf.params_to_hf(config, params)
    same = exported.keys() == tensors.keys()
    if not same or any(exported[name].tobytes() != tensor.tobytes() for name, tensor in tensors.items()):
        defects.append("exported tensors differ from imported ones")
    written = hf.config_to_hf(config, vocab_size=vocab_size, eos_id=2, bos_id=1)
    if hf.config_from_hf(written) != (config, vocab_size):
        defects.append("config.json has another meaning after an export")
    return Outcome(case, max(differences.values()), defect="; ".join(defects))


def compute_logits(config: Any, vocab_size: int, params: Any, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns our logits [R, S, V] from one forward pass, and from two calls with a cache."""
    import jax
    import jax.numpy as jnp
    from flax import nnx

    from tests.compiling import quick_jit

    graph = nnx.split(nnx.eval_shape(lambda: config.build(vocab_size, rngs=nnx.Rngs(0))), nnx.Param)[0]
    tokens_RS = jnp.asarray(ids, jnp.int32)
    positions_RS = jnp.tile(jnp.arange(LENGTH, dtype=jnp.int32), (ROWS, 1))

    def full_and_cached(params: Any, tokens_RS: jax.Array) -> tuple[jax.Array, jax.Array]:
        model = nnx.merge(graph, params)
        full_RSV = model(tokens_RS, positions_RS, jnp.zeros_like(tokens_RS))
        cache, parts = model.init_cache(ROWS, LENGTH), []
        for part in (slice(0, LENGTH - 7), slice(LENGTH - 7, LENGTH)):
            logits_RTV, cache = model.decode(tokens_RS[:, part], positions_RS[:, part], cache)
            parts.append(logits_RTV)
        return full_RSV, jnp.concatenate(parts, axis=1)

    full_RSV, cached_RSV = quick_jit(full_and_cached)(params, tokens_RS)
    return np.asarray(full_RSV), np.asarray(cached_RSV)


def fuzz(cases: Iterable[Case]) -> list[Outcome]:
    """Compares all cases, and prints every defect at once. An interrupt (Ctrl+C) ends the comparison early."""
    import jax
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    outcomes = list[Outcome]()
    try:
        for count, case in enumerate(cases, 1):
            outcome = compare(case)
            outcomes.append(outcome)
            if outcome.defect:
                text = f"{case.family}: {outcome.defect}\n  {case.draw()[0]}\n  {case.command}"
                print(text, file=sys.stderr, flush=True)
            if count % CASES_PER_CACHE == 0:
                print(f"{count} cases", file=sys.stderr, flush=True)
                jax.clear_caches()
    except KeyboardInterrupt:
        print("stopped: the report has the cases so far", file=sys.stderr)
    return outcomes


def report(outcomes: Sequence[Outcome]) -> str:
    """Returns a table with a row for each family, and the reasons of refusals."""
    rows = []
    for family in FAMILIES:
        of_family = [outcome for outcome in outcomes if outcome.case.family == family]
        if of_family:
            counts = Counter("defect" if o.defect else "refused" if o.refused else "equal" for o in of_family)
            worst = max(outcome.difference for outcome in of_family)
            numbers = [str(counts[kind]) for kind in ("equal", "refused", "defect")]
            rows.append([family, *numbers, f"{worst:.1e}"])
    refusals = Counter(f"{outcome.case.family}: {outcome.refused}" for outcome in outcomes if outcome.refused)
    lines = [f"- {reason} ({count})" for reason, count in sorted(refusals.items())]
    table = markdown_table(["family", "equal", "refused", "defects", "largest difference"], rows)
    return "\n".join([table, *(["", "Refused:", "", *lines] if lines else [])])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--count", type=int, default=300, help="number of cases")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--only", type=int, help="number of a single case")
    parser.add_argument("--family", action="append", choices=FAMILIES, help="only these families")
    options = parser.parse_args()
    prepare_process()
    numbers = range(options.first, options.first + options.count) if options.only is None else [options.only]
    cases = [Case(options.seed, number) for number in numbers]
    start = time.process_time()
    outcomes = fuzz(case for case in cases if options.family is None or case.family in options.family)
    print("# Random configurations against transformers\n")
    print(describe_setting("jax", "torch", "transformers"), describe_load("at the end"))
    print(f"\nSeed {options.seed}, {len(outcomes)} cases, {time.process_time() - start:.0f} s of processor time.\n")
    print(report(outcomes))
    sys.exit(any(outcome.defect for outcome in outcomes))


if __name__ == "__main__":
    main()
