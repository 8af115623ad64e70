"""`lmt plan`: what it predicts, against arrays that exist and programs that run."""

from __future__ import annotations

import importlib.util
import json
import math
import re
from pathlib import Path
from typing import Any

import jax
import pytest

from benchmarks.plan_error import VOCAB, config_of, measure_live
from lm_trainer.core.errors import UserError
from lm_trainer.parallel import dispatch_threads
from lm_trainer.plan import Assumptions, DeviceGroup, plan_run
from lm_trainer.plan.devices import memory_budget, parse_bytes, parse_devices
from lm_trainer.plan.estimate import Traces, estimate_step
from lm_trainer.plan.fit import find_largest_microbatch, possible_rows
from lm_trainer.plan.memory import StepMemory
from lm_trainer.plan.programs import ProgramWork, overlapped_share, step_time
from lm_trainer.plan.table import format_bytes, plan_lines
from lm_trainer.plan.target import target_devices
from lm_trainer.profile.devices import Bandwidths, device_kind, device_memory
from lm_trainer.profile.peaks import datasheet_peak, known_devices
from lm_trainer.profile.roofline import Operation
from lm_trainer.run.build.setup import build_setup
from lm_trainer.step.dispatch.memory import PhaseBytes, state_bytes
from lm_trainer.step.state.train_state import abstract_state
from tests.conftest import Lmt, RunLmt, refused

HEADS = {"num_heads": 2, "num_kv_heads": 1}
LLAMA = {"type": "llama", "seq_len": 32, "hidden_dim": 64, "intermediate_dim": 128, "num_layers": 1, **HEADS}
LAYERWISE = {"train_batch_size": 8, "elastic_shards": 8, "determinism": "layerwise"}
FAST = {"train_batch_size": 8, "determinism": "fast", "per_device_parallelism": 2}
CONFIG = """
model: {type: gpt2, seq_len: 32, hidden_dim: 64, num_layers: 1, num_heads: 2}
data: {tokenizer: bytes}
trainer: {train_batch_size: 8, elastic_shards: 8, num_train_steps: 10}
"""


@pytest.fixture
def config(in_tmp_path: Path) -> Path:
    path = in_tmp_path / "tiny.yaml"
    path.write_text(CONFIG)
    return path


def test_the_state_takes_what_its_arrays_do_on_each_of_four_devices():
    trainer = {"train_batch_size": 8, "elastic_shards": 8, "model_averaging": {"type": "ema"}}
    program = build_setup(config_of({"model": LLAMA, "trainer": trainer}), VOCAB, jax.devices()[:4])
    state = program.init()
    trees = {"parameters": state.params, "optimizer state": state.opt_state, "averaged weights": state.averaged}
    abstract = abstract_state(program.model.shapes, program.tx, program.sharding, averaged=True)
    predicted = state_bytes(abstract)
    assert set(predicted) == set(trees)
    for name, tree in trees.items():
        for device in jax.devices()[:4]:
            shards = [s for x in jax.tree.leaves(tree) for s in x.addressable_shards if s.device == device]
            assert predicted[name] == sum(shard.data.nbytes for shard in shards)
    assert predicted["parameters"] < 4 * sum(math.prod(x.shape) for x in program.model.shapes.values()) / 3.5


@pytest.fixture(scope="module")
def memory() -> StepMemory:
    """The memory of a step on two devices that share the state."""
    return StepMemory(
        config_of({"model": LLAMA, "trainer": {"elastic_shards": 8, "train_batch_size": 8}}),
        VOCAB,
        jax.devices()[:2],
        "gpu",
    )


@pytest.mark.slow
def test_the_peak_is_within_a_tenth_of_what_training_holds(memory: StepMemory):
    predicted = memory.plan().peak.bytes
    assert predicted == pytest.approx(measure_live(memory.config, jax.devices()[:2]), rel=0.1)


