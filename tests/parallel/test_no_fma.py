"""A product and a sum that a compiler would contract are rounded one after the other."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lm_trainer.parallel.no_fma import without_fma

pytestmark = pytest.mark.optimised


def mix(tree: dict[str, jax.Array], scale: jax.Array) -> dict[str, jax.Array]:
    inner = jax.jit(lambda x, y: x * scale + jnp.square(y) * y)
    return {"sum": tree["a"] * tree["b"] + inner(tree["a"], tree["b"]), "power": tree["a"] ** 3 - tree["b"]}


def test_every_product_is_rounded_before_it_is_added() -> None:
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal(1003).astype(np.float32) for _ in range(2))
    scale = np.float32(0.37)
    expected = {"sum": a * b + (a * scale + (b * b) * b), "power": a * (a * a) - b}
    results = jax.jit(without_fma(mix))(np.uint32(0), {"a": a, "b": b}, scale)
    for name, x in expected.items():
        np.testing.assert_array_equal(np.asarray(results[name]), x, err_msg=name)
    low = {name: jnp.asarray(x, jnp.bfloat16) for name, x in (("a", a), ("b", b))}
    assert jax.jit(without_fma(mix))(np.uint32(0), low, jnp.bfloat16(scale))["sum"].dtype == jnp.bfloat16
    counts = jax.jit(without_fma(lambda n: n * 3 + 1))(np.uint32(0), np.int32(5))
    assert int(counts) == 16
