"""Compiles the experts of a layer, forward and backward, and reports FLOPs, bytes and memory of each kernel.

    python -m benchmarks.compiled_experts gpu --out benchmarks/results/compiled/experts.md
    python -m benchmarks.compiled_experts tpu --out benchmarks/results/compiled/experts_tpu.md

Needs the compiler, which is JAX's CUDA plug-in or libtpu, but no such device. For GPUs it needs JAX 0.10: later
versions make the kernel only on a machine with a GPU. Takes some minutes.
"""

from __future__ import annotations

import argparse
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
from lm_trainer.profile.devices import device_platform
from lm_trainer.step.dispatch.repeatable import compile_repeatable


class Case(NamedTuple):
    """The experts of one layer, and the device to compile them for."""

    device: str
    """As in `--devices` of `lmt plan`; the first one of several."""
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
        return f"{self.device}, {self.dtype}, {self.tokens:,} tokens, {experts}"


_MIXTRAL, _QWEN = (4096, 2048, 4096, 8, 2), (4096, 2048, 768, 128, 8)
_GPU = [
    Case("1xH100", "bfloat16", *_MIXTRAL, kernels=("dense", "ragged_dot", "grouped")),
    Case("1xH100", "float32", *_MIXTRAL),
    Case("1xH100", "bfloat16", *_QWEN, kernels=("dense", "ragged_dot", "grouped")),
    Case("1xA100", "bfloat16", *_MIXTRAL),
    Case("1xB200", "bfloat16", *_MIXTRAL),
]
_TPU = [
    Case("v5p:2x2x1", "bfloat16", *_MIXTRAL, kernels=("dense", "ragged_dot", "grouped")),
    Case("v5p:2x2x1", "bfloat16", *_QWEN, kernels=("dense", "ragged_dot", "grouped")),
    Case("v5e:2x2", "float32", *_MIXTRAL, kernels=("grouped",)),
]
COMPILERS = {"gpu": (_GPU, "jax-cuda12-plugin"), "tpu": (_TPU, "libtpu")}
"""Kind of device -> the cases to compile for it, and the package of its compiler."""
EMPTY_SLOTS = {
    "gpu": "the last tile of each expert counts as half empty",
    "tpu": "a tile with slots of two experts counts for both",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("kind", choices=COMPILERS, help="devices to compile for")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    cases, package = COMPILERS[options.kind]
    rows = [[str(case), kernel, *measure(case, kernel)] for case in cases for kernel in case.kernels]
    columns = ["experts", "kernel", "FLOPs / useful", "GB moved", "GB temporary", "kernels"]
    text = [
        f"# Experts of a layer by the {options.kind.upper()}'s own compiler",
        "",
        f"{package} {version(package)}, jax {jax.__version__}; regenerate: "
        f"`python -m benchmarks.compiled_experts {options.kind} --out FILE`.",
        "",
        "Loss and gradient of one layer on one device, compiled without it and not run. Useful are the products of",
        "tokens with the experts that they chose; the router is included in the FLOPs. Of a grouped kernel,",
        f"{EMPTY_SLOTS[options.kind]}. An array counts once for each kernel that reads or writes it.",
        "",
        markdown_table(columns, rows),
        "",
    ]
    options.out.write_text("\n".join(text))


def measure(case: Case, kernel: ExpertKernel) -> list[str]:
    """Compiles a case, and returns the figures of a row."""
    group, dtype = parse_devices(case.device), jnp.dtype(case.dtype)
    device, platform = target_devices(group)[0], device_platform(group.kind)
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
    with compiling_for(platform):
        compiled = compile_repeatable(jax.jit(jax.grad(loss, argnums=(0, 1))).lower(*arguments), platform)
    work, memory = ProgramWork.from_hlo("experts", 1, compiled.as_text() or ""), compiled.memory_analysis()
    assert memory is not None
    figures = f"{work.flops / case.useful_flops:.2f}", f"{work.num_bytes / 1e9:.1f}"
    return [*figures, f"{memory.temp_size_in_bytes / 1e9:.2f}", str(sum(work.kernels.values()))]


if __name__ == "__main__":
    main()