def test_a_cpu_holds_what_lanes_side_by_side_take(memory: StepMemory, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(dispatch_threads, "available_cores", lambda: 4)
    beside = StepMemory(memory.config, VOCAB, jax.devices()[:2], "cpu", programs=memory.programs)
    (one,), (two,) = (
        [phase for phase in plan.plan().phases if phase.name == "microbatch"] for plan in (memory, beside)
    )
    # The lane that is first has one program and its result, the other one as much again.
    gradients = two.parts["gradients"] - one.parts["gradients"]
    assert two.parts["temporary"] == 2 * one.parts["temporary"]
    assert gradients == pytest.approx(4 * sum(math.prod(x.shape) for x in memory.setup.model.shapes.values()), abs=200)


def estimate_of(memory: StepMemory) -> tuple[PhaseBytes, dict[str, PhaseBytes]]:
    """The phase that is estimated for a run on two devices, and the phases of its plan."""
    phases = {phase.name: phase for phase in memory.plan().phases}
    temporary = {name: phase.parts["temporary"] for name, phase in phases.items()}
    return estimate_step(memory.config, parse_devices("2xH100"), temporary, Traces(VOCAB)), phases


def test_an_estimate_without_devices_has_the_parts_of_the_plan(memory: StepMemory):
    estimate, phases = estimate_of(memory)
    planned = phases[estimate.name]
    assert list(estimate.parts) == list(planned.parts)
    # What a program returns has a table of pointers as well, and gradients come with what the loss reports.
    near = {name: pytest.approx(planned.parts[name], rel=1e-3) for name in ("gathered parameters", "gradients")}
    assert estimate.parts == {**planned.parts, **near}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "together", "phase"),
    [
        ({"num_layers": 2}, None, "leave gradient"),
        # Values that are narrow on their way, sums of several microbatches, and sums of two turns.
        pytest.param({"num_layers": 2, "intermediate_dim": 4096}, 2, "layer 0 gradient", marks=pytest.mark.slow),
    ],
)
def test_an_estimate_layer_by_layer_has_the_parts_of_the_plan(model: dict[str, Any], together: int | None, phase: str):
    trainer = {**LAYERWISE, "mp": "p=f32,c=bfloat16", "microbatches_per_gather": together}
    config = config_of({"model": {**LLAMA, **model}, "trainer": trainer})
    memory = StepMemory(config, VOCAB, jax.devices()[:2], "gpu")
    estimate, phases = estimate_of(memory)
    assert estimate.name == phase == max(phases.values(), key=lambda other_phase: other_phase.bytes).name
    assert estimate.parts == {
        name: pytest.approx(size, rel=1e-3, abs=200) for name, size in phases[phase].parts.items()
    }


@pytest.mark.slow
@pytest.mark.parametrize("together", [None, 2])
@pytest.mark.parametrize("precision", ["f32", "p=f32,c=bfloat16"])
def test_the_peak_layer_by_layer_is_within_a_tenth(together: int | None, precision: str):
    trainer = {**LAYERWISE, "mp": precision, "microbatches_per_gather": together}
    # Rows long enough that a layer holds more than the update of the weights.
    config = config_of({"model": {**LLAMA, "num_layers": 3, "seq_len": 256}, "trainer": trainer})
    memory = StepMemory(config, VOCAB, jax.devices()[:2], "gpu")
    peak = memory.plan().peak
    assert peak.name.endswith("gradient")
    assert peak.bytes == pytest.approx(measure_live(config, jax.devices()[:2]), rel=0.1)


@pytest.mark.slow
def test_the_peak_of_one_program_for_all_is_too():
    config, places = config_of({"model": LLAMA, "trainer": FAST}), jax.devices()[:2]
    memory = StepMemory(config, VOCAB, places, "gpu")
    predicted = memory.plan().peak.bytes
    assert predicted == pytest.approx(measure_live(config, places), rel=0.1)


