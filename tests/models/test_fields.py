"""Settings of every family: each is noticed, and defaults are those of the models that they name."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx
from pydantic import ValidationError

from lm_trainer.core.docstrings import field_docs
from lm_trainer.models import (
    MODEL_CONFIGS,
    Cohere2Config,
    DecoderConfig,
    DeepseekV2Config,
    DeepseekV3Config,
    Gemma2Config,
    Gemma3Config,
    Gemma4Config,
    Glm4Config,
    GptNeoxConfig,
    GptOssConfig,
    Granite4Config,
    Llama4Config,
    LlamaConfig,
    Mamba2Config,
    MiniCpm3Config,
    MistralConfig,
    NanochatConfig,
    Olmo3Config,
    Phi3Config,
    Qwen2Config,
    Qwen3Config,
    Qwen35Config,
    Qwen35MoeConfig,
    SeedOssConfig,
    SmolLm3Config,
    StarCoder2Config,
)
from lm_trainer.models.rope import DefaultRope, Llama3Rope, LongRope, YarnRope
from lm_trainer.nn.rope_spec import LongRopeScaling, RopeSpec
from lm_trainer.nn.spec import QkNormSpec
from lm_trainer.profile.flops import flops_per_token, parameter_count
from tests.models.common import TINY, VOCAB, change

OTHER: dict[str, Any] = {
    "num_heads": 2,
    "num_kv_heads": 4,
    "head_dim": 20,
    "activation_function": "relu",
    "gradient_checkpointing": "dots",
    "attn_backend": "xla",
    "use_flash_attention": True,
    "flash_attention_block_size": 8,
    "attn_max_documents": 3,
    "scan_layers": True,
    "rope": {"type": "yarn", "theta": 77.0, "factor": 8.0},
    "partial_rotary_factor": 0.75,
    "rotary_pct": 0.5,
    "sliding_window": 7,
    "attn_logit_softcapping": 9.0,
    "final_logit_softcapping": 9.0,
    "clip_qkv": 9.0,
    "softmax_scale": 9.0,
    "time_step_limit": (0.1, 0.5),
    "q_lora_rank": 12,
    "attention_layers": (0,),
    "num_experts_per_tok": 1,
    "mlp_only_layers": (1,),
    "layers_without_rope": (0,),
    "moe_layers": (0,),
    "hidden_dim": 64,
    "expert_kernel": "dense",
    "n_group": 2,
    "topk_group": 1,
    "num_kv_shared_layers": 0,
    "sliding_window_pattern": 1,
}
"""A valid value that is not the tiny configuration's, where doubling or negating does not give one."""
NOT_IN_THE_SPEC = {"type", "cross_entropy_block_size", "reference_checkpoint"}
GEMMA4_26B = Gemma4Config(
    hidden_dim=2816, intermediate_dim=2112, num_layers=30, num_heads=16, num_kv_heads=8, num_global_kv_heads=2,
    n_routed_experts=128, num_experts_per_tok=8, moe_intermediate_dim=704,
)  # fmt: skip

_GEMMA4_SMALL: dict[str, Any] = {
    "seq_len": 131072, "num_heads": 8, "num_global_kv_heads": None, "attention_k_eq_v": False, "sliding_window": 512,
    "layer_embedding_dim": 256,
}  # fmt: skip
GEMMA4_E2B = Gemma4Config(
    **_GEMMA4_SMALL, hidden_dim=1536, intermediate_dim=6144, num_layers=35, num_kv_heads=1, sliding_window_pattern=5,
    num_kv_shared_layers=20, use_double_wide_mlp=True,
)  # fmt: skip
GEMMA4_E4B = Gemma4Config(
    **_GEMMA4_SMALL, hidden_dim=2560, intermediate_dim=10240, num_layers=42, num_kv_heads=2, num_kv_shared_layers=18,
)  # fmt: skip


def another(name: str, value: Any) -> Any:
    if name in OTHER:
        return OTHER[name]
    if name == "lbl_over":
        return "batch" if value == "row" else "row"
    if isinstance(value, bool):
        return not value
    return value * 2 if value else 0.25


