"""`lmt plan --compile` for GPUs, and programs that a compiler refuses."""

from __future__ import annotations

import json
import re
import tempfile
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from lm_trainer.core.errors import UserError
from lm_trainer.plan.devices import parse_devices
from lm_trainer.plan.gpu_target import gpu_target, supported_gpus
from lm_trainer.plan.refusal import explain_refusals
from lm_trainer.profile.devices import device_bandwidths, device_memory
from tests.conftest import RunLmt

SMALL = {
    "model": {"type": "llama", "seq_len": 256, "hidden_dim": 128, "intermediate_dim": 256, "num_layers": 2,
              "num_heads": 2, "num_kv_heads": 1, "attn_backend": "auto"},
    "data": {"tokenizer": "bytes"},
    "trainer": {"train_batch_size": 16, "mp": "p=f32,c=bfloat16", "determinism": "layerwise"},
}  # fmt: skip
LAYER = 2 * 128 * 128 + 2 * 128 * 64 + 3 * 128 * 256
"""Number of weights of a layer of `SMALL`, without its norms."""


def plugin(monkeypatch: pytest.MonkeyPatch, **versions: str) -> None:
    def version(package: str) -> str:
        name = package.replace("-", "_")
        if name not in versions:
            raise metadata.PackageNotFoundError(package)
        return versions[name]

    monkeypatch.setattr(metadata, "version", version)


@pytest.mark.parametrize("kind", supported_gpus())
def test_descriptions_agree_with_the_datasheets(kind: str, monkeypatch: pytest.MonkeyPatch):
    plugin(monkeypatch, jax_cuda12_pjrt="0.10.2", jaxlib="0.10.2")
    target = gpu_target(kind, 8)
    figures = {name: float(value) for name, value in re.findall(r"^  (\w+): ([\d.]+)$", target["target_config"], re.M)}
    memory, bandwidths = device_memory(kind), device_bandwidths(kind)
    assert memory is not None
    assert bandwidths is not None
    # A driver shows what a maker rounds, and a card with a little less than its chip has.
    assert figures["device_memory_size"] == pytest.approx(memory.bytes, rel=0.08)
    assert figures["memory_bandwidth"] == pytest.approx(bandwidths.memory, rel=0.05)
    assert figures["shared_memory_per_block_optin"] == figures["shared_memory_per_core"] - 1024
    assert f'device_description_str: "{kind}"' in target["target_config"]


def test_gpus_come_in_nodes_of_eight(monkeypatch: pytest.MonkeyPatch):
    plugin(monkeypatch, jax_cuda12_pjrt="0.10.2", jaxlib="0.10.2")
    shapes = {count: gpu_target("NVIDIA H200", count)["topology"] for count in (1, 8, 12, 64)}
    assert shapes == {1: "1x1x1", 8: "1x1x8", 12: "1x2x8", 64: "1x8x8"}


def test_a_plug_in_that_is_not_there_or_does_not_fit_is_named(monkeypatch: pytest.MonkeyPatch):
    plugin(monkeypatch, jaxlib="0.10.2")
    with pytest.raises(UserError, match=r"JAX's CUDA plug-in: install it with pip install 'lm_trainer\[gpu\]'"):
        gpu_target("NVIDIA H200", 8)
    plugin(monkeypatch, jax_cuda13_pjrt="0.9.1", jaxlib="0.10.2")
    with pytest.raises(UserError, match=r"0\.9\.1 does not fit jaxlib 0\.10\.2: .* 'jax\[cuda13\]=="):
        gpu_target("NVIDIA H200", 8)


def left_behind() -> set[Path]:
    return {*Path(tempfile.gettempdir()).glob("lmt-plan-*")}


