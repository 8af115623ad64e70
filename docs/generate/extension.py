"""The Markdown extension of `docs.generate`, which `mkdocs.yml` names."""

from typing import Any

from markdown import Extension, Markdown
from markdown.preprocessors import Preprocessor

from docs.generate import fill


class _Fill(Preprocessor):
    def run(self, lines: list[str]) -> list[str]:
        return fill("\n".join(lines)).split("\n")


class GenerateExtension(Extension):
    def extendMarkdown(self, md: Markdown) -> None:
        """Registers the preprocessor after whitespace is normalised (30) and before fenced code is extracted (25)."""
        md.preprocessors.register(_Fill(md), "generate", 28)


def makeExtension(**settings: Any) -> GenerateExtension:
    """Called by Python-Markdown, which looks for this name."""
    return GenerateExtension(**settings)
