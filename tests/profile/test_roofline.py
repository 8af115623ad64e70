"""Least FLOPs and bytes of a program, against a count by hand and XLA's own."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from lm_trainer.profile.roofline import Operation, compute_bounds, list_operations

N, M, TURNS = 256, 64, 20


@jax.jit
def program(x, stack):
    with jax.named_scope("wide"):
        x = jnp.tanh(x @ stack[0].T)

    def body(carry, w):
        with jax.named_scope("loop"):
            return carry @ w, None

    return jax.lax.scan(body, x, stack)[0]


@pytest.fixture(scope="module")
def operations() -> list[Operation]:
    x, stack = jnp.ones((M, N)), jnp.ones((TURNS, N, N))
    return list_operations(program.lower(x, stack).compile().as_text() or "", {"wide", "loop"})


def test_products_are_counted_for_each_turn_of_a_loop(operations):
    one = 2 * M * N * N
    by_part = {
        bound.name: bound for bound in compute_bounds(operations, flops_per_second=1, bytes_per_second=1e30, by="part")
    }
    assert by_part["wide, forward"].flops == one
    assert by_part["loop, forward"].flops == TURNS * one


def test_a_loop_reads_each_slice_of_a_stack_and_not_the_whole_stack_each_time(operations):
    moved = sum(op.num_bytes for op in operations)
    weights, rows = N * N * 4, M * N * 4
    least = (1 + TURNS) * (weights + 2 * rows)
    assert least <= moved <= 3 * least < TURNS * TURNS * weights


def test_the_backward_pass_is_told_apart():
    def loss(w):
        with jax.named_scope("wide"):
            return jnp.sum(jnp.tanh(jnp.ones((M, N)) @ w) ** 2)

    hlo = jax.jit(jax.grad(loss)).lower(jnp.ones((N, N))).compile().as_text() or ""
    parts = {
        bound.name
        for bound in compute_bounds(list_operations(hlo, {"wide"}), flops_per_second=1, bytes_per_second=1, by="part")
    }
    assert {"wide, forward", "wide, backward"} <= parts


def test_each_operation_is_bound_by_what_takes_it_longer():
    ops = [
        Operation("dot", "a", flops=100.0, num_bytes=10.0),
        Operation("add", "a", flops=0.0, num_bytes=30.0),
        Operation("add", "b", flops=0.0, num_bytes=2.0),
    ]
    a, b = compute_bounds(ops, flops_per_second=2.0, bytes_per_second=1.0, by="part")
    assert (a.name, a.compute_seconds, a.memory_seconds, a.seconds, a.bound_by) == ("a", 50.0, 30.0, 80.0, "compute")
    assert (b.name, b.seconds, b.bound_by) == ("b", 2.0, "memory")
    by_name = compute_bounds(ops, flops_per_second=2.0, bytes_per_second=1.0, by="name")
    assert [(bound.name, bound.num_bytes, bound.bound_by) for bound in by_name] == [
        ("dot", 10.0, "compute"),
        ("add", 32.0, "memory"),
    ]


def test_a_product_counts_where_it_belongs_whatever_it_is_fused_with():
    hlo = """
%fused (a: f32[8,16], b: f32[16,4]) -> f32[8,4] {
  %a = f32[8,16]{1,0} parameter(0)
  %b = f32[16,4]{1,0} parameter(1)
  %dot = f32[8,4]{1,0} dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}, metadata={op_name="wide/dot"}
  ROOT %add = f32[8,4]{1,0} add(%dot, %dot), metadata={op_name="jit/elsewhere/add"}
}

ENTRY %main (x: f32[8,16], y: f32[16,4]) -> f32[8,4] {
  %x = f32[8,16]{1,0} parameter(0)
  %y = f32[16,4]{1,0} parameter(1)
  ROOT %out = f32[8,4]{1,0} fusion(%x, %y), kind=kOutput, calls=%fused, metadata={op_name="jit/elsewhere/add"}
}
"""
    (product,) = list_operations(hlo, {"wide"})
    assert (product.part, product.flops) == ("wide, forward", 2 * 8 * 16 * 4)


@pytest.mark.parametrize(
    ("left", "right", "result", "attributes", "expected"),
    [
        # [512, 512] x [512, 512]: rows by weights.
        ("512,512", "512,512", "512,512", "dim_labels=bf_io->bf", 2 * 512**3),
        # The same with weights [4 heads, 128, 512]: each position of the result meets one of the window.
        (
            "512,512,1",
            "4,128,512",
            "512,4,128",
            "window={size=4 pad=3_3 rhs_reversal=1}, dim_labels=bf0_0oi->b0f",
            2 * 512**3,
        ),
        # Scores of 2 heads: 256 queries x 512 keys x 128 elements each, the heads apart by holes in the input.
        (
            "2,256,128",
            "2,512,128",
            "2,256,512",
            "window={size=2 lhs_dilate=2}, dim_labels=0bf_0oi->0bf",
            2 * 2 * 256 * 512 * 128,
        ),
    ],
)
def test_products_that_a_tpu_writes_as_convolutions(left: str, right: str, result: str, attributes: str, expected: int):
    """As the compiler for TPU v5e writes them, inside a fusion inside a fusion."""
    text = f"""
