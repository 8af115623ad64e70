"""Mamba 2 (Dao and Gu 2024, arXiv 2405.21060): selective state-space models as the only sublayers."""

import math
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from lm_trainer.models.base import DecoderConfig
from lm_trainer.models.hf_table import HfFamily, HfField, HfTensor, linear_tensors
from lm_trainer.nn.mixer_spec import StateSpaceSpec
from lm_trainer.nn.spec import BlockSpec, DecoderSpec, HeadSpec, NormSpec

_MIXER, _ATTENTION = "layers.{}.mixer", "blocks.{}.attention"
_CONVOLVED = ("x", "b", "c")
_INFINITY = {"__float__": "Infinity"}
"""Infinity in the files of transformers 5."""


def state_space_tensors(hf: str) -> tuple[HfTensor, ...]:
    """Lists the tensors of a mixer, which is named `hf` in the file. It joins all maps of the input."""
    convolutions = tuple(f"{_ATTENTION}.{name}_conv" for name in _CONVOLVED)
    return (
        *linear_tensors(f"{hf}.in_proj", *(f"{_ATTENTION}.{name}" for name in ("gate", *_CONVOLVED, "dt"))),
        HfTensor(f"{hf}.conv1d.weight", tuple(f"{name}.weight" for name in convolutions), reversed=True),
        HfTensor(f"{hf}.conv1d.bias", tuple(f"{name}.bias" for name in convolutions)),
        HfTensor(f"{hf}.dt_bias", (f"{_ATTENTION}.dt_bias",)),
        HfTensor(f"{hf}.A_log", (f"{_ATTENTION}.a_log",)),
        HfTensor(f"{hf}.D", (f"{_ATTENTION}.d",)),
        HfTensor(f"{hf}.norm.weight", (f"{_ATTENTION}.norm.scale",)),
        *linear_tensors(f"{hf}.out_proj", f"{_ATTENTION}.readout"),
    )


def time_step_limit_from_hf(hf: Mapping[str, Any]) -> tuple[float, float | None]:
    """Reads the bounds of the time step; no upper bound is None here and infinity in a file."""
    low, high = list[Any](hf.get("time_step_limit") or (0.0, _INFINITY))
    # transformers 4 writes a number that JSON does not have.
    return float(low), None if high in (_INFINITY, math.inf) else float(high)


def time_step_limit_to_hf(limit: tuple[float, float | None]) -> dict[str, Any]:
    """The inverse of `time_step_limit_from_hf`; writes nothing for the default."""
    low, high = limit
    return {} if (low, high) == (0.0, None) else {"time_step_limit": [low, _INFINITY if high is None else high]}


def _from_hf(hf: Mapping[str, Any]) -> dict[str, Any]:
    hidden, heads = hf.get("hidden_size") or 4096, hf.get("num_heads") or 128
    size, expand = hf.get("head_dim") or 64, hf.get("expand") or 2
    if heads * size != expand * hidden:
        raise ValueError(f"num_heads={heads} of head_dim={size} are not expand={expand} times hidden_size={hidden}")
    return {"time_step_limit": time_step_limit_from_hf(hf)}


