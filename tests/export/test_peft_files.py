"""Adapters that PEFT wrote, read as models: their logits beside those of PEFT on torch, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lm_trainer.core.errors import UserError
from lm_trainer.data.tokenizer.bytes import ByteTokenizer
from lm_trainer.export.huggingface import read_hf
from lm_trainer.run.open_model import open_model
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
    "GPT2": {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True},
    "Llama": {
        "target_modules": ["q_proj", "down_proj", "v_proj"],
        "rank_pattern": {"down_proj": 5},
        "alpha_pattern": {"layers.1.self_attn.q_proj": 16},
        "use_rslora": True,
    },
}
MODELS = {"GPT2": {**TINY_GPT2, "vocab_size": 300}, "Llama": LLAMA}


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


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("family", LORA)
def test_an_adapter_of_peft_is_read_as_the_model_that_it_stands_for(
    family: str, make_hf_model: MakeHfModel, tmp_path: Path
) -> None:
    import torch

    base = make_hf_model(family, **MODELS[family])
    theirs, directory = adapter(base, tmp_path / "adapter", **LORA[family])
    tokens = np.random.default_rng(0).integers(0, 300, (2, 12))
    with torch.no_grad():
        expected = theirs(torch.from_numpy(tokens)).logits.numpy()
        plain = theirs.get_base_model()
        with theirs.disable_adapter():
            without = plain(torch.from_numpy(tokens)).logits.numpy()
    positions = jnp.tile(jnp.arange(12), (2, 1))
    # One program on one device: the operations of an eager call over emulated devices wait for one another's threads.
    model = jax.jit(open_model(str(directory)).build(jax.local_devices()[:1]))
    found = np.asarray(model(jnp.asarray(tokens), positions, jnp.zeros_like(positions)))
    np.testing.assert_allclose(found, expected, atol=1e-4)
    assert np.abs(expected - without).max() > 0.05, "the adapter is heard"


@pytest.fixture
def saved(make_hf_model: MakeHfModel, tmp_path: Path) -> Path:
    return adapter(make_hf_model("GPT2", **MODELS["GPT2"]), tmp_path / "adapter", **LORA["GPT2"])[1]


def edit(directory: Path, **changes: Any) -> None:
    file = directory / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"peft_type": "IA3"}, "peft_type 'IA3' is not read"),
        ({"use_dora": True}, "use_dora: True is not read; merge it with PEFT"),
        ({"modules_to_save": ["lm_head"]}, r"modules_to_save: \['lm_head'\] is not read"),
        ({"base_model_name_or_path": "some/model"}, "some/model, is no directory on this machine; download it"),
        ({"base_model_name_or_path": None}, "base_model_name_or_path is missing"),
        ({"fan_in_fan_out": False}, "it is the adapter of another model"),
    ],
)
def test_what_is_no_sum_of_products_for_this_base_is_refused(saved: Path, changes: dict[str, Any], told: str) -> None:
    edit(saved, **changes)
    with pytest.raises(UserError, match=told):
        read_hf(saved)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_half_of_a_pair_and_a_layer_that_is_not_there_are_refused(saved: Path) -> None:
    from safetensors.numpy import load_file, save_file

    file = saved / "adapter_model.safetensors"
    tensors = load_file(file)
    name = next(name for name in tensors if name.endswith("lora_B.weight"))
    save_file({key: x for key, x in tensors.items() if key != name}, file)
    with pytest.raises(UserError, match=r"lora_B\.weight is not half of a pair"):
        read_hf(saved)
    save_file({key.replace("h.0.", "h.7."): x for key, x in tensors.items()}, file)
    with pytest.raises(UserError, match=r"an adapter for transformer\.h\.7\.\S+, which .* does not have"):
        read_hf(saved)