@pytest.mark.parametrize("config", TINY.values(), ids=TINY)
def test_every_field_matters(config):
    spec = config.spec(VOCAB)
    for name in type(config).model_fields.keys() - NOT_IN_THE_SPEC:
        fields = {name: another(name, getattr(config, name))}
        if name == "use_sliding_window":
            fields["sliding_window"] = None
        assert change(config, **fields).spec(VOCAB) != spec, name


@pytest.mark.parametrize("config_class", MODEL_CONFIGS, ids=lambda c: c.__name__)
def test_every_field_is_described(config_class):
    assert not config_class.model_fields.keys() - field_docs(config_class).keys()


def test_defaults_are_llama_2_7b():
    config = LlamaConfig()
    assert parameter_count(config.spec(32000)) == 6_738_415_616
    assert config.scan
    assert config.remat == "full"


@pytest.mark.parametrize(
    ("config", "vocab_size", "parameters"),
    [
        (MistralConfig(), 32000, 7_241_732_096),
        (
            LlamaConfig(intermediate_dim=14336, num_kv_heads=8, seq_len=8192, rope=Llama3Rope()),
            128256,
            8_030_261_248,
        ),
        (Gemma2Config(), 256000, 2_614_341_888),
        (
            Qwen3Config(
                hidden_dim=1024, intermediate_dim=3072, num_layers=28, num_heads=16, num_kv_heads=8,
                tie_word_embeddings=True,
            ),
            151936,
            596_049_920,
        ),
        (SmolLm3Config(), 128256, 3_075_098_624),
        (StarCoder2Config(), 49152, 3_030_371_328),
        (Cohere2Config(), 256000, 8_028_033_024),
        (Glm4Config(), 151552, 9_400_279_040),
        (SeedOssConfig(), 155136, 36_151_104_512),
        (NanochatConfig(), 65536, 560_988_160),
        (MiniCpm3Config(), 73448, 4_073_875_968),
        (DeepseekV3Config(), 129280, 671_026_404_352),
        (DeepseekV2Config(), 102400, 15_706_484_224),
        (Mamba2Config(), 50288, 2_702_599_680),
        (GptOssConfig(), 201088, 20_914_757_184),
        (GptOssConfig(num_layers=36, n_routed_experts=128), 201088, 116_829_156_672),
        (Granite4Config(), 100352, 6_939_037_248),
        # transformers has a parameter fewer for each layer of Gemma 4, because their factors are buffers there.
        (Gemma4Config(), 262144, 30_697_345_340),
        (GEMMA4_26B, 262144, 25_233_141_790),
        (GEMMA4_E2B, 262144, 4_628_569_379),
        (GEMMA4_E4B, 262144, 7_463_013_418),
        (Qwen35Config(), 248320, 26_895_998_464),
        (Qwen35MoeConfig(), 248320, 34_660_610_688),
        (Llama4Config(), 202048, 107_769_861_120),
        (Llama4Config(n_routed_experts=128, interleave_moe_layer_step=2), 202048, 400_711_848_960),
    ],
    ids=["Mistral 7B", "Llama 3 8B", "Gemma 2 2B", "Qwen3 0.6B", "SmolLM3 3B", "StarCoder2 3B", "R7B", "GLM-4 9B",
         "Seed-OSS 36B", "nanochat d20", "MiniCPM3 4B", "DeepSeek-V3", "DeepSeek-V2 Lite", "Mamba 2 2.7B",
         "gpt-oss 20B", "gpt-oss 120B", "Granite 4 H Tiny", "Gemma 4 31B", "Gemma 4 26B A4B", "Gemma 4 E2B",
         "Gemma 4 E4B", "Qwen3.5 27B", "Qwen3.5 35B A3B", "Llama 4 Scout", "Llama 4 Maverick"],
)  # fmt: skip
def test_published_sizes(config, vocab_size, parameters):
    assert parameter_count(config.spec(vocab_size)) == parameters


