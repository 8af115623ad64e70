"""Hugging Face model directories: safetensors, config.json, tokenizer and card, written and read."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

from lm_trainer.core.bucket import StoragePath
from lm_trainer.core.errors import UserError
from lm_trainer.export.card import TrainingFacts, model_card
from lm_trainer.export.files import CONFIG, FILES, GENERATION
from lm_trainer.export.output import complete_directory
from lm_trainer.export.peft_files import AdaptedWeights, adapter_base, is_adapter_directory
from lm_trainer.export.settings import HfSettings
from lm_trainer.export.weights import Weights, read_json, write_weights
from lm_trainer.models import hf
from lm_trainer.models.hf_section import any_length
from lm_trainer.models.hf_table import file_name
from lm_trainer.step.state.inference_sharding import shard_for_inference
from lm_trainer.step.state.model_def import ModelDef

if TYPE_CHECKING:
    from lm_trainer.data.tokenizer import HfTokenizer, Tokenizer
    from lm_trainer.models.base import DecoderConfig
    from lm_trainer.nn.decoder import Decoder

DTYPES = {"f32": np.dtype(np.float32), "bf16": np.dtype(jnp.bfloat16)}


@dataclass(frozen=True)
class TextModel:
    """A model outside of a run, with everything that is needed to use it."""

    config: DecoderConfig
    vocab_size: int
    """Rows of the embedding; the tokenizer may have added tokens beyond them."""
    params: Mapping[str, Any]
    """Nested dicts of arrays, as `nnx.to_pure_dict` gives them: NumPy's, or such as several devices have parts of."""
    tokenizer: HfTokenizer
    name: str
    """For people: the title of the card."""
    facts: TrainingFacts = field(default_factory=TrainingFacts)
    settings: HfSettings | None = None
    """Those of the published model that it comes from; None: it comes from none."""

    @property
    def end_ids(self) -> tuple[int, ...]:
        """The tokens that each end a text, that of the tokenizer first."""
        return all_ends(self.tokenizer, self.settings)

    def build(self, devices: Sequence[Any] | None = None) -> Decoder:
        """The module with these parameters, cut over devices of this process (None: all) unless they are on some."""
        # Traced, so that no random weights are ever made.
        definition = ModelDef.trace(lambda: self.config.build(self.vocab_size, rngs=nnx.Rngs(0)))
        return definition.merge(shard_for_inference(definition, dict(self.params), devices))


@dataclass(frozen=True)
class ExportOptions:
    """Options of an export; the defaults lose nothing and overwrite nothing."""

    dtype: str = "f32"
    """A key of `DTYPES`; a narrower one than the parameters' rounds to the nearest."""
    max_shard_size: int = 5 * 10**9
    """Bytes; larger models are written as several files with an index."""
    overwrite: bool = False
    """Replace an earlier export at the same place."""
    hub_name: str | None = None
    """`ORG/NAME` on the hub, for the snippet in the card."""
    context: int | None = None
    """Tokens that config.json says the model reads. None: as many as its source says, or the rows of the run are
    long."""


def write_hf(out: StoragePath, model: TextModel, options: ExportOptions) -> None:
    """Writes the model to `out`, which is complete afterwards, or as it was before if this raises.

    Tensors are copied off the devices one after another; the host holds those of one file at a time.

    Raises:
        UserError: when the format has no place for something the model has, or `out` may not be replaced.
        MachineError: when the file system refuses.
    """
    dtype = DTYPES[options.dtype]
    tensors = hf.file_params(model.config, model.params)
    settings = _exported_settings(model, options)
    parameters = sum(tensor.size for tensor in tensors.values())
    # All that may be refused comes before the first file is written.
    card = model_card(
        model.name, hf_config=settings.config, parameters=parameters, facts=model.facts, hub_name=options.hub_name
    )
    with complete_directory(out, overwrite=options.overwrite, replaceable=FILES) as draft:
        settings.write(draft)
        write_weights(draft, tensors, dtype=dtype, max_shard_size=options.max_shard_size)
        model.tokenizer.save(draft)
        (draft / "README.md").write_text(card, encoding="utf-8")


def check_exportable(config: DecoderConfig) -> None:
    """Raises `UserError` where the format has no place for something that a model of this configuration has."""
    hf.check_writable(config)


def all_ends(tokenizer: Tokenizer, settings: HfSettings | None) -> tuple[int, ...]:
    """The tokens that each end a text: that of the tokenizer, and those of the model's settings."""
    return tuple(dict.fromkeys((tokenizer.eos_id, *(settings.end_ids if settings else ()))))


def _exported_settings(model: TextModel, options: ExportOptions) -> HfSettings:
    config, context = model.config, options.context
    if context is not None and not any_length(config, model.vocab_size):
        raise UserError(f"--context {context}: the model has a parameter for each position; leave it away")
    longest = config if context is None else config.model_copy(update={"seq_len": context})
    settings = made = HfSettings.made_for(longest, model.vocab_size, model.tokenizer)
    if model.settings is not None:
        settings = model.settings.for_model(config, model.vocab_size, model.tokenizer, context=context)
    # transformers 5 reads `dtype`, and 4 reads `torch_dtype`.
    written = dict.fromkeys(("dtype", "torch_dtype"), DTYPES[options.dtype].name)
    return replace(settings, config={**settings.config, **written, "architectures": made.config["architectures"]})


