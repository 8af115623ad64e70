"""Whisper (Radford et al. 2022): an encoder for log-mel spectrograms, and a decoder that generates the transcript."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from lm_trainer.models.base import ActivationName, DecoderConfig
from lm_trainer.models.hf_table import HfFamily, HfField, HfTensor, linear_tensors
from lm_trainer.nn.spec import (
    AttentionSpec,
    BlockSpec,
    DecoderSpec,
    EmbeddingSpec,
    EncoderSpec,
    MlpSpec,
    NormSpec,
    ScoreSpec,
)

if TYPE_CHECKING:
    from lm_trainer.nn.encoder_decoder import EncoderDecoder

_OLD_GENERATION = ("suppress_tokens", "begin_suppress_tokens", "forced_decoder_ids")
"""Generation settings that config.json may also contain."""


def _from_hf(hf: Mapping[str, Any]) -> dict[str, Any]:
    return {
        # The encoder downsamples two frames into one position.
        "num_frames": 2 * hf.get("max_source_positions", 1500),
        "generation_config": {key: hf[key] for key in _OLD_GENERATION if hf.get(key) is not None},
    }


def _to_hf(config: WhisperConfig) -> dict[str, Any]:
    generation = config.generation_config
    return {
        "max_source_positions": config.num_frames // 2,
        # Written even if unset, because the default applies only to the published vocabulary.
        **{key: generation.get(key) for key in _OLD_GENERATION[:2]},
        "is_encoder_decoder": True,
    }


def _norm_tensors(hf: str, param: str) -> tuple[HfTensor, HfTensor]:
    return HfTensor(f"{hf}.weight", (f"{param}.scale",)), HfTensor(f"{hf}.bias", (f"{param}.bias",))


def _attention_tensors(hf: str, param: str) -> tuple[HfTensor, ...]:
    names = {"q_proj": "q", "k_proj": "k", "v_proj": "v", "out_proj": "out"}
    return tuple(
        tensor for hf_name, name in names.items() for tensor in linear_tensors(f"{hf}.{hf_name}", f"{param}.{name}")
    )


def _layer_tensors(hf: str, param: str) -> tuple[HfTensor, ...]:
    return (
        *_attention_tensors(f"{hf}.self_attn", f"{param}.attention"),
        *_norm_tensors(f"{hf}.self_attn_layer_norm", f"{param}.attention_pre_norm"),
        *linear_tensors(f"{hf}.fc1", f"{param}.mlp.up"),
        *linear_tensors(f"{hf}.fc2", f"{param}.mlp.down"),
        *_norm_tensors(f"{hf}.final_layer_norm", f"{param}.mlp_pre_norm"),
    )


_HF = HfFamily(
    model_type="whisper",
    reference="openai/whisper-tiny",
    architecture="WhisperForConditionalGeneration",
    fields=(
        HfField("max_target_positions", "seq_len", 448),
        HfField("d_model", "hidden_dim", 384),
        HfField("decoder_layers", "num_layers", 4),
        HfField("decoder_attention_heads", "num_heads", 6),
        HfField("decoder_ffn_dim", "intermediate_dim", 1536),
        HfField("encoder_layers", "encoder_layers", 4),
        HfField("encoder_attention_heads", "encoder_heads", 6),
        HfField("encoder_ffn_dim", "encoder_intermediate_dim", 1536),
        HfField("num_mel_bins", "num_mels", 80),
        HfField("init_std", "initializer_range", 0.02),
        HfField("dropout", "resid_pdrop", 0.0),
        HfField("attention_dropout", "attn_pdrop", 0.0),
        HfField(
            "activation_function",
            "activation_function",
            "gelu",
            read={"swish": "silu", "gelu_pytorch_tanh": "gelu_new", "gelu_fast": "gelu_new"},
        ),
        HfField("decoder_start_token_id", "decoder_start_token_id", 50257),
        HfField("pad_token_id", "pad_token_id", 50256),
    ),
    tensors=(
        HfTensor("encoder.conv1.weight", ("encoder.conv1.weight",), reversed=True),
        HfTensor("encoder.conv1.bias", ("encoder.conv1.bias",)),
        HfTensor("encoder.conv2.weight", ("encoder.conv2.weight",), reversed=True),
        HfTensor("encoder.conv2.bias", ("encoder.conv2.bias",)),
        HfTensor("encoder.embed_positions.weight", ("encoder.positions",)),
        *_layer_tensors("encoder.layers.{}", "encoder.blocks.{}"),
        *_norm_tensors("encoder.layer_norm", "encoder.final_norm"),
        HfTensor("decoder.embed_tokens.weight", ("embed.tokens",)),
        HfTensor("decoder.embed_positions.weight", ("embed.positions",)),
        *_layer_tensors("decoder.layers.{}", "blocks.{}"),
        *_attention_tensors("decoder.layers.{}.encoder_attn", "blocks.{}.cross"),
        *_norm_tensors("decoder.layers.{}.encoder_attn_layer_norm", "blocks.{}.cross_pre_norm"),
        *_norm_tensors("decoder.layer_norm", "final_norm"),
    ),
    prefix="model.",
    fixed={"scale_embedding": False, "tie_word_embeddings": True},
    inert={
        "activation_dropout": 0.0,
        "encoder_layerdrop": 0.0,
        "decoder_layerdrop": 0.0,
        "apply_spec_augment": False,
    },
    computed_from_hf=_from_hf,
    computed_to_hf=_to_hf,
    read_only=("num_hidden_layers",),
    tied={"proj_out.weight": "decoder.embed_tokens.weight"},
)


class WhisperConfig(DecoderConfig):
    """The Whisper family of speech recognition models; the defaults are Whisper tiny (38M parameters)."""

    hf: ClassVar[HfFamily] = _HF
    frozen_params: ClassVar[frozenset[str]] = frozenset({"encoder.positions"})

    type: Literal["whisper"] = "whisper"
    """Name of the model family."""
    seq_len: int = Field(default=448, gt=0)
    """Maximum text length in tokens."""
    num_layers: int = Field(default=4, gt=0)
    """Number of blocks of the decoder."""
    hidden_dim: int = Field(default=384, ge=4, multiple_of=2)
    """Width of the residual streams; must be a multiple of num_heads and of encoder_heads."""
    num_heads: int = Field(default=6, gt=0)
    """Number of attention heads of the decoder, in self-attention and in cross-attention."""
    intermediate_dim: int = Field(default=1536, gt=0)
    """Width of the decoder's MLPs."""
    encoder_layers: int = Field(default=4, gt=0)
    """Number of blocks of the encoder."""
    encoder_heads: int = Field(default=6, gt=0)
    """Number of attention heads of the encoder."""
    encoder_intermediate_dim: int = Field(default=1536, gt=0)
    """Width of the encoder's MLPs."""
    num_mels: int = Field(default=80, gt=0)
    """Number of channels of the log-mel spectrogram."""
    num_frames: int = Field(default=3000, gt=0, multiple_of=2)
    """Number of frames per row; 3000 are 30 s at 100 frames per second. Shorter audio is padded with silence."""
    activation_function: ActivationName = "gelu"
    """Activation of the MLPs: gelu (exact), gelu_new (its tanh approximation), quick_gelu, relu, relu2 (its square),
    silu or tanh. The convolutions always use gelu."""
    initializer_range: float = Field(default=0.02, ge=0)
    """Standard deviation of the initial weights. Weights that write to a residual stream are initialised with this
    divided by sqrt(2 * layers of this stream)."""
    resid_pdrop: float = Field(default=0.0, ge=0, lt=1)
    """Dropout rate of the inputs of the first layers, and of the output of each sublayer before it is added to the
    residual stream."""
    attn_pdrop: float = Field(default=0.0, ge=0, lt=1)
    """Dropout rate of the attention probabilities."""
    decoder_start_token_id: int | None = Field(default=None, ge=0)
    """Token at the beginning of every text, for `transformers` and for transcription."""
    pad_token_id: int | None = Field(default=None, ge=0)
    """Padding token of texts in `transformers`."""
    generation_config: dict[str, Any] = Field(default_factory=dict)
    """Generation settings as in Hugging Face's `generation_config.json`: tokens to suppress, tokens of languages and
    tasks, timestamps. Import keeps them, export writes them, and transcription applies them."""

    @model_validator(mode="after")
    def _check_heads_divide(self) -> Self:
        for name in ("num_heads", "encoder_heads"):
            if self.hidden_dim % getattr(self, name):
                raise ValueError(f"hidden_dim={self.hidden_dim} is not a multiple of {name}={getattr(self, name)}")
        if self.attn_backend == "ring":
            raise ValueError("attn_backend: ring cannot attend to an encoder; remove it")
        return self

    def with_generation(self, raw: Mapping[str, Any]) -> Self:
        settings = {key: value for key, value in raw.items() if key != "transformers_version"}
        return self.model_copy(update={"generation_config": {**self.generation_config, **settings}})

    def generation_to_hf(self, plain: Mapping[str, Any]) -> Mapping[str, Any]:
        # Sampling settings are for free text generation, but transcription returns the most likely text.
        ids = {key: value for key, value in plain.items() if key.endswith("_token_id")}
        ids |= {"decoder_start_token_id": self.decoder_start_token_id, "pad_token_id": self.pad_token_id}
        return {**{key: value for key, value in ids.items() if value is not None}, **self.generation_config}

    def preprocessor_to_hf(self) -> dict[str, Any]:
        return {
            "feature_extractor_type": "WhisperFeatureExtractor",
            "feature_size": self.num_mels,
            "chunk_length": self.num_frames // 100,
            "sampling_rate": 16_000,
            "hop_length": 160,
            "n_fft": 400,
            "n_samples": 160 * self.num_frames,
            "nb_max_frames": self.num_frames,
            "padding_side": "right",
            "padding_value": 0.0,
            "return_attention_mask": False,
        }

    @property
    def features_shape(self) -> tuple[int, int]:
        return self.num_frames, self.num_mels

    @classmethod
    def module(cls) -> type[EncoderDecoder]:
        from lm_trainer.nn.encoder_decoder import EncoderDecoder

        return EncoderDecoder

    def spec(self, vocab_size: int) -> DecoderSpec:
        norm = NormSpec()
        encoder_block = BlockSpec(
            # No kernel supports attention without a mask.
            replace(self._attention_spec(self.encoder_heads), scores=self._unmasked_score_spec()),
            self._mlp_spec(self.encoder_intermediate_dim),
            pre_norm=norm,
            dropout=self.resid_pdrop,
        )
        block = BlockSpec(
            self._attention_spec(self.num_heads),
            self._mlp_spec(self.intermediate_dim),
            pre_norm=norm,
            dropout=self.resid_pdrop,
            cross=replace(self._attention_spec(self.num_heads), scores=self._unmasked_score_spec()),
        )
        return DecoderSpec(
            vocab_size=vocab_size,
            hidden_dim=self.hidden_dim,
            num_positions=self.seq_len,
            blocks=(block,) * self.num_layers,
            final_norm=norm,
            embedding=EmbeddingSpec(learned_positions=True, dropout=self.resid_pdrop),
            encoder=EncoderSpec(
                self.num_mels,
                self.num_frames // 2,
                (encoder_block,) * self.encoder_layers,
                final_norm=norm,
                dropout=self.resid_pdrop,
            ),
            init_std=self.initializer_range,
            scan=self.scan,
            remat=self.remat,
            remat_groups=self.remat_groups,
        )

    def _unmasked_score_spec(self) -> ScoreSpec:
        return replace(self.score_spec(dropout=self.attn_pdrop), backend="xla")

    def _attention_spec(self, heads: int) -> AttentionSpec:
        scores = self.score_spec(dropout=self.attn_pdrop)
        return AttentionSpec(heads, self.hidden_dim // heads, key_bias=False, scores=scores)

    def _mlp_spec(self, width: int) -> MlpSpec:
        return MlpSpec(width, activation=self.activation_function)
