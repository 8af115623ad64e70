"""Configurations written for Levanter validate here as they stand, and train."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml

from lm_trainer.checkpoint.policy import is_permanent
from lm_trainer.config.loader import load
from lm_trainer.core.errors import ConfigError
from lm_trainer.optim.averaging import EmaConfig, EmaDecaySqrtConfig
from lm_trainer.run.config.run_config import RunConfig
from lm_trainer.trackers import TensorboardConfig, WandbConfig
from tests.config.reference_examples import EXAMPLES, INCLUDED
from tests.conftest import Lmt, RunLmt
from tests.run.conftest import merge

Written = Callable[[str], Path]


@pytest.fixture
def written(tmp_path: Path) -> Written:
    """Writes an example to a file, beside the one that it may include."""

    def write(name: str) -> Path:
        (tmp_path / "data.yaml").write_text(INCLUDED)
        (tmp_path / "my-run.yaml").write_text(EXAMPLES[name])
        return tmp_path / "my-run.yaml"

    return write


def read(path: Path, *overrides: str) -> RunConfig:
    return load(path, list(overrides), RunConfig).config


@pytest.mark.parametrize("name", EXAMPLES)
def test_it_validates(name: str, written: Written) -> None:
    read(written(name))


def test_what_an_example_says_is_what_is_read(written: Written) -> None:
    full_run = read(written("a whole run"))
    assert full_run.data.train_urls == ["gs://my_bucket/openwebtext-sharded/openwebtext_train.{1..128}-of-128.jsonl.gz"]
    assert full_run.optimizer.learning_rate == 6e-4
    assert (full_run.trainer.mp.param, full_run.trainer.mp.compute) == ("float32", "bfloat16")
    assert full_run.trainer.step_plan.microbatches.at(0).rows == 4
    assert read(written("an included file")).data == full_run.data
    assert read(written("the compilation cache")).trainer.jax_config["jax_persistent_cache_min_compile_time_secs"] == 5

    (tracker,) = read(written("a tracker without a type")).trainer.trackers
    assert isinstance(tracker, WandbConfig)
    assert (tracker.project, tracker.entity) == ("my-project", "my-entity")
    trackers = read(written("several trackers")).trainer.trackers
    assert [type(tracker) for tracker in trackers] == [WandbConfig, TensorboardConfig]
    assert read(written("several trackers, one without a type")).trainer.trackers == trackers
    assert read(written("averaged weights")).trainer.model_averaging == EmaConfig(beta=0.999)
    late = read(written("the other average")).trainer.model_averaging
    assert late == EmaDecaySqrtConfig(beta=0.999, switch_step=100_000, decay_steps=100_000)

    keep = read(written("steps to keep")).trainer.checkpointer.keep
    permanent = [step for step in range(1, 70_001) if is_permanent(step, keep)]
    expected = [*range(1000, 10_001, 1000), *range(15_000, 40_001, 5000), *range(50_000, 70_001, 10_000)]
    assert permanent == expected


def test_defaults_are_those_of_the_reference(tmp_path: Path) -> None:
    (tmp_path / "empty.yaml").write_text("{}\n")
    config = read(tmp_path / "empty.yaml")
    trainer, optimizer, checkpointer = config.trainer, config.optimizer, config.trainer.checkpointer
    expected: dict[str, Any] = {
        "seed": 0,
        "quantization": None,
        "model_averaging": None,
        "log_dir": "logs/",
        "id": None,
        "profiler": False,
        "profiler_start_step": 5,
        "profiler_num_steps": 100,
        "profiler_perfetto_link": False,
        "log_jaxprs": True,
        "log_xla_hlo": True,
        "crash_on_nan": True,
        "crash_on_inf": True,
        "batch_axis": "batch",
        "fsdp_axis": "embed",
        "tensor_parallel_axes": None,
        "axis_resources": {},
        "parameter_axis_resources": {},
        "replica_ici_axis_size": 1,
        "model_axis_size": 1,
        "replica_dcn_axis_size": 1,
        "train_batch_size": 512,
        "per_device_parallelism": -1,
        "per_device_eval_parallelism": -1,
        "allow_nondivisible_batch_size": False,
        "num_train_steps": 400_000,
        "steps_per_eval": 1000,
        "max_eval_batches": None,
        "load_checkpoint": None,
        "load_checkpoint_path": None,
        "initialize_from": None,
        "allow_partial_checkpoint": False,
        "jax_compilation_cache_dir": None,
        "require_accelerator": None,
        "shutdown_at_exit": False,
    }
    assert {name: getattr(trainer, name) for name in expected} == expected
    assert (trainer.mp.param, trainer.mp.compute) == ("float32", "float32")
    assert (checkpointer.base_path, checkpointer.save_interval) == ("checkpoints/", timedelta(minutes=15))
    assert [entry.model_dump() for entry in checkpointer.keep] == [{"every": 10_000, "until": None}]
    assert (checkpointer.append_run_id_to_base_path, checkpointer.delete_old_temp_checkpoints) == (True, True)
    assert trainer.distributed.model_dump() == {
        "coordinator_address": None,
        "num_processes": None,
        "process_id": None,
        "local_device_ids": None,
        "initialize_jax_distributed": True,
    }
    assert trainer.ray.model_dump() == {"address": None, "start_workers": True, "auto_start_cluster": True}
    adam: dict[str, Any] = {
        "type": "adam",
        "learning_rate": 6e-4,
        "weight_decay": 0.1,
        "min_lr_ratio": 0.1,
        "warmup": 0.01,
        "decay": None,
        "rewarmup": 0.0,
        "cycle_length": None,
        "cycles": None,
        "lr_schedule": "cosine",
        "weight_decay_modules": None,
        "default_weight_decay_mask": None,
        "beta1": 0.9,
        "beta2": 0.95,
        "epsilon": 1e-8,
        "max_grad_norm": 1.0,
        "nesterov": False,
        "update_rms_clipping": None,
        "clip_update_norm": None,
        "skip_bad_steps": False,
        "adamc_weight_decay": False,
    }
    assert {name: getattr(optimizer, name) for name in adam} == adam


@pytest.mark.parametrize(
    ("text", "key", "instead"),
    [
        ("optimizer: {cooldown: 0.1}", "cooldown", "decay"),
        ("model: {type: llama, tokenizer: x}", "tokenizer", "data.tokenizer"),
        ("initialize_from_checkpoint_path: x", "initialize_from_checkpoint_path", "trainer.initialize_from"),
        ("data_seed: 3", "data_seed", "trainer.seed"),
        ("epoch: 3", "epoch", "data.epochs"),
        ("lora: {r: 8}", "lora", "adapter"),
        ("max_seq_len: 8", "max_seq_len", "model.seq_len"),
    ],
)
def test_what_is_deprecated_is_refused_with_its_replacement(text: str, key: str, instead: str, tmp_path: Path) -> None:
    (tmp_path / "old.yaml").write_text(text + "\n")
    with pytest.raises(ConfigError) as caught:
        read(tmp_path / "old.yaml")
    (problem,) = caught.value.problems
    assert problem.startswith(f"{tmp_path / 'old.yaml'}:1:")
    assert f"{key}: " in problem
    assert f"`{instead}`" in problem


@pytest.mark.parametrize(
    ("text", "our_text", "notes"),
    [
        (
            "trainer: {wandb: {project: p}}",
            "trainer: {tracker: {type: wandb, project: p}}",
            ["1:11: trainer.wandb is read as tracker"],
        ),
        (
            "trainer: {per_device_train_parallelism: 4, train_batch_size: 32}",
            "trainer: {per_device_parallelism: 4, train_batch_size: 32}",
            ["1:11: trainer.per_device_train_parallelism is read as per_device_parallelism"],
        ),
        ("optimizer: {haps: [10]}", "optimizer: {cycles: [10]}", ["1:13: optimizer.haps is read as cycles"]),
        (
            "optimizer: {warmup_ratio: 0.1}",
            "optimizer: {warmup: 0.1}",
            ["1:13: optimizer.warmup_ratio is read as warmup"],
        ),
        (
            "optimizer: {type: rmsprop, eps: 1e-6}",
            "optimizer: {type: rmsprop, epsilon: 1e-6}",
            ["1:28: optimizer.eps is read as epsilon"],
        ),
        (
            "data: {cache_options: {batch_size: 8, num_shards_per_group: 4}}",
            "{}",
            ["1:8: data.cache_options has no effect: caches need no tuning; num_workers sets the number of processes"],
        ),
        (
            "data: {enforce_eos: true, chat_template: null}",
            "{}",
            ["1:8: data.enforce_eos has no effect: every document ends with the end-of-document token"],
        ),
        ("optimizer: {haps: null, cooldown: null}\ntrainer: {wandb: null}\nepoch: null\n", "{}", []),
    ],
)
def test_what_means_the_same_or_nothing_is_read_with_a_note(
    text: str, our_text: str, notes: list[str], tmp_path: Path
) -> None:
    (tmp_path / "theirs.yaml").write_text(text + "\n")
    (tmp_path / "ours.yaml").write_text(our_text + "\n")
    loaded = load(tmp_path / "theirs.yaml", [], RunConfig)
    assert loaded.config == read(tmp_path / "ours.yaml")
    assert [note.removeprefix(f"{tmp_path / 'theirs.yaml'}:") for note in loaded.notes] == notes


SMALL = {
    "data": {"tokenizer": "bytes", "num_workers": 0},
    "model": {"seq_len": 32, "hidden_dim": 24, "num_layers": 2, "num_heads": 2, "scan_layers": True},
    "trainer": {
        "id": "run",
        "num_train_steps": 4,
        "train_batch_size": 8,
        "max_eval_batches": 1,
        "max_devices": 1,
        "sample_tokens": 0,
        "log_jaxprs": False,
        "log_xla_hlo": False,
        "jax_compilation_cache_dir": os.environ["JAX_COMPILATION_CACHE_DIR"],
    },
}


def small(example: str) -> dict[str, Any]:
    """The example on the text that Python carries, with a model and a number of steps for a test."""
    content = yaml.safe_load(example.replace("!include ", ""))
    content.pop("data", None)
    if content.get("model", {}).get("type") == "llama":
        content["model"] |= {"intermediate_dim": 48, "num_kv_heads": 2}
    if "cycles" in content.get("optimizer", {}):
        content["optimizer"]["cycles"] = [2]
        content["optimizer"]["warmup"] = 0
    return merge(content, SMALL)


OF_A_PROCESS = "the compilation cache"
"""The example that sets what JAX keeps for all later runs of its process."""


READ_AS_OTHERS = ("an included file", "a tracker without a type", "several trackers, one without a type")
"""Examples that train as another example does. A test above checks the settings that are read from them."""


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.exhaustive if name in READ_AS_OTHERS else pytest.mark.slow)
        for name in EXAMPLES
    ],
)
def test_it_trains(name: str, lmt: Lmt, run_lmt: RunLmt, in_tmp_path: Path) -> None:
    (in_tmp_path / "small.yaml").write_text(yaml.safe_dump(small(EXAMPLES[name])))
    done = (run_lmt if name == OF_A_PROCESS else lmt)("train", "small.yaml")
    assert done.returncode == 0, done.stderr
    assert "done: step 4" in done.stdout
    assert "sample (" not in done.stdout, "sample_tokens is 0"