def is_hf_directory(path: Path) -> bool:
    """Returns True if `path` looks like a Hugging Face model or an adapter; `read_hf` finds out if it is sound."""
    return (path / CONFIG).is_file() or is_adapter_directory(path)


def read_hf(directory: Path, *, tokenizer: Path | None = None, name: str | None = None) -> TextModel:
    """Reads a model that `write_hf`, transformers or anybody else wrote. Runs nothing that the directory holds.

    Args:
        directory: with config.json, safetensors weights and, unless `tokenizer` is given, tokenizer.json; or with an
            adapter of PEFT, which is merged into the model that it names.
        tokenizer: another directory to take the tokenizer from.
        name: the name of the model; None: that of the directory.

    Raises:
        UserError: for a family or setting that is not supported, code in the directory, damaged or missing files,
            tensors that do not fit the configuration, or a tokenizer that does not fit the model.
    """
    from lm_trainer.data.tokenizer import load_tokenizer
    from lm_trainer.data.tokenizer.compare import has_rows_for

    config, vocab_size, settings = read_hf_settings(directory)
    base = adapter_base(directory) if is_adapter_directory(directory) else directory
    home = tokenizer or (directory if (directory / "tokenizer.json").is_file() else base)
    if not (home / "tokenizer.json").is_file():
        raise UserError(f"{home}: no tokenizer.json; name a directory that has the model's with --tokenizer")
    loaded = load_tokenizer(home)
    if not has_rows_for(loaded, vocab_size):
        raise UserError(
            f"{home / 'tokenizer.json'}: has {loaded.vocab_size} tokens, but the model in {directory} only knows "
            f"{vocab_size}; it is the tokenizer of another model"
        )
    # The headers are checked in full before the first tensor is read.
    weights = Weights(base) if base is directory else AdaptedWeights(directory, base)
    with blame(directory):
        hf.plan_reading(config, vocab_size, *weights.headers())
        params = hf.params_from_hf(config, vocab_size, weights)
    name = name or directory.resolve().name
    return TextModel(config, vocab_size, params, loaded, name, settings=settings.for_tokenizer(loaded, base))


def read_hf_config(directory: Path) -> tuple[DecoderConfig, int]:
    """The first two of `read_hf_settings`."""
    return read_hf_settings(directory)[:2]


def read_hf_settings(directory: Path) -> tuple[DecoderConfig, int, HfSettings]:
    """Reads what is beside the weights: the configuration of the model, the size of its vocabulary, and all settings.

    Raises:
        UserError: for a family or setting that is not supported, code in the directory, or a damaged or missing file.
    """
    if not directory.is_dir():
        raise UserError(f"{directory}: no such directory")
    if is_adapter_directory(directory):
        directory = adapter_base(directory)
    config_file = directory / CONFIG
    raw = read_json(config_file)
    if "auto_map" in raw:
        raise UserError(
            f"{config_file}: `auto_map` asks to run code from the directory, which is never done; "
            f"use a model that transformers supports without trust_remote_code"
        )
    with blame(config_file):
        _check_unquantized(raw)
        config, vocab_size = hf.config_from_hf(raw)
    with blame(directory):
        config = _with_own_head(config, vocab_size, directory)
    settings = HfSettings.read(directory)
    if (directory / GENERATION).is_file():
        config = config.with_generation(settings.generation)
    return config, vocab_size, settings


def _with_own_head(config: DecoderConfig, vocab_size: int, directory: Path) -> DecoderConfig:
    """The configuration, without shared weights where the files have a head that differs from the embedding.

    So does transformers since version 5, whatever `tie_word_embeddings` says.
    """
    family = config.hf_family()
    if not getattr(config, "tie_word_embeddings", False) or not any(directory.glob("*.safetensors")):
        return config
    weights = Weights(directory)
    head = {file_name(family, second) for second in family.tied} & weights.keys()
    if not head:
        return config
    # As it is in the files, which may lack the prefix that the head's family gives to all other names.
    copies = hf.plan_reading(config, vocab_size, *weights.headers()).repeated
    if all(weights.are_equal(copy, first) for copy, first in copies.items()):
        return config
    return config.model_copy(update={"tie_word_embeddings": False})


def _check_unquantized(raw: Mapping[str, Any]) -> None:
    """Raises `UserError` for a config.json whose weights are quantized, with the method that it names."""
    block = raw.get("quantization_config")
    if not block:
        return
    named = block.get("quant_method") if isinstance(block, Mapping) else None
    # The first files of bitsandbytes name no method.
    method = named or ("bitsandbytes" if {"load_in_4bit", "load_in_8bit"} & set(block) else "an unnamed method")
    raise UserError(
        f"`quantization_config`: the weights are quantized with {method}, which is not read; use the model that they "
        f"were made from, or save it dequantized (transformers: `dequantize()`) in f32, f16 or bf16"
    )


@contextlib.contextmanager
def blame(path: Path) -> Iterator[None]:
    """Puts the name of the file or directory before an error of its content."""
    try:
        yield
    except UserError as error:
        message = str(error)
        raise UserError(message if str(path) in message else f"{path}: {message}") from None
    except ValueError as error:
        raise UserError(f"{path}: {error}") from None
