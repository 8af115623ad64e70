"""Processes of a run on a Ray cluster that is there already."""

from __future__ import annotations

import sys

import pytest

from lm_trainer.core.errors import UserError
from lm_trainer.launch.ray_cluster import RayJob, launch_on_ray


def test_no_cluster_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray")
    with pytest.raises(UserError, match=r"there is no Ray cluster at '127.0.0.1:1'.*ray start --head"):
        launch_on_ray(["-c", ""], RayJob(2, "127.0.0.1:1"), print)


def test_ray_is_an_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UserError, match="pip install ray"):
        launch_on_ray(["-c", ""], RayJob(2, "auto"), print)
