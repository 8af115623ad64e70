"""Kinds of contents of a data set, by which the formats of data and the losses of training are matched."""

from typing import Literal

DataContent = Literal["documents", "pairs", "examples"]
"""Documents of any kind; pairs of a chosen and a rejected answer; or single answers, each with a label."""
