"""The tiny run that tests of whole runs vary."""

from tests.run.conftest import make_config, text_files

__all__ = ["make_config", "text_files"]
