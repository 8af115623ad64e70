from pathlib import Path

import pytest

from tests.config.samples import Files


@pytest.fixture
def files(in_tmp_path: Path) -> Files:
    return Files(in_tmp_path)
