"""Settings and tensors of families whose models may predict tokens after the next one."""

import functools
import logging
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import ClassVar, Self

from pydantic import Field

from lm_trainer.models.hf_table import HfFamily, HfField, HfTensor, linear_tensors
from lm_trainer.models.rotary import BLOCK, LAYER, TIED, RotaryConfig
from lm_trainer.nn.multi_token_spec import MultiTokenSpec
from lm_trainer.nn.spec import BlockSpec, DecoderSpec

logger = logging.getLogger(__name__)

_MODULE = "multi_token.blocks.{}"
DEPTH = HfField("num_nextn_predict_layers", "mtp_depth", 0, old_names=("num_mtp_layers",))
"""Field of the number of modules. transformers writes it although it does not save the modules."""


class MultiTokenConfig(RotaryConfig):
    """Settings of a decoder with modules that predict later tokens."""

    newer_fields: ClassVar[frozenset[str]] = RotaryConfig.newer_fields | {"mtp_depth", "mtp_loss_weight"}

    mtp_depth: int = Field(default=0, ge=0)
    """Number of modules that predict further tokens during training: the first one predicts the token after the next
    one. Each is a layer of its own, with the embedding and the output layer of the model. Generation does not use them.
    """
    mtp_loss_weight: float = Field(default=0.3, ge=0)
    """Weight of the mean loss of these modules. It affects only the gradient; the loss is logged as `mtp_loss`."""

    def with_modules(self, spec: DecoderSpec, block: BlockSpec) -> DecoderSpec:
        """Returns the spec with the modules of these settings, whose layers are like `block`."""
        if not self.mtp_depth:
            return spec
        modules = MultiTokenSpec(block, self.norm_spec(), self.mtp_depth, self.mtp_loss_weight)
        return replace(spec, multi_token=modules)

    def file_table(self) -> HfFamily:
        # The modules of a file follow its layers. Each repeats the embedding and the head.
        first, end = self.num_layers, self.num_layers + self.mtp_depth
        head = TIED["lm_head.weight"] if self.tie_word_embeddings else "lm_head.weight"
        copies = {f"layers.{layer}.embed_tokens.weight": "embed_tokens.weight" for layer in range(first, end)}
        copies |= {f"layers.{layer}.shared_head.head.weight": head for layer in range(first, end)}
        family = super().file_table()
        return replace(family, copies=copies, tied={**family.tied, **copies}, first_ignored_layer=end)

    def fit_to_files(self, names: Collection[str]) -> Self:
        if not self.mtp_depth or any(re.search(rf"\blayers\.{self.num_layers}\.", name) for name in names):
            return self
        _warn_absent_modules(self.mtp_depth, self.num_layers)
        return self.model_copy(update={"mtp_depth": 0})


@functools.cache
def _warn_absent_modules(depth: int, layer: int) -> None:
    logger.warning(
        "config.json: %s=%s, but the files have no tensor of layers.%s; the model is read with mtp_depth: 0",
        DEPTH.hf,
        depth,
        layer,
    )


def with_module_tensors(tensors: Iterable[HfTensor]) -> tuple[HfTensor, ...]:
    """Returns a family's tensors and the tensors of the modules: the tensors of a layer, a matrix and three norms."""
    tensors = tuple(tensors)
    norms: Mapping[str, str] = {"enorm": "token_norm", "hnorm": "hidden_norm", "shared_head.norm": "final_norm"}
    return (
        *tensors,
        *(
            replace(entry, params=tuple(name.replace(BLOCK, f"{_MODULE}.layer") for name in entry.params))
            for entry in tensors
            if "{}" in entry.hf
        ),
        *linear_tensors(f"{LAYER}.eh_proj", f"{_MODULE}.join"),
        *(HfTensor(f"{LAYER}.{hf}.weight", (f"{_MODULE}.{name}.scale",)) for hf, name in norms.items()),
    )
