"""Memory of attention kernels that no compiler without the device counts."""

from __future__ import annotations

from typing import Any

import jax
import pytest

from benchmarks.plan_error import VOCAB, config_of
from lm_trainer.plan import parse_devices
from lm_trainer.plan.attention_workspace import AttentionWorkspace
from lm_trainer.plan.run import Assumptions, plan_run, target_of_kind

H100 = "NVIDIA H100 80GB HBM3"
LLAMA_1B = {"type": "llama", "seq_len": 2048, "num_heads": 32, "hidden_dim": 2048, "num_layers": 2}
SMALL = {"type": "llama", "seq_len": 256, "hidden_dim": 64, "num_layers": 2, "num_heads": 4, "num_kv_heads": 4,
         "intermediate_dim": 128, "attn_backend": "auto"}  # fmt: skip


def workspace(kind: str = H100, backend: str = "cudnn", axes: dict[str, int] | None = None,
              model: dict[str, Any] | None = None, **trainer: Any) -> int:  # fmt: skip
    trainer = {"mp": "p=f32,c=bfloat16", **trainer}
    config = config_of({"model": {**LLAMA_1B, **(model or {})}, "trainer": {"train_batch_size": 32, **trainer}})
    return AttentionWorkspace.of(config, VOCAB, target_of_kind(kind), backend, axes or {}).bytes(4)


def test_llama_1b_takes_a_gibibyte() -> None:
    # 4 rows, 32 heads, 2,048 x 2,048 pairs, 2 bytes: the figure in NVIDIA's description of the change.
    assert workspace() == 2**30


@pytest.mark.parametrize(
    ("changes", "bytes_expected"),
    [
        ({"kind": "NVIDIA A100-SXM4-80GB"}, 0),
        ({"kind": "TPU v5"}, 0),
        ({"backend": "xla"}, 0),
        ({"determinism": "fast"}, 0),
        ({"axes": {"context": 2}, "context_axis_size": 2}, 2**29),
        ({"model": {"attn_max_documents": 1}}, 2**30),
        ({"model": {"attn_max_documents": 3}}, 2**32),  # and a run of padding
        ({"axes": {"model": 4}, "model_axis_size": 4, "tensor_parallel_axes": ["heads"]}, 2**28),
        ({"axes": {"model": 4}, "model_axis_size": 4, "tensor_parallel_axes": ["mlp"]}, 2**30),
        ({"axes": {"pipeline": 2}}, 2**28),  # one row at a time
    ],
    ids=str,
)
def test_where_it_is_needed(changes: dict[str, Any], bytes_expected: int) -> None:
    assert workspace(**changes) == bytes_expected


@pytest.mark.parametrize("gather", ["model", pytest.param("layer", marks=pytest.mark.slow)])
def test_the_plan_counts_it_in_the_backward_pass(gather: str) -> None:
    trainer = {"train_batch_size": 16, "elastic_shards": 2, "mp": "p=f32,c=bfloat16", "gather": gather}
    config = config_of({"model": SMALL, "trainer": trainer})

    def temporaries(kind: str) -> dict[str, int]:
        plan = plan_run(config, parse_devices(f"2x{kind}"), jax.devices()[:2], Assumptions(vocab_size=VOCAB))
        return {phase.name: phase.parts.get("temporary", 0) for phase in plan.memory.phases}

    with_workspace, without = temporaries("H100"), temporaries("A100")
    extra = {name: size - without[name] for name, size in with_workspace.items() if size != without[name]}
    (name,) = extra
    assert name == ("microbatch" if gather == "model" else "layer 0 gradient")
    assert extra[name] == 8 * 4 * 256 * 256 * 2