def test_the_largest_microbatch_fits_and_no_larger_one_does(monkeypatch: pytest.MonkeyPatch):
    # Rows long enough that a microbatch holds more than the update of the weights.
    config = config_of({"model": {**LLAMA, "seq_len": 128}, "trainer": {"elastic_shards": 8, "train_batch_size": 8}})
    memory = StepMemory(config, VOCAB, jax.devices()[:2], "gpu")
    sizes = possible_rows(memory.config.trainer, memory.setup.sharding.mesh)
    assert sizes == [1, 2, 4]
    peaks = {rows: memory.plan(rows).peak.bytes for rows in sizes}
    assert len(set(peaks.values())) == len(sizes)
    for limit in (max(peaks.values()), (peaks[2] + peaks[4]) // 2, peaks[2], min(peaks.values()) - 1):
        fit = find_largest_microbatch(memory, limit)
        assert fit.rows == max((rows for rows in sizes if peaks[rows] <= limit), default=None)
        if fit.rows is None:
            assert fit.bytes == peaks[fit.least_rows] == min(peaks.values())
        else:
            assert fit.bytes == peaks[fit.rows] <= limit
            assert fit.next_rows is None or fit.next_bytes == peaks[fit.next_rows] > limit


@pytest.mark.slow
def test_fewer_microbatches_share_a_gather_where_all_do_not_fit():
    # Activations of many long rows weigh more than the sums of gradients that wait for the next turn.
    model = {**LLAMA, "seq_len": 512, "num_layers": 2}
    trainer = {"train_batch_size": 16, "elastic_shards": 16, "determinism": "layerwise"}
    config, devices = config_of({"model": model, "trainer": trainer}), jax.devices()[:2]

    memory = StepMemory(config, VOCAB, devices, "gpu")
    peaks = {n: memory.with_gather(n).plan().peak.bytes for n in (8, 4, 2)}
    assert peaks[8] == memory.plan().peak.bytes > peaks[4] > peaks[2]
    plan = plan_run(config, parse_devices("2xH100"), devices, Assumptions(vocab_size=VOCAB, memory=peaks[4]))
    assert plan.fit is not None
    assert (plan.fit.rows, plan.fit.together, plan.fit.bytes) == (1, 4, peaks[4])
    # A run on GPUs chooses these 4 by itself, so they are planned.
    assert plan.microbatches_per_gather == 4
    assert plan.memory.peak.bytes == peaks[4]
    text = "\n".join(plan_lines(plan))
    assert "for 4 microbatches of a device at a time, which a run on these devices chooses by itself" in text
    assert "DOES NOT FIT" not in text
    configured = config.model_copy(update={"trainer": config.trainer.model_copy(update={"microbatches_per_gather": 8})})
    plan = plan_run(configured, parse_devices("2xH100"), devices, Assumptions(vocab_size=VOCAB, memory=peaks[4]))
    text = "\n".join(plan_lines(plan))
    assert re.search(r"1 row, as it is, .* with trainer.microbatches_per_gather=4 \(the same numbers\)", text)
    missing = format_bytes(peaks[8] - peaks[4])
    assert re.search(rf"DOES NOT FIT in {format_bytes(peaks[4])} .*, by {re.escape(missing)}$", text, re.MULTILINE)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "devices", "settings"),
    [
        ("llama3_70b", "64xH100", ()),
        ("llama_1b", "1xL4", ("--memory", "22GB", "trainer.determinism=layerwise", "optimizer.state_dtype=bfloat16",
                              "model.gradient_checkpointing=true", "trainer.train_batch_size=16",
                              "trainer.per_device_parallelism=2")),
    ],
)  # fmt: skip
def test_large_models_fit_on_the_devices_that_they_are_for(
    run_lmt: RunLmt, name: str, devices: str, settings: tuple[str, ...]
):
    workload = Path(__file__).parents[2] / f"benchmarks/workloads/{name}.yaml"
    done = run_lmt("plan", workload, "--devices", devices, *settings, "--json")
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    assert plan["memory"]["peak_bytes"] <= plan["budget"]["bytes"]


