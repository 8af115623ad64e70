"""The values of a layer that a backward pass in another program reads from memory."""

from __future__ import annotations

from jax.extend.core import Primitive

from lm_trainer.nn.linear import DROPOUT_MASK
from lm_trainer.nn.read import saves_all_but_gathered

_CHEAP = frozenset(
    """
    abs add add_any and bitcast_convert_type broadcast_in_dim cbrt ceil clamp concatenate convert_element_type copy cos
    cosh div eq erf erfc exp exp2 expm1 floor ge gt integer_pow iota is_finite le log log1p logistic lt max min mul ne
    neg not or pad pow random_bits random_fold_in random_split random_unwrap random_wrap reshape reshard round rsqrt
    select_n shift_right_logical sign sin sinh slice split sqrt square squeeze stop_gradient sub tan tanh transpose xor
    """.split()  # noqa: SIM905 - a list would have a line for each
)
"""Names of the primitives that compute each element by itself, or that only move elements."""


def saves_costly_values(primitive: Primitive, *_: object, **options: object) -> bool:
    """Policy for `jax.checkpoint` that saves the results of products, kernels, sums and other costly operations, and
    masks of dropout, which have one byte per element.

    The backward pass computes elementwise values again, which takes about as long as reading them from memory: of a
    GELU, for example, JAX would save six arrays.
    """
    if primitive.name == "name":
        # The values with other names are results of operations that are decided by themselves.
        return options["name"] == DROPOUT_MASK
    return primitive.name not in _CHEAP and saves_all_but_gathered(primitive)
