"""A model that is there, with its parameters where they are computed with.

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
from lm_trainer.run.build.model import TokenNll, trace_model
from lm_trainer.run.build.setup import TrainingSetup, plan_training
from lm_trainer.run.config.run_config import RunConfig
from lm_trainer.run.files.find_run import find_checkpoints
from lm_trainer.run.weights.adapters import load_whole
from lm_trainer.run.weights.local_params import local_params
from lm_trainer.run.weights.open_model import local_model
from lm_trainer.run.weights.saved_model import LoadedModel, read_config
from lm_trainer.step.evaluate import Evaluator
from lm_trainer.step.state.model_def import Params

MAX_ROW = 2048
"""Tokens in a row for models that say nothing of training here; they may read a hundred times as many."""

_TOKENS_AT_ONCE = 8192
"""Tokens in a microbatch of such models."""

_ONE_PROCESS = (
    "trainer.distributed.initialize_jax_distributed=false",
    "trainer.replica_ici_axis_size=1",
    "trainer.replica_dcn_axis_size=1",
)


@dataclass(frozen=True)
class EvalModel:
    """A model that gives the losses of tokens."""

    name: str
    step: int | None
    """Step of the checkpoint; None for a model that is no run's."""
    config: RunConfig
    """Configuration of its run; of another model its `model` section, and the defaults for the rest."""
    tokenizer: HfTokenizer
    row: int
    """Tokens in a row."""
    vocab_size: int
    """Rows of the embedding."""
    setup: TrainingSetup
    params: Params
    settings: HfSettings | None
    """Those of the published model that it comes from."""

    @property
    def losses(self) -> Evaluator:
        """Computes the losses of tokens."""
        return self.setup.evaluate

    def decoder(self) -> Decoder:
        """The module with its parameters, as `local_params` gives them."""
        return self.setup.model.merge(local_params(self.setup, self.params))

    def token_losses(self, batches: Iterable[Batch]) -> Iterator[np.ndarray]:
        """-log p of each target in nats, float32 [B, S], for each batch; the same bits on any number of devices."""
        return (found["nll"] for found in self.losses.rows(self.params, batches))


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
        source: as for `lm_trainer.run.weights.open_model.open_model`.
        step: which checkpoint of a run; None: the newest that is intact.
        averaged: the averaged weights of a run that keeps them, instead of those that were trained.
        context: tokens in a row; None: as in training, or `MAX_ROW` of a model that was trained elsewhere.
        overrides: settings over those of the run, as `trainer.max_devices=2`.

    Raises:
        UserError: when there is no such model, it is damaged, or the devices cannot share it.
    """
    path = local_model(source)
    if path is not None:
        if step is not None:
            raise UserError(f"{source} is a model in Hugging Face's layout and has no steps; leave --step away")
        return _of_files(path, context, overrides)
    directory, _ = find_checkpoints(source)
    config = read_config(directory, [*_ONE_PROCESS, *overrides])
    _configure(config)
    loaded = load_whole(source, step, averaged=averaged)
    # An adapter is merged by now.
    config = config.model_copy(update={"adapter": None})
    return _place(loaded, loaded.step, config, context)


def _of_files(path: Path, context: int | None, overrides: Sequence[str]) -> EvalModel:
    row = context or min(read_hf_config(path)[0].seq_len, MAX_ROW)
    rows = max(_TOKENS_AT_ONCE // row, 1)
    model = read_hf_config(path)[0]
    # Written and read again, so that overrides are checked as for a run.
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / f"{path.name}.yaml"
        file.write_text(to_yaml(RunConfig(model=model)))  # pyright: ignore[reportArgumentType]
        settings = (f"trainer.train_batch_size={8 * rows}", "trainer.tracker=[]")
        config = load(file, [*settings, *_ONE_PROCESS, *overrides], RunConfig).config
    _configure(config)
    text = read_hf(path)
    return _place(text, None, config, row)


def _configure(config: RunConfig) -> None:
    trainer = config.trainer
    configure_jax(trainer.jax_config, trainer.jax_compilation_cache_dir, trainer.cpu_threads)


def _place(model: LoadedModel | TextModel, step: int | None, config: RunConfig, context: int | None) -> EvalModel:
    most = config.model.spec(model.vocab_size).num_positions
    if context is not None and not 1 <= context <= most:
        raise UserError(f"--context {context}: the model reads 1 to {most} tokens")
    trainer = config.trainer
    loss = TokenNll(trainer.mp.compute_dtype, config.model.cross_entropy_block_size)
    traced = trace_model(config, model.vocab_size)
    setup = plan_training(trainer, config.optimizer, traced, loss, seq_len=config.model.seq_len)
    storage, dtype = setup.sharding.storage, trainer.mp.param_dtype
    params = named_leaves(dict(model.params))
    placed = {name: jax.device_put(_cast(x, dtype), storage[name]) for name, x in params.items()}
    row = context or config.model.seq_len
    return EvalModel(model.name, step, config, model.tokenizer, row, model.vocab_size, setup, placed, model.settings)


def _cast(x: Any, dtype: Any) -> Any:
    return x if x.dtype == dtype else x.astype(dtype)
