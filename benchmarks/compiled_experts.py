"""Compiles the experts of a layer, forward and backward, for GPUs, and reports FLOPs, bytes and memory of each kernel.

    python -m benchmarks.compiled_experts --out benchmarks/results/compiled/experts.md

Needs JAX's CUDA plug-in, but no GPU, and JAX 0.10: later versions make the kernel only on a machine with a GPU. Takes
some minutes.
"""

from __future__ import annotations

import argparse
import re
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import SingleDeviceSharding

from benchmarks.setting import markdown_table
from lm_trainer.nn.expert_spec import ExpertKernel, MoeSpec
from lm_trainer.nn.init import Initializer
from lm_trainer.nn.moe import Moe
from lm_trainer.parallel.target_platform import compiling_for
from lm_trainer.plan.devices import parse_devices
from lm_trainer.plan.programs import ProgramWork
from lm_trainer.plan.target import target_devices
from lm_trainer.step.dispatch.repeatable import compile_repeatable


class Case(NamedTuple):
    """The experts of one layer, and the GPU to compile them for."""

    gpu: str
    dtype: str
    tokens: int
    dim: int
    width: int
    experts: int
    chosen: int
    kernels: tuple[ExpertKernel, ...] = ("dense", "grouped")

    @property
    def useful_flops(self) -> int:
        """FLOPs of the products with the chosen experts, forward and backward."""
        return 3 * 3 * 2 * self.tokens * self.chosen * self.dim * self.width

    def __str__(self) -> str:
        experts = f"{self.chosen} of {self.experts}, {self.dim} x {self.width}"
        return f"{self.gpu}, {self.dtype}, {self.tokens:,} tokens, {experts}"


_MIXTRAL, _QWEN = (4096, 2048, 4096, 8, 2), (4096, 2048, 768, 128, 8)
CASES = [
    Case("H100", "bfloat16", *_MIXTRAL, kernels=("dense", "ragged_dot", "grouped")),
    Case("H100", "float32", *_MIXTRAL),
    Case("H100", "bfloat16", *_QWEN, kernels=("dense", "ragged_dot", "grouped")),
    Case("A100", "bfloat16", *_MIXTRAL),
    Case("B200", "bfloat16", *_MIXTRAL),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    rows = [[str(case), kernel, *measure(case, kernel)] for case in CASES for kernel in case.kernels]
    columns = ["experts", "kernel", "FLOPs / useful", "GB moved", "GB temporary", "Triton kernels"]
    text = [
        "# Experts of a layer by the GPU's own compiler",
        "",
        f"jax-cuda12-plugin {version('jax-cuda12-plugin')}, jax {jax.__version__}; regenerate: "
        "`python -m benchmarks.compiled_experts --out FILE`.",
        "",
        "Loss and gradient of one layer on one device, compiled without the GPU and not run. Useful are the products",
        "of tokens with the experts that they chose; the router is included in the FLOPs. Of a grouped kernel, the",
        "last tile of each expert counts as half empty. An array counts once for each kernel that reads or writes it.",
        "",
        markdown_table(columns, rows),
        "",
    ]
    options.out.write_text("\n".join(text))


def measure(case: Case, kernel: ExpertKernel) -> list[str]:
    """Compiles a case, and returns the figures of a row."""
    device, dtype = target_devices(parse_devices(f"1x{case.gpu}"))[0], jnp.dtype(case.dtype)
    spec = MoeSpec(case.width, case.experts, case.chosen, kernel=kernel)

    def build() -> Moe:
        return Moe(spec, case.dim, init=Initializer(nnx.Rngs(0), std=0.02, residual_std=0.02))

    graph, params = nnx.split(nnx.eval_shape(build), nnx.Param)

    def loss(params: nnx.State, x_BSD: jax.Array) -> jax.Array:
        y_BSD, _ = nnx.merge(graph, params)(x_BSD, jnp.ones(x_BSD.shape[:2], bool))
        return jnp.sum(jnp.sin(y_BSD.astype(jnp.float32)))

    def on_device(x: jax.Array | jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, dtype, sharding=SingleDeviceSharding(device))

    arguments = jax.tree.map(on_device, (params, jax.ShapeDtypeStruct((1, case.tokens, case.dim), dtype)))
    with compiling_for("gpu"):
        compiled = compile_repeatable(jax.jit(jax.grad(loss, argnums=(0, 1))).lower(*arguments), "gpu")
    work, memory = ProgramWork.from_hlo("experts", 1, compiled.as_text() or ""), compiled.memory_analysis()
    assert memory is not None
    figures = f"{work.flops / case.useful_flops:.2f}", f"{work.num_bytes / 1e9:.1f}"
    kernels = sum(count for name, count in work.kernels.items() if re.search("triton", name))
    return [*figures, f"{memory.temp_size_in_bytes / 1e9:.2f}", str(kernels)]


if __name__ == "__main__":
    main()
