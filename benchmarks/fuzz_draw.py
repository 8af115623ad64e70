"""Random values of the fields that model families share, for `benchmarks.fuzz_configs`."""

from __future__ import annotations

import random
from typing import Any

LENGTH = 48
"""Number of positions of the compared rows. Windows are shorter, so that they matter."""
VOCAB = 67
LONGEST = 64
"""Maximum sequence length."""
PRETRAINED = 32
"""Maximum sequence length before rotary positions were scaled."""

Fields = dict[str, Any]


class Draw:
    """Random values of configurations.

    Args:
        seed: equal seeds draw equal configurations.
    """

    def __init__(self, seed: str):
        self._random = random.Random(seed)

    def one(self, *values: Any) -> Any:
        """Returns one of the values."""
        return self._random.choice(values)

    def between(self, low: float, high: float) -> float:
        """Returns a number between two bounds."""
        return round(self._random.uniform(low, high), 3)

    def subset(self, count: int) -> list[int]:
        """Returns some of the numbers below `count`, in order."""
        return [number for number in range(count) if self._random.random() < 0.4]

    def factors(self, count: int) -> list[float]:
        """Returns factors of LongRoPE, which grow from pair to pair."""
        return sorted(self.between(1.0, 9.0) for _ in range(count))

    def shared(self) -> Fields:
        """Returns the fields that almost all families have."""
        return {
            "vocab_size": VOCAB,
            "hidden_size": self.one(16, 24, 40),
            "intermediate_size": self.one(20, 56),
            "num_hidden_layers": self.one(1, 2, 3, 4),
            "max_position_embeddings": LONGEST,
            "initializer_range": 0.12,
            "rms_norm_eps": self.one(1e-6, 1e-5, 1e-2),
            "hidden_act": self.one("silu", "gelu", "gelu_pytorch_tanh", "relu"),
            "tie_word_embeddings": self.one(False, True),
            "bos_token_id": 1,
            "eos_token_id": 2,
            "pad_token_id": 0,
        }

    def heads(self, *, sized: bool = True, grouped: bool = True) -> Fields:
        """Returns the numbers and sizes of heads, and a hidden size that they fit.

        Args:
            sized: True if the size of heads is a field of its own.
            grouped: True if query heads may share keys and values.
        """
        heads = self.one(1, 2, 3, 4, 6)
        fields: Fields = {"num_attention_heads": heads, "hidden_size": heads * self.one(4, 8, 12)}
        if grouped:
            fields["num_key_value_heads"] = self.one(*(n for n in range(1, heads + 1) if heads % n == 0))
        if sized:
            fields["head_dim"] = self.one(4, 6, 8, 16, fields["hidden_size"] // heads)
        return fields

    def rotary(self, *, scaled: bool = True, **fields: Any) -> Fields:
        """Returns the block of rotary positions, with further fields of it."""
        kinds = (self._default_rope,) * 2
        kinds += (self._linear_rope, self._llama3_rope, self._yarn_rope) if scaled else ()
        return {"rope_theta": self.one(100.0, 1e4, 5e5), **self.one(*kinds)(), **fields}

    def _default_rope(self) -> Fields:
        return {"rope_type": "default"}

    def _linear_rope(self) -> Fields:
        return {"rope_type": "linear", "factor": self.one(2.0, 4.0)}

    def _llama3_rope(self) -> Fields:
        return {
            "rope_type": "llama3",
            "factor": self.one(2.0, 8.0),
            "low_freq_factor": self.one(0.5, 1.0),
            "high_freq_factor": self.one(2.0, 4.0),
            "original_max_position_embeddings": self.one(8, PRETRAINED),
        }

    def _yarn_rope(self) -> Fields:
        yarn: Fields = {
            "rope_type": "yarn",
            "factor": self.one(2.0, 4.0),
            "original_max_position_embeddings": self.one(16, PRETRAINED),
        }
        further: Fields = {
            "beta_fast": self.one(8.0, 16.0),
            "beta_slow": self.one(0.5, 2.0),
            "attention_factor": self.between(0.5, 2.0),
            "truncate": False,
        }
        return yarn | {name: further[name] for name in sorted(further) if self.one(False, False, True)}

    def pattern(self, layers: int, often: str) -> list[str]:
        """Returns kinds of layers, with full attention in every n-th layer."""
        interval = self.one(1, 2, 3, 4)
        return ["full_attention" if (layer + 1) % interval == 0 else often for layer in range(layers)]

    def window(self) -> int:
        """Returns the size of a window."""
        return self.one(1, 5, 16, 40)

    def experts(self, layers: int) -> Fields:
        """Returns the fields of experts in the families of Qwen."""
        experts = self.one(2, 4, 5)
        return {
            "num_experts": experts,
            "num_experts_per_tok": self.one(1, 2, experts),
            "moe_intermediate_size": self.one(12, 24),
            "norm_topk_prob": self.one(False, True),
            "mlp_only_layers": self.subset(layers),
            "decoder_sparse_step": self.one(1, 1, 2),
        }

    def grouped_experts(self, layers: int) -> Fields:
        """Returns the fields of experts in groups, after first layers without experts."""
        groups, of_group = self.one(1, 2, 4), self.one(2, 3)
        top_groups = self.one(*range(1, groups + 1))
        return {
            "n_routed_experts": groups * of_group,
            "n_group": groups,
            "topk_group": top_groups,
            "num_experts_per_tok": self.one(*range(1, top_groups * of_group + 1)),
            "moe_intermediate_size": self.one(12, 24),
            "n_shared_experts": self.one(1, 2),
            "first_k_dense_replace": self.one(*range(layers + 1)),
            "routed_scaling_factor": self.one(1.0, 1.5),
        }

    def latent(self) -> Fields:
        """Returns the fields of multi-head latent attention."""
        heads = self.one(1, 2, 3, 4)
        rope = self.rotary()
        if rope["rope_type"] == "yarn" and "attention_factor" not in rope and self.one(False, True):
            magnitude = self.one(0.7, 1.0)
            rope |= {"mscale": self.one(magnitude, 1.0), "mscale_all_dim": magnitude}
        return {
            "num_attention_heads": heads,
            "num_key_value_heads": heads,
            "kv_lora_rank": self.one(6, 10),
            "q_lora_rank": self.one(None, 14),
            "qk_nope_head_dim": self.one(6, 8),
            "qk_rope_head_dim": self.one(4, 8),
            "v_head_dim": self.one(6, 8, 12),
            "attention_bias": self.one(False, True),
            "rope_parameters": rope,
        }