@pytest.mark.parametrize(
    ("config", "seq_len", "vocab_size", "forward"),
    [
        (LlamaConfig(), 4096, 32000, 15_374_221_312),
        (LlamaConfig(intermediate_dim=14336, num_kv_heads=8), 8192, 128256, 19_329_449_984),
    ],
    ids=["Llama 2 7B", "Llama 3 8B"],
)
def test_published_flops(config, seq_len, vocab_size, forward):
    """Figures that Levanter computes for the same models."""
    assert flops_per_token(config.spec(vocab_size), seq_len).forward == forward


def windows(config: DecoderConfig) -> list[int | None]:
    return [block.attention.window for block in config.spec(VOCAB).blocks]


def test_layers_with_a_window():
    tiny: dict[str, Any] = {"hidden_dim": 32, "num_heads": 4, "num_kv_heads": 4, "num_layers": 7}
    assert windows(MistralConfig(**tiny, sliding_window=5)) == [5] * 7
    assert windows(Gemma2Config(**tiny, sliding_window=5)) == [5, None, 5, None, 5, None, 5]
    assert windows(Gemma3Config(**tiny, sliding_window=5)) == [5, 5, 5, 5, 5, None, 5]
    assert windows(Olmo3Config(**tiny, sliding_window=5)) == [5, 5, 5, None, 5, 5, 5]
    assert windows(Cohere2Config(**tiny, sliding_window=5)) == [5, 5, 5, None, 5, 5, 5]
    assert windows(SmolLm3Config(**tiny, sliding_window=5)) == [None, None, None, 5, None, None, None]
    late = Qwen2Config(**tiny, use_sliding_window=True, sliding_window=5, max_window_layers=4)
    assert windows(late) == [None] * 4 + [5] * 3
    ropes = [
        block.attention.positions for block in Gemma3Config(**tiny, rope=DefaultRope(factor=8.0)).spec(VOCAB).blocks
    ]
    assert ropes[0] == RopeSpec(10_000.0)
    assert ropes[5] == DefaultRope(factor=8.0).spec(7)


def test_layers_without_positions():
    tiny: dict[str, Any] = {"hidden_dim": 32, "num_heads": 4, "num_kv_heads": 4, "num_layers": 5}
    configs = {
        (3,): SmolLm3Config(**tiny),
        (1, 3): SmolLm3Config(**tiny, no_rope_layer_interval=2),
        (0, 4): SmolLm3Config(**tiny, layers_without_rope=(0, 4)),
        (): SmolLm3Config(**tiny, layers_without_rope=()),
        (2,): Cohere2Config(**tiny, sliding_window_pattern=3),
    }
    for layers, config in configs.items():
        blocks = config.spec(VOCAB).blocks
        assert tuple(i for i, block in enumerate(blocks) if block.attention.positions is None) == layers
    with pytest.raises(ValidationError, match=r"layers_without_rope lists \[5\], but layers have indices 0 to 4"):
        SmolLm3Config(**tiny, layers_without_rope=(2, 5))


def test_what_llama_can_add():
    norm = LlamaConfig().norm_spec()
    spec = LlamaConfig(hybrid_norm=True, use_qk_norm=True, input_embedding_norm=True, num_layers=1).spec(VOCAB)
    assert spec.blocks[0].pre_norm == spec.blocks[0].post_norm == spec.embedding.norm == spec.final_norm == norm
    assert spec.blocks[0].attention.qk_norm == QkNormSpec(norm)


@pytest.mark.parametrize(
    ("config_class", "fields", "message"),
    [
        (LlamaConfig, {"num_heads": 6, "num_kv_heads": 4}, "num_heads=6 is not a multiple of num_kv_heads=4"),
        (LlamaConfig, {"hidden_dim": 100}, "hidden_dim=100 is not a multiple of 2 \\* num_heads=64; set head_dim"),
        (LlamaConfig, {"head_dim": 5}, "multiple of 2"),
        (LlamaConfig, {"rope": {"type": "other"}}, "'default', 'linear', 'llama3', 'yarn', 'longrope'"),
        (Qwen2Config, {"sliding_window": 8}, "sliding_window has no effect without use_sliding_window: true"),
    ],
)
def test_wrong_values_are_refused(config_class, fields, message):
    with pytest.raises(ValidationError, match=message):
        config_class(**fields)


