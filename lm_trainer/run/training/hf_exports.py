"""Exports the model for `transformers` during training, to one directory per step, and uploads the directories."""

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
from lm_trainer.core.tree import nest_named_leaves
from lm_trainer.data.tokenizer import HfTokenizer
from lm_trainer.export.adapter import AdapterModel, write_adapter
from lm_trainer.export.card import TrainingFacts
from lm_trainer.export.files import FILES
from lm_trainer.export.hub import PushedModel, prepare_push, push
from lm_trainer.export.huggingface import ExportOptions, TextModel, check_exportable, write_hf
from lm_trainer.export.settings import HfSettings
from lm_trainer.nn.lora import is_adapter_param
from lm_trainer.nn.reference import policy_params
from lm_trainer.parallel.processes import is_lead
from lm_trainer.run.build.setup import TrainingSetup
from lm_trainer.run.config.run_config import RunConfig
from lm_trainer.run.training.hooks import StepInfo, is_due
from lm_trainer.run.training.metrics import MetricLogger
from lm_trainer.run.weights.adapters import base_model_name
from lm_trainer.step.state.model_def import Params
from lm_trainer.step.state.train_state import to_host
from lm_trainer.trackers import Progress

_DTYPES = {"float32": "f32", "bfloat16": "bf16", "f32": "f32", "bf16": "bf16"}


def check_exports(config: RunConfig, run_id: str) -> str | None:
    """Checks that the exports of a run are possible, before text is tokenised. Does nothing for a run without exports.

    Returns:
        The name of the hub repository for the uploads, which is created if needed; None without uploads.

    Raises:
        UserError: if the format does not support the model, if `hf_save_path` is a bucket that cannot be written, or if
            the hub would reject the upload.
        MachineError: if the hub is unreachable.
    """
    if config.hf_save_path is None:
        return None
    check_exportable(config.model)
    if is_lead() and isinstance(path := storage_path(config.hf_save_path), Bucket):
        (path / run_id).check_writable("hf_save_path")
    if not config.hf_upload or not is_lead():
        return None
    return prepare_push(run_id if config.hf_upload is True else config.hf_upload)


@dataclass
class HfExports:
    """Context manager that exports the model every `hf_save_steps` steps, and uploads it in the background.

    All processes of the run must call its methods. Only the first process writes files.
    """

    config: RunConfig
    run_id: str
    progress: Progress
    tokenizer: HfTokenizer
    hub_name: str | None = None
    """Name of the repository to upload to, from `check_exports`; None without uploads."""
    settings: HfSettings | None = None
    """Settings of the published model that the run started from, if any."""
    _uploads: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "upload"))
    _uploading: tuple[StoragePath, Future[PushedModel]] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Waits for the last upload."""
        self._report_upload()
        self._uploads.shutdown()

    @property
    def directory(self) -> StoragePath:
        """The directory that contains the exports of the run."""
        base = storage_path(self.config.hf_save_path or "")
        return base / self.run_id if self.config.trainer.checkpointer.append_run_id_to_base_path else base

    def is_due(self, step: int) -> bool:
        """Returns True if an export is due after `step` steps."""
        return is_due(self.config.hf_save_steps, step)

    def export(self, info: StepInfo, setup: TrainingSetup, metrics: MetricLogger) -> None:
        """Exports the model after a step.

        Raises:
            MachineError: if the files cannot be written.
        """
        # Reads the metrics now, so that the model card reports the loss of this step and not of the previous one.
        metrics.flush()
        # The last entry contains the weights to export.
        *_, weights = setup.weights_to_evaluate(info.state).values()
        if self.config.adapter is not None:
            weights = {name: x for name, x in weights.items() if is_adapter_param(name)}
        weights = policy_params(weights)
        params = _gather_on_lead(weights)
        # The other processes return only now, because gathering is a collective operation.
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
            nested = nest_named_leaves(params)
            text_model = TextModel(model, vocab_size, nested, self.tokenizer, self.run_id, facts, self.settings)
            write_hf(out, text_model, options)
        else:
            base, vocab_size = base_model_name(self.config), setup.model.shapes["embed.tokens"].shape[0]
            host_params = {name: np.asarray(x) for name, x in params.items()}
            adapter_model = AdapterModel(
                model, vocab_size, adapter, host_params, base, self.tokenizer, self.run_id, facts
            )
            write_adapter(out, adapter_model, options)
        self.progress.note(f"step {info.step}: exported to {out}")
        if self.hub_name:
            # Only one upload runs at a time, so that the commits are in the order of the steps.
            self._report_upload()
            job = self._uploads.submit(
                push, out, self.hub_name, public=False, patterns=FILES, message=f"Step {info.step}"
            )
            self._uploading = out, job

    @property
    def _dtype(self) -> str:
        # float32 represents the values of any other parameter dtype exactly.
        return _DTYPES.get(self.config.hf_save_dtype or self.config.trainer.mp.param_dtype.name, "f32")

    def _report_upload(self) -> None:
        """Waits for the upload in progress. A failed upload does not end the training."""
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


def _gather_on_lead(weights: Params) -> Mapping[str, Any]:
    """Returns weights that the first process can read."""
    # A single process leaves the weights on its devices, and copies them one tensor at a time later.
    return weights if jax.process_count() == 1 else to_host(weights, keep=is_lead())
