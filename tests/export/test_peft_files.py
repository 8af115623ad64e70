"""Adapters that PEFT wrote, read as models: their logits beside those of PEFT on torch, and what is refused."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lm_trainer.core.errors import UserError
from lm_trainer.data.tokenizer.bytes import ByteTokenizer
from lm_trainer.export.huggingface import read_hf
from lm_trainer.export.peft_files import KNOWN_SETTINGS, AdaptedWeights
from lm_trainer.run.weights.open_model import open_model
from tests.conftest import TINY_GPT2, MakeHfModel

LLAMA: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LORA: dict[str, dict[str, Any]] = {
    # A pattern that begins with the prefix, which files of the base may lack.
    "GPT2": {
        "target_modules": ["c_attn", "c_proj"],
        "fan_in_fan_out": True,
        "alpha_pattern": {"^transformer.h.1.mlp.c_proj": 21},
    },
    "Llama": {
        "target_modules": ["q_proj", "down_proj", "v_proj"],
        "rank_pattern": {"down_proj": 5},
        "alpha_pattern": {"layers.1.self_attn.q_proj": 16},
        "use_rslora": True,
    },
    # Embedding and head, and the experts of a layer as parameters.
    "Mixtral": {
        "target_modules": ["embed_tokens", "lm_head", "k_proj"],
        "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        "rank_pattern": {"lm_head": 2},
        "alpha_pattern": {"mlp.experts.down_proj": 11},
    },
}
MODELS = {
    "GPT2": {**TINY_GPT2, "vocab_size": 300},
    "Llama": LLAMA,
    "Mixtral": {**LLAMA, "num_local_experts": 3, "num_hidden_layers": 1},
}


def adapter(base: Path, out: Path, **settings: Any) -> tuple[Any, Path]:
    """A PEFT model with random adapters, in float32, and the directory that it was saved to with a tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(3)
    peft = pytest.importorskip("peft", reason="compares with PEFT, which is not installed")
    config = peft.LoraConfig(r=3, lora_alpha=7, task_type="CAUSAL_LM", init_lora_weights=False, **settings)
    model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), config).eval()
    model.save_pretrained(out)
    ByteTokenizer().save(out)
    return model, out


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::RuntimeWarning", "ignore::UserWarning")
@pytest.mark.parametrize("family", ["GPT2", "Llama", pytest.param("Mixtral", marks=pytest.mark.slow)])
def test_an_adapter_of_peft_is_read_as_the_model_that_it_stands_for(
    family: str, make_hf_model: MakeHfModel, tmp_path: Path
) -> None:
    import torch

    base = make_hf_model(family, **MODELS[family])
    peft_model, directory = adapter(base, tmp_path / "adapter", **LORA[family])
    tokens = np.random.default_rng(0).integers(0, 300, (2, 12))
    with torch.no_grad():
        expected = peft_model(torch.from_numpy(tokens)).logits.numpy()
        plain = peft_model.get_base_model()
        with peft_model.disable_adapter():
            without = plain(torch.from_numpy(tokens)).logits.numpy()
    positions = jnp.tile(jnp.arange(12), (2, 1))
    # One program on one device: the operations of an eager call over emulated devices wait for one another's threads.
    model = jax.jit(open_model(str(directory)).build(jax.local_devices()[:1]))
    actual = np.asarray(model(jnp.asarray(tokens), positions, jnp.zeros_like(positions)))
    np.testing.assert_allclose(actual, expected, atol=1e-4)
    assert np.abs(expected - without).max() > 0.05, "the adapter is heard"


def test_every_setting_of_peft_is_known() -> None:
    peft = pytest.importorskip("peft", reason="compares with PEFT, which is not installed")
    fields = {field.name for field in dataclasses.fields(peft.LoraConfig)}
    assert fields - KNOWN_SETTINGS == set()
    # Every way to begin that PEFT lists is decided.
    listed = {"gaussian", "eva", "orthogonal", "mica", "pissa", "olora", "corda", "loftq", "lora_ga"}
    hint = str(peft.LoraConfig.__dataclass_fields__["init_lora_weights"].type)
    assert set(re.findall(r"'([a-z_]+)'", hint)) <= listed


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.slow
@pytest.mark.parametrize("init", ["gaussian", "eva", "orthogonal", "mica", "pissa", "pissa_niter_4", "olora"])
def test_an_adapter_that_was_trained_is_that_of_peft_or_refused(
    init: str, make_hf_model: MakeHfModel, tmp_path: Path
) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    peft = pytest.importorskip("peft", reason="compares with PEFT, which is not installed")
    base = make_hf_model("Llama", **LLAMA)
    config = peft.LoraConfig(
        r=4, lora_alpha=6, task_type="CAUSAL_LM", init_lora_weights=init, target_modules=["q_proj"]
    )
    trained = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), config)
    torch.manual_seed(5)
    with torch.no_grad():
        for name, parameter in trained.named_parameters():
            if "lora_" in name:
                parameter.add_(0.3 * torch.randn(parameter.shape))
    trained.save_pretrained(tmp_path)
    ByteTokenizer().save(tmp_path)
    if init not in ("gaussian", "eva", "orthogonal", "mica"):
        with pytest.raises(UserError, match=f"init_lora_weights: '{init}' is not read"):
            read_hf(tmp_path)
        return
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    merged = peft.PeftModel.from_pretrained(plain, tmp_path).merge_and_unload()
    weight = merged.get_parameter("model.layers.1.self_attn.q_proj.weight").detach().numpy()
    actual = AdaptedWeights(tmp_path, base)["model.layers.1.self_attn.q_proj.weight"]
    np.testing.assert_allclose(actual, weight, atol=1e-6)


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.slow
@pytest.mark.parametrize(("family", "target"), [("GPT2", "attn.c_proj"), ("Llama", "self_attn.q_proj")])
def test_the_direction_of_a_layer_is_that_of_its_class_whatever_the_file_says(
    family: str, target: str, make_hf_model: MakeHfModel, tmp_path: Path
) -> None:
    """The matrix is square, so no shape tells a transposed product."""
    import torch
    from transformers import AutoModelForCausalLM

    peft = pytest.importorskip("peft", reason="compares with PEFT, which is not installed")
    base = make_hf_model(family, **MODELS[family])
    _, directory = adapter(base, tmp_path / "adapter", target_modules=[target])
    edit(directory, fan_in_fan_out=family != "GPT2")
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    before = {name: x.detach().clone() for name, x in plain.named_parameters()}
    merged = peft.PeftModel.from_pretrained(plain, directory).merge_and_unload()
    changed = {name: x for name, x in merged.named_parameters() if not torch.equal(x, before[name])}
    assert len(changed) > 1
    weights = AdaptedWeights(directory, base)
    for name, x in changed.items():
        assert x.shape[0] == x.shape[1]
        np.testing.assert_allclose(weights[name], x.detach().numpy(), atol=1e-6)


