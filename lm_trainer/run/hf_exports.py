"""Exports for `transformers` while a run goes on: one directory for each step that is due, and its upload."""

from __future__ import annotations

import math
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, Self

from lm_trainer.core.errors import UserError
from lm_trainer.data.tokenizer import Tokenizer
from lm_trainer.export.adapter import AdapterModel, write_adapter
from lm_trainer.export.card import TrainingFacts
from lm_trainer.export.hub import Pushed, prepare_push, push
from lm_trainer.export.huggingface import FILES, ExportOptions, TextModel, check_exportable, write_hf
from lm_trainer.nn.lora import is_adapter
from lm_trainer.parallel.processes import is_lead
from lm_trainer.run.adapters import base_name
from lm_trainer.run.config import RunConfig
from lm_trainer.run.hooks import HookFn, StepInfo
from lm_trainer.run.metrics import Recorder
from lm_trainer.run.program import Program
from lm_trainer.step.state import to_host
from lm_trainer.trackers import Progress

_DTYPES = {"float32": "f32", "bfloat16": "bf16", "f32": "f32", "bf16": "bf16"}


class _Trainer(Protocol):
    @property
    def program(self) -> Program: ...

    @property
    def recorder(self) -> Recorder: ...


@dataclass
class HfExports:
    """A hook that exports the model, and uploads it in the background; use it as a context manager.

    Every process of the run calls it; the first one writes.
    """

    config: RunConfig
    run_id: str
    progress: Progress
    _hub_name: str | None = None
    _uploads: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "upload"))
    _uploading: tuple[Path, Future[Pushed]] | None = None

    def __enter__(self) -> Self:
        """Finds what would make the exports fail, before the first step.

        Raises:
            UserError: when the model has no place in the format, or the hub would refuse the upload.
            MachineError: when the hub cannot be reached.
        """
        check_exportable(self.config.model)
        if self.config.hf_upload and is_lead():
            wanted = self.run_id if self.config.hf_upload is True else self.config.hf_upload
            self._hub_name = prepare_push(wanted)
        return self

    def __exit__(self, *_: object) -> None:
        """Waits for the last upload."""
        self._report_upload()
        self._uploads.shutdown()

    @property
    def directory(self) -> Path:
        """What the exports of the run lie in."""
        base = Path(self.config.hf_save_path or "")
        return base / self.run_id if self.config.trainer.checkpointer.append_run_id_to_base_path else base

    def hook(self, trainer: _Trainer, tokenizer: Tokenizer) -> HookFn:
        """What exports the model of this run after a step."""
        return lambda info: self._save(info, trainer.program, trainer.recorder, tokenizer)

    def _save(self, info: StepInfo, program: Program, recorder: Recorder, tokenizer: Tokenizer) -> None:
        """Exports the model after a step.

        Raises:
            MachineError: when the file system refuses.
        """
        recorder.flush()
        # The last set of weights is the one to export. All processes take part in gathering it.
        *_, weights = program.weights(info.state).values()
        if self.config.adapter is not None:
            weights = {name: x for name, x in weights.items() if is_adapter(name)}
        params = to_host(weights, keep=is_lead())
        if not is_lead():
            return
        out = self.directory / f"step-{info.step}"
        self.progress.phase(f"exporting to {out}")
        facts = TrainingFacts(
            step=info.step,
            tokens=info.total_tokens,
            train_loss=recorder.train_loss if math.isfinite(recorder.train_loss) else None,
            validation_losses={name: loss for name, loss in recorder.eval_losses.items() if math.isfinite(loss)},
        )
        options = ExportOptions(dtype=self._dtype, overwrite=True, hub_name=self._hub_name)
        model, adapter = self.config.model, self.config.adapter
        if adapter is None:
            vocab_size = len(params["embed.tokens"])
            whole = TextModel(model, vocab_size, program.model.nested(params), tokenizer, self.run_id, facts)
            write_hf(out, whole, options)
        else:
            base, vocab_size = base_name(self.config), program.model.shapes["embed.tokens"].shape[0]
            tuned = AdapterModel(model, vocab_size, adapter, params, base, tokenizer, self.run_id, facts)
            write_adapter(out, tuned, options)
        self.progress.note(f"step {info.step}: exported to {out}")
        if self._hub_name:
            self._report_upload()
            job = self._uploads.submit(
                push, out, self._hub_name, public=False, patterns=FILES, message=f"Step {info.step}"
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
                f"lmt export-hf {out} OUT --push-to-hub {self._hub_name}"
            )