@pytest.mark.slow
@pytest.mark.usefixtures("compiled_once")
def test_the_table_says_what_is_as_good_as_it_gets():
    schedule = [{"start": 0, "value": 2}, {"start": 5, "value": 4}]
    config = config_of(
        {"model": LLAMA, "trainer": {"elastic_shards": 2, "train_batch_size": schedule, "num_train_steps": 10}}
    )
    group, places = DeviceGroup(2, "NVIDIA H100 80GB HBM3"), jax.devices()[:2]

    def text(memory: int | None) -> str:
        return "\n".join(plan_lines(plan_run(config, group, places, Assumptions(vocab_size=VOCAB, memory=memory))))

    assert re.search(r"largest microbatch +2 rows, as it is", text(None))
    assert re.search(r"largest microbatch +none: the least that a step takes is .* with \d rows?; parameters", text(1))


@pytest.mark.slow
def test_a_ring_plans_rows_of_128k_without_arrays_of_all_pairs():
    length, devices = 2**17, 8
    model = {**LLAMA, "seq_len": length, "attn_backend": "ring", "cross_entropy_block_size": 1024}
    trainer = {"train_batch_size": 1, "elastic_shards": 1, "context_axis_size": devices}
    config, group = config_of({"model": model, "trainer": trainer}), DeviceGroup(devices, "NVIDIA H100 80GB HBM3")
    plan = plan_run(config, group, jax.devices(), Assumptions(vocab_size=VOCAB))
    (microbatch,) = (phase for phase in plan.memory.phases if phase.name == "microbatch")
    assert plan.kernel is None
    assert plan.ring is not None
    # Keys and values of 2 x 16,384 x 32 numbers: here and arriving, and three times their gradients.
    assert plan.ring.buffers == 2 * 16384 * 32 * 4 * (2 + 3) < microbatch.parts["temporary"]
    assert microbatch.parts["temporary"] < 4 * length // devices * length / 16
    # Each of 256 blocks of queries has itself and those before it.
    assert plan.ring.share == pytest.approx(257 / 512)
    hidden = (1 - plan.ring.share) * (4 * 64 + 3 * 2) * length
    assert plan.ring.computed_flops_per_token == pytest.approx(plan.work.flops_per_token - 3 * hidden)
    text = "\n".join(plan_lines(plan))
    assert re.search(r"attention +ring of 8: 50.2% of all pairs computed", text)
    assert "keeps no scores" not in text


@pytest.mark.slow
def test_the_table_says_what_is_not_known():
    config, assumptions = config_of({"model": LLAMA, "trainer": FAST}), Assumptions(vocab_size=VOCAB)
    text = "\n".join(plan_lines(plan_run(config, DeviceGroup(2, "cpu"), jax.devices()[:2], assumptions)))
    assert "n/a: how much memory 'cpu' has is not known; give --memory" in text
    assert "n/a: no datasheet figure for float32 on 'cpu'" in text
    assert "XLA's plan for a CPU" in text


def test_every_device_of_the_peak_table_has_a_memory():
    assert [kind for kind in known_devices() if device_memory(device_kind(kind)) is None] == []
    assert device_kind("h100") == "NVIDIA H100 80GB HBM3"
    assert all(datasheet_peak(device_kind(name), "bfloat16") for name in ("H100", "A100", "v5e", "v5p", "v6e", "L4"))


def test_devices_and_bytes_as_people_write_them(monkeypatch: pytest.MonkeyPatch):
    for variable in ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"):
        monkeypatch.delenv(variable, raising=False)
    assert (parse_devices("64xv5p").count, parse_devices("64xv5p").kind) == (64, "TPU v5")
    assert parse_devices("8xNVIDIA H100 80GB HBM3") == parse_devices("8 x H100")
    assert parse_devices("v5p:4x4x4") == DeviceGroup(64, "TPU v5", "4x4x4")
    assert (parse_bytes("80GiB"), parse_bytes("1.5 gb")) == (80 * 2**30, 1_500_000_000)
    # JAX takes a part of a GPU's memory, and all of a TPU's.
    budgets = {kind: getattr(memory_budget(kind), "bytes", None) for kind in ("NVIDIA H200", "TPU v4", "cpu")}
    assert budgets == {"NVIDIA H200": 0.9 * 141e9, "TPU v4": 32e9, "cpu": None}


