"""`ModelLadder`: a family of runs, from small to large, that are alike but for their size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, overload

from rich.console import Console

from lm_trainer.core.files import AnyPath
from lm_trainer.ladder.batch import BatchShape
from lm_trainer.ladder.checkpoints import RunCheckpointInfo, find_checkpoints
from lm_trainer.ladder.config import LadderConfig
from lm_trainer.ladder.metrics import frame, rows_of
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
    """Runs of several sizes with one recipe, so that what the largest will do can be predicted.

    Methods have the names that they have in OLMo-core; each is a function of this package on the configuration.
    """

    def vocab_size(self) -> int:
        """Rows of the token embedding.

        Raises:
            UserError: when the tokenizer cannot be reached to ask it.
        """
        return vocab_size_of(self)

    def get_model_config(self, size_spec: str) -> DecoderConfig:
        """The model of a size."""
        return model_config(self, size_spec)

    def get_num_params(self, size_spec: str, vocab_size: int | None = None) -> int:
        """Parameters without the token embedding; an output layer of its own counts, as in OLMo-core."""
        return count_params(self, size_spec, vocab_size)

    def get_num_devices(self, size_spec: str) -> int:
        """Devices that a run uses: a power of two, as many as share its batch and are there."""
        return batch_shape(self, size_spec).devices

    def get_batch_size(self, size_spec: str) -> int:
        """Tokens in a global batch; it does not depend on devices."""
        return batch_shape(self, size_spec).batch_size

    def batch_shape(
        self, size_spec: str, *, vocab_size: int | None = None, compat: Literal["olmo"] | None = None
    ) -> BatchShape:
        """The batch and its split, with `compat="olmo"` as OLMo-core would choose them on this hardware.

        Raises:
            UserError: where OLMo-core knows nothing about the hardware.
        """
        return batch_shape(self, size_spec, vocab_size=vocab_size, compat=compat)

    def run_name(self, size_spec: str, seed: int | None = None) -> str:
        """The name of the run of a size: the size, and its seed where that is not the first."""
        return run_name(self, size_spec, seed)

    def get_save_folder(self, size_spec: str, seed: int | None = None) -> str:
        """The directory of the run of a size."""
        return str(run_folder(self, size_spec, seed))

    def run_config(self, size_spec: str, seed: int | None = None, vocab_size: int | None = None) -> RunConfig:
        """The run of a size: an ordinary one, that `lmt train` could run as well."""
        return run_config(self, size_spec, seed, vocab_size)

    def dry_run(self, size_spec: str, show_plot: bool = True, save_plot: AnyPath | None = None) -> RungPlan:
        """Prints the plan of a run, and draws its learning rate."""
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
        """Trains a size, or goes on where its run stopped; raises as `lm_trainer.run.train.train`.

        With `for_benchmarking` it only times the step, as `run_benchmark`, and shows no progress.
        """
        if for_benchmarking:
            return benchmark_rung(self, size_spec, seed=seed)
        return run_rung(self, size_spec, seed=seed, progress=progress)

    def run_benchmark(self, size_spec: str) -> dict[str, Any]:
        """Times the training step of a size, as `lmt bench mfu`; writes nothing."""
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
        """The checkpoints of a size, in order, those that do not exist yet as well; see `find_checkpoints`.

        `download_metrics` has OLMo-core's place and no effect: metrics lie in `dir`, which is a local directory.
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
        """One row for each checkpoint of a size (of all its seeds) that has metrics; None where there is none.

        Raises:
            UserError: without pandas, and when the directory holds metrics of another ladder.
        """
        found = rows_of(self, size_spec, prefix, discover_all=discover_all, alternative_dirs=alternative_dirs)
        return frame(found) if found else None
