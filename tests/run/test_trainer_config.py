"""Fields that decide what is computed where: each changes the plan of a run, or the program that is traced of it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import optax
import pytest
import yaml
from jax.sharding import PartitionSpec
from pydantic import ValidationError

from lm_trainer.core.errors import UserError
from lm_trainer.data.tokenizer.bytes import ByteTokenizer
from lm_trainer.health.power_off import shut_down_at_exit
from lm_trainer.optim.averaging import EmaDecaySqrtConfig
from lm_trainer.parallel.distributed import DistributedConfig
from lm_trainer.profile.workload import random_batch
from lm_trainer.run import sample, train
from lm_trainer.run.build.model import loss_function, trace_model
from lm_trainer.run.build.setup import build_setup
from lm_trainer.run.config.run_config import RunConfig
from lm_trainer.run.config.trainer_config import TrainerConfig
from lm_trainer.run.dry_run import dry_run
from lm_trainer.run.trainer import Trainer
from lm_trainer.step.dispatch.microbatch_plan import MicrobatchPlan
from tests.conftest import RunLmt, lmt_environment

VOCAB = 61
MODEL = {
    "type": "gpt2",
    "seq_len": 16,
    "hidden_dim": 8,
    "num_layers": 2,
    "num_heads": 2,
    "gradient_checkpointing": False,
}
UP = "blocks.0.mlp.up.weight"
MIXTRAL = {"type": "mixtral", "num_kv_heads": 1, "intermediate_dim": 8, "n_routed_experts": 2}


def config(*, model: dict[str, Any] | None = None, **trainer: Any) -> RunConfig:
    return RunConfig.model_validate(
        {"model": {**MODEL, **(model or {})}, "data": {"tokenizer": "bytes"}, "trainer": trainer}
    )


def traced(run: RunConfig) -> str:
    """The gradient of the training loss, as JAX writes it."""
    model, loss, batch = trace_model(run, VOCAB), loss_function(run), random_batch(2, 16, VOCAB)
    return str(jax.make_jaxpr(jax.grad(lambda params: loss(model.merge(params), batch, None)[0]))(model.shapes))


@pytest.mark.parametrize(
    ("changes", "mark"),
    [
        ({"mp": "p=f32,c=bfloat16"}, "bf16["),
        ({"quantization": {"type": "int8"}}, ":i8["),
        ({"quantization": {"type": "fp8"}}, "f8_e4m3fn["),
        ({"model": {"gradient_checkpointing": True}}, "remat"),
        ({"model": {"scan_layers": True}}, "scan["),
        ({"model": {"flash_attention_block_size": 8}}, "scan["),
    ],
    ids=str,
)
def test_what_is_traced(changes: dict[str, Any], mark: str) -> None:
    assert mark not in traced(config())
    assert mark in traced(config(**changes))


def test_logits_are_held_at_once_or_block_by_block() -> None:
    logits = f"f32[32,{VOCAB}]"
    assert logits in traced(config())
    assert logits not in traced(config(model={"cross_entropy_block_size": 8}))


@pytest.mark.parametrize(("policy", "dtype"), [("f32", "float32"), ("p=bfloat16,c=f32", "bfloat16")])
def test_parameters_have_the_dtype_of_the_policy(policy: str, dtype: str) -> None:
    assert {x.dtype.name for x in trace_model(config(mp=policy), VOCAB).shapes.values()} == {dtype}


def test_the_seed_decides_weights_and_data(monkeypatch: pytest.MonkeyPatch) -> None:
    def weights(seed: int) -> bytes:
        model = trace_model(config(seed=seed), VOCAB)
        return np.asarray(jax.jit(lambda: model.init()["embed.tokens"])()).tobytes()

    assert weights(0) == weights(0) != weights(1)
    seeds = []
    monkeypatch.setattr(train, "open_data", lambda *_, seed, **__: seeds.append(seed))
    train.open_training_data(config(seed=7), None)  # pyright: ignore[reportArgumentType]
    assert seeds == [7]


EMBED_OVER_DATA, REPLICATED = PartitionSpec(None, "data", None), PartitionSpec(None, None, None)
MLP_OVER_DATA = PartitionSpec(None, None, "data")
EMBED_AND_MLP, MLP_OVER_MODEL = PartitionSpec(None, "data", "model"), PartitionSpec(None, None, "model")


@pytest.mark.parametrize(
    ("trainer", "storage", "compute"),
    [
        ({}, EMBED_OVER_DATA, REPLICATED),
        ({"fsdp_axis": None}, REPLICATED, REPLICATED),
        ({"fsdp_axis": ["mlp", "vocab"]}, MLP_OVER_DATA, REPLICATED),
        ({"fsdp_axis": None, "axis_resources": {"mlp": "data"}}, MLP_OVER_DATA, REPLICATED),
        ({"fsdp_axis": None, "parameter_axis_resources": {"mlp": "data"}}, MLP_OVER_DATA, REPLICATED),
        ({"parameter_axis_resources": {"embed": []}}, REPLICATED, REPLICATED),
        ({"model_axis_size": 2, "tensor_parallel_axes": ["mlp"]}, EMBED_AND_MLP, MLP_OVER_MODEL),
        ({"model_axis_size": 2, "axis_resources": {"mlp": "model"}}, EMBED_AND_MLP, MLP_OVER_MODEL),
        ({"model_axis_size": 2, "parameter_axis_resources": {"mlp": "model"}}, EMBED_AND_MLP, REPLICATED),
        ({"model_axis_size": 2, "compute_axis_resources": {"mlp": "model"}}, EMBED_OVER_DATA, MLP_OVER_MODEL),
        ({"context_axis_size": 2}, EMBED_OVER_DATA, REPLICATED),
        (
            {"context_axis_size": 2, "parameter_axis_resources": {"mlp": "context"}},
            PartitionSpec(None, "data", "context"),
            REPLICATED,
        ),
        ({"pipeline_axis_size": 2}, PartitionSpec("pipeline", "data", None), PartitionSpec("pipeline", None, None)),
    ],
    ids=str,
)
def test_where_a_parameter_lies(trainer: dict[str, Any], storage: PartitionSpec, compute: PartitionSpec) -> None:
    param_sharding = build_setup(config(**trainer), VOCAB, jax.devices()[:4]).sharding.params[UP]
    assert (param_sharding.storage, param_sharding.compute) == (storage, compute)


@pytest.mark.parametrize(
    ("trainer", "sizes"),
    [
        ({}, {"data": 8}),
        ({"max_devices": 2}, {"data": 2}),
        ({"max_devices": 64}, {"data": 8}),
        ({"replica_dcn_axis_size": 4}, {"replica_dcn": 4, "data": 2}),
        ({"replica_ici_axis_size": 2}, {"replica": 2, "data": 4}),
        ({"model_axis_size": 8}, {"model": 8}),
        ({"context_axis_size": 4}, {"data": 2, "context": 4}),
        ({"pipeline_axis_size": 2}, {"data": 4, "pipeline": 2}),
        ({"expert_axis_size": 2, "model": MIXTRAL}, {"data": 4, "expert": 2}),
    ],
    ids=str,
)
def test_the_axes_of_the_mesh(trainer: dict[str, Any], sizes: dict[str, int]) -> None:
    mesh = build_setup(config(**trainer), VOCAB).sharding.mesh
    assert {axis: size for axis, size in mesh.shape.items() if size > 1} == sizes
    assert list(mesh.devices.flat) == jax.devices()[: mesh.devices.size]


@pytest.mark.parametrize(
    ("trainer", "plan", "rows_of_evaluation"),
    [
        ({"train_batch_size": 32}, (1, 32), 32),
        ({"train_batch_size": 32, "per_device_parallelism": 2}, (16, 2), 32),
        ({"train_batch_size": 32, "elastic_shards": 2}, (2, 16), 32),
        ({"train_batch_size": 32, "elastic_shards": 8, "per_device_eval_parallelism": 6}, (8, 4), 48),
        ({"train_batch_size": 30, "elastic_shards": 8, "allow_nondivisible_batch_size": True}, (8, 4), 32),
    ],
    ids=str,
)
def test_how_a_batch_is_cut(trainer: dict[str, Any], plan: tuple[int, int], rows_of_evaluation: int) -> None:
    run = config(**trainer)
    assert run.trainer.step_plan.microbatches.at(0) == MicrobatchPlan(trainer["train_batch_size"], *plan)
    setup = build_setup(run, VOCAB, jax.devices()[:1])
    assert (setup.evaluate.batch_size, setup.step.plans.at(0).count) == (rows_of_evaluation, plan[0])


def test_a_plan_is_resolved_once_and_a_changed_copy_has_its_own() -> None:
    trainer = TrainerConfig(train_batch_size=32)
    assert trainer.step_plan is trainer.step_plan
    copy = trainer.model_copy(update={"per_device_parallelism": 2, "axis_resources": {"mlp": "model"}})
    assert copy.step_plan.microbatches.at(0) == MicrobatchPlan(32, 16, 2)
    assert copy.step_plan.compute_rules["mlp"] == ("model",)
    assert trainer == TrainerConfig(train_batch_size=32)
    assert "step_plan" not in trainer.model_dump()


@pytest.mark.parametrize(
    ("trainer", "message"),
    [
        ({"batch_axis": "rows"}, "the only batch axis is 'batch'"),
        ({"axis_resources": {"batch": "model"}}, "axis_resources: the batch is always cut over replica_dcn"),
        ({"axis_resources": {"mlp": "context"}}, "context_axis_size alone says what the mesh axis 'context' cuts"),
        ({"expert_axis_size": 2, "axis_resources": {"experts": "model"}}, "expert_axis_size already says how"),
        ({"train_batch_size": 30, "elastic_shards": 8}, "set allow_nondivisible_batch_size"),
        ({"load_checkpoint": False, "load_checkpoint_path": "x"}, "no effect while load_checkpoint is false"),
        ({"initialize_from": "y", "load_checkpoint_path": "x"}, "not both"),
        ({"shutdown_at_exit": -1.0}, "greater than or equal to 0"),
        ({"distributed": {"num_processes": 2}}, "belong together"),
        (
            {"distributed": {"coordinator_address": "h:1", "num_processes": 2, "process_id": 2}},
            "process_id 2 is not below num_processes 2",
        ),
    ],
    ids=str,
)  # fmt: skip
def test_what_would_have_no_effect_is_refused(trainer: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        TrainerConfig.model_validate(trainer)


@pytest.mark.usefixtures("in_tmp_path")
def test_an_accelerator_is_required_in_a_dry_run_too() -> None:
    assert dry_run(config(), name="run")[-1] == "nothing was written"
    with pytest.raises(UserError, match="JAX sees no accelerator"):
        dry_run(config(require_accelerator=True), name="run")


def test_a_sample_goes_on_from_its_prompt_with_as_many_tokens_as_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    used_settings: list[Any] = []
    monkeypatch.setattr(
        sample, "generate", lambda _model, _prompts, settings: used_settings.append(settings) or [[104, 105]]
    )
    held_out = SimpleNamespace(batches=lambda *_, **__: [random_batch(1, 16, 97)._replace(tokens=np.full((1, 16), 97))])
    data: Any = SimpleNamespace(validation=lambda: {"": held_out}, tokenizer=ByteTokenizer())
    setup: Any = SimpleNamespace(
        gathers_layers=False, model=SimpleNamespace(merge=dict), weights_to_evaluate=lambda _: {"": {}}
    )
    state: Any = None
    assert sample.draw_sample(config(sample_tokens=5, seed=3), setup, data, state) == "aaaa⟫hi"
    assert [(settings.max_new_tokens, settings.seed) for settings in used_settings] == [(5, 3)]
    # The end of a prompt that is too long for the context.
    for prompt, expected in (("def f", "def f⟫hi"), ("b" * 20 + "cc", "b" * 6 + "cc⟫hi")):
        assert sample.draw_sample(config(sample_prompt=prompt), setup, data, state) == expected


def test_an_average_that_comes_to_rest() -> None:
    average = EmaDecaySqrtConfig(beta=0.75, switch_step=3, decay_steps=4)
    expected = [0.25 * (1 - x) for x in (0, 0, 0, 0.5, 0.5**0.5, 0.75**0.5, 1, 1)]
    assert [average.rate(step) for step in range(1, 9)] == pytest.approx(expected)


def test_processes_are_connected_as_they_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[dict[str, Any]] = []
    monkeypatch.setattr(jax.distributed, "initialize", lambda **settings: calls.append(settings))
    for name in ("SLURM_NTASKS", "TPU_WORKER_HOSTNAMES", "MEGASCALE_COORDINATOR_ADDRESS"):
        monkeypatch.delenv(name, raising=False)
    DistributedConfig().start()
    settings = {"coordinator_address": "host:1", "num_processes": 4, "process_id": 3, "local_device_ids": (0, 2)}
    DistributedConfig(**settings, initialize_jax_distributed=False).start()
    assert calls == [], "a run of one process"
    DistributedConfig(**settings).start()
    later = {"initialization_timeout": 360}  # than the limit of lm_trainer
    assert calls == [settings | later]
    with pytest.raises(UserError, match="local_device_ids chooses the devices of one of several processes"):
        DistributedConfig(local_device_ids=1).start()
    step = {"JOB_ID": "7", "STEP_NODELIST": "a", "NTASKS": "2", "PROCID": "0", "LOCALID": "0"}
    for name, value in step.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    DistributedConfig(local_device_ids=1).start()
    detected = {"coordinator_address": "a:61447", "local_device_ids": 1}
    assert calls[1] == dict.fromkeys(settings) | detected | later


@pytest.mark.parametrize(("setting", "seconds"), [(False, []), (True, [5.0]), (0.0, [0.0]), (30, [30.0])])
def test_when_a_machine_is_shut_down(
    setting: bool | float, seconds: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    registered: list[float] = []
    monkeypatch.setattr("atexit.register", lambda _, delay: registered.append(delay))
    shut_down_at_exit(setting)
    assert registered == seconds


@pytest.mark.slow
def test_a_machine_is_shut_down_when_a_command_fails(tmp_path: Path, run_lmt: RunLmt) -> None:
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, code in (("shutdown", 1), ("sudo", 0)):
        (programs / name).write_text(f'#!/bin/sh\necho {name} "$@" >> {tmp_path}/called\nexit {code}\n')
        (programs / name).chmod(0o755)
    content = {"data": {"tokenizer": "bytes", "train_urls": ["missing.txt"]}, "trainer": {"shutdown_at_exit": 0.01}}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(content))
    done = run_lmt("train", "run.yaml", env={"PATH": f"{programs}:{os.environ['PATH']}"})
    assert done.returncode == 2
    assert "missing.txt" in done.stderr
    assert "this machine shuts down in 0.01 s" in done.stderr
    assert (tmp_path / "called").read_text() == "shutdown -h now\nsudo -n shutdown -h now\n"


JAX = """
import jax
from lm_trainer.run.trainer import Trainer
from tests.run.own_model import OPTIMIZER, loss, settings

