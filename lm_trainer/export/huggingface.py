"""Hugging Face model directories: writes and reads safetensors, config.json, tokenizer and card."""

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
from lm_trainer.export.output import atomic_directory
from lm_trainer.export.peft_files import AdaptedWeights, base_model_directory, is_adapter_directory
from lm_trainer.export.settings import HfSettings, is_read_quantization
from lm_trainer.export.weights import Weights, read_json, write_weights
from lm_trainer.models import hf
from lm_trainer.models.generation_fields import describe_unsupported
from lm_trainer.models.hf_section import allows_any_length
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
    """A model outside of a run, with everything needed to use it."""

    config: DecoderConfig
    vocab_size: int
    """Number of rows of the embedding. The tokenizer may have added tokens with higher ids."""
    params: Mapping[str, Any]
    """Nested dicts of arrays, as returned by `nnx.to_pure_dict`: NumPy arrays, or arrays sharded over several
    devices."""
    tokenizer: HfTokenizer
    name: str
    """Display name, which is also the title of the card."""
    facts: TrainingFacts = field(default_factory=TrainingFacts)
    settings: HfSettings | None = None
    """Settings of the published model that this model was imported from; None if there is none."""

    @property
    def end_ids(self) -> tuple[int, ...]:
        """Tokens that end a text; the tokenizer's end token comes first."""
        return all_end_ids(self.tokenizer, self.settings)

    @property
    def stop_texts(self) -> tuple[str, ...]:
        """Texts that end a text, in addition to the tokens."""
        return self.settings.stop_texts if self.settings else ()

    @property
    def generation_note(self) -> str | None:
        """Note about generation settings of the model that are not computed here; None if there are none."""
        return describe_unsupported(self.settings.generation) if self.settings else None

    def build(self, devices: Sequence[Any] | None = None) -> Decoder:
        """Builds the module with these parameters. Shards them over `devices` (None: all of this process) unless they
        are on devices already.
        """
        # Only traced, so that no random weights are computed.
        definition = ModelDef.trace(lambda: self.config.build(self.vocab_size, rngs=nnx.Rngs(0)))
        return definition.merge(shard_for_inference(definition, dict(self.params), devices))


@dataclass(frozen=True)
class ExportOptions:
    """Options of an export; the defaults lose no precision and overwrite no files."""

    dtype: str = "f32"
    """A key of `DTYPES`. Parameters are rounded to nearest if the dtype is narrower than theirs."""
    max_shard_size: int = 5 * 10**9
    """Maximum number of bytes per file. A larger model is split into several files with an index."""
    overwrite: bool = False
    """Replaces an earlier export at the same path."""
    hub_name: str | None = None
    """`ORG/NAME` on the hub, for the snippet in the card."""
    context: int | None = None
    """Context length in config.json, in tokens. None: the source's, or the row length of the run if that is longer."""


def write_hf(out: StoragePath, model: TextModel, options: ExportOptions) -> None:
    """Writes the model to `out`. If the function returns, `out` is complete; if it raises, `out` is unchanged.

    Copies the tensors from the devices one by one. The host holds the tensors of one file at a time.

    Raises:
        UserError: if the format cannot express a part of the model, or `out` may not be replaced.
        MachineError: if the file system reports an error.
    """
    dtype = DTYPES[options.dtype]
    tensors = hf.pending_params_to_hf(model.config, model.params)
    settings = _settings_to_export(model, options)
    parameters = sum(tensor.size for tensor in tensors.values())
    # All checks that may fail come before the first file is written.
    card = model_card(
        model.name, hf_config=settings.config, parameters=parameters, facts=model.facts, hub_name=options.hub_name
    )
    with atomic_directory(out, overwrite=options.overwrite, replaceable=FILES) as draft:
        settings.write(draft)
        write_weights(draft, tensors, dtype=dtype, max_shard_size=options.max_shard_size)
        model.tokenizer.save(draft)
        (draft / "README.md").write_text(card, encoding="utf-8")


def check_exportable(config: DecoderConfig) -> None:
    """Raises `UserError` if the format cannot express a part of a model with this configuration."""
    hf.check_writable(config)


def all_end_ids(tokenizer: Tokenizer, settings: HfSettings | None) -> tuple[int, ...]:
    """Lists the tokens that end a text: the tokenizer's end token and the end tokens in the model's settings."""
    return tuple(dict.fromkeys((tokenizer.eos_id, *(settings.end_ids if settings else ()))))


def _settings_to_export(model: TextModel, options: ExportOptions) -> HfSettings:
    config, context = model.config, options.context
    if context is not None and not allows_any_length(config, model.vocab_size):
        raise UserError(f"--context {context}: the model has a parameter for each position; leave it away")
    longest = config if context is None else config.model_copy(update={"seq_len": context})
    settings = defaults = HfSettings.default_for(longest, model.vocab_size, model.tokenizer)
    if model.settings is not None:
        settings = model.settings.adapt_to_model(config, model.vocab_size, model.tokenizer, context=context)
    # transformers 5 reads `dtype`, and 4 reads `torch_dtype`.
    dtypes = dict.fromkeys(("dtype", "torch_dtype"), DTYPES[options.dtype].name)
    return replace(settings, config={**settings.config, **dtypes, "architectures": defaults.config["architectures"]})


