"""Programs of training steps, as the compilers of TPUs and GPUs write them for devices that are only described."""

from __future__ import annotations

import math
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, cast
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src import compiler
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from benchmarks.plan_error import VOCAB, config_of
from lm_trainer.core.errors import UserError
from lm_trainer.parallel.target_platform import compiling_for, target_platform
from lm_trainer.plan import parse_devices
from lm_trainer.plan.compiler_flags import SPARSE_CORES
from lm_trainer.plan.memory import StepMemory
from lm_trainer.plan.programs import ProgramWork
from lm_trainer.plan.target import target_devices
from lm_trainer.profile.collectives import bytes_sent
from lm_trainer.profile.devices import device_platform
from lm_trainer.profile.hlo import array_dimensions, parse_program, walk_fusion, walk_instructions
from lm_trainer.profile.roofline import BLOCK_SCALED_PRODUCT
from lm_trainer.profile.workload import random_batch
from lm_trainer.run.build.setup import build_setup
from lm_trainer.run.config.run_config import RunConfig
from lm_trainer.step.dispatch.executable import Executable
from lm_trainer.step.dispatch.measured_programs import MeasuredPrograms
from lm_trainer.step.dispatch.program import Program
from lm_trainer.step.dispatch.recorder import Key, Measure, MeasuredProgram, measure_traced
from lm_trainer.step.dispatch.repeatable import compile_repeatable
from tests.compiled.kept import Compile
from tests.conftest import lmt_environment

pytestmark = pytest.mark.aot

BATCH, ROWS, LENGTH, WIDTH, WIDE, LAYERS, HEADS, DEVICES = 16, 2, 1024, 256, 1024, 4, 4, 4
MODEL = {"type": "llama", "seq_len": LENGTH, "hidden_dim": WIDTH, "intermediate_dim": WIDE, "num_layers": LAYERS,
         "num_heads": HEADS, "num_kv_heads": HEADS, "scan_layers": True,
         "gradient_checkpointing": True, "cross_entropy_block_size": 512}  # fmt: skip
LINEAR_MAPS, HEAD_PRODUCTS = 7, 3
"""Linear maps of a layer, and products of the loss with its gradients."""
LAYER = 4 * WIDTH * WIDTH + 3 * WIDTH * WIDE
"""Weights of a layer."""
TARGETS = ("v5e:2x2", "4xH100")


def config_for(determinism: str, **trainer: Any) -> RunConfig:
    always = {"train_batch_size": BATCH, "per_device_parallelism": ROWS, "mp": "p=f32,c=bfloat16"}
    return config_of({"model": MODEL, "trainer": {**always, "determinism": determinism, **trainer}})


@cache
def described(target: str) -> Sequence[Any]:
    """The devices, or a skipped test where there is no compiler for them."""
    try:
        return target_devices(parse_devices(target))
    except UserError as error:
        # Any other reason, such as another process that holds the compiler of TPUs, must not look like a passed test.
        if "needs the compiler" not in str(error):
            raise
        pytest.skip(str(error))


def test_two_processes_may_compile_at_once() -> None:
    described("v5e:2x2")
    program = (
        "from lm_trainer.plan import parse_devices; from lm_trainer.plan.target import target_devices; "
        "print(len(target_devices(parse_devices('v5e:2x2'))))"
    )
    # Without the settings that this process has made by now.
    environment = {name: value for name, value in lmt_environment().items() if "TPU" not in name}
    command = [sys.executable, "-c", program]
    second = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert second.stdout == "4\n", second.stderr


@dataclass(frozen=True)
class Step:
    """The programs of a step."""

    memory: StepMemory
    peak: int
    works: dict[str, ProgramWork]
    texts: dict[str, str]


@cache
def step_of(target: str, determinism: str, count: int = DEVICES) -> Step:
    devices, platform = described(target)[:count], device_platform(parse_devices(target).kind)
    with compiling_for(platform):
        memory = StepMemory(config_for(determinism), VOCAB, devices, platform)
        peak = memory.plan().peak.bytes
    runs, texts = memory.run_counts(), memory.hlo_texts()
    works = {name: ProgramWork.from_hlo(name, runs[name], text) for name, text in texts.items()}
    return Step(memory, peak, works, texts)


class CompiledWhenRead:
    """A program that is compiled when something of it is read, because each takes ten seconds."""

    def __init__(self, traced: jax.stages.Traced, platform: str) -> None:
        self._traced, self._platform = traced, platform

    @cached_property
    def _compiled(self) -> jax.stages.Compiled:
        return compile_repeatable(self._traced.lower(), self._platform)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._compiled, name)


def compile_when_read(jitted: jax.stages.Wrapped, *args: Any, repeatable: bool = True) -> Executable:
    assert repeatable, "no program of a step under test may be compiled otherwise"
    traced, compiled = jitted.trace(*args), cast("Any", CompiledWhenRead)
    return Executable(traced, compiled(traced, target_platform()))