@pytest.fixture
def saved(make_hf_model: MakeHfModel, tmp_path: Path) -> Path:
    return adapter(make_hf_model("GPT2", **MODELS["GPT2"]), tmp_path / "adapter", **LORA["GPT2"])[1]


def edit(directory: Path, **changes: Any) -> None:
    file = directory / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"peft_type": "IA3"}, "peft_type 'IA3' is not read"),
        ({"use_dora": True}, "use_dora: True is not read; merge it with PEFT"),
        ({"modules_to_save": ["lm_head"]}, r"modules_to_save: \['lm_head'\] is not read"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights: 'pissa' is not read; merge it with PEFT"),
        ({"init_lora_weights": "pissa_niter_16"}, "init_lora_weights: 'pissa_niter_16' is not read"),
        ({"init_lora_weights": "olora"}, "init_lora_weights: 'olora' is not read"),
        ({"init_lora_weights": "corda"}, "init_lora_weights: 'corda' is not read"),
        ({"init_lora_weights": "loftq"}, "init_lora_weights: 'loftq' is not read"),
        ({"init_lora_weights": "lora_ga"}, "init_lora_weights: 'lora_ga' is not read"),
        ({"bias": "lora_only"}, "bias: 'lora_only' is not read"),
        ({"lora_bias": True}, "lora_bias: True is not read"),
        ({"trainable_token_indices": [3]}, r"trainable_token_indices: \[3\] is not read"),
        ({"alora_invocation_tokens": [1, 2]}, "alora_invocation_tokens: .* is not read"),
        ({"use_of_tomorrow": True}, "use_of_tomorrow: True is not read, and what it means is not known here"),
        ({"base_model_name_or_path": "some/model"}, "some/model, is no directory on this machine; download it"),
        ({"base_model_name_or_path": None}, "base_model_name_or_path is missing"),
    ],
)
def test_what_is_no_sum_of_products_for_this_base_is_refused(
    saved: Path, changes: dict[str, Any], message: str
) -> None:
    edit(saved, **changes)
    with pytest.raises(UserError, match=message):
        read_hf(saved)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_half_of_a_pair_and_a_layer_that_is_not_there_are_refused(saved: Path) -> None:
    from safetensors.numpy import load_file, save_file

    file = saved / "adapter_model.safetensors"
    tensors = load_file(file)
    name = next(name for name in tensors if name.endswith("lora_B.weight"))
    save_file({key: x for key, x in tensors.items() if key != name}, file)
    with pytest.raises(UserError, match=r"lora_A\.weight is not half of a pair"):
        read_hf(saved)
    save_file({key.replace("h.0.", "h.7."): x for key, x in tensors.items()}, file)
    with pytest.raises(UserError, match=r"an adapter for transformer\.h\.7\.\S+, which .* does not have"):
        read_hf(saved)
    embedding = "base_model.model.transformer.wte.lora_embedding_"
    save_file({f"{embedding}A": np.ones((3, 300), np.float32), f"{embedding}B": np.ones((32, 3), np.float32)}, file)
    with pytest.raises(UserError, match=r"an adapter for transformer\.wte, whose weight is the head's too"):
        read_hf(saved)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_patterns_match_the_names_of_peft_whatever_those_of_the_base_files_are(saved: Path, tmp_path: Path) -> None:
    from safetensors.numpy import load_file, save_file

    base = Path(json.loads((saved / "adapter_config.json").read_text())["base_model_name_or_path"])
    bare = tmp_path / "bare"
    bare.mkdir()
    tensors = {name.removeprefix("transformer."): x for name, x in load_file(base / "model.safetensors").items()}
    save_file(tensors, bare / "model.safetensors")
    one, other = AdaptedWeights(saved, base), AdaptedWeights(saved, bare)
    for layer in (0, 1):
        name = f"h.{layer}.mlp.c_proj.weight"
        np.testing.assert_array_equal(one[f"transformer.{name}"], other[name])
