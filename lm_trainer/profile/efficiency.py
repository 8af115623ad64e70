"""Shares of their datasheet that matrix units, memory and links of devices reach, by published microbenchmarks.

No figure is fitted to published training runs. `python -m benchmarks.published_runs` compares the expectations that
follow from them with published runs.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from lm_trainer.profile.devices import device_bandwidths, device_platform


@dataclass(frozen=True)
class Efficiency:
    """Shares of the datasheet's figures that one JAX device reaches."""

    products: float
    """Share of the peak FLOP/s in products of activations and weights."""
    attention_forward: float
    """Share of the peak FLOP/s in the forward pass of a causal attention kernel, for heads of `head_width`. FLOPs of
    masked pairs do not count."""
    attention_backward: float
    """The same for the backward pass, with 5 products for the 2 of the forward pass."""
    memory: float
    """Share of the memory bandwidth in operations on whole arrays."""
    links: float
    """Share of the bandwidth of the links in a node or slice."""
    in_step: float = 1.0
    """Speed of operations in a step, relative to products and copies that run alone: caches are cold, clocks are lower,
    and there are gaps between operations."""
    adapters: float = 1.0
    """Share of the bandwidth of the network adapters between nodes."""
    overlap_slowdown: float = 0.0
    """Seconds by which a second of communication slows down the computation that it overlaps with."""
    latency: float = 0.0
    """Seconds of a collective without data."""
    head_width: int = 128
    """Size of a head at which an attention kernel reaches its share."""
    narrow_heads: float = 1.0
    """Exponent of the loss for heads narrower than `head_width`: the share falls with (size / head_width) ** this."""
    sources: tuple[tuple[str, str], ...] = field(default=(), compare=False)
    """Pairs of a figure and its source."""

    def attention(self, head_dim: int, *, backward: bool) -> float:
        """Returns the share of the peak that an attention kernel reaches with heads of size `head_dim`."""
        fill = min(1.0, head_dim / self.head_width) ** self.narrow_heads
        return fill * (self.attention_backward if backward else self.attention_forward)


def device_efficiency(kind: str) -> Efficiency | None:
    """Returns the efficiency of a `jax.Device.device_kind`; None if there is none, as for a CPU.

    Devices without a measurement of their own, but with bandwidths, get the figures of a similar device.
    """
    if (entry := _MEASURED.get(kind)) is not None:
        return entry
    if device_bandwidths(kind) is None:
        return None
    similar = "TPU v6 lite" if device_platform(kind) == "tpu" else _SIMILAR.get(kind, "NVIDIA A100-SXM4-80GB")
    return _assume_as(similar)


def _assume_as(kind: str) -> Efficiency:
    entry = _MEASURED[kind]
    sources = tuple((name, f"no measurement found; assumed as for {kind}") for name, _ in entry.sources)
    return Efficiency(**{**vars(entry), "sources": sources})


_ML_ENGINEERING = "Bekman, Machine Learning Engineering (github.com/stas00/ml-engineering)"
_SEMI_ANALYSIS = "SemiAnalysis, MI300X vs H100 vs H200, part 1 (newsletter.semianalysis.com, 2024-12-22)"
_FLASH_2 = "Dao 2023, arXiv 2307.08691, figures of the repository Dao-AILab/flash-attention"
_FLASH_3 = "Shah et al. 2024, arXiv 2407.08608, figures 5 and 6"
_RECIPES = "github.com/AI-Hypercomputer/tpu-recipes, microbenchmarks"
_SCALING_BOOK = "Austin et al. 2025, How to Scale Your Model (jax-ml.github.io/scaling-book)"
_MAXIMUM = f"{_ML_ENGINEERING}: largest rate of any shape"
_SHAPES = "times 0.91, the ratio of shapes of Llama 70B to the best shape on an H100"
_NCCL = f"{_ML_ENGINEERING}: all-gather on 8 H200, 361 of 450 GB/s"
_NCCL_A100 = f"{_ML_ENGINEERING}: all-reduce on 8 A100, 235 of 300 GB/s"
_ADAPTERS = f"{_ML_ENGINEERING}: all-reduce of 4 GiB on 4 nodes, 36.5 of 50 GB/s for each GPU"
_OVERLAP = "Characterizing Compute-Communication Overlap, arXiv 2507.03114: on average 18.9 %"
_LATENCY = f"{_ML_ENGINEERING}: all-reduce of 1 MiB on a node, 46 microseconds"
_COPY = "github.com/aigatech/vpbenchmarking: copies on an H100, 2,903 of 3,350 GB/s"
_TPU_ATTENTION = "no measurement found; assumed as for the H100, for heads as wide as the matrix unit (128; v6e: 256)"
_IN_STEP = (
    "this package, benchmarks/results/1xH200/mfu.md: GPT-2 with determinism: fast on one H200 takes 299 ms, and 276 ms "
    "by XLA's count of FLOPs and bytes at the speeds of a product and a copy on the same GPU"
)
_GPU = (("in_step", f"{_IN_STEP}; other GPUs assumed alike"), ("overlap_slowdown", _OVERLAP), ("latency", _LATENCY))

