"""The configuration of a Ray cluster for tokenising."""

from __future__ import annotations

from lm_trainer.core.config import Config


class RayConfig(Config):
    """A Ray cluster to tokenise on. Its machines must see the sources and the cache directory under the same paths."""

    address: str | None = None
    """The address of a running cluster, such as `auto` for the cluster of this machine or `ray://host:10001`."""
    start_workers: bool = True
    """Lets a cluster that is started here use this machine's cores; if False, start the workers yourself."""
    auto_start_cluster: bool = True
    """Starts a cluster on this machine when Ray is requested without an address."""
