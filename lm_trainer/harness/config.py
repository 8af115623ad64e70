"""The configuration of evaluation tasks."""

from __future__ import annotations

import importlib.util
import os
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveInt, model_validator

from lm_trainer.core.config import Config, LocalPath


class TaskConfig(BaseModel):
    """A task of lm-evaluation-harness, with additional settings."""

    # The settings of a task depend on the harness version, which checks them.
    model_config = ConfigDict(extra="allow", frozen=True)

    task: str
    """Name of a task, a group or a tag."""
    task_alias: str | None = None
    """Name under which the results of the task are reported."""
    num_fewshot: NonNegativeInt | None = None
    """Number of few-shot examples per question; null means the task's default."""

    def settings(self) -> dict[str, Any]:
        """Returns the settings that override the task's own settings."""
        return {key: value for key, value in self.model_dump(exclude={"task"}).items() if value is not None}


class HarnessConfig(Config):
    """Tasks of lm-evaluation-harness (`pip install "lm_trainer[eval]"`) to evaluate during training."""

    task_spec: tuple[str | TaskConfig, ...] = Field(min_length=1)
    """List of tasks. Each is a name such as `arc_easy`, or a mapping with `task`, and optionally `task_alias`,
    `num_fewshot` and other settings of the task."""
    max_examples: PositiveInt | None = None
    """Maximum number of questions per task; null means all."""
    include_path: LocalPath | None = None
    """Directory with your own tasks, in the form of YAML files of the harness."""
    apply_chat_template: bool = False
    """Formats questions with the tokenizer's chat template."""
    fewshot_as_multiturn: bool = False
    """Writes the few-shot examples as earlier turns of the conversation, if there is a chat template."""
    log_samples: bool = False
    """Writes every question with the model's answer to RUN_DIR/eval-harness."""
    bootstrap_iters: NonNegativeInt = 1000
    """Number of bootstrap resamplings for standard errors that have no closed formula."""
    max_eval_length: PositiveInt | None = None
    """Maximum number of tokens that the model reads; null means its context length."""
    confirm_run_unsafe_code: bool = False
    """Runs the code that the model generates in tasks such as humaneval."""

    @model_validator(mode="after")
    def _check_harness_installed(self) -> HarnessConfig:
        check_harness_installed()
        return self


def check_harness_installed() -> None:
    """Raises ValueError if lm-evaluation-harness is not installed."""
    if importlib.util.find_spec("lm_eval") is None:
        raise ValueError('lm-evaluation-harness is not installed; run: pip install "lm_trainer[eval]"')


def disable_progress_bars() -> None:
    """Disables the progress bars of the harness, which shows one for every step of every task.

    Call it before importing the harness, because the progress bar package reads the environment only once.
    """
    os.environ.setdefault("TQDM_DISABLE", "1")
