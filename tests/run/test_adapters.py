"""Training an adapter: what moves and what stays, what is saved, and on which model it goes on."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from lm_trainer.checkpoint.store import CheckpointStore, read_record
from lm_trainer.config.loader import load
from lm_trainer.config.render import to_yaml
from lm_trainer.core.batch import Batch
from lm_trainer.core.errors import ConfigError, UserError
from lm_trainer.core.tree import named_leaves, nest_named_leaves
from lm_trainer.data.tokenizer.bytes import ByteTokenizer
from lm_trainer.models import Gpt2Config, hf
from lm_trainer.nn.lora import is_adapter_param
from lm_trainer.profile.flops import flops_per_token
from lm_trainer.run.build.model import loss_function, trace_model
from lm_trainer.run.build.setup import TrainingSetup, plan_training
from lm_trainer.run.config.run_config import RunConfig
from lm_trainer.run.training.hf_exports import HfExports
from lm_trainer.run.weights.adapters import find_base_checkpoint, load_merged_model, training_flops
from lm_trainer.run.weights.initial_weights import StartRequest, load_initial_state
from lm_trainer.run.weights.saved_model import load_model, write_model
from lm_trainer.run.weights.saved_state import save_state
from lm_trainer.step.state.train_state import TrainState, to_host
from lm_trainer.trackers import Progress
from tests.conftest import run_here
from tests.run.conftest import MakeConfig

MODEL: dict[str, Any] = {"seq_len": 32, "hidden_dim": 32, "num_layers": 2, "num_heads": 2}
ADAPTER = {"rank": 2, "alpha": 6.0, "dropout": 0.1}
STEPS, VOCAB = 4, ByteTokenizer().vocab_size
TRAINER: dict[str, Any] = {
    "num_train_steps": STEPS,
    "steps_per_eval": STEPS,
    "initialize_from": "base",
    "tracker": [],
    "checkpointer": {"save_interval": "1h", "keep": [{"every": 2}]},
}


def write_base(out: Path, seed: int) -> dict[str, np.ndarray]:
    """A checkpoint with random weights."""
    tokenizer, rng, model = ByteTokenizer(), np.random.default_rng(seed), Gpt2Config(**MODEL)
    leaves = hf.param_infos(model, tokenizer.vocab_size)
    params = {name: 0.1 * rng.standard_normal(leaf.shape, np.float32) for name, leaf in leaves.items()}
    write_model(
        out, model_config=model, params=nest_named_leaves(params), tokenizer=tokenizer, vocab_size=tokenizer.vocab_size
    )
    return params


def configuration(make_config: MakeConfig, *overrides: str, **changes: Any) -> RunConfig:
    trainer = {**TRAINER, **changes.pop("trainer", {})}
    return load(make_config(adapter=ADAPTER, trainer=trainer, **changes), list(overrides), RunConfig).config


def plan(config: RunConfig, devices: int = 1) -> tuple[CheckpointStore, dict[str, Any], TrainingSetup]:
    """The run's checkpoints, what its records say of the base, and the program that starts from the base."""
    store = CheckpointStore(Path("checkpoints/run"), config.trainer.checkpointer)
    base = find_base_checkpoint(config, store)
    assert base is not None
    model = base.with_initial_weights(trace_model(config, VOCAB))
    setup = plan_training(
        config.trainer.model_copy(update={"initialize_from": None}),
        config.optimizer,
        model,
        loss_function(config),
        devices=jax.devices()[:devices],
    )
    return store, base.facts, setup


def start(config: RunConfig, store: CheckpointStore, setup: TrainingSetup) -> TrainState:
    trainer = config.trainer.model_copy(update={"initialize_from": None})
    return load_initial_state(StartRequest(trainer, setup, store, setup.init, lambda _: "same")).state


def some_steps(setup: TrainingSetup, state: TrainState) -> tuple[TrainState, list[float]]:
    rows = np.random.default_rng(0).integers(0, 256, (STEPS, 16, 33)).astype(np.int32)
    losses = []
    for step in range(STEPS):
        batch = _batch(rows[step])
        if step == 0:
            setup.step.compile(batch)
        state, metrics = setup.step(state, setup.step.put(batch), 1e-2)
        losses.append(float(metrics["loss"]))
    return state, losses


