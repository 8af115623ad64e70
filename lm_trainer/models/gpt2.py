"""GPT-2 (Radford et al. 2019): learned positions, LayerNorm before each sublayer, tied head."""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from lm_trainer.models.hf_table import HfFamily, HfField, HfTensor
from lm_trainer.models.learned_positions import LearnedPositionsConfig
from lm_trainer.nn.spec import DecoderSpec


def _from_hf(hf: Mapping[str, Any]) -> dict[str, Any]:
    inner, width = hf.get("n_inner"), hf.get("n_embd", 768)
    if inner is not None and inner % width:
        raise ValueError(f"n_inner={inner} is not supported, only multiples of n_embd={width} are")
    # transformers writes null if the MLP is four times as wide as the model.
    return {"mlp_scale": 4 if inner is None else inner // width}


def _to_hf(config: "Gpt2Config") -> dict[str, Any]:
    if not config.use_bias:
        raise ValueError("its linear layers and LayerNorm have biases, but the model was made with use_bias: false")
    inner = None if config.mlp_scale == 4 else config.mlp_scale * config.hidden_dim
    # The context under its older name, which llama.cpp reads.
    return {"n_inner": inner, "n_ctx": config.seq_len}


_HF = HfFamily(
    model_type="gpt2",
    reference="openai-community/gpt2",
    architecture="GPT2LMHeadModel",
    fields=(
        HfField("n_positions", "seq_len", 1024, old_names=("n_ctx",)),
        HfField("n_embd", "hidden_dim", 768),
        HfField("n_layer", "num_layers", 12),
        HfField("n_head", "num_heads", 12),
        HfField("initializer_range", "initializer_range", 0.02),
        HfField("embd_pdrop", "embed_pdrop", 0.1),
        HfField("resid_pdrop", "resid_pdrop", 0.1),
        HfField("attn_pdrop", "attn_pdrop", 0.1),
        HfField("layer_norm_epsilon", "layer_norm_epsilon", 1e-5),
        HfField(
            "activation_function",
            "activation_function",
            "gelu_new",
            read={"swish": "silu", "gelu_pytorch_tanh": "gelu_new", "gelu_fast": "gelu_new"},
        ),
        HfField("scale_attn_by_inverse_layer_idx", "scale_attn_by_inverse_layer_idx", False),
        HfField("reorder_and_upcast_attn", "upcast_attn", False),
    ),
    tensors=(
        HfTensor("wte.weight", ("embed.tokens",)),
        HfTensor("wpe.weight", ("embed.positions",)),
        HfTensor("ln_f.weight", ("final_norm.scale",)),
        HfTensor("ln_f.bias", ("final_norm.bias",)),
        HfTensor("h.{}.ln_1.weight", ("blocks.{}.attention_pre_norm.scale",)),
        HfTensor("h.{}.ln_1.bias", ("blocks.{}.attention_pre_norm.bias",)),
        HfTensor("h.{}.ln_2.weight", ("blocks.{}.mlp_pre_norm.scale",)),
        HfTensor("h.{}.ln_2.bias", ("blocks.{}.mlp_pre_norm.bias",)),
        # These layers are `Conv1D` in transformers. They have inputs before outputs, as here, so they are not
        # transposed. `c_attn` concatenates queries, keys and values.
        *(
            HfTensor(f"h.{{}}.{hf}.{kind}", tuple(f"blocks.{{}}.{name}.{kind}" for name in params))
            for hf, params in {
                "attn.c_attn": ("attention.q", "attention.k", "attention.v"),
                "attn.c_proj": ("attention.out",),
                "mlp.c_fc": ("mlp.up",),
                "mlp.c_proj": ("mlp.down",),
            }.items()
            for kind in ("weight", "bias")
        ),
    ),
    prefix="transformer.",
    fixed={"scale_attn_weights": True, "add_cross_attention": False, "tie_word_embeddings": True},
    computed_from_hf=_from_hf,
    computed_to_hf=_to_hf,
    read_only=("n_special", "predict_special_tokens"),
    # Causal masks, which earlier versions of transformers saved with the weights.
    ignored=r"h\.\d+\.attn\.(bias|masked_bias)",
    tied={"lm_head.weight": "wte.weight"},
)


class Gpt2Config(LearnedPositionsConfig):
    """The GPT-2 family; the defaults are GPT-2 small (124M parameters)."""

    hf: ClassVar[HfFamily] = _HF

    type: Literal["gpt2"] = "gpt2"
    """Name of the model family."""

    def spec(self, vocab_size: int) -> DecoderSpec:
        return self.backbone_spec(vocab_size)
