"""A trained model with its parameters on the devices, for evaluation.

Shape letters: B rows of a batch, S positions.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from lm_trainer.config.loader import load
from lm_trainer.config.render import to_yaml
from lm_trainer.core.batch import Batch
from lm_trainer.core.errors import UserError
from lm_trainer.core.runtime import configure_jax
from lm_trainer.core.tree import named_leaves
from lm_trainer.data.tokenizer import HfTokenizer
from lm_trainer.export.huggingface import TextModel, read_hf, read_hf_config
from lm_trainer.export.settings import HfSettings
from lm_trainer.nn.decoder import Decoder
from lm_trainer.objectives import NextTokenConfig
from lm_trainer.run.build.model import TokenNll, trace_model
from lm_trainer.run.build.setup import TrainingSetup, plan_training
from lm_trainer.run.config.run_config import RunConfig
from lm_trainer.run.files.find_run import find_checkpoints
from lm_trainer.run.weights.adapters import load_merged_model
from lm_trainer.run.weights.local_params import gather_full_params
from lm_trainer.run.weights.open_model import find_hf_directory
from lm_trainer.run.weights.saved_model import LoadedModel, read_config
from lm_trainer.step.evaluate import Evaluator
from lm_trainer.step.state.model_def import Params

MAX_ROW = 2048
"""Maximum number of tokens per row for a model that was not trained by a run. Its context may be 100 times longer."""

_TOKENS_AT_ONCE = 8192
"""Number of tokens per microbatch for a model that was not trained by a run."""

_ONE_PROCESS = (
    "trainer.distributed.initialize_jax_distributed=false",
    "trainer.replica_ici_axis_size=1",
    "trainer.replica_dcn_axis_size=1",
)


@dataclass(frozen=True)
class EvalModel:
    """A model that computes the losses of tokens."""

    name: str
    step: int | None
    """Step of the checkpoint; None for a model without a run."""
    config: RunConfig
    """Configuration of the model's run. Without a run, its `model` section, with defaults for all other sections."""
    tokenizer: HfTokenizer
    row: int
    """Number of tokens per row."""
    vocab_size: int
    """Number of rows of the embedding."""
    setup: TrainingSetup
    params: Params
    settings: HfSettings | None
    """Settings of the published model that this model was converted from."""

    @property
    def losses(self) -> Evaluator:
        """Computes the losses of tokens."""
        return self.setup.evaluate

    def decoder(self) -> Decoder:
        """The module with the parameters that `gather_full_params` returns."""
        return self.setup.model.merge(gather_full_params(self.setup, self.params))

    def token_losses(self, batches: Iterable[Batch]) -> Iterator[np.ndarray]:
        """Yields -log p of each target in nats, float32 [B, S] per batch; bitwise equal on any number of devices."""
        return (row_losses["nll"] for row_losses in self.losses.compute_row_values(self.params, batches))


def open_eval_model(
    source: str,
    *,
    step: int | None = None,
    averaged: bool = True,
    context: int | None = None,
    overrides: Sequence[str] = (),
) -> EvalModel:
    """Reads a model and plans its evaluation on the devices of this process.

    Args:
        source: a model, as for `lm_trainer.run.weights.open_model.open_model`.
        step: step of a run's checkpoint; None means the newest intact one.
        averaged: uses the averaged weights instead of the raw weights if the run keeps them.
        context: number of tokens per row. None means as in training, or at most `MAX_ROW` for a model trained
            elsewhere.
        overrides: settings that override the run's, such as `trainer.max_devices=2`.

    Raises:
        UserError: if the model does not exist or is damaged, or cannot be sharded over the devices.
    """
    path = find_hf_directory(source)
    if path is not None:
        if step is not None:
            raise UserError(f"{source} is a model in Hugging Face's layout and has no steps; leave --step away")
        return _open_hf_directory(path, context, overrides)
    directory, _ = find_checkpoints(source)
    config = read_config(directory, [*_ONE_PROCESS, *overrides])
    _configure_jax(config)
    loaded = load_merged_model(source, step, averaged=averaged)
    # Adapters are already merged into the weights, and the loss of training, which may need a reference, is not used.
    config = config.model_copy(update={"adapter": None, "loss": NextTokenConfig()})
    return _place_on_devices(loaded, loaded.step, config, context)


def _open_hf_directory(path: Path, context: int | None, overrides: Sequence[str]) -> EvalModel:
    row = context or min(read_hf_config(path)[0].seq_len, MAX_ROW)
    rows = max(_TOKENS_AT_ONCE // row, 1)
    model = read_hf_config(path)[0]
    # Written to a file and loaded from it, so that overrides are checked as for a run.
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / f"{path.name}.yaml"
        file.write_text(to_yaml(RunConfig(model=model)))  # pyright: ignore[reportArgumentType]
        settings = (f"trainer.train_batch_size={8 * rows}", "trainer.tracker=[]")
        config = load(file, [*settings, *_ONE_PROCESS, *overrides], RunConfig).config
    _configure_jax(config)
    text = read_hf(path)
    return _place_on_devices(text, None, config, row)


def _configure_jax(config: RunConfig) -> None:
    trainer = config.trainer
    configure_jax(trainer.jax_config, trainer.jax_compilation_cache_dir, trainer.cpu_threads)


def _place_on_devices(
    model: LoadedModel | TextModel, step: int | None, config: RunConfig, context: int | None
) -> EvalModel:
    max_length = config.model.spec(model.vocab_size).num_positions
    if context is not None and not 1 <= context <= max_length:
        raise UserError(f"--context {context}: the model reads 1 to {max_length} tokens")
    trainer = config.trainer
    loss = TokenNll(trainer.mp.compute_dtype, config.model.cross_entropy_block_size)
    # Saved models have no parameters for measurements of training.
    optimizer = config.optimizer.without_logit_limit()
    traced = trace_model(config.model_copy(update={"optimizer": optimizer}), model.vocab_size)
    setup = plan_training(trainer, optimizer, traced, loss, seq_len=config.model.seq_len)
    storage, dtype = setup.sharding.storage, trainer.mp.param_dtype
    params = named_leaves(dict(model.params))
    placed = {name: jax.device_put(_cast(x, dtype), storage[name]) for name, x in params.items()}
    row = context or config.model.seq_len
    return EvalModel(model.name, step, config, model.tokenizer, row, model.vocab_size, setup, placed, model.settings)


def _cast(x: Any, dtype: Any) -> Any:
    return x if x.dtype == dtype else x.astype(dtype)
