"""`ModelLadder`: a family of runs, from small to large, that differ only in model size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, overload

from rich.console import Console

from lm_trainer.core.files import AnyPath
from lm_trainer.ladder.batch import BatchShape
from lm_trainer.ladder.checkpoints import RunCheckpointInfo, find_checkpoints
from lm_trainer.ladder.config import LadderConfig
from lm_trainer.ladder.metrics import collect_rows, to_dataframe
from lm_trainer.ladder.plan import RungPlan, plan_rung
from lm_trainer.ladder.rungs import (
    batch_shape,
    count_params,
    model_config,
    run_config,
    run_folder,
    run_name,
    vocab_size_of,
)
from lm_trainer.ladder.running import benchmark_rung, run_rung
from lm_trainer.models.base import DecoderConfig
from lm_trainer.run.config.run_config import RunConfig
from lm_trainer.run.summary import Summary
from lm_trainer.trackers import Progress

if TYPE_CHECKING:
    import pandas


class ModelLadder(LadderConfig):
    """Runs of several model sizes with one recipe, to predict the result of larger sizes.

    The methods have the same names as in OLMo-core. Each calls a function of this package with the configuration.
    """

    def vocab_size(self) -> int:
        """Returns the number of rows of the token embedding.

        Raises:
            UserError: if the tokenizer cannot be loaded.
        """
        return vocab_size_of(self)

    def get_model_config(self, size_spec: str) -> DecoderConfig:
        """Returns the model configuration of a size."""
        return model_config(self, size_spec)

    def get_num_params(self, size_spec: str, vocab_size: int | None = None) -> int:
        """Counts the parameters that a token uses, without the token embedding.

        As in OLMo-core, an untied output layer counts. Experts that the token did not choose do not.
        """
        return count_params(self, size_spec, vocab_size)

    def get_num_devices(self, size_spec: str) -> int:
        """Returns the number of devices in use: a power of two, at most `max_devices` and the shards of the batch."""
        return batch_shape(self, size_spec).devices

    def get_batch_size(self, size_spec: str) -> int:
        """Returns the number of tokens in a global batch, which is the same for any number of devices."""
        return batch_shape(self, size_spec).batch_size

    def batch_shape(
        self, size_spec: str, *, vocab_size: int | None = None, compat: Literal["olmo"] | None = None
    ) -> BatchShape:
        """Returns the batch and its split. With `compat="olmo"`, as OLMo-core would choose them on this hardware.

        Raises:
            UserError: with `compat="olmo"`, if OLMo-core has no figures for the hardware.
        """
        return batch_shape(self, size_spec, vocab_size=vocab_size, compat=compat)

    def run_name(self, size_spec: str, seed: int | None = None) -> str:
        """Returns the name of a run: the size, followed by the seed unless it is the first seed."""
        return run_name(self, size_spec, seed)

    def get_save_folder(self, size_spec: str, seed: int | None = None) -> str:
        """Returns the directory of a run."""
        return str(run_folder(self, size_spec, seed))

    def run_config(self, size_spec: str, seed: int | None = None, vocab_size: int | None = None) -> RunConfig:
        """Returns the configuration of a run, which `lmt train` could run as well."""
        return run_config(self, size_spec, seed, vocab_size)

    def dry_run(self, size_spec: str, show_plot: bool = True, save_plot: AnyPath | None = None) -> RungPlan:
        """Prints the plan of a run, and plots its learning rate."""
        plan = plan_rung(self, size_spec)
        Console().print("\n".join(plan.lines()), highlight=False, markup=False)
        self.run_configurator.plot_lr_schedule(plan.num_params, plan.batch_size, show=show_plot, save_path=save_plot)
        return plan

    @overload
    def run(
        self,
        size_spec: str,
        for_benchmarking: Literal[False] = False,
        *,
        seed: int | None = None,
        progress: Progress | None = None,
    ) -> Summary: ...

    @overload
    def run(
        self, size_spec: str, for_benchmarking: bool, *, seed: int | None = None, progress: Progress | None = None
    ) -> Summary | dict[str, Any]: ...

    def run(
        self,
        size_spec: str,
        for_benchmarking: bool = False,
        *,
        seed: int | None = None,
        progress: Progress | None = None,
    ) -> Summary | dict[str, Any]:
        """Trains a size, or resumes its run if it was stopped. Raises the errors of `lm_trainer.run.train.train`.

        With `for_benchmarking`, only times the training step like `run_benchmark`, and shows no progress.
        """
        if for_benchmarking:
            return benchmark_rung(self, size_spec, seed=seed)
        return run_rung(self, size_spec, seed=seed, progress=progress)

    def run_benchmark(self, size_spec: str) -> dict[str, Any]:
        """Times the training step of a size like `lmt bench mfu`. Writes no files."""
        return benchmark_rung(self, size_spec)

    def get_checkpoints(
        self,
        size_spec: str,
        download_metrics: bool = False,
        discover_all: bool = False,
        alternative_dirs: Sequence[AnyPath] | None = None,
        *,
        seed: int | None = None,
    ) -> list[RunCheckpointInfo]:
        """Lists all checkpoints of a size in order, including missing ones; see `find_checkpoints`.

        `download_metrics` exists only for compatibility with OLMo-core. It has no effect, because metrics are in the
        local directory `dir`.
        """
        del download_metrics
        return find_checkpoints(
            self, size_spec, seed=seed, discover_all=discover_all, alternative_dirs=alternative_dirs
        )

    def get_metrics(
        self,
        size_spec: str,
        prefix: str | None = None,
        discover_all: bool = False,
        alternative_dirs: Sequence[AnyPath] | None = None,
    ) -> pandas.DataFrame | None:
        """Returns one row per checkpoint of a size that has metrics, over all seeds; None if no checkpoint has metrics.

        Raises:
            UserError: if pandas is not installed, or the directory contains metrics of another ladder.
        """
        rows = collect_rows(self, size_spec, prefix, discover_all=discover_all, alternative_dirs=alternative_dirs)
        return to_dataframe(rows) if rows else None
