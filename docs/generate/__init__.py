"""Fills pages of the documentation from the code, so they cannot become outdated.

A page contains a marker such as `<!-- generated: command line -->`; words after a second colon are the argument, as in
`<!-- generated: configuration: optimizer -->`. `<!-- generated: plot -->` below a YAML block draws its schedules.
"""

import re
from collections.abc import Callable

from docs.generate import (
    command_line,
    configuration,
    family_checks,
    features,
    levanter,
    notebook,
    peers,
    repository,
    schedules,
    speed,
)

GENERATORS: dict[str, Callable[..., str]] = {
    "configuration": configuration.configuration,
    "command line": command_line.command_line,
    "what there is": configuration.what_there_is,
    "features of models": features.features,
    "checks of families": family_checks.family_checks,
    "keys of Levanter": levanter.levanter_keys,
    "file": repository.file_of_repository,
    "output": repository.output,
    "notebook": notebook.notebook_page,
    "peers": peers.peers_table,
    "bfloat16 products": peers.bfloat16_table,
    "speed": speed.speed_table,
    "shared results": speed.shared_table,
    "measuring commands": speed.measuring_commands,
}
"""Markdown generators, by the name in the marker. An argument is a string."""


def fill(markdown: str) -> str:
    """Replaces the markers of a page."""
    return re.sub(r"<!-- generated: ([\w ]+)(?:: (\S+))? -->", _generated, schedules.with_plots(markdown))


def _generated(match: re.Match[str]) -> str:
    return GENERATORS[match[1]](*filter(None, [match[2]]))
