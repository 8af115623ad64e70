"""Tables of the architecture and the supported features of each model family, generated from the code."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

YES, NO = "✓", "no"

VOCABULARY = 50_304
POSITIONS = 2048
"""Row length for which kernel support is tested."""

AXES = ("model", "context", "expert", "pipeline")
KERNELS = {"cudnn": "gpu", "splash": "tpu", "ring": "tpu"}
"""Attention backend -> a platform that has it."""


def features() -> str:
    """Two tables, each with a row for every family."""
    from lm_trainer.models import MODEL_CONFIGS

    families = {family.model_fields["type"].default: family for family in MODEL_CONFIGS}
    heading = "## Supported features { #what-can-be-done-with-it }"
    return "\n".join([*_table(families, _MADE_OF), "", heading, "", *_table(families, _ABILITIES)])


def _table(families: dict[str, Any], columns: dict[str, Callable[[Any], str]]) -> Iterator[str]:
    yield f"| family | {' | '.join(columns)} |"
    yield "|---" * (len(columns) + 1) + "|"
    for name, family in families.items():
        yield f"| `{name}` | {' | '.join(cell(family) for cell in columns.values())} |"


def _spec(family: Any) -> Any:
    return family().spec(VOCABULARY)


def _positions(family: Any) -> str:
    spec = _spec(family)
    if spec.embedding.learned_positions:
        return "learned"
    kinds = {type(_positions_of(block.mixer)).__name__.removesuffix("Spec") for block in spec.blocks}
    some_absent = "NoneType" in kinds
    names = {"Rope": "rotary", "Alibi": "ALiBi"}
    (kind,) = kinds - {"NoneType"} or {None}
    return "none" if kind is None else names[kind] + (", not in every layer" if some_absent else "")


def _positions_of(mixer: Any) -> Any:
    from lm_trainer.nn.mixer_spec import LatentSpec

    return mixer.rope if isinstance(mixer, LatentSpec) else getattr(mixer, "positions", None)


def _attention(family: Any) -> str:
    from lm_trainer.nn.mixer_spec import DeltaSpec, LatentSpec, StateSpaceSpec, softmax_specs

    kinds = {type(block.mixer) for block in _spec(family).blocks}
    attentions = softmax_specs(_spec(family).blocks)
    found = {
        "none": not attentions,
        "state-space model": StateSpaceSpec in kinds,
        "Gated DeltaNet in some layers": DeltaSpec in kinds,
        "latent": LatentSpec in kinds,
        "gated": any(attention.gated for attention in attentions),
        "sliding window": any(attention.window for attention in attentions),
        "sinks": any(attention.sinks for attention in attentions),
        "grouped heads": any(attention.kv_heads < attention.num_heads for attention in attentions),
        "query and key norm": any(attention.qk_norm for attention in attentions),
        "soft cap": any(attention.scores.softcap for attention in attentions),
        "attends to an encoder": _spec(family).encoder is not None,
    }
    return ", ".join(name for name, there in found.items() if there) or "plain"


def _mlp(family: Any) -> str:
    # Imported when used, like all of the library here.
    from lm_trainer.nn.expert_spec import MoeSpec

    mlps = [block.mlp for block in _spec(family).blocks]
    if mixtures := [mlp for mlp in mlps if isinstance(mlp, MoeSpec)]:
        shared = ", and a shared one" if mixtures[0].shared else ""
        return f"{mixtures[0].num_experts} experts, {mixtures[0].top_k} for each token{shared}"
    mlp = mlps[0]
    if mlp is None:
        return "none"
    activation = mlp.activation
    name = activation if isinstance(activation, str) else type(activation).__name__.removesuffix("Spec").lower()
    return f"gated {name}" if mlp.gated else name


def _norm(family: Any) -> str:
    spec = _spec(family)
    block = spec.blocks[0]
    kind = (block.pre_norm or block.post_norm).kind
    where = [name for name, norm in (("before", block.pre_norm), ("after", block.post_norm)) if norm]
    shared = ", one for both parts" if block.shared_norm else ""
    return f"{'RMS' if kind == 'rms' else 'layer'}, {' and '.join(where)}{shared}"


def _head(family: Any) -> str:
    return "tied" if _spec(family).head.tied else "own"


def _hugging_face(family: Any) -> str:
    from lm_trainer.models.hf_table import NoHfFormat

    return NO if isinstance(family.hf, NoHfFormat) else YES


def _axis(axis: str) -> Callable[[Any], str]:
    def cell(family: Any) -> str:
        from lm_trainer.core.errors import UserError
        from lm_trainer.step.dispatch.model_parallel_limits import check_model

        try:
            # 24 layers, so their number never prevents a split into stages.
            check_model(family(num_layers=24).spec(VOCABULARY), {name: 2 if name == axis else 1 for name in AXES})
        except UserError:
            return NO
        return YES

    return cell


def _kernel(name: str) -> Callable[[Any], str]:
    def cell(family: Any) -> str:
        """The kernel must support the self-attention of every layer."""
        import jax.numpy as jnp

        from lm_trainer.core.errors import UserError
        from lm_trainer.nn.attention_dispatch import choose_backend
        from lm_trainer.nn.attention_kernel import AttentionMetadata
        from lm_trainer.nn.mixer_spec import softmax_specs

        metadata = AttentionMetadata(KERNELS[name], jnp.bfloat16, POSITIONS, POSITIONS * (2 if name == "ring" else 1))
        try:
            for attention in softmax_specs(_spec(family).blocks):
                scores = dataclasses.replace(attention.scores, backend=name)
                choose_backend(dataclasses.replace(attention, scores=scores), metadata)
        except UserError:
            return NO
        return YES

    return cell


_MADE_OF = {"positions": _positions, "attention": _attention, "MLP": _mlp, "norms": _norm, "head": _head}
_ABILITIES = {
    "Hugging Face": _hugging_face,
    **{f"`{axis}_axis_size`": _axis(axis) for axis in AXES},
    **{f"`{name}`": _kernel(name) for name in KERNELS},
}
