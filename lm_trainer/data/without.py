"""Documents that do not count in training, although their rows stay in place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

from pydantic import BeforeValidator, Field, NonNegativeInt

from lm_trainer.core.config import Config, LocalPath


def _as_list(value: object) -> object:
    return [value] if isinstance(value, str | int) else value


DocumentLists = Annotated[
    list[LocalPath], BeforeValidator(_as_list, json_schema_input_type=LocalPath | list[LocalPath])
]
NumberInSet = Annotated[str, Field(pattern=r"^.+:\d+$")]


class WithoutConfig(Config):
    """Documents whose tokens have no weight in the loss and are not attended to. All rows keep their places."""

    documents: Annotated[
        list[NonNegativeInt | NumberInSet],
        BeforeValidator(_as_list, json_schema_input_type=int | str | list[int | str]),
    ] = []
    """Numbers of documents in their set, counted from 0, as `lmt data find` prints them. In a mixture, with the name of
    the set: `wiki:17`."""
    files: DocumentLists = []
    """Lists of documents, as written by `lmt data dedup`, `lmt data overlap` and `lmt without`."""
    sets: Annotated[list[str], BeforeValidator(_as_list, json_schema_input_type=str | list[str])] = []
    """Names of sets of a mixture of which no document counts."""

    def numbers_of(self, name: str) -> list[int]:
        """Returns the listed numbers of the documents of a set. A number without a name is in the only set."""
        pairs = [(name, entry) if isinstance(entry, int) else split_number(entry) for entry in self.documents]
        return [number for of_set, number in pairs if of_set == name]

    def check(self, sets: Mapping[str, bool], *, mixture: bool) -> None:
        """Checks that all sets exist and consist of documents of text.

        Args:
            sets: whether the rows of each set of the data section consist of documents of text, by name.
            mixture: True if the sets have names.

        Raises:
            ValueError: for a problem, with its remedy.
        """
        if not (self.documents or self.files or self.sets):
            raise ValueError("without names no document; give documents, files or sets, or remove it")
        names = ", ".join(sets)
        for entry in self.documents:
            if isinstance(entry, int) and mixture:
                raise ValueError(f"without.documents: {entry} is in which set? write SET:{entry}, with one of {names}")
            if not isinstance(entry, int) and split_number(entry)[0] not in sets:
                raise ValueError(f"without.documents: {entry}: there is no such set; there are {names}")
        for name in self.sets:
            if name not in sets or not mixture:
                raise ValueError(f"without.sets: {name} is no set of a mixture (configs)")
        for name, has_documents in sets.items():
            if not has_documents:
                raise ValueError(
                    f"without: the tokens of a document of text can be left out of the loss, but {name} has other "
                    "rows; leave the documents out of its files, and train a new run"
                )


def split_number(text: str) -> tuple[str, int]:
    """Splits `SET:NUMBER`."""
    name, _, number = text.rpartition(":")
    return name, int(number)