def test_each_pair_of_dimensions_has_a_factor():
    tiny: dict[str, Any] = {"hidden_dim": 32, "num_heads": 4, "num_kv_heads": 4, "num_layers": 1, "seq_len": 32}
    rope = LongRope(short_factor=(1.0, 2.0), long_factor=(3.0, 9.0), factor=4.0, original_max_position_embeddings=8)
    long, short = (
        Phi3Config(**{**tiny, "seq_len": n}, rope=rope, partial_rotary_factor=0.5).rope.spec(n) for n in (9, 8)
    )
    assert long.scaling == LongRopeScaling((3.0, 9.0), (5 / 3) ** 0.5)
    assert short.scaling == LongRopeScaling((1.0, 2.0), (5 / 3) ** 0.5)
    with pytest.raises(ValidationError, match=r"rope.short_factor has 2 numbers, but 4 pairs of dimensions are"):
        Phi3Config(**tiny, rope=rope)
    with pytest.raises(ValidationError, match=r"rope.short_factor has 2 numbers, but 1 pairs"):
        GptNeoxConfig(hidden_dim=32, num_heads=4, rope=rope)


def test_rope_blocks_agree_with_themselves():
    with pytest.raises(ValidationError, match=r"low_freq_factor=4.0 must be below"):
        Llama3Rope(low_freq_factor=4.0)
    with pytest.raises(ValidationError, match="attention_factor and mscale set the same thing"):
        YarnRope(attention_factor=1.0, mscale=2.0)
    assert DefaultRope(type="linear", factor=2.0).spec(7) == DefaultRope(factor=2.0).spec(7)


def test_what_levanter_asks_a_model() -> None:
    hidden, layers, vocab, seq = 32, 3, 100, 64
    config = LlamaConfig(
        seq_len=seq, hidden_dim=hidden, intermediate_dim=48, num_layers=layers, num_heads=4, num_kv_heads=2
    )
    # Two of four attention matrices have half the heads, and the head of the model is a matrix of its own.
    attention, mlp = 3 * hidden * hidden, 3 * hidden * 48
    weights = layers * (attention + mlp) + hidden * vocab
    norms = (2 * layers + 1) * hidden
    assert config.total_trainable_params(vocab) == weights + norms + hidden * vocab
    for length in (seq, 16):
        scores = layers * length * (4 * hidden + 3 * 4)
        assert config.flops_per_token(vocab, length) == 2 * weights + scores
    assert config.flops_per_token(vocab) == config.flops_per_token(vocab, context_length=seq)


def test_a_key_makes_the_weights_of_its_rngs() -> None:
    config = LlamaConfig(
        seq_len=8, hidden_dim=8, intermediate_dim=8, num_layers=1, num_heads=1, num_kv_heads=1, scan_layers=False
    )
    key = jax.random.key(3)
    builds = (lambda: config.build(11, key=key), lambda: config.build(11, rngs=nnx.Rngs(key)))
    by_key, by_rngs = (
        jax.tree.leaves(jax.jit(lambda build=build: nnx.to_pure_dict(nnx.state(build(), nnx.Param)))())
        for build in builds
    )
    assert all(np.array_equal(x, y) for x, y in zip(by_key, by_rngs, strict=True))
    with pytest.raises(ValueError, match="either rngs or key"):
        config.build(11)


@pytest.mark.parametrize("name", DecoderConfig.absent)
def test_what_a_model_has_not_names_what_to_use(name: str) -> None:
    with pytest.raises(AttributeError, match=rf"no LlamaConfig\.{name}: .*(use|set) "):
        getattr(LlamaConfig(), name)
