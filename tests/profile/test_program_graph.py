"""Hashes of how programs compute their results: equal for the same computation, however it is written."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import pytest

from lm_trainer.profile.program_graph import output_hashes

PIECES = """
HloModule join

ENTRY %main (x: f32[4,8]) -> f32[4,8] {{
  %x = f32[4,8]{{1,0}} parameter(0)
  %start.0 = ((f32[4,8]), f32[{rows},8]{{1,0:S(1)}}, s32[]) slice-start(%x), slice={{[0:{rows}], [0:8]}}
  %start.1 = ((f32[4,8]), f32[2,8]{{1,0:S(1)}}, s32[]) slice-start(%x), slice={{[2:4], [0:8]}}
  %done.0 = f32[{rows},8]{{1,0:S(1)}} slice-done(%start.0)
  %done.1 = f32[2,8]{{1,0:S(1)}} slice-done(%start.1)
  %joined = f32[4,8]{{1,0:S(1)}} custom-call({operands}), custom_call_target="ConcatBitcast"
  ROOT %result = f32[4,8]{{1,0}} negate(%joined)
}}
"""
WHOLE = """
HloModule plain

ENTRY %main (x: f32[4,8]) -> f32[4,8] {
  %x = f32[4,8]{1,0} parameter(0)
  ROOT %result = f32[4,8]{1,0} negate(%x)
}
"""


BYTES = """
HloModule bytes

ENTRY %main (x: f32[4,8]) -> f32[4,8] {{
  %x = f32[4,8]{{1,0}} parameter(0)
  %bytes = s8[128]{{0}} bitcast(%x)
  %start.0 = ((s8[128]{{0}}), s8[64]{{0:S(1)}}, s32[]) slice-start(%bytes), slice={{[0:64]}}
  %start.1 = ((s8[128]{{0}}), s8[64]{{0:S(1)}}, s32[]) slice-start(%bytes), slice={{[64:128]}}
  %done.0 = s8[64]{{0:S(1)}} slice-done(%start.0)
  %done.1 = s8[64]{{0:S(1)}} slice-done(%start.1)
  %joined = f32[4,8]{{{layout}:S(1)}} custom-call(%done.0, %done.1), custom_call_target="ConcatBitcast"
  ROOT %result = f32[4,8]{{1,0}} negate(%joined)
}}
"""


def test_an_array_that_is_prefetched_in_pieces_is_the_array() -> None:
    whole = output_hashes(WHOLE)
    assert output_hashes(PIECES.format(rows=2, operands="%done.0, %done.1")) == whole
    assert output_hashes(BYTES.format(layout="1,0")) == whole
    for other in (
        PIECES.format(rows=2, operands="%done.1, %done.0"),
        PIECES.format(rows=1, operands="%done.0, %done.1"),
        BYTES.format(layout="0,1"),
    ):
        assert output_hashes(other) != whole


def hashes_of_loop(body: Callable[..., dict[str, jax.Array]], order: str) -> list[str]:
    """Hashes of the results of a loop whose state is carried in this order, by name."""

    def run(x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
        state = {"n": jnp.int32(0), "x": x, "y": y, "z": y}

        def step(values: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            following = body(**dict(zip(order, values, strict=True)))
            return tuple(following[name] for name in order)

        end = jax.lax.while_loop(
            lambda values: values[order.index("n")] < 5, step, tuple(state[name] for name in order)
        )
        return end[order.index("x")], end[order.index("y")]

    vector = jax.ShapeDtypeStruct((8,), jnp.float32)
    return output_hashes(jax.jit(run).lower(vector, vector).compile().as_text() or "")


def step(n: jax.Array, x: jax.Array, y: jax.Array, z: jax.Array) -> dict[str, jax.Array]:
    return {"n": n + 1, "x": x * 2 + y, "y": jnp.sin(z), "z": z + 1}


@pytest.mark.parametrize("order", ["xyzn", "zynx", "ynzx"])
def test_the_order_of_the_values_in_a_loop_does_not_matter(order: str) -> None:
    assert hashes_of_loop(step, order) == hashes_of_loop(step, "nxyz")


@pytest.mark.parametrize(
    "change",
    [
        lambda n, x, y, z: {**step(n, x, y, z), "x": x * 2 + z},
        # Neither `x` nor `y` reads another value in the next step, but `y` does in the step after.
        lambda n, x, y, z: {**step(n, x, y, z), "z": z + 2},
        lambda n, x, y, z: {**step(n, x, y, z), "n": n + 2},
    ],
)
def test_a_loop_that_computes_something_else_has_other_hashes(change: Callable[..., dict[str, jax.Array]]) -> None:
    for one, other in zip(hashes_of_loop(step, "nxyz"), hashes_of_loop(change, "nxyz"), strict=True):
        assert one != other