changes = {"jax_persistent_cache_min_compile_time_secs": 0, "jax_num_cpu_devices": 2}
with Trainer(settings(jax_config=changes, jax_compilation_cache_dir="compiled"), OPTIMIZER, loss):
    print(jax.device_count(), jax.jit(lambda x: 3 * x + 1)(2))
"""


@pytest.mark.slow
def test_jax_is_set_up_and_compiled_programs_are_kept(tmp_path: Path) -> None:
    command = [sys.executable, "-c", JAX]
    env = lmt_environment(env={"XLA_FLAGS": ""})
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert done.stdout == "2 7\n", done.stderr
    assert list((tmp_path / "compiled").iterdir()), "a program that is compiled in no time is kept as well"


TEXT = """
import sys
from lm_trainer.core.runtime import configure_jax

configure_jax({"jax_persistent_cache_min_compile_time_secs": 0}, sys.argv[1], int(sys.argv[2]))
import jax, jax.numpy as jnp
print(jax.jit(lambda x: jnp.tanh(x) + jnp.sin(x)).lower(jnp.zeros((1024, 256))).compile().as_text())
"""


@pytest.mark.slow
def test_a_program_is_not_read_that_was_compiled_for_another_number_of_threads(tmp_path: Path) -> None:
    def text(cache: str, threads: int) -> str:
        command = [sys.executable, "-c", TEXT, str(tmp_path / cache), str(threads)]
        return subprocess.run(command, env=lmt_environment(), capture_output=True, text=True, check=True).stdout

    first = text("shared", 1)
    assert text("shared", 8) == text("other", 8) != first


CACHING_PROGRAM = """
import sys
from lm_trainer.core import runtime