def check_merged(merged: dict[str, Any], base: dict[str, np.ndarray], adapter: dict[str, np.ndarray]) -> None:
    assert merged.keys() == base.keys()
    for name, x in base.items():
        layer = name.removesuffix(".weight")
        if f"{layer}.lora.a" not in adapter:
            np.testing.assert_array_equal(merged[name], x)
            continue
        a, b = adapter[f"{layer}.lora.a"], adapter[f"{layer}.lora.b"]
        change = np.stack([3.0 * a[i].reshape(-1, 2) @ b[i].reshape(2, -1) for i in range(2)]).reshape(x.shape)
        assert np.abs(change).max() > 1e-3
        np.testing.assert_allclose(merged[name], x + change, atol=1e-5)


@pytest.mark.slow
def test_a_run_moves_the_adapter_alone_and_goes_on_beside_the_same_model_only(
    make_config: MakeConfig, in_tmp_path: Path
) -> None:
    base, config = write_base(Path("base"), seed=0), configuration(make_config)
    store, facts, setup = plan(config)
    state, _ = some_steps(setup, start(config, store, setup))
    adapter = to_host(state.params)
    assert len(adapter) == 2 * 6
    assert all(map(is_adapter_param, adapter))
    assert {name: x.sum() for name, x in to_host(state.frozen).items()} == {n: x.sum() for n, x in base.items()}
    save_state(store, state, setup, {"vocab_size": VOCAB, "data_fingerprint": "same", **facts})
    store.close()
    (store.directory / "config.yaml").write_text(to_yaml(config))
    ByteTokenizer().save(store.directory / "tokenizer")

    saved = load_model("run").record["shapes"]
    assert not [name for name in saved if name.startswith("params.") and ".lora." not in name]
    moments = [name for name, shape in saved.items() if name.startswith("opt_state.") and "[]" not in shape]
    assert len(moments) == 2 * len(adapter), "two moments of Adam for each matrix, and none for what is frozen"

    check_merged(named_leaves(load_merged_model("run").params), base, adapter)

    # A base that trains on is used at the step that the adapter was begun on.
    shutil.copytree("base/0", "base/7")
    store, facts, setup = plan(config)
    assert facts == {"base_step": 0}
    resumed = start(config, store, setup)
    for name, x in to_host(resumed.params).items():
        np.testing.assert_array_equal(x, adapter[name])
    assert resumed.step == STEPS
    shutil.rmtree("base")
    write_base(Path("base"), seed=1)
    with pytest.raises(UserError, match=r"step 4 was trained beside other frozen weights .* set trainer\.id"):
        start(config, store, setup)
    with pytest.raises(UserError, match="run is an adapter for other weights than those that are now in base"):
        load_merged_model("run")
    shutil.rmtree("base")
    with pytest.raises(UserError, match="run is an adapter, and the model that it is for cannot be read: base: no run"):
        load_merged_model("run")
    store.close()


def test_exports_during_training_are_of_the_adapter_alone(in_tmp_path: Path) -> None:
    config = RunConfig.model_validate(
        {
            "model": {"type": "gpt2", **MODEL},
            "adapter": ADAPTER,
            "trainer": {"initialize_from": "base"},
            "hf_save_path": "out",
        }
    )
    model, rng = trace_model(config, VOCAB), np.random.default_rng(0)
    weights = {name: jax.numpy.asarray(rng.standard_normal(x.shape, np.float32)) for name, x in model.shapes.items()}
    recorder = SimpleNamespace(flush=lambda: None, train_loss=1.5, eval_losses={})
    setup = SimpleNamespace(weights_to_evaluate=lambda state: {"": state}, model=model)
    info: Any = SimpleNamespace(step=3, state=weights, total_tokens=640)
    exports: Any = HfExports(config, "run", Progress(5), ByteTokenizer())
    with exports:
        exports.export(info, setup, recorder)
    written = load_file("out/run/step-3/adapter_model.safetensors")
    name = "base_model.model.transformer.h.1.mlp.c_fc.lora_A.weight"
    np.testing.assert_array_equal(written[name], weights["blocks.0.mlp.up.lora.a"][1].T)
    assert not Path("out/run/step-3/model.safetensors").exists()


