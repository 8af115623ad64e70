"""A twin of small models in torch, with the multipliers of CompleteP in its forward pass, and Adam with the settings of
table 1 of Dey et al. 2025 (arXiv 2505.01618) for alpha = 1.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from lm_trainer.core.batch import Batch
from lm_trainer.run.config.run_config import RunConfig


def train_twin(config: RunConfig, initial: Mapping[str, np.ndarray], batch: Batch, *, steps: int) -> list[float]:
    """Returns the loss of each step on one batch, in float64.

    Args:
        config: configuration with `parametrization: completep`, `type: adam` and a constant learning rate.
        initial: initial weights of the run.
        batch: the batch.
        steps: number of steps.
    """
    import torch

    model: Any = config.model
    base = getattr(config.parametrization, "base")  # noqa: B009 - of one member of the union
    sizes = Sizes(model, base)
    weights = {}
    for name, x in initial.items():
        # The run has the product of weight and multiplier.
        value = torch.tensor(x, dtype=torch.float64) / sizes.multiplier(name)
        weights[name] = value.requires_grad_()
    optimizer: Any = config.optimizer
    groups = []
    for name, weight in weights.items():
        rate = 1 / sizes.width if sizes.is_hidden_matrix(name) else 1.0
        epsilon = 1 / sizes.width / (sizes.depth if name.startswith("blocks.") else 1.0)
        decay = optimizer.weight_decay / rate if sizes.is_hidden_matrix(name) or name == "head" else 0.0
        settings = {"lr": optimizer.learning_rate * rate, "eps": optimizer.epsilon * epsilon, "weight_decay": decay}
        groups.append({"params": [weight], **settings})
    adam = torch.optim.AdamW(groups, betas=(optimizer.beta1, optimizer.beta2))
    tokens, targets = (torch.tensor(x, dtype=torch.int64) for x in (batch.tokens, batch.targets))
    losses = []
    for _ in range(steps):
        adam.zero_grad()
        forward = _gpt2_logits if model.type == "gpt2" else _llama_logits
        logits = forward(weights, tokens, sizes)
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        loss.backward()
        adam.step()
        losses.append(loss.item())
    return losses


class Sizes:
    """Ratios of a model to its base."""

    def __init__(self, model: Any, base: Mapping[str, int]):
        self.layers, self.heads = model.num_layers, model.num_heads
        self.eps, self.tied = model.layer_norm_epsilon, model.type == "gpt2"
        self.width, self.depth = model.hidden_dim / base["hidden_dim"], model.num_layers / base["num_layers"]
        self.head_dim = model.hidden_dim // model.num_heads
        base_head_dim = base["hidden_dim"] // base.get("num_heads", model.num_heads)
        # 1 / d, with the constant that makes it 1 / sqrt(d) at the base.
        self.score_scale = base_head_dim**0.5 / self.head_dim

    def is_hidden_matrix(self, name: str) -> bool:
        return re.fullmatch(r"blocks\..*\.weight", name) is not None

    def multiplier(self, name: str) -> float:
        """The factor of a weight in the forward pass."""
        if re.search(r"\.(out|down)\.", name):
            return 1 / self.depth
        if re.search(r"attention\.q\.", name):
            return self.score_scale * self.head_dim**0.5
        # The run has the factor of the logits in the head, or in the norm before a tied head.
        is_factor_of_logits = name.startswith("final_norm") if self.tied else name == "head"
        return 1 / self.width if is_factor_of_logits else 1.0


def _attend(q: Any, k: Any, v: Any, scale: float) -> Any:
    import torch

    scores = torch.einsum("bqnh,bknh->bnqk", q, k) * scale
    mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
    return torch.einsum("bnqk,bknh->bqnh", torch.softmax(scores.masked_fill(~mask, -torch.inf), -1), v)


def _gpt2_logits(w: Mapping[str, Any], tokens: Any, sizes: Sizes) -> Any:
    import torch

    def norm(x: Any, name: str, layer: int | None = None) -> Any:
        scale, bias = (w[f"{name}.{kind}"] for kind in ("scale", "bias"))
        scale, bias = (scale, bias) if layer is None else (scale[layer], bias[layer])
        return torch.nn.functional.layer_norm(x, x.shape[-1:], scale, bias, sizes.eps)

    x = w["embed.tokens"][tokens] + w["embed.positions"][: tokens.shape[1]]
    for i in range(sizes.layers):
        a, m = "blocks.0.attention", "blocks.0.mlp"
        h = norm(x, f"{a}_pre_norm", i)
        q, k, v = (
            torch.einsum("bsd,dnh->bsnh", h, w[f"{a}.{name}.weight"][i]) + w[f"{a}.{name}.bias"][i] for name in "qkv"
        )
        o = _attend(q, k, v, sizes.score_scale)
        branch = torch.einsum("bsnh,nhd->bsd", o, w[f"{a}.out.weight"][i]) + w[f"{a}.out.bias"][i]
        x = x + branch / sizes.depth
        h = norm(x, f"{m}_pre_norm", i) @ w[f"{m}.up.weight"][i] + w[f"{m}.up.bias"][i]
        h = torch.nn.functional.gelu(h, approximate="tanh")
        x = x + (h @ w[f"{m}.down.weight"][i] + w[f"{m}.down.bias"][i]) / sizes.depth
    return norm(x, "final_norm") @ w["embed.tokens"].T / sizes.width


def _llama_logits(w: Mapping[str, Any], tokens: Any, sizes: Sizes) -> Any:
    import torch

    def norm(x: Any, scale: Any) -> Any:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + sizes.eps) * scale

    half = sizes.head_dim // 2
    angles = torch.arange(tokens.shape[1])[:, None] * 10_000.0 ** -(torch.arange(half, dtype=torch.float64) / half)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]

    def rotate(x: Any) -> Any:
        first, second = x[..., :half], x[..., half:]
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)

    x = w["embed.tokens"][tokens]
    for i in range(sizes.layers):
        a, m = "blocks.0.attention", "blocks.0.mlp"
        h = norm(x, w[f"{a}_pre_norm.scale"][i])
        q, k, v = (torch.einsum("bsd,dnh->bsnh", h, w[f"{a}.{name}.weight"][i]) for name in "qkv")
        k, v = (y.repeat_interleave(sizes.heads // y.shape[2], 2) for y in (rotate(k), v))
        o = _attend(rotate(q), k, v, sizes.score_scale)
        x = x + torch.einsum("bsnh,nhd->bsd", o, w[f"{a}.out.weight"][i]) / sizes.depth
        h = norm(x, w[f"{m}_pre_norm.scale"][i])
        h = torch.nn.functional.silu(h @ w[f"{m}.gate.weight"][i]) * (h @ w[f"{m}.up.weight"][i])
        x = x + h @ w[f"{m}.down.weight"][i] / sizes.depth
    return norm(x, w["final_norm.scale"]) @ w["head"].T / sizes.width
