"""FLOPs of grouped products in programs for GPUs, counted from the text of a program."""

from __future__ import annotations

import pytest

from lm_trainer.plan.programs import ProgramWork
from lm_trainer.profile.expert_kernels import TRITON

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
