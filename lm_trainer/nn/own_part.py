"""Numbers of weights of parts of a layer that a class of the user computes (`module` in their specs)."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from lm_trainer.nn.spec import AttentionSpec, MlpSpec


class PartWeights(NamedTuple):
    """Numbers of weights of one part."""

    total: int
    """All parameters."""
    matrices: int
    """Parameters with at least two axes. A token's forward pass multiplies and adds each of them once."""


@lru_cache(maxsize=64)
def count_part(spec: AttentionSpec | MlpSpec, dim: int) -> PartWeights:
    """Counts the weights of the part that `spec.module` builds for a stream of width `dim`, without allocating them."""
    import math

    from flax import nnx

    from lm_trainer.nn.init import Initializer

    build = spec.module
    assert build is not None
    part = nnx.eval_shape(lambda: build(spec, dim, init=Initializer(nnx.Rngs(0), 0.02, 0.02)))
    shapes = [variable.shape for _, variable in nnx.iter_graph(part) if isinstance(variable, nnx.Param)]
    return PartWeights(
        sum(math.prod(shape) for shape in shapes), sum(math.prod(shape) for shape in shapes if len(shape) > 1)
    )