_H100 = Efficiency(
    products=0.728,
    attention_forward=0.524,
    attention_backward=0.455,
    memory=0.867,
    links=0.80,
    in_step=0.92,
    adapters=0.73,
    overlap_slowdown=0.189,
    latency=46e-6,
    narrow_heads=0.5,
    sources=(
        ("products", f"{_SEMI_ANALYSIS}: 720 of 989.5 TFLOP/s for shapes of Llama 70B; the best shape reaches 0.80"),
        ("attention_forward", f"{_FLASH_3}: cuDNN, causal, 4k positions, heads of 128: 518 TFLOP/s"),
        ("attention_backward", f"{_FLASH_3}: cuDNN, 499 TFLOP/s without a mask, times 0.90 for a causal mask, as for "
                               f"FlashAttention-2"),
        ("narrow_heads", f"{_FLASH_3}: heads of 64 reach 0.67 of heads of 128 in the forward pass"),
        ("memory", _COPY),
        ("links", _NCCL),
        ("adapters", _ADAPTERS),
        *_GPU,
    ),
)  # fmt: skip
_A100 = Efficiency(
    products=0.788,
    attention_forward=0.554,
    attention_backward=0.554,
    memory=0.867,
    links=0.78,
    in_step=0.92,
    adapters=0.73,
    overlap_slowdown=0.189,
    latency=46e-6,
    narrow_heads=0.15,
    sources=(
        ("products", f"{_MAXIMUM}, 271 of 312 TFLOP/s, {_SHAPES}"),
        ("attention_forward", f"{_FLASH_2}: forward and backward, causal, 4k positions, heads of 128: 173 TFLOP/s"),
        ("attention_backward", "the same figure, of both passes"),
        ("narrow_heads", f"{_FLASH_2}: heads of 64 reach 0.90 of heads of 128"),
        ("memory", "no measurement found; assumed as for the H100"),
        ("links", _NCCL_A100),
        ("adapters", "no measurement found; assumed as for other GPUs: " + _ADAPTERS),
        *_GPU,
    ),
)


def _like_h100(products: float, source: str, *, links: float = 0.80, links_source: str = _NCCL) -> Efficiency:
    """Returns the efficiency of a newer GPU, of which only products and links were measured."""
    measured = {"products": source, "links": links_source}
    as_h100 = "no measurement found; assumed as for the H100"
    sources = tuple((name, measured.get(name, text if name in dict(_GPU) else as_h100)) for name, text in _H100.sources)
    return Efficiency(**{**vars(_H100), "products": products, "links": links, "sources": sources})


def _tpu(products: float, source: str, *, links: float, head_width: int = 128) -> Efficiency:
    """Returns the efficiency of a TPU."""
    return Efficiency(
        products=products,
        attention_forward=0.524,
        attention_backward=0.455,
        memory=0.83,
        links=links,
        in_step=0.92,
        overlap_slowdown=0.189,
        latency=5e-6,
        head_width=head_width,
        sources=(
            ("products", source),
            ("attention_forward", _TPU_ATTENTION),
            ("attention_backward", _TPU_ATTENTION),
            ("narrow_heads", "part of the matrix unit that a head fills"),
            ("memory", f"{_RECIPES}: copies on a v6e, 1,360 of 1,640 GB/s; other TPUs assumed alike"),
            ("links", f"{_SCALING_BOOK}, table of links: bytes per second of a link, of the datasheet's"),
            ("in_step", f"no measurement found; assumed as for GPUs: {_IN_STEP}"),
            ("overlap_slowdown", f"no measurement found; assumed as for GPUs: {_OVERLAP}"),
            ("latency", f"{_SCALING_BOOK}: 1 microsecond for each hop; assumed 5 hops"),
        ),
    )


_OLDER_TPU = "no measurement found; assumed as for the TPU v6e"

_MEASURED: dict[str, Efficiency] = {
    "NVIDIA H100 80GB HBM3": _H100,
    "NVIDIA H200": _like_h100(0.728, f"{_SEMI_ANALYSIS}: 720 of 989.5 TFLOP/s"),
    "NVIDIA B200": _like_h100(
        0.706,
        f"{_MAXIMUM}, 1,745 of 2,250 TFLOP/s, {_SHAPES}",
        links=0.82,
        links_source=f"{_ML_ENGINEERING}: all-reduce on 8 B200, 741 of 900 GB/s",
    ),
    "NVIDIA GB200": _like_h100(
        0.663,
        f"{_MAXIMUM}, 1,822 of 2,500 TFLOP/s, {_SHAPES}",
        links=0.82,
        links_source="no measurement found; assumed as for the B200",
    ),
    "NVIDIA A100-SXM4-80GB": _A100,
    "TPU v4": _tpu(0.90, _OLDER_TPU, links=0.90),
    "TPU v5 lite": _tpu(0.90, _OLDER_TPU, links=0.90),
    "TPU v5": _tpu(0.90, _OLDER_TPU, links=0.90),
    "TPU v6 lite": _tpu(
        0.90, f"{_RECIPES}: product of 8192 squared on a v6e, 827 of 918 TFLOP/s", links=0.80, head_width=256
    ),
}

_SIMILAR = {
    "NVIDIA H200 NVL": "NVIDIA H100 80GB HBM3",
    "NVIDIA H100 NVL": "NVIDIA H100 80GB HBM3",
    "NVIDIA H100 PCIe": "NVIDIA H100 80GB HBM3",
}