@pytest.mark.parametrize(("target", "quantization"), [*((target, None) for target in TARGETS), ("4xB200", "mxfp8")])
@pytest.mark.parametrize(("determinism", "name"), [("elastic", "microbatch"), ("layerwise", "layer 0 gradient")])
def test_a_microbatch_is_one_program_on_every_device_and_mesh(
    target: str, quantization: str | None, determinism: str, name: str, caplog: pytest.LogCaptureFixture
):
    devices, platform = described(target), device_platform(parse_devices(target).kind)
    config = config_for(determinism, quantization=quantization and {"type": quantization})
    fingerprints = set()
    for places in (devices[:1], devices[3:], devices[1:3]):
        with compiling_for(platform), mock.patch.object(Executable, "from_jitted", compile_when_read):
            step = build_setup(config, VOCAB, places).step
            compiled = step.compile(random_batch(1, LENGTH, VOCAB))
            program = compiled if isinstance(compiled, Executable) else compiled.by_name[name]
            fingerprints.add(program.fingerprint())
    assert len(fingerprints) == 1
    # The programs of a mesh are compared with one another when they are compiled.
    assert "different programs" not in caplog.text


def test_what_is_compiled_for_another_chip_than_the_first_checks_where_it_runs(
    compile_anew: Compile, monkeypatch: pytest.MonkeyPatch
):
    """Reason for which programs of a TPU's chips are neither shared among chips nor kept: `compile_per_device.py`."""
    monkeypatch.setattr(compiler, "backend_compile_and_load", compile_anew)
    checks = []
    for device in described("v5e:2x2"):
        x = jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.bfloat16, sharding=SingleDeviceSharding(device))
        program: Any = jax.jit(lambda x: x @ x).lower(x).compile().runtime_executable()
        checks.append(b"Invalid physical row: ChipId()" in program.serialize())
    assert checks == [False, True, True, True]


@pytest.mark.parametrize("target", TARGETS)
def test_programs_send_what_is_planned_and_no_more(target: str):
    works, other_share = step_of(target, "layerwise").works, (DEVICES - 1) / DEVICES
    for name, work in works.items():
        sent = sum(work.sent.values())
        if name.startswith("gather"):
            # A TPU's compiler gathers small arrays by adding zeros.
            assert work.sent.keys() <= {"all-gather", "all-reduce"}
            # In the dtype of the products, also the tables of tokens.
            size = 2 * LAYER if "layer" in name else 2 * VOCAB * WIDTH
            assert sent == pytest.approx(other_share * size, rel=0.1), name
        elif name.startswith("reduce"):
            assert work.sent.keys() <= {"all-to-all", "all-gather", "all-reduce"}
            # Two microbatches of a device are one sum, in float32.
            numbers = LAYER if "layer" in name else VOCAB * WIDTH
            assert sent <= 1.1 * 4 * other_share * numbers, name
        elif " with " in name:
            # Layers that gather their neighbour, and reduce the gradients of the other one, while they compute.
            gathered = other_share * 2 * LAYER
            reduced = 4 * other_share * LAYER if "reduce" in name else 0
            assert 0.9 * (gathered + 0.5 * reduced) <= sent <= 1.1 * (gathered + reduced), name
        elif name == "norm":
            assert sent <= 64 * 1024
        else:
            assert sent == 0, name
    # The gradient of the embedding does not read its table.
    assert "enter gradient" in works
    assert "gather enter gradient" not in works
    # The layer is compiled in both programs as it is alone.
    assert {"layer 0 with gather layer 0", "layer 0 gradient with gather layer 0, reduce layer 0"} <= works.keys()


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("count", [2, DEVICES])
def test_a_fast_step_sends_what_is_planned_and_no_more(target: str, count: int):
    (work,) = step_of(target, "fast", count).works.values()
    gpu, tokens, table, norms = "H100" in target, ROWS * LENGTH, VOCAB * WIDTH, (2 * LAYERS + 1) * WIDTH
    # In bfloat16 layers, for the forward pass and again for the backward pass, and the table of the embedding; in
    # float32 the head, whose gradient is summed in it, and norms; and the ids of all tokens.
    gathered = 2 * 2 * LAYERS * LAYER + 2 * table + 4 * table + 2 * 4 * norms + 4 * count * tokens
    # Gradients of all that but the embedding, whose gradient comes in pieces: it is made of what follows, which is less
    # to send wherever a device has fewer than V tokens.
    reduced = 2 * LAYERS * LAYER + 4 * table + 4 * norms
    # The gradient of the embedding's result, from the tokens of a device to its columns of the table.
    returned = (2 if gpu else 4) * tokens * WIDTH
    sent = dict(work.sent)
    all_reduced = sent.pop("all-reduce")
    if gpu:
        # The loss, the count of tokens and the norm.
        assert all_reduced <= 64
    # A TPU's compiler leaves some sums whole, which is twice as much to send.
    sent["reduce-scatter"] += all_reduced / 2
    planned = {"all-gather": gathered, "reduce-scatter": reduced, "all-to-all": returned}
    assert sent.keys() == planned.keys()
    for kind, size in planned.items():
        limit = BATCH // (ROWS * count) * (count - 1) / count * size
        # A TPU's compiler gathers the head once, in bfloat16.
        assert 0.85 * limit <= sent[kind] <= 1.01 * limit, kind


