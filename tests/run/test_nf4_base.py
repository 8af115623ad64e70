"""Adapters of a base in 4 bits: equal bits on any devices, the values of the base, and what is made of it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding
from safetensors.numpy import load_file, save_file

from lm_trainer.core.errors import UserError
from lm_trainer.core.nf4 import NF4_VALUES, SCALE_VALUES, dequantize_matrix, quantize_matrix
from lm_trainer.core.tree import named_leaves
from lm_trainer.export.weights import write_json
from lm_trainer.models import hf
from lm_trainer.run.build.model import trace_model
from lm_trainer.run.config.run_config import RunConfig, config_hash
from lm_trainer.run.weights.adapters import describe_num_params, load_merged_model
from lm_trainer.run.weights.pretrained import HfCheckpoint
from lm_trainer.step.state.train_state import to_host
from tests.conftest import MakeHfModel, run_here
from tests.run.conftest import MakeConfig
from tests.run.test_adapters import ADAPTER, MODEL, TRAINER, VOCAB, configuration, plan, some_steps, write_base

NF4 = "adapter.base_quantization=nf4"


def dequantized(name: str, w: np.ndarray) -> np.ndarray:
    """The values that a weight of the blocks has in 4 bits, layer by layer, with a row per output."""
    if not name.startswith("blocks.") or not name.endswith(".weight"):
        return w
    # The output of attention has two dimensions of inputs, queries and so on two of outputs.
    inputs = 64 * 2 if name.endswith("mlp.down.weight") else 32
    layers = [x.reshape(inputs, -1) for x in w]
    return np.stack([dequantize_matrix(quantize_matrix(x.T)).T for x in layers]).reshape(w.shape)


@pytest.mark.parametrize(
    "numbers",
    [pytest.param((2, 3), marks=pytest.mark.slow), pytest.param((4, 8), marks=pytest.mark.exhaustive)],
)
def test_bits_are_the_same_on_any_number_of_devices(
    numbers: tuple[int, ...], make_config: MakeConfig, in_tmp_path: Path
) -> None:
    write_base(Path("base"), seed=0)
    results = []
    targets = "adapter.target_modules=[attention.*,mlp.*,embed.tokens]"
    for devices in (1, *numbers):
        config = configuration(make_config, NF4, targets, "adapter.dropout=0", "trainer.elastic_shards=8")
        store, _, setup = plan(config, devices)
        state = setup.init()
        codes = state.frozen["blocks.0.mlp.up.weight.codes"]
        assert (codes.dtype, codes.shape) == (np.uint8, (2, 128, 16))
        # No dimension is divisible by 3.
        assert codes.addressable_shards[0].data.size == codes.size // (1 if devices == 3 else devices)
        state, losses = some_steps(setup, state)
        results.append((losses, to_host(state.params)))
        store.close()
    for losses, params in results[1:]:
        assert losses == results[0][0]
        for name, x in results[0][1].items():
            np.testing.assert_array_equal(x, params[name], err_msg=name)


@pytest.mark.slow
def test_the_commands_from_training_to_the_export(make_config: MakeConfig, in_tmp_path: Path) -> None:
    base = write_base(Path("base"), seed=0)
    config = make_config(adapter={**ADAPTER, "base_quantization": "nf4"}, trainer={**TRAINER, "max_devices": 1})
    done = run_here("train", config)
    assert done.returncode == 0, done.stderr
    assert "2,304 trained and 34,720 frozen parameters" in done.stdout
    for command in (("generate", "run", "--prompt", "A"), ("export-hf", "run", "whole", "--merge")):
        done = run_here(*command)
        assert done.returncode == 0, done.stderr
    merged = named_leaves(load_merged_model("run").params)
    for name, x in base.items():
        # A adapter of four steps changes a weight little.
        np.testing.assert_allclose(merged[name], dequantized(name, x), atol=0.02, err_msg=name)
    exported = load_file("whole/model.safetensors")
    np.testing.assert_array_equal(exported["transformer.h.1.mlp.c_fc.weight"], merged["blocks.0.mlp.up.weight"][1])
    shutil.rmtree("base")
    write_base(Path("base"), seed=1)
    with pytest.raises(UserError, match="run is an adapter for other weights"):
        load_merged_model("run")


def test_counts_are_of_the_weights_and_bytes_of_their_codes() -> None:
    section = {"model": {"type": "gpt2", **MODEL}, "trainer": {"initialize_from": "base"}}
    plain, quantized = (
        RunConfig.model_validate({**section, "adapter": {**ADAPTER, "base_quantization": kind}})
        for kind in (None, "nf4")
    )
    older = RunConfig.model_validate({**section, "adapter": ADAPTER})
    assert config_hash(plain) == config_hash(older) != config_hash(quantized)
    models = [trace_model(config, VOCAB) for config in (plain, quantized)]
    assert describe_num_params(models[0]) == describe_num_params(models[1])
    assert models[0].trainable == models[1].trainable
    sizes = [sum(x.size * x.dtype.itemsize for x in model.shapes.values()) for model in models]
    weights = 2 * (4 * 32 * 32 + 2 * 32 * 128)
    # Half a byte for a weight, one for 64, and four for 256 blocks of them or a rest, and for the mean.
    matrices = 2 * 6
    assert sizes[0] - sizes[1] == 4 * weights - (weights // 2 + weights // 64 + 4 * matrices + 4 * matrices)


def quantize_file(directory: Path, out: Path) -> Path:
    """Writes a checkpoint with the linear layers as bitsandbytes stores them."""
    out.mkdir()
    tensors: dict[str, np.ndarray] = {}
    for name, x in load_file(directory / "model.safetensors").items():
        if "proj" not in name:
            tensors[name] = x
            continue
        matrix = quantize_matrix(x)
        state = {"quant_type": "nf4", "blocksize": 64, "dtype": "float32", "shape": [*x.shape]}
        state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": float(matrix.offset)}
        tensors |= {
            name: matrix.codes.reshape(-1, 1),
            f"{name}.absmax": matrix.scales,
            f"{name}.quant_map": NF4_VALUES,
            f"{name}.nested_absmax": matrix.group_scales,
            f"{name}.nested_quant_map": SCALE_VALUES,
            f"{name}.quant_state.bitsandbytes__nf4": np.frombuffer(json.dumps(state).encode(), np.uint8),
        }
    save_file({name: np.ascontiguousarray(x) for name, x in tensors.items()}, out / "model.safetensors")
    config = json.loads((directory / "config.json").read_text())
    block = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    write_json(out / "config.json", {**config, "quantization_config": block})
    return out


LLAMA: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


def load_start(directory: Path, **adapter: Any) -> dict[str, np.ndarray]:
    section = {"initialize_from_hf": str(directory), "use_hf_model_config": True, "adapter": {**ADAPTER, **adapter}}
    config = RunConfig.model_validate(section)
    source = HfCheckpoint.open(config)
    shapes = trace_model(config.model_copy(update={"model": source.config}), source.vocab_size).shapes
    placement = SingleDeviceSharding(jax.devices()[0])
    return to_host(source.load(source.config, shapes, dict.fromkeys(shapes, placement)))


def test_a_file_in_4_bits_keeps_its_codes_or_is_dequantized(make_hf_model: MakeHfModel, tmp_path: Path) -> None:
    base = make_hf_model("Llama", **LLAMA)
    file = quantize_file(base, tmp_path / "nf4")
    from_values = load_start(base, base_quantization="nf4")
    from_codes = load_start(file, base_quantization="nf4")
    assert from_values.keys() == from_codes.keys()
    assert "blocks.0.mlp.down.weight.codes" in from_codes
    for name, x in from_values.items():
        np.testing.assert_array_equal(x, from_codes[name], err_msg=name)
    expected = {
        name: dequantize_matrix(quantize_matrix(x)) if "proj" in name else x
        for name, x in load_file(base / "model.safetensors").items()
    }
    values = load_start(file)
    model, vocab_size = hf.config_from_hf(json.loads((base / "config.json").read_text()))
    for name, x in named_leaves(hf.params_from_hf(model, vocab_size, expected)).items():
        np.testing.assert_array_equal(values[name], x, err_msg=name)


def test_codes_of_joined_layers_are_refused(make_hf_model: MakeHfModel, tmp_path: Path) -> None:
    settings = {**LLAMA, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    file = quantize_file(make_hf_model("Phi3", **settings), tmp_path / "nf4")
    with pytest.raises(UserError, match=r"qkv_proj\.weight joins 3 matrices .* leave adapter\.base_quantization out"):
        load_start(file, base_quantization="nf4")
    assert "blocks.0.attention.q.weight" in load_start(file)