@pytest.mark.slow
def test_the_commands_from_training_to_the_export(make_config: MakeConfig, in_tmp_path: Path) -> None:
    write_base(Path("base"), seed=0)
    done = run_here(
        "train", make_config(adapter=ADAPTER, trainer={**TRAINER, "max_devices": 1}, model={"resid_pdrop": 0.0})
    )
    assert done.returncode == 0, done.stderr
    # Of each layer 2 x (32 + 32) for each of q, k, v and attn.c_proj, and twice 2 x (32 + 128) for the MLP.
    assert "2,304 trained and 34,720 frozen parameters" in done.stdout
    assert read_record(Path("checkpoints/run"), STEPS)["base_step"] == 0
    rerun = run_here("train", "run.yaml")
    assert "run run was complete already" in rerun.stdout, rerun.stderr
    for command in (
        ("generate", "run", "--prompt", "A"),
        ("export-hf", "run", "adapter"),
        ("export-hf", "run", "whole", "--merge"),
    ):
        done = run_here(*command)
        assert done.returncode == 0, done.stderr
    assert {path.name for path in Path("adapter").iterdir()} >= {"adapter_config.json", "adapter_model.safetensors"}
    assert {path.name for path in Path("whole").iterdir()} >= {"config.json", "model.safetensors"}
    assert "| Rank | 2 |" in Path("adapter/README.md").read_text()
    refused = run_here("export-hf", "base", "other", "--merge")
    assert refused.returncode == 2
    assert "base has no adapter, so there is nothing to merge" in refused.stderr


@pytest.mark.slow
def test_what_cannot_be_adapted_is_refused(make_config: MakeConfig, in_tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no model to adapt; name a run or checkpoint as trainer\.initialize_from"):
        configuration(make_config, trainer={"initialize_from": None})
    with pytest.raises(ConfigError, match="`rank`"):
        configuration(make_config, "adapter.r=4")
    write_base(Path("base"), seed=0)
    for model, message in (
        ({"activation_function": "relu"}, r"blocks\.0\.mlp\.activation: gelu_new there, relu here"),
        ({"num_heads": 4}, r"blocks\.0\.mixer\.num_heads: 2 there, 4 here"),
    ):
        with pytest.raises(UserError, match=rf"base is a model that computes something else .*\n  {message}"):
            plan(configuration(make_config, model=model))
    store, _, setup = plan(configuration(make_config, model={"seq_len": 16, "attn_pdrop": 0.1}))
    with pytest.raises(
        UserError, match=r"base is another model:\n  embed\.positions: \(32, 32\) there, \(16, 32\) here"
    ):
        setup.init()
    store.close()


def test_operations_of_a_step_are_those_that_a_frozen_model_needs(make_config: MakeConfig, in_tmp_path: Path) -> None:
    config = configuration(make_config, "adapter.target_modules=[c_attn]")
    count = flops_per_token(config.model.spec(256), 32)
    products = count.qkv + count.attention_out + count.mlp + count.head
    pairs = 2 * 3 * (32 * 2 + 2 * 32)
    expected = 2 * products + 3 * (count.attention_product + count.attention_softmax) + 3 * 2 * pairs
    assert training_flops(count, trace_model(config, 256)) == expected
    full_config = load(make_config(), [], RunConfig).config
    assert training_flops(count, trace_model(full_config, 256)) == count.training


def _batch(rows: np.ndarray) -> Batch:
    shape = (len(rows), rows.shape[1] - 1)
    positions = np.tile(np.arange(shape[1], dtype=np.int32), (len(rows), 1))
    return Batch(rows[:, :-1], rows[:, 1:], np.ones(shape, np.float32), positions, np.zeros(shape, np.int32))