def is_hf_directory(path: Path) -> bool:
    """Returns True if `path` looks like a Hugging Face model or adapter. Only `read_hf` checks whether it is valid."""
    return (path / CONFIG).is_file() or is_adapter_directory(path)


def read_hf(directory: Path, *, tokenizer: Path | None = None, name: str | None = None) -> TextModel:
    """Reads a model written by `write_hf`, transformers or other programs. Never executes code from the directory.

    Args:
        directory: contains config.json, safetensors weights and, unless `tokenizer` is given, tokenizer.json. Or
            contains an adapter of PEFT, which is merged into its base model.
        tokenizer: directory of the tokenizer, if it differs from `directory`.
        name: name of the model; None means the name of the directory.

    Raises:
        UserError: for an unsupported family or setting, code in the directory, damaged or missing files, tensors that
            do not fit the configuration, or a tokenizer that does not fit the model.
    """
    from lm_trainer.data.tokenizer import load_tokenizer
    from lm_trainer.data.tokenizer.compare import has_rows_for

    config, vocab_size, settings = read_hf_settings(directory)
    base = base_model_directory(directory) if is_adapter_directory(directory) else directory
    home = tokenizer or (directory if (directory / "tokenizer.json").is_file() else base)
    if not (home / "tokenizer.json").is_file():
        raise UserError(f"{home}: no tokenizer.json; name a directory that has the model's with --tokenizer")
    loaded = load_tokenizer(home)
    if not has_rows_for(loaded, vocab_size):
        raise UserError(
            f"{home / 'tokenizer.json'}: has {loaded.vocab_size} tokens, but the model in {directory} only knows "
            f"{vocab_size}; it is the tokenizer of another model"
        )
    # All headers are checked before the first tensor is read.
    weights = Weights(base) if base is directory else AdaptedWeights(directory, base)
    with errors_prefixed_with(directory):
        hf.plan_reading(config, vocab_size, *weights.shapes_and_files())
        params = hf.params_from_hf(config, vocab_size, weights)
    name = name or directory.resolve().name
    return TextModel(config, vocab_size, params, loaded, name, settings=settings.adapt_to_tokenizer(loaded, base))


def read_hf_config(directory: Path) -> tuple[DecoderConfig, int]:
    """Returns the first two results of `read_hf_settings`."""
    return read_hf_settings(directory)[:2]


def read_hf_settings(directory: Path) -> tuple[DecoderConfig, int, HfSettings]:
    """Reads everything except the weights: the model configuration, the vocabulary size, and all settings.

    Raises:
        UserError: for an unsupported family or setting, code in the directory, or a damaged or missing file.
    """
    if not directory.is_dir():
        raise UserError(f"{directory}: no such directory")
    if is_adapter_directory(directory):
        directory = base_model_directory(directory)
    config_file = directory / CONFIG
    raw = read_json(config_file)
    if "auto_map" in raw:
        raise UserError(
            f"{config_file}: `auto_map` asks to run code from the directory, which is never done; "
            f"use a model that transformers supports without trust_remote_code"
        )
    with errors_prefixed_with(config_file):
        _refuse_quantized(raw)
        config, vocab_size = hf.config_from_hf(raw)
    with errors_prefixed_with(directory):
        if any(directory.glob("*.safetensors")):
            config = config.fit_to_files(Weights(directory).keys())
        config = _untie_distinct_head(config, vocab_size, directory)
    settings = HfSettings.read(directory)
    if (directory / GENERATION).is_file():
        config = config.with_generation(settings.generation)
    return config, vocab_size, settings


def _untie_distinct_head(config: DecoderConfig, vocab_size: int, directory: Path) -> DecoderConfig:
    """Returns the configuration. Its weights are untied if the files contain a head that differs from the embedding.

    transformers does the same since version 5, for any value of `tie_word_embeddings`.
    """
    family = config.hf_family()
    if not getattr(config, "tie_word_embeddings", False) or not any(directory.glob("*.safetensors")):
        return config
    weights = Weights(directory)
    head = {file_name(family, second) for second in family.tied} & weights.keys()
    if not head:
        return config
    # Names as in the files, which may lack the prefix that a model with a head has.
    copies = hf.plan_reading(config, vocab_size, *weights.shapes_and_files()).repeated
    if all(weights.are_equal(copy, first) for copy, first in copies.items()):
        return config
    return config.model_copy(update={"tie_word_embeddings": False})


def _refuse_quantized(raw: Mapping[str, Any]) -> None:
    """Raises `UserError`, with the name of the method, for a config.json of weights in a format that is not read."""
    block = raw.get("quantization_config")
    if not block or is_read_quantization(block):
        return
    named = block.get("quant_method") if isinstance(block, Mapping) else None
    # Files written by early versions of bitsandbytes name no method.
    method = named or ("bitsandbytes" if {"load_in_4bit", "load_in_8bit"} & set(block) else "an unnamed method")
    raise UserError(
        f"`quantization_config`: the weights are quantized with {method}, which is not read; use the model that they "
        f"were made from, or save it dequantized (transformers: `dequantize()`) in f32, f16 or bf16"
    )


@contextlib.contextmanager
def errors_prefixed_with(path: Path) -> Iterator[None]:
    """Prefixes errors about the content of a file or directory with its path."""
    try:
        yield
    except UserError as error:
        message = str(error)
        raise UserError(message if str(path) in message else f"{path}: {message}") from None
    except ValueError as error:
        raise UserError(f"{path}: {error}") from None