def _to_hf(config: "Mamba2Config") -> dict[str, Any]:
    width = config.num_heads * config.head_dim
    if width % config.hidden_dim:
        raise ValueError(f"num_heads * head_dim = {width} is not a multiple of hidden_dim={config.hidden_dim}")
    return {"expand": width // config.hidden_dim, **time_step_limit_to_hf(config.time_step_limit)}


class Mamba2Config(DecoderConfig):
    """The Mamba 2 family; the defaults are Mamba 2 2.7B."""

    hf: ClassVar[HfFamily] = HfFamily(
        model_type="mamba2",
        reference="state-spaces/mamba2-2.7b",
        architecture="Mamba2ForCausalLM",
        fields=(
            HfField("hidden_size", "hidden_dim", 4096),
            HfField("num_hidden_layers", "num_layers", 64),
            HfField("num_heads", "num_heads", 128),
            HfField("head_dim", "head_dim", 64),
            HfField("state_size", "state_dim", 128),
            HfField("n_groups", "num_groups", 8),
            HfField("conv_kernel", "conv_width", 4),
            HfField("use_conv_bias", "use_conv_bias", True),
            HfField("use_bias", "use_bias", False),
            HfField("chunk_size", "chunk_size", 256),
            HfField("layer_norm_epsilon", "layer_norm_epsilon", 1e-5),
            HfField("initializer_range", "initializer_range", 0.1),
            HfField("tie_word_embeddings", "tie_word_embeddings", False),
            HfField("time_step_min", "time_step_min", 0.001),
            HfField("time_step_max", "time_step_max", 0.1),
            HfField("time_step_floor", "time_step_floor", 1e-4),
        ),
        tensors=(
            HfTensor("embeddings.weight", ("embed.tokens",)),
            HfTensor("lm_head.weight", ("head",)),
            HfTensor("norm_f.weight", ("final_norm.scale",)),
            HfTensor("layers.{}.norm.weight", ("blocks.{}.attention_pre_norm.scale",)),
            *state_space_tensors(_MIXER),
        ),
        prefix="backbone.",
        unprefixed=("lm_head.weight",),
        fixed={"hidden_act": "silu"},
        inert={"residual_in_fp32": True, "rescale_prenorm_residual": False, "time_step_rank": "auto"},
        read_only=("time_step_limit", "rms_norm", "norm_before_gate"),
        computed_from_hf=_from_hf,
        computed_to_hf=_to_hf,
        tied={"lm_head.weight": "embeddings.weight"},
    )

    newer_fields: ClassVar[frozenset[str]] = frozenset()
    # There is no attention, and so nothing to set about it.
    attn_backend: ClassVar[None] = None  # pyright: ignore[reportIncompatibleVariableOverride]
    flash_attention_block_size: ClassVar[None] = None  # pyright: ignore[reportIncompatibleVariableOverride]
    attn_max_documents: ClassVar[None] = None  # pyright: ignore[reportIncompatibleVariableOverride]
    upcast_attn: ClassVar[bool] = False  # pyright: ignore[reportIncompatibleVariableOverride]

    type: Literal["mamba2"] = "mamba2"
    """Name of the model family."""
    seq_len: int = Field(default=2048, gt=0)
    """Maximum sequence length in tokens of training and generation. The model has no positions, so it affects no
    result."""
    num_layers: int = Field(default=64, gt=0)
    """Number of blocks."""
    hidden_dim: int = Field(default=2560, gt=0)
    """Width of the residual stream."""
    num_heads: int = Field(default=80, gt=0)
    """Number of heads."""
    head_dim: int = Field(default=64, gt=0)
    """Number of dimensions per head."""
    state_dim: int = Field(default=128, gt=0)
    """Size of the state of each dimension of a head."""
    num_groups: int = Field(default=1, gt=0)
    """Number of groups of heads, which share the vectors that write to the state and read from it."""
    conv_width: int = Field(default=4, gt=1)
    """Number of positions that the convolution reads."""
    use_conv_bias: bool = True
    """Adds a bias to the convolution."""
    use_bias: bool = False
    """Adds biases to the linear maps of input and result."""
    chunk_size: int = Field(default=256, gt=0)
    """Number of positions that are computed at once. Results are the same up to rounding."""
    time_step_min: float = Field(default=0.001, gt=0)
    """Lowest initial time step."""
    time_step_max: float = Field(default=0.1, gt=0)
    """Highest initial time step."""
    time_step_floor: float = Field(default=1e-4, gt=0)
    """Lower bound of initial time steps."""
    time_step_limit: tuple[float, float | None] = (0.0, None)
    """Bounds of the time step; no upper bound is `null`."""
    initializer_range: float = Field(default=0.1, ge=0)
    """Standard deviation of the initial weights. Weights that write to the residual stream are initialised with this
    divided by sqrt(num_layers)."""
    layer_norm_epsilon: float = Field(default=1e-5, gt=0)
    """Epsilon that is added to the mean square in the norms."""
    tie_word_embeddings: bool = True
    """Ties the weights of the output layer to the token embedding."""

    @model_validator(mode="after")
    def _check_groups(self) -> "Mamba2Config":
        if self.num_heads % self.num_groups:
            raise ValueError(f"num_heads={self.num_heads} is not a multiple of num_groups={self.num_groups}")
        return self

    def spec(self, vocab_size: int) -> DecoderSpec:
        norm = NormSpec(kind="rms", eps=self.layer_norm_epsilon, bias=False)
        low, high = self.time_step_limit
        mixer = StateSpaceSpec(
            num_heads=self.num_heads,
            head_dim=self.head_dim,
            state_dim=self.state_dim,
            norm=norm,
            num_groups=self.num_groups,
            norm_groups=self.num_groups,
            conv_width=self.conv_width,
            conv_bias=self.use_conv_bias,
            bias=self.use_bias,
            time_step_limit=(low, math.inf if high is None else high),
            time_step_range=(self.time_step_min, self.time_step_max, self.time_step_floor),
            chunk_size=self.chunk_size,
        )
        return DecoderSpec(
            vocab_size=vocab_size,
            hidden_dim=self.hidden_dim,
            num_positions=self.seq_len,
            blocks=(BlockSpec(mixer, None, pre_norm=norm),) * self.num_layers,
            final_norm=norm,
            head=HeadSpec(tied=self.tie_word_embeddings),
            init_std=self.initializer_range,
            scan=self.scan,
            remat=self.remat,
            remat_groups=self.remat_groups,
        )