@pytest.mark.parametrize("text", ["H100", "0xH100", "8x", "8xH1000", "-1xcpu", "99999xcpu", "H100:2x2", "v5e:64x128"])
def test_other_devices_are_refused(text: str):
    with pytest.raises(UserError, match=r"--devices|unknown device"):
        parse_devices(text)


@pytest.mark.parametrize("text", ["80", "GiB", "0GiB", "8 bananas"])
def test_other_amounts_of_memory_are_refused(text: str):
    with pytest.raises(UserError, match="such as 80GiB"):
        parse_bytes(text)


def test_devices_that_no_table_has_are_refused(lmt: Lmt, config: Path):
    refused(lmt("plan", config, "--devices", "8xH10"), "unknown device 'H10'", "did you mean 'H100'")


def test_devices_that_cannot_share_the_batch_are_refused(run_lmt: RunLmt, config: Path):
    """In a process of its own, where the command emulates as many devices as it is asked about."""
    done = run_lmt("plan", config, "--devices", "16xH100")
    refused(done, "16 devices along the data axes cannot share 8 microbatches")


def test_devices_that_the_run_would_leave_idle_are_refused():
    config = config_of({"model": LLAMA, "trainer": {"elastic_shards": 8, "train_batch_size": 8, "max_devices": 2}})
    with pytest.raises(UserError, match="idle"):
        plan_run(config, DeviceGroup(4, "cpu"), jax.devices()[:4], Assumptions())


@pytest.mark.slow
def test_json_agrees_with_itself_and_with_a_hand_count(run_lmt: RunLmt, config: Path):
    options = ("--devices", "2xH100", "--mfu", "0.5", "--price", "3", "--vocab-size", "300", "--json")
    settings = ("trainer.mp=bfloat16", "trainer.determinism=fast", "model.attn_backend=cudnn")
    done = run_lmt("plan", config, *options, *settings)
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    memory, work, time = plan["memory"], plan["work"], plan["time"]
    assert memory["peak_bytes"] == max(phase["bytes"] for phase in memory["phases"])
    assert all(phase["bytes"] == sum(phase["parts"].values()) for phase in memory["phases"])
    layer = 2 * 64 * 3 * 64 + 4 * 32 * 64 + 3 * 32 * 2 + 2 * 64 * 64 + 4 * 64 * 256
    assert work["flops_per_token"] == 3 * (layer + 2 * 64 * 300)
    assert (work["tokens_per_step"], work["tokens"]) == (8 * 32, 10 * 8 * 32)
    assert time["step_seconds"] == pytest.approx(work["flops_per_step"] / (2 * 989.5e12 * 0.5))
    assert time["cost"] == pytest.approx(3 * 2 * 10 * time["step_seconds"] / 3600)
    assert plan["budget"]["bytes"] == 72e9
    assert (plan["fit"]["rows"], plan["kernel"]) == (4, "cudnn")
    assert [path.name for path in config.parent.iterdir()] == ["tiny.yaml"]


@pytest.mark.slow
def test_the_devices_own_compiler_says_what_programs_do(lmt: Lmt, config: Path, monkeypatch: pytest.MonkeyPatch):
    # JAX runs here already, and cannot be given two devices of its own.
    monkeypatch.setattr("lm_trainer.plan.emulate_devices", lambda _, count: jax.devices()[:count])
    done = lmt("plan", config, "--devices", "2xcpu", "--compile", "--json", "model.attn_pdrop=0")
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    programs = {program["name"]: program for program in plan["compiled"]["programs"]}
    assert (programs["microbatch"]["runs"], programs["update"]["runs"]) == (4, 1)
    # The products of the model by formula, which takes the embedding for a look-up and no layer to be recomputed.
    assert 8 * programs["microbatch"]["flops"] == pytest.approx(plan["work"]["flops_per_step"], rel=0.35)
    assert programs["gather"]["bytes_sent"] == {"all-gather": pytest.approx(4 * plan["num_params"] / 2, rel=0.02)}
    assert plan["fit"] is None
    assert "step_seconds" not in plan["compiled"], "no datasheet says what a CPU can"