%inner (a: bf16[{left}], b: bf16[{right}]) -> bf16[{result}] {{
  %a = bf16[{left}] parameter(0)
  %b = bf16[{right}] parameter(1)
  ROOT %c = bf16[{result}] convolution(%a, %b), {attributes}, metadata={{op_name="jit(f)/wide/dot_general"}}
}}

%outer (a: bf16[{left}], b: bf16[{right}]) -> bf16[{result}] {{
  %a = bf16[{left}] parameter(0)
  %b = bf16[{right}] parameter(1)
  ROOT %f = bf16[{result}] fusion(%a, %b), kind=kOutput, calls=%inner
}}

ENTRY %main (a: bf16[{left}], b: bf16[{right}]) -> bf16[{result}] {{
  %a = bf16[{left}]{{1,0}} parameter(0)
  %b = bf16[{right}]{{1,0}} parameter(1)
  ROOT %f = bf16[{result}]{{1,0}} fusion(%a, %b), kind=kOutput, calls=%outer
}}
"""
    (only,) = list_operations(text, {"wide"})
    assert (only.flops, only.part) == (expected, "wide, forward")


def test_what_a_tpu_keeps_on_its_chip_is_not_moved():
    """An array is fetched to the chip by an asynchronous copy, used there, and the result goes to memory."""
    text = """
ENTRY %main (a: f32[64,32]) -> f32[64,32] {
  %a = f32[64,32]{1,0:T(8,128)} parameter(0)
  %s = (f32[64,32]{1,0:T(8,128)S(1)}, f32[64,32]{1,0:T(8,128)}, u32[]{:S(2)}) copy-start(%a)
  %d = f32[64,32]{1,0:T(8,128)S(1)} copy-done(%s)
  ROOT %e = f32[64,32]{1,0:T(8,128)} exponential(%d)
}
"""
    array = 64 * 32 * 4
    # The context of the copy is a number of four bytes.
    assert sum(op.num_bytes for op in list_operations(text, set())) == 2 * array + 4


def test_a_slice_in_a_fusion_inside_a_fusion_reads_only_the_slice():
    """The TPU compiler takes a layer's weights out of the stack of all layers inside the fusion of their product."""
    text = """
%sliced (stack: bf16[16,64,32], layer: s32[]) -> bf16[64,32] {
  %stack = bf16[16,64,32]{2,1,0} parameter(0)
  %layer = s32[] parameter(1)
  %zero = s32[] constant(0)
  %slice = bf16[1,64,32]{2,1,0} dynamic-slice(%stack, %layer, %zero, %zero), dynamic_slice_sizes={1,64,32}
  ROOT %weights = bf16[64,32]{1,0} bitcast(%slice)
}
%product (x: bf16[8,64], all: bf16[16,64,32], at: s32[]) -> bf16[8,32] {
  %x = bf16[8,64]{1,0} parameter(0)
  %all = bf16[16,64,32]{2,1,0} parameter(1)
  %at = s32[] parameter(2)
  %inner = bf16[64,32]{1,0} fusion(%all, %at), kind=kLoop, calls=%sliced
  ROOT %dot = bf16[8,32]{1,0} dot(%x, %inner), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}
ENTRY %main (a: bf16[8,64], b: bf16[16,64,32], c: s32[]) -> bf16[8,32] {
  %a = bf16[8,64]{1,0} parameter(0)
  %b = bf16[16,64,32]{2,1,0} parameter(1)
  %c = s32[] parameter(2)
  ROOT %f = bf16[8,32]{1,0} fusion(%a, %b, %c), kind=kOutput, calls=%product
}
"""
    (product,) = list_operations(text, ())
    assert product.flops == 2 * 8 * 64 * 32
    assert product.num_bytes == 2 * (8 * 64 + 64 * 32 + 8 * 32) + 4


def test_a_product_of_blocks_that_share_a_scale_is_counted_as_any_other():
    hlo = """
ENTRY %main (x: f8e4m3fn[1,8,64], y: f8e4m3fn[1,16,64], a: f8e8m0fnu[1,8,2], b: f8e8m0fnu[1,16,2]) -> bf16[1,8,16] {
  %x = f8e4m3fn[1,8,64]{2,1,0} parameter(0)
  %y = f8e4m3fn[1,16,64]{2,1,0} parameter(1)
  %a = f8e8m0fnu[1,8,2]{2,1,0} parameter(2)
  %b = f8e8m0fnu[1,16,2]{2,1,0} parameter(3)
  %p = (bf16[1,8,16]{2,1,0}, u8[0]{0}) custom-call(%x, %y, %a, %b), custom_call_target="__cudnn$blockScaledDot"
  ROOT %out = bf16[1,8,16]{2,1,0} get-tuple-element(%p), index=0
}
"""
    (product,) = list_operations(hlo, ())
    assert product.flops == 2 * 8 * 16 * 64
    assert product.num_bytes == 8 * 64 + 16 * 64 + 8 * 2 + 16 * 2 + 2 * 8 * 16
