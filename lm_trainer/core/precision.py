"""Mixed precision policies in the usual notation, such as `f32` or `p=f32,c=bfloat16`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from pydantic import BeforeValidator, Field, PlainSerializer

if TYPE_CHECKING:
    import jax.numpy as jnp

_DTYPES = {
    "f32": "float32",
    "float32": "float32",
    "full": "float32",
    "bf16": "bfloat16",
    "bfloat16": "bfloat16",
    "f16": "float16",
    "float16": "float16",
    "half": "float16",
}
_PARTS = {
    "p": "param",
    "params": "param",
    "param": "param",
    "c": "compute",
    "compute": "compute",
    "o": "output",
    "output": "output",
}


class Policy(NamedTuple):
    """The dtypes of parameters, computation and output, as NumPy names."""

    param: str = "float32"
    """Master weights, gradients and optimizer state."""
    compute: str = "float32"
    """Activations and the operands of matrix products."""
    output: str = "float32"
    """Has no effect, since logits and losses are float32. Accepted for compatibility with other frameworks'
    policies."""

    @property
    def compute_dtype(self) -> jnp.dtype:
        import jax.numpy as jnp

        return jnp.dtype(self.compute)

    @property
    def param_dtype(self) -> jnp.dtype:
        import jax.numpy as jnp

        return jnp.dtype(self.param)


def parse_policy(value: Any) -> Policy:
    """Parses `f32`, `bfloat16` (for all parts) or `p=f32,c=bfloat16[,o=f32]`. The output dtype defaults to compute.

    Raises:
        ValueError: if a dtype or part is unknown; the message lists the valid ones.
    """
    if isinstance(value, Policy):
        return value
    if not isinstance(value, str):
        raise ValueError(f"expected a precision policy such as f32 or p=f32,c=bfloat16, got {value!r}")
    if "=" not in value:
        dtype = _parse_dtype(value)
        return Policy(dtype, dtype, dtype)
    parts: dict[str, str] = {}
    for item in value.split(","):
        key, _, dtype = item.partition("=")
        name = _PARTS.get(key.strip())
        if name is None:
            raise ValueError(f"unknown part {key.strip()!r} of a precision policy; use p, c and o (p=f32,c=bfloat16)")
        if name in parts:
            raise ValueError(f"the precision policy {value!r} sets {key.strip()!r} twice")
        parts[name] = _parse_dtype(dtype)
    param = parts.get("param", "float32")
    compute = parts.get("compute", param)
    return Policy(param, compute, parts.get("output", compute))


def _parse_dtype(text: str) -> str:
    try:
        return _DTYPES[text.strip().lower()]
    except KeyError:
        raise ValueError(f"unknown dtype {text.strip()!r}; use f32, bfloat16 or float16") from None


def format_policy(policy: Policy) -> str:
    """Formats a policy as a text. This is the inverse of `parse_policy`."""
    return f"p={policy.param},c={policy.compute},o={policy.output}"


PrecisionPolicy = Annotated[
    Policy,
    BeforeValidator(parse_policy, json_schema_input_type=str),
    PlainSerializer(format_policy, return_type=str),
    Field(json_schema_extra={"examples": ["f32", "p=f32,c=bfloat16"]}),
]
"""A `Policy` as users write it."""
