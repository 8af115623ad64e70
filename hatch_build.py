"""Metadata of the package that depends on the place it is built for: addresses, and links in the description.

`LMT_REPOSITORY_URL` is the address of the repository. The release workflow sets it. Without it, a package has no
addresses, and its description has no links to files of the repository.
"""

import os
import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

_LINK = re.compile(r"\[([^]]+)\]\((?![a-z]+:|#)([^)]+)\)")
"""A Markdown link to a file of the repository."""


class RepositoryMetadata(MetadataHookInterface):
    """Sets the description and the addresses of the package."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Fills `metadata`, the `project` table of pyproject.toml, in place."""
        root, url = Path(self.root), os.environ.get("LMT_REPOSITORY_URL", "").rstrip("/")
        files = f"{url}/blob/{_revision(root)}"
        text = (root / "README.md").read_text(encoding="utf-8")
        # The index of packages shows the description without the files around it, so relative links would be broken.
        text = _LINK.sub(rf"[\1]({files}/\2)" if url else r"\1", text)
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
        if url:
            metadata["urls"] = {
                "Homepage": url,
                "Documentation": f"{files}/docs/index.md",
                "Source": url,
                "Changelog": f"{files}/CHANGELOG.md",
                "Issues": f"{url}/issues",
            }


def _revision(root: Path) -> str:
    """Returns the tag of a release, or the newest commit for a version in development."""
    text = (root / "lm_trainer/__init__.py").read_text(encoding="utf-8")
    match = re.search(r'^__version__ = "([^"]+)"$', text, re.MULTILINE)
    assert match is not None
    return "HEAD" if ".dev" in match[1] else f"v{match[1]}"
