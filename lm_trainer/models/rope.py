"""The `rope` block of rotary models, and its form in Hugging Face's format."""

import math
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from lm_trainer.core.config import Config
from lm_trainer.nn.rope_spec import LinearScaling, LongRopeScaling, RopeSpec, WavelengthScaling, YarnScaling
from lm_trainer.nn.spec import NormSpec, QkNormSpec

_Scaling = LinearScaling | WavelengthScaling | YarnScaling | LongRopeScaling | None


class RopeConfig(Config):
    """Rotary position embedding (RoPE)."""

    theta: float = Field(default=10_000.0, gt=1)
    """Base of the wavelengths. The longest wavelength is about 2 pi theta positions."""

    @abstractmethod
    def scaling(self, _seq_len: int) -> _Scaling:
        """Returns the scaling of frequencies in a model with this maximum sequence length; None: no scaling."""

    def check_head_size(self, size: int) -> None:
        """Raises ValueError if `size` dimensions of a head cannot be rotated with these settings."""

    def describe_difference_from_hf(self, _seq_len: int) -> str | None:
        """Describes the sequences for which transformers computes a different result; None if there are none."""
        return None

    def spec(self, seq_len: int, fraction: float = 1.0, *, interleaved: bool = False) -> RopeSpec:
        """Builds the `RopeSpec` of an attention layer that rotates `fraction` of each head's dimensions."""
        return RopeSpec(self.theta, fraction, self.scaling(seq_len), interleaved)

    @abstractmethod
    def to_hf(self) -> dict[str, Any]:
        """Returns the block as Hugging Face writes it, without theta."""


class DefaultRope(RopeConfig):
    """Rotary positions, interpolated if `factor` is not 1."""

    type: Literal["default", "linear"] = "default"
    """Kind of scaling. `linear` is another name for `default` with a factor."""
    factor: float = Field(default=1.0, gt=0)
    """Divides all positions, so that sequences longer by this factor span the same positions as in pretraining."""

    def scaling(self, _seq_len: int) -> _Scaling:
        return None if self.factor == 1.0 else LinearScaling(self.factor)

    def to_hf(self) -> dict[str, Any]:
        return {"rope_type": "default"} if self.factor == 1.0 else {"rope_type": "linear", "factor": self.factor}


class Llama3Rope(RopeConfig):
    """Scaling of Llama 3.1: long wavelengths are stretched, and short wavelengths are unchanged."""

    type: Literal["llama3"] = "llama3"
    """Kind of scaling."""
    theta: float = Field(default=500_000.0, gt=1)
    """Base of the wavelengths."""
    factor: float = Field(default=8.0, gt=0)
    """Factor by which long wavelengths are stretched."""
    low_freq_factor: float = Field(default=1.0, gt=0)
    """Wavelengths above original_max_position_embeddings / low_freq_factor are stretched in full."""
    high_freq_factor: float = Field(default=4.0, gt=0)
    """Wavelengths below original_max_position_embeddings / high_freq_factor are unchanged."""
    original_max_position_embeddings: int = Field(default=8192, gt=0)
    """Maximum sequence length in pretraining."""

    @model_validator(mode="after")
    def _check_order(self) -> "Llama3Rope":
        if self.low_freq_factor >= self.high_freq_factor:
            raise ValueError(
                f"low_freq_factor={self.low_freq_factor} must be below high_freq_factor={self.high_freq_factor}"
            )
        return self

    def scaling(self, _seq_len: int) -> _Scaling:
        return WavelengthScaling(
            self.factor, self.low_freq_factor, self.high_freq_factor, self.original_max_position_embeddings
        )

    def to_hf(self) -> dict[str, Any]:
        return {"rope_type": "llama3", **self.model_dump(exclude={"type", "theta"})}


