"""FLOPs of attention kernels, counted from the text of a program and by pairs of blocks."""

from __future__ import annotations

import pytest

from lm_trainer.nn.spec import AttentionSpec, ScoreSpec
from lm_trainer.plan.programs import ProgramWork, TargetFigures
from lm_trainer.profile.attention_kernels import computed_share, count_products, kernel_block, visible_share
from lm_trainer.profile.hlo import parse_program
from lm_trainer.profile.network import Network


def program(*kernels: tuple[str, str]) -> str:
    lines = [f'  %{name} = f32[4]{{0}} custom-call(%x), custom_call_target="{target}"' for name, target in kernels]
    return "\n".join(["HloModule m", "", "ENTRY %e (x: f32[4]) -> f32[4] {", "  %x = f32[4]{0} parameter(0)", *lines,
                      "  ROOT %r = f32[4]{0} negate(%x)", "}", ""])  # fmt: skip


FORWARD = ("splash_mha_fwd_segmented_residuals.1", "tpu_custom_call")
KEYS = ("splash_mha_dkv_segmented_no_residuals.1", "tpu_custom_call")
QUERIES = ("splash_mha_dq_segmented_no_residuals.3", "tpu_custom_call")


@pytest.mark.parametrize(
    ("kernels", "products"),
    [
        ([FORWARD], 2),
        ([FORWARD, KEYS], 2 + 5),
        ([FORWARD, KEYS, QUERIES], 2 + 4 + 3),
        ([("custom-call.1", "__cudnn$fmhaScaleBiasSoftmax")], 2),
        ([("custom-call.2", "__cudnn$fmhaScaleBiasSoftmaxBackward")], 5),
        ([("gmm.1", "tpu_custom_call")], 0),
    ],
    ids=str,
)
def test_products_of_a_kernel(kernels: list[tuple[str, str]], products: int) -> None:
    assert count_products(parse_program(program(*kernels))) == products


@pytest.mark.parametrize("length", [512, 1024, 2048])
@pytest.mark.parametrize("window", [None, 1, 2, 128, 129, 300, 4096])
@pytest.mark.parametrize("block", [128, 512])
def test_blocks_with_a_visible_pair_are_computed(length: int, window: int | None, block: int) -> None:
    spec = AttentionSpec(num_heads=2, num_kv_heads=1, head_dim=64, window=window)
    count = length // block
    visible = sum(
        any(
            key <= query and (window is None or query - key < window)
            for query in (row * block, row * block + block - 1)
            for key in (column * block, column * block + block - 1)
        )
        for row in range(count)
        for column in range(count)
    )
    assert computed_share(spec, length, block) == pytest.approx(visible / count**2)


@pytest.mark.parametrize("window", [None, 1, 7, 32, 100])
@pytest.mark.parametrize("chunk", [None, 1, 5, 16, 100])
def test_the_mask_leaves_earlier_positions_in_window_and_chunk(window: int | None, chunk: int | None) -> None:
    spec = AttentionSpec(num_heads=2, head_dim=64, window=window, chunk=chunk)
    visible = sum(
        key <= query and (window is None or query - key < window) and (chunk is None or query // chunk == key // chunk)
        for query in range(32)
        for key in range(32)
    )
    assert visible_share(spec, 32) == pytest.approx(visible / 32**2)


@pytest.mark.parametrize(
    ("kind", "length", "size", "block"),
    [("TPU v4", 2048, None, 512), ("TPU v4", 640, None, 128), ("TPU v4", 3072, None, 768),
     ("TPU v4", 4096, None, 1024), ("TPU v4", 32768, None, 1024), ("TPU v4", 2048, 256, 256),
     ("TPU v4", 100, None, 100), ("TPU v6 lite", 4096, None, 1024), ("TPU v6 lite", 6144, None, 1536),
     ("TPU v6 lite", 8192, None, 2048), ("TPU v5 lite", 16384, None, 2048), ("TPU v5 lite", 32768, None, 1024),
     ("TPU v5", 8192, None, 1024),
     ("NVIDIA A100-SXM4-80GB", 2048, None, 128), ("NVIDIA A100-SXM4-80GB", 64, None, 64), ("cpu", 2048, None, 2048)],
)  # fmt: skip
def test_blocks_are_the_ones_that_the_kernel_is_given(kind: str, length: int, size: int | None, block: int) -> None:
    spec = AttentionSpec(num_heads=2, head_dim=64, scores=ScoreSpec(block_size=size))
    assert kernel_block(spec, length, kind) == block


def test_blocks_of_a_window_are_small() -> None:
    assert kernel_block(AttentionSpec(num_heads=2, head_dim=64, window=1024), 8192, "TPU v6 lite") == 512


@pytest.mark.parametrize(("head_dim", "itemsize", "block"), [(128, 2, 2048), (256, 2, 1024), (128, 4, 1024)])
def test_blocks_of_wide_keys_are_smaller(head_dim: int, itemsize: int, block: int) -> None:
    spec = AttentionSpec(num_heads=2, head_dim=head_dim)
    assert kernel_block(spec, 8192, "TPU v6 lite", itemsize) == block


def test_layers_of_a_kind_count_with_their_own_share() -> None:
    target = TargetFigures(Network(None), attention_flops=[100.0, 50.0])

    def flops(name: str) -> float:
        return ProgramWork.from_hlo(name, 1, program(FORWARD), target).kernel_flops

    assert (flops("layer 0"), flops("layer 1 gradient"), flops("microbatch")) == (200.0, 100.0, 150.0)
    assert ProgramWork.from_hlo("layer 0", 1, program(FORWARD), target).flops == 200.0
    assert ProgramWork.from_hlo("layer 0", 1, program(FORWARD)).flops == 0.0
