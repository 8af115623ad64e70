"""QK-Clip (Kimi K2, arXiv 2507.20534, section 2.1): the weights that scale with the largest logit of their head.

Shape letters: N heads, H head size.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import jax.numpy as jnp
from flax import nnx

from lm_trainer.nn.attention import Attention
from lm_trainer.nn.latent_attention import LatentAttention
from lm_trainer.nn.measured import MeasuredParam

LOGIT_CLIP = "logit_clip"
"""Metadata key of the `LogitClip` of a `LogitParam`."""
_NAME = "largest_logits"


class HeadScale(NamedTuple):
    """A part of the weights of each head that is scaled to scale the head's logits."""

    weight: str
    """Dotted name of the parameter, [..., N, H]; in the metadata of a `LogitParam`, relative to its module."""
    first: int
    """First dimension of the head that is scaled."""
    last: int
    """The dimension after the last one."""
    power: float
    """Power of the factor of the logits by which the part is multiplied."""


@dataclass(frozen=True)
class LogitClip:
    """Scaling of the weights of the heads whose largest logit exceeds a limit."""

    limit: float
    """Largest logit of a head whose weights are not scaled."""
    scales: tuple[HeadScale, ...]
    """Parts of the weights of each head. Together they multiply its logits by limit / largest logit."""

    def within(self, module: str) -> LogitClip:
        """Returns the clip with the names of the weights of the module with this dotted name."""
        scales = tuple(scale._replace(weight=f"{module}.{scale.weight}") for scale in self.scales)
        return replace(self, scales=scales)


class LogitParam(MeasuredParam):
    """The largest attention logit of each head in the last step, [N]; the gradient is the largest logit of the
    microbatch. Its `LOGIT_CLIP` is applied by `lm_trainer.step.updates.logit_clip`.
    """


def is_largest_logits(name: str) -> bool:
    """Returns true for the dotted name of a `LogitParam`."""
    return name.endswith(f".{_NAME}")


def attach_logit_params(model: nnx.Module, limit: float) -> None:
    """Makes the attention of all layers measure its largest logits, and names the weights that are scaled by them.

    The factor g = limit / largest logit multiplies the logits of a head:

    - Heads with keys of their own: queries and keys are multiplied by sqrt(g) each, as in the paper, with their biases.
    - Keys that several heads of queries or several layers share, and keys that are values too: the queries are
      multiplied by g. Smaller keys would change the other heads and layers, or the values. The paper does the same for
      the shared rotary part of latent attention.
    - Latent attention: the parts of queries and keys without positions are multiplied by sqrt(g), and the rotary part
      of queries by g.
    """
    for _, module in nnx.iter_graph(model):
        if isinstance(module, Attention | LatentAttention):
            scales = _latent_scales(module) if isinstance(module, LatentAttention) else _scales(module)
            layers = module.out.matrix().shape[: -len(module.out.in_shape) - len(module.out.out_shape)]
            zeros = jnp.zeros((*layers, module.spec.num_heads), jnp.float32)
            axes = (*("layers",) * len(layers), "heads")
            clip = LogitClip(limit, scales)
            setattr(module, _NAME, nnx.data(LogitParam(zeros, logical_axes=axes, logit_clip=clip)))


def _scales(module: Attention) -> tuple[HeadScale, ...]:
    spec = module.spec
    shared = spec.kv_heads != spec.num_heads or spec.values_are_keys or spec.sharing is not None
    linears = {"q": module.q} if shared or module.k is None else {"q": module.q, "k": module.k}
    power = 1.0 if shared else 0.5
    return tuple(
        HeadScale(f"{name}.{part}", 0, spec.head_dim, power)
        for name, linear in linears.items()
        for part in ("weight", *(() if linear.bias is None else ("bias",)))
    )


def _latent_scales(module: LatentAttention) -> tuple[HeadScale, ...]:
    spec = module.spec
    queries = "q.weight" if spec.query_latent_dim is None else "q_up.weight"
    return (
        HeadScale(queries, 0, spec.plain_dim, 0.5),
        HeadScale(queries, spec.plain_dim, spec.head_dim, 1.0),
        HeadScale("kv_up.weight", 0, spec.plain_dim, 0.5),
    )