class YarnRope(RopeConfig):
    """YaRN (Peng et al. 2023)."""

    type: Literal["yarn"] = "yarn"
    """Kind of scaling."""
    factor: float = Field(default=1.0, gt=0)
    """Ratio of the new sequence length to the pretraining length."""
    original_max_position_embeddings: int = Field(default=2048, gt=0)
    """Maximum sequence length in pretraining."""
    beta_fast: float = Field(default=32.0, gt=0)
    """Pairs of dimensions with more rotations than this over the original length are unchanged."""
    beta_slow: float = Field(default=1.0, gt=0)
    """Pairs of dimensions with fewer rotations than this over the original length are stretched in full."""
    mscale: float = Field(default=1.0, ge=0)
    """Cosines and sines are multiplied by 0.1 * mscale * log(factor) + 1, unless `attention_factor` is set."""
    attention_factor: float | None = Field(default=None, gt=0)
    """Factor that multiplies cosines and sines. Unset: it follows from `mscale`."""
    truncate: bool = True
    """Rounds the ends of the ramp between unchanged and stretched pairs to whole dimensions."""

    @model_validator(mode="after")
    def _check_one_magnitude(self) -> "YarnRope":
        if self.attention_factor is not None and self.mscale != 1.0:
            raise ValueError("attention_factor and mscale set the same thing; remove one of them")
        return self

    def scaling(self, _seq_len: int) -> _Scaling:
        # The softmax temperature, which is applied by scaling the rotations of queries and keys (Peng et al. 2023,
        # section 3.4).
        magnitude = 1.0 if self.factor <= 1.0 else 0.1 * self.mscale * math.log(self.factor) + 1.0
        return YarnScaling(
            self.factor,
            self.original_max_position_embeddings,
            self.beta_fast,
            self.beta_slow,
            magnitude if self.attention_factor is None else self.attention_factor,
            self.truncate,
        )

    def to_hf(self) -> dict[str, Any]:
        block = self.model_dump(include={"factor", "original_max_position_embeddings"})
        block |= self.model_dump(include={"beta_fast", "beta_slow"}, exclude_defaults=True)
        scaling = self.scaling(0)
        # The resulting factor is written, because in a file `mscale` has an effect only together with `mscale_all_dim`.
        if isinstance(scaling, YarnScaling) and (self.attention_factor is not None or self.mscale != 1.0):
            block["attention_factor"] = scaling.magnitude
        return {"rope_type": "yarn", **block, **({} if self.truncate else {"truncate": False})}


class LongRope(RopeConfig):
    """LongRoPE (Ding et al. 2024), as in Phi-3 with 128k tokens: each pair of dimensions has its own factor.

    transformers uses `long_factor` if the longest sequence of a batch is longer than
    `original_max_position_embeddings`. Here the model's `seq_len` decides. So the result for a document does not depend
    on other documents, or on how much of the document has been read.
    """

    type: Literal["longrope"] = "longrope"
    """Kind of scaling."""
    short_factor: tuple[Annotated[float, Field(gt=0)], ...]
    """One factor per pair of dimensions, for models of at most original_max_position_embeddings tokens."""
    long_factor: tuple[Annotated[float, Field(gt=0)], ...]
    """One factor per pair of dimensions, for models of longer sequences."""
    factor: float = Field(gt=0)
    """Ratio of the new sequence length to the pretraining length."""
    original_max_position_embeddings: int = Field(default=4096, gt=1)
    """Maximum sequence length in pretraining."""
    attention_factor: float | None = Field(default=None, gt=0)
    """Factor for cosines and sines. Unset: sqrt(1 + log(factor) / log(original_max_position_embeddings)), or 1."""

    def check_head_size(self, size: int) -> None:
        for name in ("short_factor", "long_factor"):
            if (count := len(getattr(self, name))) != size // 2:
                raise ValueError(f"rope.{name} has {count} numbers, but {size // 2} pairs of dimensions are rotated")

    def scaling(self, _seq_len: int) -> _Scaling:
        original, factor = self.original_max_position_embeddings, max(self.factor, 1.0)
        magnitude = math.sqrt(1.0 + math.log(factor) / math.log(original))
        factors = self.long_factor if _seq_len > original else self.short_factor
        return LongRopeScaling(factors, magnitude if self.attention_factor is None else self.attention_factor)

    def describe_difference_from_hf(self, _seq_len: int) -> str | None:
        original = self.original_max_position_embeddings
        if _seq_len <= original or self.short_factor == self.long_factor:
            return None
        return (
            f"seq_len is {_seq_len:,}, so rotary positions are scaled by long_factor in sequences of every length; "
            f"transformers takes short_factor up to {original:,} tokens, as a run with model.seq_len: {original} does"
        )

    def to_hf(self) -> dict[str, Any]:
        block = self.model_dump(exclude={"type", "theta"}, exclude_none=True)
        return {"rope_type": "longrope", **{k: list(v) if isinstance(v, tuple) else v for k, v in block.items()}}