def test_the_flags_for_a_torus_have_its_sparse_cores_gather_and_scatter():
    mesh = Mesh(np.array(described("v5p:4x4x4")), ("data",))
    replicated, sharded = NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec("data"))
    flags: dict[str, str | bool] = {flag[2:].split("=")[0]: True for flag in SPARSE_CORES.split()}
    rows = jax.ShapeDtypeStruct((64 * 128, WIDE), jnp.bfloat16, sharding=sharded)
    gather, scatter = (
        jax.jit(lambda x: x + x, out_shardings=replicated),
        jax.jit(lambda x: x.T @ x, out_shardings=sharded),
    )
    size = {"all-gather": 64 * 128 * WIDE * 2, "reduce-scatter": WIDE * WIDE * 2}
    for program, kind in ((gather, "all-gather"), (scatter, "reduce-scatter")):
        lowered = program.lower(rows)
        plain, flagged = (bytes_sent(lowered.compile(options).as_text() or "") for options in (None, flags))
        assert plain == {"all-reduce": 2 * size[kind] * 63 / 64}
        assert flagged == {kind: size[kind] * 63 / 64}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("determinism", ["elastic", "layerwise", "fast"])
def test_products_are_in_the_precision_that_was_asked_for(target: str, determinism: str):
    found_products = [product for text in step_of(target, determinism).texts.values() for product in products(text)]
    # Forward and backward of four kinds of weights at least, or the text was not understood.
    assert len(found_products) >= 12
    assert [line for line, dtypes in found_products if dtypes == {"f32"}] == []


def products(hlo: str) -> Iterator[tuple[str, set[str]]]:
    """Matrix products, and the dtypes of their operands."""
    program = parse_program(hlo)
    for op, of, _ in walk_instructions(program):
        for one, inside in ((op, of), *walk_fusion(program, op)):
            if one.opcode in ("dot", "convolution"):
                dtypes = {inside[name].shape.split("[")[0] for name in one.operands[:2]}
                yield f"{one.shape} {one.opcode} {one.attributes[:120]}", dtypes


class SomePrograms(MeasuredPrograms):
    """Compiles only the programs with these names, because each takes ten seconds, and traces the others."""

    def __init__(self, names: Collection[str]) -> None:
        super().__init__()
        self._names = names

    @contextmanager
    def measure_for_rows(self, rows: int) -> Iterator[Measure]:
        with super().measure_for_rows(rows) as compile_and_measure:

            def measure(program: Program, key: Key, args: tuple[Any, ...]) -> MeasuredProgram:
                return (compile_and_measure if program.name in self._names else measure_traced)(program, key, args)

            yield measure


@pytest.mark.parametrize(
    ("target", "kind"), [("4xH100", "fp8"), ("4xH100", "int8"), ("v5e:2x2", "int8"), ("v6e:2x2", "int8")]
)
def test_products_of_8_bits_have_operands_of_8_bits(target: str, kind: str):
    platform = device_platform(parse_devices(target).kind)
    # A GPU's compiler makes one product of several of the same operand.
    forward, backward = (4, 11) if platform == "gpu" else (LINEAR_MAPS, 3 * LINEAR_MAPS - 1)
    least_products = {"layer 0": forward, "layer 0 gradient": backward}
    programs = SomePrograms(least_products)
    with compiling_for(platform):
        config = config_for("layerwise", quantization={"type": kind, "backward": True})
        StepMemory(config, VOCAB, described(target), platform, programs=programs).step_record()
    texts = {key[0]: text for key, text in programs.texts.items()}
    for name, least in least_products.items():
        found_products = list(products(texts[name]))
        # On a TPU rotations are products too.
        narrow = [line for line, dtypes in found_products if all(dtype.startswith(("f8", "s8")) for dtype in dtypes)]
        assert len(narrow) >= least, name
        assert len(found_products) - len(narrow) <= (0 if platform == "gpu" else 4), name
        # Sums of integers, in which a TPU's compiler includes the conversion that follows.
        results = {"fp8": ("f32[", "bf16["), "int8": ("s32[",) if platform == "gpu" else ("s32[", "bf16[")}[kind]
        assert [line for line in narrow if not line.startswith(results)] == [], name


