"""The bytes that programs send, against those that follow from what they compute."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec

from lm_trainer.parallel.mesh import MeshShape, build_mesh
from lm_trainer.profile.collectives import bytes_sent

SIZE = 8 * 1024 * 4


def test_compiled_collectives_are_counted() -> None:
    mesh = build_mesh(MeshShape(replica=2), jax.devices())

    def body(x: jax.Array) -> Any:
        return (
            lax.all_gather(x, "data", tiled=True),
            lax.psum_scatter(x, "data", scatter_dimension=1, tiled=True),
            lax.all_to_all(x, ("replica", "data"), 1, 1, tiled=True),
            lax.ppermute(x, "data", [(0, 1), (1, 2)]),
        )

    spec = PartitionSpec(("replica", "data"))
    mapped = jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=(spec,) * 4, check_vma=False)
    x = jax.ShapeDtypeStruct((64, 1024), np.float32)
    text = jax.jit(mapped).lower(x).compile().as_text() or ""
    expected = {"all-gather": 3 * SIZE, "reduce-scatter": SIZE * 3 / 4, "all-to-all": SIZE * 7 / 8}
    assert bytes_sent(text) == {**expected, "collective-permute": SIZE}
    assert bytes_sent(jax.jit(jnp.sin).lower(x).compile().as_text() or "") == {}


def program(*lines: str) -> str:
    """The text of a program of these lines."""
    return "\n".join(["ENTRY %main (x: f32[8]) -> f32[8] {", *(f"  {line}" for line in lines), "}"])


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("%a = (bf16[2,8]{1,0}, bf16[16]{0}) all-reduce(%x, %y), replica_groups=[2,4]<=[8], to_apply=%add", 96.0),
        ("%a = (f32[4], f32[16]) all-gather-start(%x), replica_groups={{0,1,2,3}}, dimensions={0}", 48.0),
        ("%a = f32[64] all-gather(%x), replica_groups=mesh['axis_0'=2,'axis_1'=4] {'axis_1'}, dimensions={0}", 192.0),
        ("%a = f32[64] all-gather(%x), replica_groups=mesh['axis_0'=8] {'axis_0':(1)2}, dimensions={0}", 128.0),
        (
            "%a = f32[64] all-gather(%x), replica_groups=mesh['axis_0'=4,'axis_1'=2], device_ids=([2,4]T(1,0)) "
            "{'axis_0'}, dimensions={0}",
            192.0,
        ),
        (
            "%a = (bf16[64]{0}, bf16[64]{0}, u32[]{:S(2)}, u32[]{:S(2)}) collective-permute-start(%x), "
            "source_target_pairs={{0,1},{1,0}}",
            128.0,
        ),
        ("%a = f32[16] all-gather-done(%b)", None),
        ("%a = pred[16] fusion(%all-gather), kind=kLoop", None),
    ],
)
def test_lines_as_other_backends_write_them(line: str, expected: float | None) -> None:
    assert sum(bytes_sent(program(line)).values()) == (expected or 0.0)


@pytest.mark.parametrize("start", [False, True])
def test_an_exchange_of_ragged_rows_counts_as_the_smaller_array(start: bool) -> None:
    result = "((bf16[64,8], bf16[16,8], s64[4]), bf16[16,8])" if start else "bf16[16,8]"
    exchange = f"ragged-all-to-all{'-start' if start else ''}(%x, %y, %n, %n, %n, /*index=5*/%n)"
    text = program(
        "%x = bf16[64,8] parameter(0)",
        "%y = bf16[16,8] parameter(1)",
        "%n = s64[4] parameter(2)",
        f"%a = {result} {exchange}, channel_id=1, replica_groups={{{{0,1,2,3}}}}",
    )
    assert bytes_sent(text) == {"all-to-all": 16 * 8 * 2 * 3 / 4}


def test_a_collective_of_unknown_devices_is_refused() -> None:
    with pytest.raises(ValueError, match="which devices take part cannot be read"):
        bytes_sent(program("%a = f32[16] all-gather(%x), dimensions={0}"))


def test_a_collective_in_a_loop_counts_for_each_turn() -> None:
    """The loop as a TPU's compiler writes it, its collective carried through a fusion beside which it runs."""
    text = """
%start (p: f32[4]) -> f32[16] {
  %p = f32[4] parameter(0)
  ROOT %a = f32[16] all-gather(%p), channel_id=1, replica_groups={{0,1,2,3}}, dimensions={0}
}

%async_collective_fusion.1 (p: f32[4]) -> f32[16] {
  %p = f32[4] parameter(0)
  ROOT %a = f32[16] all-gather(%p), channel_id=1, replica_groups={{0,1,2,3}}, dimensions={0}
}

%end (p: f32[4]) -> f32[16] {
  %p = f32[4] parameter(0)
  ROOT %a = f32[16] all-gather(%p), channel_id=1, replica_groups={{0,1,2,3}}, dimensions={0}
}

%body (t: (s32[], f32[4])) -> (s32[], f32[4]) {
  %x = f32[4] get-tuple-element(%t), index=1
  %async-collective-start = f32[16] fusion(%x), kind=kCustom, calls=%start
  %g = f32[16] fusion(%x), kind=kCustom, calls=%async_collective_fusion.1
  %async-collective-done = f32[16] fusion(%g), kind=kCustom, calls=%end
}

%cond (t: (s32[], f32[4])) -> pred[] {
  %c = s32[]{:T(128)} constant(5)
  %n = s32[] get-tuple-element(%t), index=0
  ROOT %lt = pred[] compare(%n, %c), direction=LT
}
"""
    loop = program("%w = (s32[], f32[4]) while(%t), condition=%cond, body=%body")
    assert bytes_sent(f"{text}\n{loop}") == {"all-gather": 5 * 48.0}