AnyRope = Annotated[DefaultRope | Llama3Rope | YarnRope | LongRope, Field(discriminator="type")]
"""Type of the `rope:` section; `type` selects the kind of scaling."""

_KINDS: Mapping[str, type[RopeConfig]] = {
    "default": DefaultRope,
    "linear": DefaultRope,
    "llama3": Llama3Rope,
    "yarn": YarnRope,
    "longrope": LongRope,
    # The first name of LongRoPE, which early files of Phi-3 contain.
    "su": LongRope,
}
ORIGINAL_LENGTH = "original_max_position_embeddings"
"""Key of the maximum sequence length before rotary positions were scaled, inside or outside the block."""
_WITH_ORIGINAL = {"llama3", "yarn", "longrope", "su"}
_REFUSED = {
    "dynamic": "its frequencies change with the length of what is read",
    "proportional": "only families that are not known here have it",
}
# These are not fields of a rope. `rope_from_hf`, `parse_rope` and `fraction_from_hf` read them, except for the order of
# the three numbers that give a position in an image or a video: in text all three are equal.
_IGNORED = {"rope_theta", "rope_type", "type", "partial_rotary_factor", "mrope_section", "mrope_interleaved"}


def rope_from_hf(hf: Mapping[str, Any], default_theta: float = 10_000.0, *, layers: str | None = None) -> RopeConfig:
    """Reads the rope of a config.json written by transformers 4 (`rope_theta`, `rope_scaling`) or 5
    (`rope_parameters`).

    Args:
        hf: the content of config.json.
        default_theta: theta if the file has none.
        layers: kind of layers whose rope is returned, if the file has one rope per kind of layer.

    Raises:
        ValueError: for an unsupported kind of scaling.
    """
    block = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    if layers is not None and layers in block:
        block = _fill_in_lengths(block[layers], {**hf, ORIGINAL_LENGTH: None})
    else:
        block = _fill_in_lengths(block, hf)
    theta = block.get("rope_theta") or hf.get("rope_theta") or default_theta
    return parse_rope(block, float(theta))


def _fill_in_lengths(block: Mapping[str, Any], hf: Mapping[str, Any]) -> dict[str, Any]:
    """Adds lengths that are outside the block or implied, by the rules of transformers."""
    kind, longest = _rope_type(block), hf.get("max_position_embeddings")
    if kind not in _WITH_ORIGINAL:
        return dict(block)
    # The length outside the block takes precedence over the length inside it.
    original = hf.get(ORIGINAL_LENGTH) or block.get(ORIGINAL_LENGTH) or longest
    completed = {**block, ORIGINAL_LENGTH: original}
    if _KINDS[kind] is LongRope:
        completed["factor"] = block.get("factor") or (longest / original if longest and original else 1.0)
    return completed


def _rope_type(block: Mapping[str, Any]) -> str:
    return str(block.get("rope_type") or block.get("type") or "default")


