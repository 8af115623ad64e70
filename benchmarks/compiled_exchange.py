"""Compiles experts that several devices share, forward and backward, and reports the bytes that each device sends.

    python -m benchmarks.compiled_exchange --out benchmarks/results/compiled/expert_exchange.md

Needs JAX's CUDA plug-in and libtpu, but no GPU and no TPU. Takes some minutes.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from benchmarks.setting import markdown_table
from lm_trainer.nn.expert_spec import MoeSpec
from lm_trainer.nn.init import Initializer
from lm_trainer.nn.moe import Moe
from lm_trainer.parallel.mesh import MeshShape, build_mesh
from lm_trainer.parallel.target_platform import compiling_for
from lm_trainer.plan.devices import parse_devices
from lm_trainer.plan.target import target_devices
from lm_trainer.profile.collectives import bytes_sent
from lm_trainer.profile.devices import device_platform
from lm_trainer.profile.expert_kernels import expected_targets
from lm_trainer.step.dispatch.model_parallel import manual_axes
from lm_trainer.step.dispatch.repeatable import compile_repeatable

_ITEMSIZE = 2


class Case(NamedTuple):
    """The experts of one layer, in bfloat16, and the devices that share them."""

    target: str
    devices: int
    tokens: int
    """Tokens of each device."""
    dim: int
    width: int
    experts: int
    chosen: int

    @property
    def spec(self) -> MoeSpec:
        return MoeSpec(self.width, self.experts, self.chosen, kernel="grouped")

    @property
    def gathered(self) -> float:
        """Bytes that a device would send if all tokens, results and their gradients went to all devices."""
        return 4 * (self.devices - 1) * self.tokens * self.dim * _ITEMSIZE

    @property
    def expected(self) -> float:
        """Bytes of tokens, results and their gradients that a device sends, if all experts are equally likely."""
        targets = expected_targets(self.spec, self.devices) * (self.devices - 1) / self.devices
        return 4 * targets * self.tokens * self.dim * _ITEMSIZE

    def __str__(self) -> str:
        experts = f"{self.chosen} of {self.experts}, {self.dim} x {self.width}"
        return f"{self.target}, {self.devices} x {self.tokens:,} tokens, {experts}"


_MIXTRAL, _QWEN = (2048, 4096, 8, 2), (2048, 768, 128, 8)
CASES = [
    Case(target, devices, 4096, *sizes)
    for target, devices in (("v5p:2x2x1", 4), ("v5p:2x2x2", 8), ("8xH100", 8))
    for sizes in (_MIXTRAL, _QWEN)
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    columns = ["experts", "all tokens", "expected", "expected / all", "most", "choices", "GB temporary"]
    text = [
        "# Exchange of tokens among devices that share experts",
        "",
        f"libtpu {version('libtpu')}, jax-cuda12-plugin {version('jax-cuda12-plugin')}, jax {jax.__version__}; "
        "regenerate: `python -m benchmarks.compiled_exchange --out FILE`.",
        "",
        "MB that one device sends for the experts of a layer, forward and backward, without recomputation; tokens and",
        "results are bfloat16. `all tokens`, by formula: every token goes to all devices, and their sums come back.",
        "`expected`, by formula: every token goes to the devices of its experts, and all experts are equally likely.",
        "`most`, by the compiled program: no two experts of a token are on the same device. `choices`, by the compiled",
        "program: experts and weights of the tokens, which all devices receive, and gradients of the weights.",
        "Temporary memory is by the compiled program, for the largest number of rows that a device can receive.",
        "",
        markdown_table(columns, [[str(case), *measure(case)] for case in CASES]),
        "",
    ]
    options.out.write_text("\n".join(text))


def measure(case: Case) -> list[str]:
    """Compiles a case, and returns the figures of a row."""
    compiled = compile_experts(case)
    sent, memory = bytes_sent(compiled.as_text() or ""), compiled.memory_analysis()
    assert memory is not None
    # The choices are gathered; the gradients of the weights are 4 bytes for each choice and device.
    gradients = (case.devices - 1) * case.tokens * case.chosen * 4
    rows, choices = sent["all-to-all"] - gradients, sent["all-gather"] + gradients
    shown = [f"{size / 1e6:.1f}" for size in (case.gathered, case.expected)]
    shown += [f"{case.expected / case.gathered:.2f}", *(f"{size / 1e6:.1f}" for size in (rows, choices))]
    return [*shown, f"{memory.temp_size_in_bytes / 1e9:.2f}"]


def compile_experts(case: Case) -> jax.stages.Compiled:
    """Compiles the loss and gradient of a layer's experts on devices that share them."""
    devices = target_devices(parse_devices(case.target))[: case.devices]
    platform = device_platform(parse_devices(case.target).kind)
    mesh = build_mesh(MeshShape(expert=case.devices), devices)

    def build() -> Moe:
        return Moe(case.spec, case.dim, init=Initializer(nnx.Rngs(0), std=0.02, residual_std=0.02))

    graph, params = nnx.split(nnx.eval_shape(build), nnx.Param)
    rows = PartitionSpec("expert")
    specs = {"router": PartitionSpec(None, "expert"), **dict.fromkeys(("gate", "up", "down"), rows)}

    def on_devices(x: Any, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec))

    tokens = jax.ShapeDtypeStruct((case.devices, case.tokens, case.dim), jnp.bfloat16)
    arguments = {name: on_devices(param, specs[name]) for name, param in nnx.to_pure_dict(params).items()}
    gradient = jax.jit(_share(_gradient_of(graph), mesh, (specs, rows)))
    with compiling_for(platform):
        return compile_repeatable(gradient.lower(arguments, on_devices(tokens, rows)), platform)


def _gradient_of(graph: nnx.GraphDef[Moe]) -> Callable[..., Any]:
    def loss(params: dict[str, jax.Array], x_BSD: jax.Array) -> jax.Array:
        state = nnx.State({name: nnx.Param(value) for name, value in params.items()})
        y_BSD, _ = nnx.merge(graph, state)(x_BSD, jnp.ones(x_BSD.shape[:2], bool))
        return jnp.sum(jnp.sin(y_BSD.astype(jnp.float32)))

    return jax.grad(loss, argnums=(0, 1))


def _share(function: Callable[..., Any], mesh: Mesh, specs: Any) -> Callable[..., Any]:
    return jax.shard_map(
        function, mesh=mesh, in_specs=specs, out_specs=specs, axis_names=manual_axes(mesh), check_vma=False
    )


if __name__ == "__main__":
    main()
