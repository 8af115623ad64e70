"""Text at URLs of object storage, for which the packages of an extra are needed."""

from __future__ import annotations

import sys

import pytest
from fsspec.registry import _registry

from lm_trainer.core.errors import UserError
from lm_trainer.data.sources.urls import match_files


@pytest.mark.parametrize(
    ("url", "package", "extra"), [("s3://b/x.txt", "s3fs", "s3"), ("gs://b/x.txt", "gcsfs", "gcs")]
)
def test_an_error_names_the_extra(monkeypatch: pytest.MonkeyPatch, url: str, package: str, extra: str) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    # Where fsspec keeps what it has imported before.
    monkeypatch.delitem(_registry, url.partition("://")[0], raising=False)
    message = rf"data.train_urls: {url} needs a package; run: pip install .lm_trainer\[{extra}\]"
    with pytest.raises(UserError, match=message):
        match_files([url], "data.train_urls")
