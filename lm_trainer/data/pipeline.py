"""Opens the data of a run: source, tokenizer, caches, order."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from lm_trainer.data.cache.format import Ledger, fingerprint, token_dtype
from lm_trainer.data.cache.loss_mask import MarkStream
from lm_trainer.data.cache.token_stream import TokenStream
from lm_trainer.data.config import DataConfig
from lm_trainer.data.dataset import Data
from lm_trainer.data.rows.growing import BackgroundBuild, Builders, OpenSet
from lm_trainer.data.rows.row_builder import Cutting
from lm_trainer.data.tokenize.build import Build, OnProgress
from lm_trainer.data.tokenize.plan import plan_caches
from lm_trainer.data.tokenize.ray_backend import RayConfig

AT_ONCE_BYTES = 2 << 20
"""Less text than this, as stored, is tokenised before anything else: it takes less time than the model does."""


def open_data(
    config: DataConfig,
    *,
    seq_len: int,
    seed: int,
    on_progress: OnProgress | None = None,
    ray: RayConfig | None = None,
    background: bool = False,
) -> Data:
    """Tokenises what is not yet cached, on a Ray cluster if one is given, and opens it.

    Args:
        config: the `data` section.
        seq_len: of the rows.
        seed: of the order.
        on_progress: told how far the tokenising is that this call waits for.
        ray: where to tokenise, if not in processes of this machine.
        background: return at once, and go on tokenising while what is there is read. The batches are the same.
            `Data.close` ends the tokenising; what was done is kept.

    Raises:
        UserError: for missing, damaged or empty data, or a cache directory that holds something else. What a
            background build meets is raised where its text is needed.
        MachineError: if the disk is full.
    """
    plan = plan_caches(config, on_progress, ray)
    growing = _unfinished(plan.builds) if background else {}
    caches = {name: _open(build, grows=name in growing) for name, build in plan.builds.items()}
    data = Data(config, Cutting(config, plan.tokenizer, seq_len, seed), plan.directory, caches)
    data.check()
    if growing:
        builds = [BackgroundBuild(build, caches[name]) for name, build in growing.items()]
        data.builders = Builders(builds, one_by_one=ray is not None)
    return data


def _unfinished(builds: Mapping[str, Build]) -> dict[str, Build]:
    """Those that are worth building in the background, told how many they are."""
    found = {name: build for name, build in builds.items() if not build.look().finished}
    if sum(shard.size for build in found.values() for shard in build.shards) < AT_ONCE_BYTES:
        return {}
    for build in found.values():
        build.options = replace(build.options, beside=len(found))
    return found


def _open(build: Build, *, grows: bool) -> OpenSet:
    ledger = Ledger.read(build.store) if grows else build.run()
    stream = TokenStream(build.store, ledger, token_dtype(build.tokenizer.vocab_size))
    if ledger.marks or build.format.marks:
        stream.marks = MarkStream(build.store, ledger, np.dtype(np.uint8))
    return OpenSet(build.store, stream, ledger, tuple(build.shards), fingerprint(build.manifest()))