def test_the_time_of_a_step_lies_between_all_at_once_and_one_after_another():
    ops = (Operation("a", "", flops=4e12, num_bytes=1e9), Operation("b", "", flops=0.0, num_bytes=3e9))
    work = ProgramWork("layer", 2, ops, {"all-gather": 1e9}, {}, network_seconds=2.0)
    times = step_time([work], flops=6e12, peak=2e12, bandwidths=Bandwidths(1e9, 0.5e9, "none"))
    # In a run: products 2 s, memory 1 + 3 s, network 2 s.
    assert (times.lower_bound, times.upper_bound, times.bound_by) == (2 * 4, 2 * (2 + 3 + 2), "memory")
    assert times.mfu(times.lower_bound) == pytest.approx(6 / 2 / 8)


def test_the_share_of_exchanges_that_overlap_is_by_their_time():
    def work(name: str, runs: int, seconds: float) -> ProgramWork:
        return ProgramWork(name, runs, (), {}, {}, network_seconds=seconds)

    # Four layers: at the ends of the passes three gathers and two reductions are separate programs.
    overlapping = [
        work("gather layer 0", 3, 1.0),
        work("reduce layer 0", 2, 2.0),
        work("layer 0 with gather layer 0", 3, 1.0),
        work("layer 0 gradient with gather layer 0, reduce layer 0", 2, 3.0),
    ]
    separate = [work("gather layer 0", 8, 1.0), work("reduce layer 0", 4, 2.0), work("layer 0", 8, 0.0)]
    # The forward pass alone overlaps: 3 of 3 s there, and none of 2 x 1 + 2 x 2 s of the backward pass.
    forward = [work("gather layer 0", 5, 1.0), work("reduce layer 0", 4, 2.0), overlapping[2]]
    assert [overlapped_share(programs) for programs in (overlapping, separate, forward, [])] == [1, 0, 1 / 3, 1]


@pytest.mark.parametrize(
    ("devices", "message"),
    [
        ("8xL4", "--compile has no description of 'NVIDIA L4' for the compiler; it has NVIDIA A100"),
        ("8xv3", "--compile compiles for the TPUs v4, v5e, v5p, v6e, not for 'TPU v3'"),
        ("v5e:4x4", "needs the compiler for TPUs, which is the package libtpu"),
    ],
)
def test_a_compiler_that_is_not_there_is_named(devices: str, message: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(UserError, match=message):
        target_devices(parse_devices(devices))


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="libtpu, the compiler for TPUs, is not installed"
)
def test_programs_of_a_slice_of_tpus(run_lmt: RunLmt, config: Path):
    settings = ("trainer.mp=p=f32,c=bfloat16", "trainer.determinism=layerwise")
    done = run_lmt("plan", config, "--devices", "v5e:2x2", "--compile", "--json", *settings)
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    programs = {program["name"]: program for program in plan["compiled"]["programs"]}
    assert programs["layer 0"]["flops"] > 0
    # Of small arrays the compiler gathers the parts by adding zeros.
    assert programs["gather layer 0"]["bytes_sent"].keys() <= {"all-gather", "all-reduce"}
    assert plan["compiled"]["step_seconds"]["least"] <= plan["compiled"]["step_seconds"]["most"]
    refused = run_lmt("plan", config, "--devices", "v5e:3x5", "--compile")
    assert refused.returncode == 2
    assert "--devices v5e:3x5: " in refused.stderr
    assert "Traceback" not in refused.stderr
