"""Export of an adapter as a directory for PEFT: adapter_config.json, tensors, tokenizer and model card."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from lm_trainer.core.bucket import StoragePath
from lm_trainer.export.card import TrainingFacts, adapter_card
from lm_trainer.export.files import FILES
from lm_trainer.export.huggingface import DTYPES, ExportOptions
from lm_trainer.export.output import atomic_directory
from lm_trainer.export.weights import write_json, write_safetensors
from lm_trainer.models.base import DecoderConfig
from lm_trainer.models.peft import adapter_to_peft
from lm_trainer.nn.lora_config import LoraConfig

if TYPE_CHECKING:
    from lm_trainer.data.tokenizer import Tokenizer


@dataclass(frozen=True)
class AdapterModel:
    """A trained adapter, without its base model."""

    config: DecoderConfig
    """Configuration of the base model."""
    vocab_size: int
    """Number of rows of the base model's embedding."""
    adapter: LoraConfig
    params: Mapping[str, np.ndarray]
    """Parameters of the adapter, by dotted name."""
    base: str
    """Path or name of the base model."""
    tokenizer: Tokenizer
    name: str
    """Display name: the title of the card."""
    facts: TrainingFacts = field(default_factory=TrainingFacts)


def write_adapter(out: StoragePath, model: AdapterModel, options: ExportOptions) -> None:
    """Writes the adapter to `out`. If the function returns, `out` is complete; if it raises, `out` is unchanged.

    Raises:
        UserError: if `transformers` does not have the model family, or `out` may not be replaced.
        MachineError: if the file system reports an error.
    """
    config, tensors = adapter_to_peft(
        model.config, model.adapter, model.params, vocab_size=model.vocab_size, base=model.base
    )
    parameters = sum(x.size for x in model.params.values())
    card = adapter_card(
        model.name, base=model.base, rank=model.adapter.rank, parameters=parameters, facts=model.facts,
        hub_name=options.hub_name,
    )  # fmt: skip
    with atomic_directory(out, overwrite=options.overwrite, replaceable=FILES) as draft:
        write_json(draft / "adapter_config.json", config)
        write_safetensors(draft / "adapter_model.safetensors", tensors, dtype=DTYPES[options.dtype])
        model.tokenizer.save(draft)
        (draft / "README.md").write_text(card, encoding="utf-8")