runtime._GPU_FILES = (sys.argv[2],)
runtime.configure_jax({}, sys.argv[1])
import jax
print(jax.config.jax_persistent_cache_min_compile_time_secs)
"""


@pytest.mark.parametrize(
    ("file", "extra_env", "least"),
    [
        ("/dev/null", {}, "0.0\n"),
        ("/dev/null", {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "7"}, "0.0\n"),
        ("/dev/absent", {}, "0.1\n"),
        ("/dev/absent", {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "7"}, "7.0\n"),
    ],
)
def test_each_program_is_kept_where_kernels_are_chosen_by_timing_them(
    tmp_path: Path, file: str, extra_env: dict[str, str], least: str
) -> None:
    overridden = ("JAX_PLATFORMS", "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS")
    env = {name: value for name, value in lmt_environment().items() if name not in overridden} | extra_env
    command = [sys.executable, "-c", CACHING_PROGRAM, str(tmp_path), file]
    assert subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout == least


XLA = """
import sys
from lm_trainer.core.runtime import configure_jax

configure_jax({}, sys.argv[1])
import jax
print(jax.config.jax_persistent_cache_enable_xla_caches)
"""


@pytest.mark.parametrize(
    ("directory", "expected"), [("gs://bucket/compiled", "none"), ("compiled", "xla_gpu_per_fusion_autotune_cache_dir")]
)
def test_xla_keeps_no_choice_of_kernels_in_a_bucket(tmp_path: Path, directory: str, expected: str) -> None:
    command = [sys.executable, "-c", XLA, directory]
    env = lmt_environment()
    # The tests themselves keep nothing of XLA's.
    del env["JAX_PERSISTENT_CACHE_ENABLE_XLA_CACHES"]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=True)
    assert done.stdout == f"{expected}\n"


def test_directories_may_be_paths() -> None:
    config = TrainerConfig.model_validate(
        {"log_dir": Path("a/b"), "initialize_from": Path("c"), "checkpointer": {"base_path": Path("d")}}
    )
    assert (config.log_dir, config.initialize_from, config.checkpointer.base_path) == ("a/b", "c", "d")
    schema = TrainerConfig.model_json_schema()["properties"]["log_dir"]
    assert schema["type"] == "string"


def test_what_levanter_asks_a_trainer_section(tmp_path: Path) -> None:
    config = TrainerConfig.model_validate(
        {
            "train_batch_size": 32,
            "per_device_parallelism": 4,
            "per_device_eval_parallelism": 2,
            "max_devices": 1,
            "tensor_parallel_axes": None,
            "checkpointer": {"base_path": str(tmp_path)},
        }
    )
    assert (config.microbatch_size, config.eval_batch_size) == (4, 2 * 32 // 4)
    assert (config.device_mesh.size, config.data_axis_size, config.replica_axis_size) == (1, 1, 1)
    assert config.batch_schedule.at(7) == 32
    assert config.parameter_axis_mapping == {"embed": ("data",)}
    assert config.compute_axis_mapping["batch"] == ("replica_dcn", "replica", "data")
    assert config.checkpointer.expanded_path("mine") == str(tmp_path / "mine")
    without_run_id = config.checkpointer.model_copy(update={"append_run_id_to_base_path": False})
    assert without_run_id.expanded_path("mine") == str(tmp_path)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        *((name, r"use (batch_schedule|eval_batch_size)") for name in ("TrainBatch", "EvalBatch")),
        ("batch_axis_at_step", r"batch_schedule\.at\(step\)"),
        ("initialize", "with Trainer"),
        ("use_device_mesh", "jax.set_mesh"),
        *((name, "use replica_dcn_axis_size|use device_mesh") for name in ("num_slices", "num_devices_per_slice")),
        *((name, r"use device_mesh\.shape") for name in ("data_ici_axis_size", "data_dcn_axis_size")),
    ],
)
def test_what_it_has_not_names_what_to_use(name: str, text: str) -> None:
    with pytest.raises(AttributeError, match=rf"no TrainerConfig\.{name}: .*({text})"):
        getattr(TrainerConfig(), name)
    with pytest.raises(AttributeError, match=r"no CheckpointerConfig\.create: use CheckpointStore"):
        _ = TrainerConfig().checkpointer.create  # pyright: ignore[reportAttributeAccessIssue]


def test_a_trainer_names_the_optimizer_it_wants() -> None:
    with pytest.raises(UserError, match=r"one of lm_trainer\.optim, such as AdamConfig.*not GradientTransformation"):
        Trainer(TrainerConfig(), optax.adam(1e-3), lambda *_: None)  # pyright: ignore[reportArgumentType]