def parse_rope(block: Mapping[str, Any], theta: float) -> RopeConfig:
    """Reads one rope from its block.

    Raises:
        ValueError: for an unsupported kind of scaling.
    """
    kind = _rope_type(block)
    rope_class = _KINDS.get(kind)
    if rope_class is None:
        reason = f" ({_REFUSED[kind]})" if kind in _REFUSED else ""
        raise ValueError(f"rope_type={kind!r} is not supported{reason}; supported: {', '.join(_KINDS)}")
    fields = {key: value for key, value in block.items() if key not in _IGNORED and value is not None}
    if rope_class is YarnRope:
        fields = _yarn_fields(fields)
    elif kind == "default":
        # If no kind of scaling is given, transformers scales no positions and ignores the factor.
        fields.pop("factor", None)
    unknown = sorted(fields.keys() - rope_class.model_fields.keys())
    if unknown:
        raise ValueError(f"{', '.join(unknown)} of rope_type={kind!r} has no counterpart here")
    return rope_class(theta=theta, **fields)


def _yarn_fields(fields: dict[str, Any]) -> dict[str, Any]:
    """Handles `mscale`, which has an effect only with `mscale_all_dim`: their ratio gives the magnitude."""
    mscale, mscale_all_dim = fields.pop("mscale", None), fields.pop("mscale_all_dim", None)
    if fields.get("attention_factor") is None and mscale and mscale_all_dim and fields["factor"] > 1:
        log_factor = math.log(fields["factor"])
        fields["attention_factor"] = (0.1 * mscale * log_factor + 1.0) / (0.1 * mscale_all_dim * log_factor + 1.0)
    return fields


def rope_to_hf(rope: RopeConfig) -> dict[str, Any]:
    """Returns the fields of config.json, for transformers 4 and 5."""
    block = rope.to_hf()
    scaling = None if block == {"rope_type": "default"} else block
    return {"rope_parameters": {"rope_theta": rope.theta, **block}, "rope_theta": rope.theta, "rope_scaling": scaling}


def local_theta_from_hf(hf: Mapping[str, Any], default: float) -> float:
    """Returns theta of the layers with a window, from a file that has one rope per kind of layer.

    Raises:
        ValueError: if their positions are scaled.
    """
    block = (hf.get("rope_parameters") or {}).get("sliding_attention")
    if block is None:
        return float(hf.get("rope_local_base_freq") or default)
    if parse_rope(block, 10_000.0).scaling(0) is not None:
        raise ValueError(f"rope_type={block['rope_type']!r} of layers with a window is not supported, only default is")
    return float(block.get("rope_theta") or default)


def ropes_to_hf(rope: RopeConfig, local_theta: float) -> dict[str, Any]:
    """Returns the fields of config.json for transformers 4 and 5, with a rope for each kind of attention."""
    shared = rope_to_hf(rope)
    local = {"rope_theta": local_theta, "rope_type": "default"}
    parameters = {"full_attention": shared["rope_parameters"], "sliding_attention": local}
    return {**shared, "rope_parameters": parameters, "rope_local_base_freq": local_theta}


def normalized_rotation(rope: RopeSpec, norm: NormSpec) -> tuple[RopeSpec, QkNormSpec]:
    """Returns a rotation, and a norm before it, that compute what `norm` without a gain computes after `rope`.

    The magnitude of a scaled rotation cancels, except that epsilon is added to squares that it multiplies.
    """
    if not isinstance(rope.scaling, YarnScaling | LongRopeScaling):
        return rope, QkNormSpec(norm)
    unscaled = replace(rope, scaling=replace(rope.scaling, magnitude=1.0))
    return unscaled, QkNormSpec(replace(norm, eps=norm.eps / rope.scaling.magnitude**2))


def fraction_from_hf(hf: Mapping[str, Any], default: float, older: str = "partial_rotary_factor") -> float:
    """Reads the fraction of each head's dimensions that is rotated. `older` is its key in earlier versions."""
    block = hf.get("rope_parameters") or {}
    value_in_block = block.get("partial_rotary_factor")
    return float(next(value for value in (value_in_block, hf.get(older), default) if value is not None))


def fraction_to_hf(fields: dict[str, Any], fraction: float, older: str = "partial_rotary_factor") -> dict[str, Any]:
    """Adds the rotated fraction to `fields`, the result of `rope_to_hf`."""
    parameters = {**fields["rope_parameters"], "partial_rotary_factor": fraction}
    return {**fields, "rope_parameters": parameters, older: fraction}
