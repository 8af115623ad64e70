"""Exports for `transformers` while a run goes on: one directory for each step that is due, and its upload."""

from __future__ import annotations

import math
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Self

import jax
import numpy as np

from lm_trainer.core.bucket import Bucket, StoragePath, storage_path
from lm_trainer.core.errors import UserError
from lm_trainer.data.tokenizer import HfTokenizer
from lm_trainer.export.adapter import AdapterModel, write_adapter
from lm_trainer.export.card import TrainingFacts
from lm_trainer.export.files import FILES
from lm_trainer.export.hub import Pushed, prepare_push, push
from lm_trainer.export.huggingface import ExportOptions, TextModel, check_exportable, write_hf
from lm_trainer.export.settings import HfSettings
from lm_trainer.nn.lora import is_adapter_param
from lm_trainer.parallel.processes import is_lead
from lm_trainer.run.build.setup import TrainingSetup
from lm_trainer.run.config.run_config import RunConfig
from lm_trainer.run.training.hooks import StepInfo, is_due
from lm_trainer.run.training.metrics import MetricLogger
from lm_trainer.run.weights.adapters import base_name
from lm_trainer.step.state.model_def import Params
from lm_trainer.step.state.train_state import to_host
from lm_trainer.trackers import Progress

_DTYPES = {"float32": "f32", "bfloat16": "bf16", "f32": "f32", "bf16": "bf16"}


def check_exports(config: RunConfig, run_id: str) -> str | None:
    """Finds what would make the exports of a run fail, before text is tokenised; nothing where it exports nothing.

    Returns:
        The repository that exports are uploaded to, which exists then; None where none is.

    Raises:
        UserError: when the model has no place in the format, hf_save_path is a bucket that cannot be written, or the
            hub would refuse the upload.
        MachineError: when the hub cannot be reached.
    """
    if config.hf_save_path is None:
        return None
    check_exportable(config.model)
    if is_lead() and isinstance(place := storage_path(config.hf_save_path), Bucket):
        (place / run_id).probe("hf_save_path")
    if not config.hf_upload or not is_lead():
        return None
    return prepare_push(run_id if config.hf_upload is True else config.hf_upload)


@dataclass
class HfExports:
    """Exports the model every `hf_save_steps` steps, and uploads it in the background; use it as a context manager.

    Every process of the run calls it; the first one writes.
    """

    config: RunConfig
    run_id: str
    progress: Progress
    tokenizer: HfTokenizer
    hub_name: str | None = None
    """The repository to upload to, from `check_exports`."""
    settings: HfSettings | None = None
    """Those of the published model that the run comes from."""
    _uploads: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "upload"))
    _uploading: tuple[StoragePath, Future[Pushed]] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Waits for the last upload."""
        self._report_upload()
        self._uploads.shutdown()

    @property
    def directory(self) -> StoragePath:
        """The directory that the exports of the run lie in."""
        base = storage_path(self.config.hf_save_path or "")
        return base / self.run_id if self.config.trainer.checkpointer.append_run_id_to_base_path else base

    def due(self, step: int) -> bool:
        """True if an export is due after `step` steps."""
        return is_due(self.config.hf_save_steps, step)

    def save(self, info: StepInfo, setup: TrainingSetup, metrics: MetricLogger) -> None:
        """Exports the model after a step.

        Raises:
            MachineError: when the file system refuses.
        """
        # Read now, so that the model card names the loss of this step and not of the one before.
        metrics.flush()
        # The last set of weights is the one to export. All processes take part in gathering it.
        *_, weights = setup.weights(info.state).values()
        if self.config.adapter is not None:
            weights = {name: x for name, x in weights.items() if is_adapter_param(name)}
        params = _readable(weights)
        # Only now: gathering is a collective, in which every process takes part.
        if not is_lead():
            return
        out = self.directory / f"step-{info.step}"
        self.progress.phase(f"exporting to {out}")
        facts = TrainingFacts(
            step=info.step,
            tokens=info.total_tokens,
            train_loss=metrics.train_loss if math.isfinite(metrics.train_loss) else None,
            validation_losses={name: loss for name, loss in metrics.eval_losses.items() if math.isfinite(loss)},
        )
        options = ExportOptions(dtype=self._dtype, overwrite=True, hub_name=self.hub_name)
        model, adapter = self.config.model, self.config.adapter
        if adapter is None:
            vocab_size = len(params["embed.tokens"])
            nested = setup.model.nested(params)
            whole = TextModel(model, vocab_size, nested, self.tokenizer, self.run_id, facts, self.settings)
            write_hf(out, whole, options)
        else:
            base, vocab_size = base_name(self.config), setup.model.shapes["embed.tokens"].shape[0]
            small = {name: np.asarray(x) for name, x in params.items()}
            tuned = AdapterModel(model, vocab_size, adapter, small, base, self.tokenizer, self.run_id, facts)
            write_adapter(out, tuned, options)
        self.progress.note(f"step {info.step}: exported to {out}")
        if self.hub_name:
            # One upload at a time: commits come in the order of the steps.
            self._report_upload()
            job = self._uploads.submit(
                push, out, self.hub_name, public=False, patterns=FILES, message=f"Step {info.step}"
            )
            self._uploading = out, job

    @property
    def _dtype(self) -> str:
        # What has no name here is narrower than float32, which holds it exactly.
        return _DTYPES.get(self.config.hf_save_dtype or self.config.trainer.mp.param_dtype.name, "f32")

    def _report_upload(self) -> None:
        """Waits for the upload that is under way. One that fails does not end the training."""
        if self._uploading is None:
            return
        (out, job), self._uploading = self._uploading, None
        self.progress.phase(f"uploading {out}")
        try:
            self.progress.note(f"uploaded {out} to {job.result().url}")
        except UserError as error:
            self.progress.note(
                f"warning: {out} was not uploaded: {error}. It is complete; to upload it: "
                f"lmt export-hf {out} OUT --push-to-hub {self.hub_name}"
            )


def _readable(weights: Params) -> Mapping[str, Any]:
    """Weights that the first process can read."""
    # One that is alone leaves them on its devices, from which it then copies tensors one by one.
    return weights if jax.process_count() == 1 else to_host(weights, keep=is_lead())
