"""Runs tasks of lm-evaluation-harness on a model."""

from __future__ import annotations

import contextlib
import difflib
import logging
import os
import socket
import urllib.parse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from lm_eval.evaluator import evaluate
from lm_eval.tasks import TaskManager

from lm_trainer.core.errors import UserError
from lm_trainer.core.files import local_path
from lm_trainer.harness.answer_loss import ANSWER_LOSS, answer_loss
from lm_trainer.harness.config import HarnessConfig, TaskConfig
from lm_trainer.harness.model import HarnessModel

logger = logging.getLogger(__name__)

_HUB_SECONDS = 5.0

FEWSHOT_SEED = 1234
"""Seed for choosing few-shot examples, as in the harness."""


@dataclass(frozen=True)
class TaskResult:
    """The results of a task, or of a group of tasks."""

    name: str
    """Name of the task, or its alias if it has an alias."""
    num_fewshot: int | None
    num_questions: int | None
    """Number of questions; None for a group."""
    metrics: Mapping[str, float]
    """Values by metric name. The name includes the answer filter, if any, after a comma."""
    errors: Mapping[str, float]
    """Standard errors by metric name, if known."""
    samples: Sequence[Mapping[str, Any]]
    """Every question with the model's answer, if they were requested."""


class Tasks:
    """The tasks of a configuration, which are loaded once and can be evaluated several times.

    Args:
        config: the tasks and their settings.
        num_fewshot: number of few-shot examples per question, for all tasks that are not defined as zero-shot.

    Raises:
        UserError: if a task is unknown, or its data cannot be read.
    """

    def __init__(self, config: HarnessConfig, *, num_fewshot: int | None = None):
        self._config = config
        specs = [spec if isinstance(spec, TaskConfig) else TaskConfig(task=spec) for spec in config.task_spec]
        with _silence_logs():
            self._loaded = _load_tasks(_make_task_manager(config, specs), specs)
            for task in self._loaded["tasks"].values():
                _set_num_fewshot(task, num_fewshot)

    def evaluate_model(self, model: HarnessModel) -> list[TaskResult]:
        """Evaluates a model on all tasks. The results are deterministic.

        Raises:
            UserError: if answers do not fit into the context, or the harness rejects anything.
        """
        config, loaded = self._config, cast(Any, self._loaded)
        with _silence_logs():
            for task in loaded["tasks"].values():
                task.set_fewshot_seed(seed=FEWSHOT_SEED)
            try:
                results: Any = evaluate(
                    lm=model,
                    task_dict=loaded,
                    limit=config.max_examples,
                    bootstrap_iters=config.bootstrap_iters,
                    # The answers are needed to compute their losses.
                    log_samples=True,
                    apply_chat_template=config.apply_chat_template,
                    fewshot_as_multiturn=config.fewshot_as_multiturn,
                    confirm_run_unsafe_code=config.confirm_run_unsafe_code,
                )
            except ValueError as error:
                raise UserError(f"the harness refuses a task: {_first_line(error)}") from None
        return [self._task_result(name, results) for name in results["results"]]

    def _task_result(self, name: str, results: Mapping[str, Any]) -> TaskResult:
        result = _parse_result(name, results)
        loss = answer_loss(self._loaded["tasks"].get(name), result.samples)
        if loss is not None:
            mean, error = loss
            errors = result.errors if error is None else {**result.errors, ANSWER_LOSS: error}
            result = replace(result, metrics={**result.metrics, ANSWER_LOSS: mean}, errors=errors)
        return result if self._config.log_samples else replace(result, samples=())


def _make_task_manager(config: HarnessConfig, specs: Sequence[TaskConfig]) -> TaskManager:
    """Lists tasks. Lists only the user's directory if it has all of them, because the harness has thousands."""
    directory = None if config.include_path is None else str(local_path(config.include_path))
    if directory is not None:
        local_manager = TaskManager(include_path=directory, include_defaults=False)
        if all(spec.task in local_manager.all_tasks for spec in specs):
            return local_manager
    _go_offline_if_unreachable()
    return TaskManager(include_path=directory)


def _go_offline_if_unreachable() -> None:
    """Switches to offline mode if the hub is unreachable, because a failing request takes half a minute."""
    import datasets.config
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE or any(os.environ.get(name) for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY")):
        return
    endpoint = urllib.parse.urlsplit(constants.ENDPOINT)
    port = endpoint.port or (443 if endpoint.scheme == "https" else 80)
    try:
        socket.create_connection((endpoint.hostname or "", port), timeout=_HUB_SECONDS).close()
    except OSError as error:
        logger.warning("%s cannot be reached (%s); data are looked for on this machine alone", endpoint.netloc, error)
        constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True


def _check_task_name(manager: TaskManager, name: str) -> None:
    names = manager.all_tasks
    if name in names or name.endswith((".yaml", ".yml")):
        return
    near = difflib.get_close_matches(name, names, 3)
    hint = f"; did you mean {' or '.join(near)}?" if near else "; `lm_eval ls tasks` lists all"
    raise UserError(f"the harness has no task {name}{hint}")


def _load_tasks(manager: TaskManager, specs: Sequence[TaskConfig]) -> dict[str, dict[str, Any]]:
    loaded: dict[str, dict[str, Any]] = {"tasks": {}, "groups": {}, "group_map": {}}
    for spec in specs:
        _check_task_name(manager, spec.task)
        try:
            new_tasks: Any = manager.load([spec.task])
        # The package that loads data sets raises many kinds of errors, and tasks may run arbitrary code.
        except Exception as error:
            raise UserError(f"the task {spec.task} cannot be read: {_first_line(error)}") from None
        if twice := sorted(new_tasks["tasks"].keys() & loaded["tasks"].keys()):
            raise UserError(f"the task {twice[0]} is named twice, the second time by {spec.task}")
        for task in new_tasks["tasks"].values():
            for key, value in spec.settings().items():
                task.set_config(key=key, value=value)
        for kind, values in loaded.items():
            values.update(new_tasks[kind])
    return loaded


def _set_num_fewshot(task: Any, num_fewshot: int | None) -> None:
    configured = task.get_config("num_fewshot")
    if num_fewshot is not None and configured != 0:
        task.set_config(key="num_fewshot", value=num_fewshot)
    elif configured is None:
        task.set_config(key="num_fewshot", value=0)


def _parse_result(name: str, results: Mapping[str, Any]) -> TaskResult:
    metrics, errors = {}, {}
    for key, value in results["results"][name].items():
        metric, _, kind = key.partition(",")
        if not kind or not isinstance(value, int | float):
            continue
        shown = metric if kind == "none" else key
        if metric.endswith("_stderr"):
            errors[shown.replace("_stderr", "", 1)] = float(value)
        else:
            metrics[shown] = float(value)
    counts = results.get("n-samples", {}).get(name, {})
    alias = str(results["results"][name].get("alias") or name).strip(" -")
    samples = results.get("samples", {}).get(name, [])
    return TaskResult(alias, results.get("n-shot", {}).get(name), counts.get("effective"), metrics, errors, samples)


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


@contextlib.contextmanager
def _silence_logs() -> Iterator[None]:
    """Silences the log messages of the harness, except errors."""
    loggers = [logging.getLogger(name) for name in ("lm_eval", "datasets", "huggingface_hub")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
