"""Published training runs: models, devices, layouts, recomputation and measured speed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

Recomputed = Literal["nothing", "every third layer", "half of the products", "elementwise", "attention", "gate and up",
                     "all but QKV and out", "layers"]  # fmt: skip
"""Work that the backward pass repeats. `elementwise`: norms and activations; `attention`: the same and attention
kernels; `gate and up`: the same and the first products of the MLP; `all but QKV and out`: the same and the product
after attention; `layers`: everything. No run repeats the last product of a layer, whose result no gradient needs."""


@dataclass(frozen=True)
class Model:
    """A model of a published run."""

    name: str
    section: dict[str, Any]
    """`model` section of a configuration."""
    vocab: int


@dataclass(frozen=True)
class PublishedRun:
    """A published run and its speed."""

    model: Model
    framework: str
    source: str
    machine: str
    """Key of `benchmarks.published_runs.MACHINES`."""
    count: int
    rows: int
    """Rows of a microbatch for each device."""
    recomputed: Recomputed
    tokens: float | None = None
    """Published tokens per second and device."""
    teraflops: float | None = None
    """Published model TFLOP/s per device, if tokens are not published. All pairs of attention count, the softmax does
    not (MaxText before its pull request 1988)."""
    microbatches: int = 1
    """Microbatches of a device per step."""
    tensor: int = 1
    """Devices that share the matrices of a layer."""
    replicated: bool = False
    """True if devices gather no parameters and sum gradients once per step in float32, without overlap."""
    fused: bool = True
    """True if a compiler fuses elementwise operations, as the expectation assumes."""


def _llama(name: str, shape: tuple[int, int, int, int, int], length: int, vocab: int, **more: Any) -> Model:
    keys = ("hidden_dim", "intermediate_dim", "num_layers", "num_heads", "num_kv_heads")
    return Model(name, {"type": "llama", **dict(zip(keys, shape, strict=True)), "seq_len": length, **more}, vocab)


def _gpt(name: str, hidden: int, layers: int, heads: int, length: int, vocab: int) -> Model:
    section = {"type": "gpt2", "hidden_dim": hidden, "num_layers": layers, "num_heads": heads, "seq_len": length}
    return Model(name, section, vocab)


_LLAMA2_7B = _llama("Llama 2 7B", (4096, 11008, 32, 32, 32), 4096, 32000)
_LLAMA2_13B = _llama("Llama 2 13B", (5120, 13824, 40, 40, 40), 4096, 32000)
_LLAMA2_34B = _llama("Llama 2 34B", (8192, 22016, 48, 64, 8), 4096, 32000)
_LLAMA2_70B = _llama("Llama 2 70B", (8192, 28672, 80, 64, 8), 4096, 32000)
_LLAMA3_8B = _llama("Llama 3 8B", (4096, 14336, 32, 32, 8), 8192, 128256)
_LLAMA3_70B = _llama("Llama 3 70B", (8192, 28672, 80, 64, 8), 8192, 128256)
_MISTRAL_7B = _llama("Mistral 7B", (4096, 14336, 32, 32, 8), 8192, 32000)
_NANOTRON_1B = _llama("Llama 1B", (2048, 4096, 24, 32, 32), 4096, 50257)
_MAXTEXT_16B = _llama("MaxText 16B", (4096, 28672, 32, 64, 64), 2048, 32000, head_dim=128)
_MAXTEXT_32B = _llama("MaxText 32B", (8192, 28672, 32, 64, 64), 2048, 32000)
_MAXTEXT_64B = _llama("MaxText 64B", (8192, 28672, 64, 64, 64), 2048, 32000)
_MAXTEXT_128B = _llama("MaxText 128B", (8192, 57344, 64, 128, 128), 2048, 32000, head_dim=128)
_MAXTEXT_22B = _gpt("MaxText 22B", 6144, 48, 24, 2048, 32000)
_GPT3_175B = _gpt("GPT-3 175B", 12288, 96, 96, 2048, 50304)

_GITHUB = "https://github.com"
_TIERS = "https://maxtext.readthedocs.io/en/maxtext-v0.2.0/reference/models/tiering.html"
_AXLEARN = "https://arxiv.org/abs/2507.05411"
_TITAN = f"{_GITHUB}/pytorch/torchtitan/blob/main/benchmarks/llama3_h100_202412_torchtitan.md"
_TITAN_TENSOR = f"{_GITHUB}/pytorch/torchtitan/blob/main/benchmarks/asyncTP_llama3_h100_2025-06_torchtitan.md"


def _recipe(folder: str, model: Model, count: int, rows: int, recomputed: Recomputed, tokens: float) -> PublishedRun:
    source = f"{_GITHUB}/AI-Hypercomputer/tpu-recipes/tree/main/training/trillium/{folder}"
    return PublishedRun(model, "MaxText", source, "TPU v6e", count, rows, recomputed, tokens)


def _maxtext(kind: str, model: Model, count: int, rows: int, recomputed: Recomputed, **figures: Any) -> PublishedRun:
    source = f"{_GITHUB}/AI-Hypercomputer/maxtext/tree/main/src/maxtext/configs/tpu/{kind}"
    return PublishedRun(model, "MaxText", source, f"TPU {kind}", count, rows, recomputed, **figures)


def _fms(card: str, model: Model, count: int, recomputed: Recomputed, tokens: float) -> PublishedRun:
    source = f"{_GITHUB}/foundation-model-stack/fms-fsdp"
    return PublishedRun(model, "fms-fsdp", source, f"{card}, shared adapters", count, 2, recomputed, tokens)


def _foundry(
    machine: str, shape: tuple[int, ...], batch: tuple[int, int, int], recomputed: Recomputed, tokens: float
) -> PublishedRun:
    """Returns a run of MosaicML.

    Args:
        machine: key of `MACHINES`.
        shape: billions of parameters, hidden dimension, layers, heads and positions.
        batch: devices, rows of a microbatch and microbatches of a device.
        recomputed: work that the backward pass repeats.
        tokens: tokens per second and device.
    """
    (billions, hidden, layers, heads, length), (count, rows, repeats) = shape, batch
    source = f"{_GITHUB}/mosaicml/llm-foundry/tree/main/scripts/train/benchmarking"
    model = _gpt(f"MPT {billions}B", hidden, layers, heads, length, 50368)
    return PublishedRun(
        model, "llm-foundry", source, machine, count, rows, recomputed, tokens, microbatches=repeats, fused=False
    )


def _nanotron(folder: str, rows: int, tokens: float, repeats: int, tensor: int) -> PublishedRun:
    source = f"https://huggingface.co/nanotron/old_bench/tree/main/llama-1B/8_GPUS/{folder}"
    return PublishedRun(_NANOTRON_1B, "nanotron", source, "H100, FlashAttention-2", 8, rows, "nothing", tokens,
                        microbatches=repeats, tensor=tensor, replicated=True, fused=False)  # fmt: skip


_KEPT = "all but QKV and out"
RUNS = (
    _recipe("Llama3.1-8B-MaxText/v6e-8", _LLAMA3_8B, 8, 3, "gate and up", 7139),
    _recipe("Llama3.1-8B-MaxText/v6e-64", _LLAMA3_8B, 64, 5, "gate and up", 7247),
    _recipe("Llama3.1-8B-MaxText/v6e-256", _LLAMA3_8B, 256, 4, "gate and up", 7207),
    _recipe("Mistral-7B-MaxText", _MISTRAL_7B, 8, 6, "gate and up", 7777),
    _recipe("Llama3.1-70B-MaxText/v6e-64", _LLAMA3_70B, 64, 2, _KEPT, 877),
    _recipe("Llama3.1-70B-MaxText/v6e-128", _LLAMA3_70B, 128, 4, _KEPT, 942),
    _recipe("Llama3.1-70B-MaxText/v6e-256", _LLAMA3_70B, 256, 5, _KEPT, 960),
    _recipe("Llama2-70B-MaxText", _LLAMA2_70B, 256, 3, _KEPT, 905),
    _recipe("GPT3-175B-MaxText/bf16", _GPT3_175B, 256, 3, "layers", 358),
    _maxtext("v5p", _MAXTEXT_32B, 64, 6, "attention", teraflops=328, tensor=4),
    _maxtext("v5p", _MAXTEXT_64B, 64, 3, "attention", teraflops=323, tensor=4),
    _maxtext("v5p", _MAXTEXT_128B, 128, 1, "attention", teraflops=315, tensor=8),
    PublishedRun(_LLAMA2_70B, "MaxText", _TIERS, "TPU v5p", 512, 4, "gate and up", 692),
    PublishedRun(_LLAMA2_7B, "AXLearn", _AXLEARN, "TPU v5p", 256, 4, "elementwise", 4 * 4096 / 2.5),
    PublishedRun(_LLAMA2_70B, "AXLearn", _AXLEARN, "TPU v5p", 512, 2, _KEPT, 2 * 4096 / 11.6),
    _maxtext("v5e", _MAXTEXT_16B, 256, 6, "layers", teraflops=120),
    _maxtext("v5e", _MAXTEXT_32B, 256, 4, "layers", teraflops=132),
    _maxtext("v4", _MAXTEXT_22B, 64, 13, "layers", teraflops=156),
    PublishedRun(_LLAMA2_7B, "AXLearn", _AXLEARN, "H100", 256, 4, "attention", 4 * 4096 / 1.4),
    PublishedRun(_LLAMA2_70B, "AXLearn", _AXLEARN, "H100", 512, 2, "layers", 2 * 4096 / 9.2),
    PublishedRun(_LLAMA3_8B, "torchtitan", _TITAN, "H100, 500 W", 8, 2, "half of the products", 6667),
    PublishedRun(_LLAMA3_8B, "torchtitan", _TITAN, "H100, 500 W", 128, 2, "half of the products", 6514),
    PublishedRun(_LLAMA3_70B, "torchtitan", _TITAN_TENSOR, "H100, 500 W", 256, 2, "layers", 597, tensor=8),
    _fms("H100", _LLAMA2_7B, 96, "nothing", 9600),
    _fms("H100", _LLAMA2_13B, 96, "every third layer", 4850),
    _fms("H100", _LLAMA2_34B, 96, "layers", 1830),
    _fms("H100", _LLAMA2_70B, 96, "layers", 890),
    _fms("A100", _LLAMA2_7B, 128, "nothing", 4550),
    _fms("A100", _LLAMA2_13B, 128, "every third layer", 2150),
    _fms("A100", _LLAMA2_34B, 128, "layers", 820),
    _fms("A100", _LLAMA2_70B, 128, "layers", 410),
    _foundry("H100, FlashAttention-2", (7, 4096, 32, 32, 2048), (128, 6, 1), "nothing", 10475),
    _foundry("H100, FlashAttention-2", (13, 5120, 40, 40, 2048), (128, 16, 1), "layers", 5080),
    _foundry("H100, FlashAttention-2", (30, 7168, 48, 56, 2048), (128, 8, 1), "layers", 2199),
    _foundry("H100, FlashAttention-2", (70, 8192, 80, 64, 2048), (128, 8, 1), "layers", 1058),
    _foundry("A100", (7, 4096, 32, 32, 2048), (8, 6, 2), "nothing", 4641),
    _foundry("A100", (13, 5120, 40, 40, 4096), (8, 10, 3), "layers", 2060),
    _nanotron("dp-4_tp-2_pp-1_mbz-8", 4, 33200, 32, 2),
    _nanotron("dp-2_tp-4_pp-1_mbz-8", 2, 27700, 64, 4),
)
