"""FLOPs of grouped products: counted from the text of a program, and expected by formula."""

from __future__ import annotations

import pytest

from lm_trainer.models import MixtralConfig, Qwen3MoeConfig
from lm_trainer.plan.programs import ProgramWork
from lm_trainer.profile.expert_kernels import TRITON, unneeded_expert_flops

SLOTS, DIM, WIDTH, EXPERTS = 4096, 64, 96, 8


def program(name: str, result: str, left: str, right: str) -> str:
    call = (
        f'custom-call(%x, %w), custom_call_target="{TRITON}", backend_config={{ir = "(\\22name = {{", name = "{name}"}}'
    )
    return "\n".join(
        (
            "HloModule m",
            "",
            f"ENTRY %e (x: {left}, w: {right}) -> {result} {{",
            f"  %x = {left} parameter(0)",
            f"  %w = {right} parameter(1)",
            f"  ROOT %y = {result} {call}",
            "}",
            "",
        )
    )


@pytest.mark.parametrize(
    ("name", "shapes", "slots"),
    [
        # Half of the last tile of 128 slots is empty in the mean.
        (
            "grouped_product",
            (f"bf16[{SLOTS},{WIDTH}]", f"bf16[{SLOTS},{DIM}]", f"bf16[{EXPERTS},{DIM},{WIDTH}]"),
            SLOTS + EXPERTS * 64,
        ),
        # Groups of fewer than 256 slots have tiles of 64 slots.
        (
            "grouped_product",
            (f"bf16[{SLOTS},{WIDTH}]", f"bf16[{SLOTS},{DIM}]", f"bf16[32,{DIM},{WIDTH}]"),
            SLOTS + 32 * 32,
        ),
        # The gradient of the rows, whose matrices are transposed.
        (
            "grouped_product",
            (f"bf16[{SLOTS},{DIM}]", f"bf16[{SLOTS},{WIDTH}]", f"bf16[{EXPERTS},{DIM},{WIDTH}]"),
            SLOTS + EXPERTS * 64,
        ),
        (
            "grouped_gradient",
            (f"bf16[{EXPERTS},{DIM},{WIDTH}]", f"bf16[{SLOTS},{DIM}]", f"bf16[{SLOTS},{WIDTH}]"),
            SLOTS,
        ),
        (
            "another_kernel",
            (f"bf16[{SLOTS},{WIDTH}]", f"bf16[{SLOTS},{DIM}]", f"bf16[{EXPERTS},{DIM},{WIDTH}]"),
            0,
        ),
    ],
)
def test_kernels_are_counted(name: str, shapes: tuple[str, str, str], slots: int) -> None:
    work = ProgramWork.from_hlo("layer 0", 1, program(name, *shapes))
    assert work.flops == 2 * slots * DIM * WIDTH
    assert work.kernels == {TRITON: 1}


def tpu_program(function: str, result: str, left: str, right: str) -> str:
    """A kernel after the arrays that describe the groups, as the compiler for TPUs writes it."""
    call = (
        'custom-call(%n, %offsets, /*index=5*/%x, %w), custom_call_target="tpu_custom_call", frontend_attributes={}, '
        f'metadata={{op_name="jit(loss)/shard_map/transpose(jvp(jit({function})))/pallas_call" stack_frame_id=1}}, '
        'backend_config={"custom_call_config":{"body":"TUzv","cost_estimate":{"flops":"1"}}}'
    )
    return "\n".join(
        (
            "HloModule m",
            "",
            f"ENTRY %e (n: s32[], offsets: s32[9], x: {left}, w: {right}) -> {result} {{",
            "  %n = s32[] parameter(0)",
            "  %offsets = s32[9]{0} parameter(1)",
            f"  %x = {left} parameter(2)",
            f"  %w = {right} parameter(3)",
            f"  ROOT %y = {result} {call}",
            "}",
            "",
        )
    )


@pytest.mark.parametrize(
    ("function", "shapes", "slots"),
    [
        # Groups of 512 slots have tiles of 128, of which the tiles at 7 borders are computed twice.
        (
            "gmm",
            (f"bf16[{SLOTS},{WIDTH}]", f"bf16[{SLOTS},{DIM}]", f"bf16[{EXPERTS},{DIM},{WIDTH}]"),
            SLOTS + 7 * 128,
        ),
        # Groups of 2048 slots have tiles of 256, and groups of 4096 tiles of 512.
        ("gmm", (f"bf16[{SLOTS},{WIDTH}]", f"bf16[{SLOTS},{DIM}]", f"bf16[2,{DIM},{WIDTH}]"), SLOTS + 256),
        ("gmm", (f"bf16[8192,{WIDTH}]", f"bf16[8192,{DIM}]", f"bf16[2,{DIM},{WIDTH}]"), 8192 + 512),
        # The gradient of the rows, whose matrices are transposed, and of the matrices.
        (
            "gmm",
            (f"bf16[{SLOTS},{DIM}]", f"bf16[{SLOTS},{WIDTH}]", f"bf16[{EXPERTS},{DIM},{WIDTH}]"),
            SLOTS + 7 * 128,
        ),
        (
            "tgmm",
            (f"bf16[{EXPERTS},{DIM},{WIDTH}]", f"bf16[{SLOTS},{DIM}]", f"bf16[{SLOTS},{WIDTH}]"),
            SLOTS + 7 * 128,
        ),
        ("splash", (f"bf16[{SLOTS},{WIDTH}]", f"bf16[{SLOTS},{DIM}]", f"bf16[{EXPERTS},{DIM},{WIDTH}]"), 0),
    ],
)
def test_kernels_for_tpus_are_counted(function: str, shapes: tuple[str, str, str], slots: int) -> None:
    work = ProgramWork.from_hlo("layer 0", 1, tpu_program(function, *shapes))
    assert work.flops == 2 * slots * DIM * WIDTH
    assert work.kernels == {"tpu_custom_call": 1}


MIXTRAL = MixtralConfig(hidden_dim=2048, intermediate_dim=4096, num_layers=3, expert_kernel="grouped")
QWEN3 = Qwen3MoeConfig(num_layers=3, expert_kernel="grouped")


@pytest.mark.parametrize(
    ("config", "platform", "devices", "empty"),
    [
        # 4096 tokens: slots that the products of the forward pass and both gradients compute in vain.
        (MIXTRAL, "tpu", 1, 3 * 7 * 128),
        (MIXTRAL, "gpu", 1, 2 * 8 * 64),
        (MIXTRAL, "cpu", 1, 3 * 8 * 16),
        (QWEN3, "tpu", 1, 3 * 127 * 128),
        (QWEN3, "gpu", 1, 2 * 128 * 64),
        # On 8 devices, each has 16 of 128 experts, and rows for all assignments.
        (QWEN3, "tpu", 8, 3 * 15 * 512),
    ],
)
def test_expected_work_of_grouped_kernels(
    config: MixtralConfig | Qwen3MoeConfig, platform: str, devices: int, empty: int
) -> None:
    spec = config.spec(32000)
    mlp = spec.blocks[0].mlp
    assert mlp is not None
    of_slot = 2 * 3 * spec.hidden_dim * mlp.hidden_dim
    assert unneeded_expert_flops(spec, platform, 4096, devices) == pytest.approx(3 * of_slot * empty / 4096)
