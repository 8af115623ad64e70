"""An adapter of a base in 4 bits, loaded by PEFT onto the base that bitsandbytes has quantized.

bitsandbytes is no dependency: pip install --no-deps bitsandbytes accelerate
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

from lm_trainer.core.tree import named_leaves
from lm_trainer.data.tokenizer.bytes import ByteTokenizer
from lm_trainer.export.adapter import AdapterModel, write_adapter
from lm_trainer.export.huggingface import ExportOptions
from lm_trainer.export.peft_files import AdaptedWeights
from lm_trainer.models import hf
from lm_trainer.nn.lora import is_adapter_param
from lm_trainer.run.build.model import trace_model
from lm_trainer.run.config.run_config import RunConfig
from lm_trainer.run.weights.pretrained import HfCheckpoint
from tests.conftest import MakeHfModel
from tests.export.test_adapter import CHECKPOINTS, load_peft

pytestmark = pytest.mark.slow

SIZES: dict[str, Any] = {**CHECKPOINTS["Llama"], "hidden_size": 64, "intermediate_size": 128}


def quantize(checkpoint: Path, out: Path) -> Path:
    """Stores the linear layers of a checkpoint in NF4, as `load_in_4bit` does."""
    import torch
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    settings = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float32,
    )
    model = AutoModelForCausalLM.from_pretrained(checkpoint, quantization_config=settings, device_map="cpu")
    model.save_pretrained(out)
    return out


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_peft_computes_the_same_logits(make_hf_model: MakeHfModel, tmp_path: Path) -> None:
    for package in ("bitsandbytes", "accelerate", "peft"):
        pytest.importorskip(package, reason=f"quantizes by {package}, which is not installed")
    import torch

    base = quantize(make_hf_model("Llama", **SIZES), tmp_path / "nf4")
    adapter = {"rank": 3, "alpha": 4.0, "base_quantization": "nf4"}
    config = RunConfig.model_validate(
        {"initialize_from_hf": str(base), "use_hf_model_config": True, "adapter": adapter}
    )
    source = HfCheckpoint.open(config)
    config = config.model_copy(update={"model": source.config})
    definition, rng = trace_model(config, source.vocab_size), np.random.default_rng(5)
    frozen = {name: x for name, x in definition.shapes.items() if not is_adapter_param(name)}
    placement = SingleDeviceSharding(jax.devices()[0])
    weights = dict(source.load(source.config, frozen, dict.fromkeys(frozen, placement)))
    drawn = {
        name: 0.2 * rng.standard_normal(x.shape, np.float32)
        for name, x in definition.shapes.items()
        if is_adapter_param(name)
    }
    tokens = rng.integers(0, SIZES["vocab_size"], (2, 24)).astype(np.int32)
    positions = np.tile(np.arange(24, dtype=np.int32), (2, 1))

    @jax.jit
    def run(params: Any) -> jax.Array:
        return definition.merge(params)(tokens, positions, np.zeros_like(positions))

    actual = np.asarray(run({**weights, **drawn}))
    zero = {name: np.zeros_like(x) for name, x in drawn.items()}
    assert np.abs(actual - np.asarray(run({**weights, **zero}))).max() > 0.1, "the adapter is heard"

    assert config.adapter is not None
    exported = AdapterModel(
        source.config, source.vocab_size, config.adapter, drawn, str(base), ByteTokenizer(), "tuned"
    )
    write_adapter(tmp_path / "adapter", exported, ExportOptions())
    # In the mode of training, because bitsandbytes multiplies in bfloat16 at inference on some CPUs.
    model = load_peft(base, tmp_path / "adapter").train()
    with torch.no_grad():
        expected = model(torch.from_numpy(tokens).long()).logits.numpy()
    np.testing.assert_allclose(actual, expected, atol=1e-4)

    # The adapter merged into the values of the base.
    values = named_leaves(
        hf.params_from_hf(source.config, source.vocab_size, AdaptedWeights(tmp_path / "adapter", base))
    )
    plain = trace_model(config.model_copy(update={"adapter": None}), source.vocab_size)
    merged = jax.jit(lambda params: plain.merge(params)(tokens, positions, np.zeros_like(positions)))(values)
    np.testing.assert_allclose(merged, actual, atol=1e-4)
