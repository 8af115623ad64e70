"""Names of modules in Levanter's models, so that patterns from Levanter's configurations match parameters here.

In Levanter a parameter has two names: its path from the root, as in `transformer.blocks.stacked.attn.c_attn.weight`,
and the class of the module that holds it, as in `Linear.weight`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from lm_trainer.optim.params import Param

PATHS: Mapping[str, tuple[str, ...]] = {
    "attention.q": ("attn.c_attn", "self_attn.q_proj"),
    "attention.k": ("attn.c_attn", "self_attn.k_proj"),
    "attention.v": ("attn.c_attn", "self_attn.v_proj"),
    "attention.out": ("attn.c_proj", "self_attn.o_proj"),
    "mlp.up": ("mlp.c_fc", "mlp.up_proj"),
    "mlp.gate": ("mlp.gate_proj",),
    "mlp.down": ("mlp.c_proj", "mlp.down_proj"),
    "attention_pre_norm": ("ln_1", "input_layernorm"),
    "mlp_pre_norm": ("ln_2", "pre_feedforward_layernorm"),
    "mlp_post_norm": ("post_feedforward_layernorm",),
    "final_norm": ("ln_f",),
}
"""Maps parts of parameter names to their paths in Levanter's model families."""

_KINDS = {"weight": "weight", "bias": "bias", "scale": "weight"}
"""Maps last parts of parameter names to last parts in Levanter."""
_NORMS = {"LayerNorm": ("LayerNorm",), "RMSNorm": ("RMSNorm", "RmsNorm")}


def levanter_names(param: Param, pattern: str) -> list[str]:
    """Returns Levanter's names of a parameter that contain a module name that is written out in `pattern`.

    Other names are omitted so that they do not change the meaning of a pattern such as `.*weight`: Levanter calls
    scales of norms `weight`.
    """
    return [name for word, name in _names_by_word(param) if word in pattern]


def _names_by_word(param: Param) -> Iterator[tuple[str, str]]:
    """Yields (word that a pattern must contain, Levanter's name of the parameter) for each name."""
    path, kind = param.name, "weight"
    if param.name.rsplit(".", 1)[-1] in _KINDS:
        path, _, last = param.name.rpartition(".")
        kind = _KINDS[last]
    for word, name in _class_names(param):
        yield word, f"{name}.{kind}"
    for part, modules in PATHS.items():
        part_pattern = re.compile(rf"(?<![^.]){re.escape(part)}(?![^.])")
        for module in modules if part_pattern.search(path) else ():
            yield module.rsplit(".", 1)[-1], f"{part_pattern.sub(module, path)}.{kind}"


def _class_names(param: Param) -> Iterator[tuple[str, str]]:
    if param.norm:
        yield from (("Norm", name) for name in _NORMS.get(param.norm, (param.norm,)))
    elif param.role == "embedding":
        yield "Embed", "Embedding"
    elif param.role in ("matrix", "head") or param.name.endswith(".bias"):
        yield "Linear", "MoELinear" if "experts" in param.axes[: param.lead] else "Linear"