def test_a_refused_program_is_kept_and_named():
    present = left_behind()
    with explain_refusals("TPU v5"):
        jax.jit(lambda x: jnp.sin(x) * 3).lower(1.0).compile()
    assert left_behind() == present

    def refused() -> None:
        with explain_refusals("TPU v5"):
            jax.jit(lambda x: jnp.cos(x) * 5).lower(1.0).compile()
            raise jax.errors.JaxRuntimeError("INTERNAL: no such register\nand a trace of it")

    with pytest.raises(UserError, match="compiler for TPU v5 refuses a program: INTERNAL: no such register; ") as error:
        refused()
    (directory,) = left_behind() - present
    program = Path(str(error.value).rpartition("the program is in ")[2])
    assert program.parent == directory
    assert "cosine" in program.read_text()
    assert jax.config.values["jax_dump_ir_to"] == ""
    for path in directory.iterdir():
        path.unlink()
    directory.rmdir()


def test_other_errors_leave_no_files():
    present = left_behind()
    with pytest.raises(ValueError, match="mine"), explain_refusals("TPU v5"):
        raise ValueError("mine")
    assert left_behind() == present


def has_plugin() -> bool:
    try:
        return metadata.version("jax-cuda12-pjrt") == metadata.version("jaxlib")
    except metadata.PackageNotFoundError:
        return False


def compile_plan(run_lmt: RunLmt, directory: Path, config: dict[str, Any], devices: str) -> dict[str, Any]:
    (directory / "small.yaml").write_text(json.dumps(config))
    done = run_lmt("plan", "small.yaml", "--devices", devices, "--compile", "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


needs_plugin = pytest.mark.skipif(
    not has_plugin(), reason="JAX's CUDA plug-in, the compiler for GPUs, is not installed"
)


@pytest.mark.slow
@needs_plugin
def test_programs_of_eight_gpus(run_lmt: RunLmt, in_tmp_path: Path):
    plan = compile_plan(run_lmt, in_tmp_path, SMALL, "8xH100")
    programs = {program["name"]: program for program in plan["compiled"]["programs"]}
    assert programs["layer 0"]["kernels"] == {"__cudnn$fmhaScaleBiasSoftmax": 1}
    # Seven of eight parts of a layer in bfloat16, and its norms.
    assert programs["gather layer 0"]["bytes_sent"]["all-gather"] == pytest.approx(2 * 7 / 8 * LAYER, rel=0.05)
    # Two rows of 256 positions. The kernel computes three of four blocks of 128 queries and 128 keys, in two products.
    attention = 2 * 2 * (2 * 2 * 256 * 256 * 64) * 3 / 4
    assert programs["layer 0"]["flops"] == pytest.approx(2 * 256 * 2 * LAYER + attention, rel=0.02)
    assert plan["compiled"]["step_seconds"]["least"] <= plan["compiled"]["step_seconds"]["most"]


@pytest.mark.slow
@needs_plugin
def test_gradients_are_added_inside_each_node_first(run_lmt: RunLmt, in_tmp_path: Path):
    trainer = {**SMALL["trainer"], "train_batch_size": 32, "elastic_shards": 16}
    plan = compile_plan(run_lmt, in_tmp_path, {**SMALL, "trainer": trainer}, "16xH100")
    programs = {program["name"]: program for program in plan["compiled"]["programs"]}
    # Each GPU sends seven eighths to the others of its node in bfloat16, and then half of the float32 sum of its eighth
    # to the other node.
    inside, between = 2 * LAYER * 7 / 8, 4 * LAYER / 16
    assert programs["reduce layer 0"]["bytes_sent"]["all-to-all"] == pytest.approx(inside + between, rel=0.05)
    assert programs["reduce layer 0"]["bytes_sent_to_nodes"] == pytest.approx(between, rel=0.05)
    bandwidths = device_bandwidths(parse_devices("16xH100").kind)
    assert bandwidths is not None
    assert bandwidths.network is not None
    assert bandwidths.between_nodes is not None
    # The second exchange starts after the first, because it sends the sums of a node.
    seconds = inside / bandwidths.network + between / bandwidths.between_nodes
    assert programs["reduce layer 0"]["network_seconds"] == pytest.approx(seconds, rel=0.05)