@pytest.mark.parametrize(("added", "turns"), [(1, 8), (2, 4), (3, 3)])
def test_a_loop_that_counts_in_steps_has_fewer_turns(added: int, turns: int) -> None:
    """As a TPU's compiler unrolls the loops in which a product overlaps with the exchange of its pieces."""
    text = f"""
%body (t: (f32[4], f32[4], f32[4], f32[4], f32[4], u32[])) -> (f32[4], f32[4], f32[4], f32[4], f32[4], u32[]) {{
  %t = (f32[4], f32[4], f32[4], f32[4], f32[4], /*index=5*/u32[]) parameter(0)
  %x = f32[4] get-tuple-element(%t), index=0
  %n = u32[]{{:T(128)}} get-tuple-element(%t), index=5
  %a = f32[4] collective-permute(%x), channel_id=1, source_target_pairs={{{{0,1}},{{1,0}}}}
  %by = u32[]{{:T(128)}} constant({added})
  %next = u32[]{{:T(128)}} add(%n, %by)
  ROOT %r = (f32[4], f32[4], f32[4], f32[4], f32[4], /*index=5*/u32[]) tuple(%a, %x, %x, %x, %x, /*index=5*/%next)
}}

%cond (t: (f32[4], f32[4], f32[4], f32[4], f32[4], u32[])) -> pred[] {{
  %t = (f32[4], f32[4], f32[4], f32[4], f32[4], /*index=5*/u32[]) parameter(0)
  %c = u32[]{{:T(128)}} constant(8)
  %n = u32[]{{:T(128)}} get-tuple-element(%t), index=5
  ROOT %lt = pred[] compare(%n, %c), direction=LT
}}
"""
    loop = program("%w = (f32[4], f32[4], f32[4], f32[4], f32[4], u32[]) while(%t), condition=%cond, body=%body")
    assert bytes_sent(f"{text}\n{loop}") == {"collective-permute": turns * 16.0}


def test_a_sum_of_which_each_device_keeps_a_slice_is_a_reduce_scatter() -> None:
    text = """
%all-reduce-scatter.3.clone.1 (p: f32[16]) -> f32[4] {
  %p = f32[16] parameter(0)
  %all = f32[16] all-reduce(%p), channel_id=1, replica_groups={{0,1,2,3}}, to_apply=%add
  %at = s32[] partition-id()
  ROOT %slice = f32[4] dynamic-slice(%all, %at), dynamic_slice_sizes={4}
}
"""
    fusion = program("%f = f32[4]{0:T(128)} fusion(%x), kind=kCustom, calls=%all-reduce-scatter.3.clone.1")
    assert bytes_sent(f"{text}\n{fusion}") == {"reduce-scatter": 3 * 16.0}


def test_a_collective_of_the_sparse_cores_is_counted() -> None:
    """As a TPU's compiler hands it to them: a call that the program starts, and does other work beside."""
    text = """
%called (p: f32[4], t: token[]) -> f32[16] {
  %p = f32[4] parameter(0)
  %t = token[] parameter(1)
  ROOT %g = f32[16] all-gather(%p), channel_id=1, replica_groups=mesh['axis_0'=4,'axis_1'=1] {'axis_0'}, dimensions={0}
}, execution_thread="sparsecore"
"""
    start = (
        "%s = ((f32[4]{0:T(128)}, token[]), f32[16]{0:T(128)}) call-start(%x, %token), "
        'async_execution_thread="sparsecore", to_apply=%called'
    )
    assert bytes_sent(f"{text}\n{program(start, '%d = f32[16]{0:T(128)} call-done(%s)')}") == {"all-gather": 48.0}