def in_mxfp8(target: str, determinism: str) -> tuple[StepMemory, dict[str, str]]:
    with compiling_for("gpu"):
        config = config_for(determinism, quantization={"type": "mxfp8"})
        memory = StepMemory(config, VOCAB, described(target), "gpu")
        return memory, memory.hlo_texts()


@pytest.mark.parametrize("determinism", ["elastic", "layerwise", "fast"])
def test_products_of_mxfp8_are_instructions_of_blackwell(determinism: str):
    (memory, texts), operand_types, wide = in_mxfp8("4xB200", determinism), Counter[tuple[str, ...]](), 0
    runs = memory.run_counts()
    for name, text in texts.items():
        for op, of, turns in walk_instructions(parse_program(text)):
            if f'"{BLOCK_SCALED_PRODUCT}"' in op.attributes:
                operand_types[tuple(of[operand].shape.split("[")[0] for operand in op.operands)] += int(
                    runs[name] * turns
                )
        wide += sum(1 for _ in products(text))
    # In each layer and microbatch: forward, again but for the last map, and for both operands of each.
    products_per_layer, microbatches = LINEAR_MAPS + LINEAR_MAPS - 1 + 2 * LINEAR_MAPS, BATCH // (ROWS * DEVICES)
    assert operand_types == {
        ("f8e4m3fn", "f8e4m3fn", "f8e8m0fnu", "f8e8m0fnu"): products_per_layer * LAYERS * microbatches
    }
    assert wide == HEAD_PRODUCTS


def test_products_of_mxfp8_are_of_16_bits_before_blackwell():
    _, texts = in_mxfp8("4xH100", "layerwise")
    operand_types = [dtypes for _, dtypes in products(texts["layer 0"])]
    assert operand_types == [{"bf16"}] * LINEAR_MAPS
    assert BLOCK_SCALED_PRODUCT not in texts["layer 0"]


@pytest.mark.parametrize("determinism", ["elastic", "layerwise"])
def test_numbers_are_added_in_an_order_that_does_not_depend_on_the_moment(determinism: str):
    scatters = [line for text in step_of("4xH100", determinism).texts.values() for line in lines_of(text, "scatter")]
    # The gradient of the embedding.
    assert scatters
    assert [line for line in scatters if "unique_indices=true" not in line] == []


def lines_of(hlo: str, opcode: str) -> list[str]:
    return [line for line in hlo.splitlines() if f" {opcode}(" in line]


@pytest.mark.parametrize("target", TARGETS)
def test_attention_is_fused(target: str):
    step, scores = step_of(target, "layerwise"), ROWS * HEADS * LENGTH * LENGTH
    assert sum(step.works["layer 0"].kernels.values()) == 1
    # The forward pass again, and one kernel for all gradients.
    assert sum(step.works["layer 0 gradient"].kernels.values()) == 2
    if target == "4xH100":
        # cuDNN leaves out the blocks that it knows to be hidden.
        assert len(re.findall('"mask_type": ?"CAUSAL"', step.texts["layer 0 gradient"])) == 2
    for name in ("layer 0", "layer 0 gradient"):
        assert max(sizes(step.texts[name])) < scores, name


def sizes(hlo: str) -> Iterator[int]:
    """Elements of the arrays that a program holds in memory."""
    for op, _, _ in walk_instructions(parse_program(hlo)):
        yield math.prod(array_dimensions(op.shape))


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("determinism", ["layerwise", "fast"])
def test_nothing_is_whole_that_is_cut(target: str, determinism: str):
    step = step_of(target, determinism)
    unsharded_shapes = [sorted((LAYERS, WIDTH, WIDE)), sorted((LAYERS, WIDTH, HEADS, WIDTH // HEADS))]
    for name, text in step.texts.items():
        for op, _, _ in walk_instructions(parse_program(text)):
            assert sorted(array_dimensions(op.shape)) not in unsharded_shapes, f"{name}: {op.shape} {op.opcode}"
    numbers = LAYERS * LAYER + 2 * VOCAB * WIDTH
    assert step.memory.state["parameters"] == pytest.approx(4 * numbers / DEVICES, rel=0.02)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("determinism", ["elastic", "layerwise", "fast"])
def test_the_compiler_takes_no_more_memory_than_the_plan(target: str, determinism: str):
    step, group = step_of(target, determinism), parse_devices(target)
    config = config_for(determinism)
    # XLA plans for a CPU as `lmt plan` has it do.
    model = config.model.model_copy(update={"attn_backend": "xla", "flash_attention_block_size": 128})
    planned = StepMemory(
        config.model_copy(update={"model": model}), VOCAB, jax.devices()[:4], device_platform(group.kind)
    )
    assert step.peak <= 1.1 * planned.plan().peak.bytes
