"""Bytes that a step moves, by formula, against XLA's counts of compiled steps."""

from __future__ import annotations

import json
import re
import statistics
from pathlib import Path
from typing import Any

import pytest

from benchmarks import compiled
from benchmarks.plan_error import config_of
from lm_trainer.plan.devices import parse_devices
from lm_trainer.plan.layout_work import LayoutWork, Recomputation
from lm_trainer.plan.memory_traffic import exchange_bytes, microbatch_bytes, update_bytes
from lm_trainer.profile.devices import device_bandwidths
from lm_trainer.profile.flops import parameter_count
from lm_trainer.profile.peaks import datasheet_peak
from lm_trainer.run.config.gather import with_resolved_gather
from lm_trainer.step.dispatch.microbatch_plan import MicrobatchPlan
from tests.plan.test_speed import sizes_of

RESULTS = Path(compiled.__file__).parent / "results" / "compiled"
NAME = re.compile(r"(?P<model>\S+) (?P<devices>\S+) (?P<microbatches>\d+) x (?P<rows>\d+) rows (?P<mode>\w+)")
MODES = {"fast": {"determinism": "fast"}, "elastic": {"gather": "model"}, "layerwise": {"gather": "layer"}}
STEPS = {
    name: step for kind in ("gpu", "tpu") for name, step in json.loads((RESULTS / f"{kind}.json").read_text()).items()
}


def ratio_to_xla(name: str, step: dict[str, Any]) -> float:
    """Returns XLA's bytes beyond the time of FLOPs, relative to the formula."""
    match = NAME.match(name)
    assert match is not None
    group = parse_devices(match["devices"])
    count, rows = int(match["microbatches"]), int(match["rows"])
    trainer = {"train_batch_size": group.count * count * rows, "per_device_parallelism": rows,
               "mp": "p=f32,c=bfloat16", **MODES[match["mode"]]}  # fmt: skip
    vocab = compiled.VOCAB[match["model"]]
    config = with_resolved_gather(config_of({"model": compiled.MODELS[match["model"]], "trainer": trainer}), vocab)
    spec = config.model.spec(vocab)
    work = LayoutWork(
        spec=spec,
        trainer=config.trainer,
        seq_len=config.model.seq_len,
        plan=MicrobatchPlan(group.count * count * rows, group.count * count, rows),
        sizes=sizes_of(data=group.count),
        shards=group.count,
        gathers=1,
        params=parameter_count(spec),
        # XLA does not count cuDNN's workspace.
        backend="splash",
        training_flops=0,
        recomputation=Recomputation.of(spec, config.trainer),
    )
    bandwidths, peak = device_bandwidths(group.kind), datasheet_peak(group.kind, "bfloat16")
    assert bandwidths is not None
    assert peak is not None
    one_by_one = step["seconds"]["most"] - step["network_seconds"]
    moved = (one_by_one - step["flops"] / peak.flops) * bandwidths.memory
    return moved / (count * microbatch_bytes(work, group.kind) + exchange_bytes(work) + update_bytes(work))


@pytest.mark.parametrize("model", ["gpt2-124m", "llama-1b", "llama-8b", "llama-70b"])
def test_the_traffic_is_near_what_xla_counts(model: str):
    ratios = [ratio_to_xla(name, step) for name, step in STEPS.items() if name.startswith(model)]
    assert len(ratios) >= 3
    assert all(0.55 < ratio < 1.3 for ratio in ratios)
    assert 0.8 < statistics.median(ratios) < 1.2
