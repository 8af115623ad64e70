"""GPT-2 and Llama in plain PyTorch. Parameters have their transformers names without the prefix.

Shape letters: B rows, S positions, D width, N query heads, K key and value heads, H head size, V vocabulary.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.peers.shapes import NORM_EPSILON, ROPE_THETA, Shape


class Gpt2Attention(nn.Module):
    def __init__(self, shape: Shape):
        super().__init__()
        self.heads, self.head_dim = shape.heads, shape.head_dim
        self.c_attn = nn.Linear(shape.width, 3 * shape.width)
        self.c_proj = nn.Linear(shape.width, shape.width)

    def forward(self, x_BSD: Tensor) -> Tensor:
        split = (*x_BSD.shape[:2], self.heads, self.head_dim)
        q_BNSH, k_BNSH, v_BNSH = (x.view(split).transpose(1, 2) for x in self.c_attn(x_BSD).chunk(3, dim=-1))
        o_BNSH = F.scaled_dot_product_attention(q_BNSH, k_BNSH, v_BNSH, is_causal=True)
        return self.c_proj(o_BNSH.transpose(1, 2).reshape(x_BSD.shape))


class Gpt2Mlp(nn.Module):
    def __init__(self, shape: Shape):
        super().__init__()
        self.c_fc = nn.Linear(shape.width, 4 * shape.width)
        self.c_proj = nn.Linear(4 * shape.width, shape.width)

    def forward(self, x_BSD: Tensor) -> Tensor:
        return self.c_proj(F.gelu(self.c_fc(x_BSD), approximate="tanh"))


class Gpt2Block(nn.Module):
    def __init__(self, shape: Shape):
        super().__init__()
        self.ln_1, self.ln_2 = (nn.LayerNorm(shape.width, eps=NORM_EPSILON) for _ in range(2))
        self.attn, self.mlp = Gpt2Attention(shape), Gpt2Mlp(shape)

    def forward(self, x_BSD: Tensor) -> Tensor:
        x_BSD = x_BSD + self.attn(self.ln_1(x_BSD))
        return x_BSD + self.mlp(self.ln_2(x_BSD))


class Gpt2(nn.Module):
    """Computes logits [B, S, V] from tokens [B, S]. The head is tied to the token embedding."""

    def __init__(self, shape: Shape):
        super().__init__()
        self.wte = nn.Embedding(shape.vocab, shape.width)
        self.wpe = nn.Embedding(shape.seq_len, shape.width)
        self.h = nn.ModuleList(Gpt2Block(shape) for _ in range(shape.layers))
        self.ln_f = nn.LayerNorm(shape.width, eps=NORM_EPSILON)

    def forward(self, tokens_BS: Tensor) -> Tensor:
        positions_S = torch.arange(tokens_BS.shape[1], device=tokens_BS.device)
        x_BSD = self.wte(tokens_BS) + self.wpe(positions_S)
        for block in self.h:
            x_BSD = block(x_BSD)
        return F.linear(self.ln_f(x_BSD), self.wte.weight)


class LlamaAttention(nn.Module):
    def __init__(self, shape: Shape):
        super().__init__()
        self.head_dim, kv_width = shape.head_dim, shape.kv_heads * shape.head_dim
        self.q_proj = nn.Linear(shape.width, shape.width, bias=False)
        self.k_proj = nn.Linear(shape.width, kv_width, bias=False)
        self.v_proj = nn.Linear(shape.width, kv_width, bias=False)
        self.o_proj = nn.Linear(shape.width, shape.width, bias=False)

    def forward(self, x_BSD: Tensor, cos_SH: Tensor, sin_SH: Tensor) -> Tensor:
        split = (*x_BSD.shape[:2], -1, self.head_dim)
        q_BNSH, k_BKSH, v_BKSH = (
            project(x_BSD).view(split).transpose(1, 2) for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        q_BNSH, k_BKSH = (_rotate(x, cos_SH, sin_SH) for x in (q_BNSH, k_BKSH))
        o_BNSH = F.scaled_dot_product_attention(q_BNSH, k_BKSH, v_BKSH, is_causal=True, enable_gqa=True)
        return self.o_proj(o_BNSH.transpose(1, 2).reshape(x_BSD.shape))


def _rotate(x: Tensor, cos_SH: Tensor, sin_SH: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return (x * cos_SH + torch.cat((-second, first), dim=-1) * sin_SH).to(x.dtype)


class LlamaMlp(nn.Module):
    def __init__(self, shape: Shape):
        super().__init__()
        self.gate_proj = nn.Linear(shape.width, shape.mlp_width, bias=False)
        self.up_proj = nn.Linear(shape.width, shape.mlp_width, bias=False)
        self.down_proj = nn.Linear(shape.mlp_width, shape.width, bias=False)

    def forward(self, x_BSD: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x_BSD)) * self.up_proj(x_BSD))


class LlamaBlock(nn.Module):
    def __init__(self, shape: Shape):
        super().__init__()
        self.input_layernorm = nn.RMSNorm(shape.width, eps=NORM_EPSILON)
        self.post_attention_layernorm = nn.RMSNorm(shape.width, eps=NORM_EPSILON)
        self.self_attn, self.mlp = LlamaAttention(shape), LlamaMlp(shape)

    def forward(self, x_BSD: Tensor, cos_SH: Tensor, sin_SH: Tensor) -> Tensor:
        x_BSD = x_BSD + self.self_attn(self.input_layernorm(x_BSD), cos_SH, sin_SH)
        return x_BSD + self.mlp(self.post_attention_layernorm(x_BSD))


class Llama(nn.Module):
    """Computes logits [B, S, V] from tokens [B, S]."""

    cos_SH: Tensor
    sin_SH: Tensor

    def __init__(self, shape: Shape):
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab, shape.width)
        self.layers = nn.ModuleList(LlamaBlock(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.width, eps=NORM_EPSILON)
        self.lm_head = nn.Linear(shape.width, shape.vocab, bias=False)
        frequencies = ROPE_THETA ** -(torch.arange(0, shape.head_dim, 2) / shape.head_dim)
        angles_SH = torch.outer(torch.arange(shape.seq_len).float(), frequencies).repeat(1, 2)
        self.register_buffer("cos_SH", angles_SH.cos(), persistent=False)
        self.register_buffer("sin_SH", angles_SH.sin(), persistent=False)

    def forward(self, tokens_BS: Tensor) -> Tensor:
        x_BSD = self.embed_tokens(tokens_BS)
        for layer in self.layers:
            x_BSD = layer(x_BSD, self.cos_SH, self.sin_SH)
        return self.lm_head(self.norm(x_BSD))


def plain_model(shape: Shape, weights: dict[str, np.ndarray]) -> nn.Module:
    """Makes the model with the given weights on the CPU."""
    model = Gpt2(shape) if shape.family == "gpt2" else Llama(shape)
    prefix = "transformer." if shape.family == "gpt2" else "model."
    # transformers stores the matrices of GPT-2 with the shape (inputs, outputs).
    transposed = (".c_attn.weight", ".c_proj.weight", ".c_fc.weight")
    tensors = {
        name.removeprefix(prefix): torch.tensor(x.T if name.endswith(transposed) else x) for name, x in weights.items()
    }
    model.load_state_dict(tensors)
    return model
