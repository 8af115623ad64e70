"""Opens the data of a run: its source, its tokenizer, its caches and its order."""

from __future__ import annotations

from collections.abc import Mapping

from lm_trainer.data.cache.ledger import Ledger
from lm_trainer.data.config import DataConfig
from lm_trainer.data.dataset import Data
from lm_trainer.data.rows.row_builder import RowBuilder
from lm_trainer.data.tokenize.background import BackgroundBuild, BackgroundBuilds
from lm_trainer.data.tokenize.build import Build
from lm_trainer.data.tokenize.finished_cache import FinishedCache
from lm_trainer.data.tokenize.first_row import build_notes
from lm_trainer.data.tokenize.open_cache import open_cache, read_excluded_documents
from lm_trainer.data.tokenize.plan import plan_caches
from lm_trainer.data.tokenize.progress import BuildCallbacks, OnProgress
from lm_trainer.data.tokenize.ray_config import RayConfig
from lm_trainer.data.tokenize.ready_rows import ReadyRows

FOREGROUND_BYTES = 2 << 20
"""Text with fewer stored bytes is tokenised before anything else, which takes less time than building the model."""


def open_data(
    config: DataConfig,
    *,
    seq_len: int,
    seed: int,
    on_progress: OnProgress | None = None,
    ray: RayConfig | None = None,
    background: bool = False,
) -> Data:
    """Tokenises text that is not cached yet, optionally on a Ray cluster, and opens the data.

    Args:
        config: the `data` section.
        seq_len: number of inputs of each row.
        seed: seed of the order.
        on_progress: called with the progress of the tokenising for which this call waits.
        ray: Ray cluster to tokenise on; None uses processes on this machine.
        background: True to return immediately, and to tokenise in the background while existing text is read. The
            batches are the same. `Data.close` ends the tokenising, and finished parts are kept.

    Raises:
        UserError: if data are missing, damaged or empty, or a cache directory has other contents. An error of a
            background build is raised when its text is needed.
        MachineError: if the disk is full.
    """
    plan = plan_caches(config, on_progress, ray)
    growing = _select_background_builds(plan.builds) if background else {}
    callbacks, excluded = BuildCallbacks(on_progress), read_excluded_documents(config)
    notes = build_notes(plan.builds)
    caches = {
        # A growing cache is opened in its current state. Any other cache is first built to its end.
        name: open_cache(
            build, Ledger.read(build.store) if name in growing else build.run(callbacks), excluded.get(name), name
        )
        for name, build in plan.builds.items()
    }
    builds = None
    if growing:
        pending = [BackgroundBuild(build, caches[name], num_builds=len(growing)) for name, build in growing.items()]
        # A Ray cluster schedules the tasks of one build at a time.
        builds = BackgroundBuilds(pending, one_by_one=ray is not None)
    data = Data(config, RowBuilder(config, plan.tokenizer, seq_len, seed), plan.directory, caches, builds, notes)
    # Started last, since an earlier error must not leave threads behind.
    if builds is not None:
        builds.start()
    return data


def _select_background_builds(builds: Mapping[str, Build | FinishedCache | ReadyRows]) -> dict[str, Build]:
    """Returns the builds that are large enough to run in the background."""
    unfinished = {
        name: build for name, build in builds.items() if isinstance(build, Build) and not build.read_ledger().finished
    }
    small = sum(shard.size for build in unfinished.values() for shard in build.shards) < FOREGROUND_BYTES
    return {} if small else unfinished
