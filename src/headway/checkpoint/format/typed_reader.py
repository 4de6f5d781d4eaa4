"""What a manifest says, asked for by type and range: a value that is not what belongs there is an error that names its place.

A manifest may be damaged, of another program, or made to do harm. Who reads it through `TypedReader` never meets a wrong type later,
when objects have been changed already.
"""

import math
from collections.abc import Iterator
from typing import Any, NoReturn

from headway.errors import CheckpointError

MOST = 2**53
"""The largest count: as many as a float counts exactly, in which ranks tell them each other."""


class TypedReader:
    """A value, and where it is.

    Args:
        value: JSON, or what `values.decode` made of it.
        where: its place, for messages.
    """

    def __init__(self, value: Any, where: str) -> None:
        self.value = value
        self._where = where

    def refuse(self, wanted: str) -> NoReturn:
        """Say that something else belongs here.

        Raises:
            CheckpointError: always.
        """
        text = repr(self.value)
        text = text if len(text) <= 80 else text[:80] + "..."
        raise CheckpointError(f"the manifest's {self._where} is {text}, where {wanted} belongs")

    def replaced(self, value: Any) -> "TypedReader":
        """Another value in this place, such as what it was decoded to."""
        return TypedReader(value, self._where)

    def whole(self, least: int = 0, most: int = MOST) -> int:
        """A whole number in that range."""
        value = self.value
        if type(value) is not int or not least <= value <= most:
            self.refuse(f"a whole number from {least} to {most}")
        return value

    def number(self, least: float = -math.inf, most: float = math.inf) -> float:
        """A finite number in that range, whole or not."""
        value = self.value
        # A whole number beyond all floats has no value as one.
        is_sound = type(value) in (int, float) and -1e308 <= value <= 1e308
        if not is_sound or not least <= value <= most:
            self.refuse(
                "a finite number" + (f" from {least} to {most}" if (least, most) != (-math.inf, math.inf) else "")
            )
        return float(value)

    def text(self) -> str:
        """Text."""
        value = self.value
        if not isinstance(value, str):
            self.refuse("text")
        return value

    def flag(self) -> bool:
        """True or False."""
        value = self.value
        if not isinstance(value, bool):
            self.refuse("true or false")
        return value

    @property
    def is_none(self) -> bool:
        """Is there nothing?"""
        return self.value is None

    def items(self, count: int | None = None) -> "list[TypedReader]":
        """What a list (or tuple) holds; `count`: as many as it must have."""
        value = self.value
        if not isinstance(value, list | tuple):
            self.refuse("a list")
        if count is not None and len(value) != count:
            self.refuse(f"a list of {count}")
        return [TypedReader(item, f"{self._where}[{index}]") for index, item in enumerate(value)]

    def table(self) -> "dict[str, TypedReader]":
        """What a table holds, by its names."""
        value = self.value
        if not isinstance(value, dict) or not all(isinstance(name, str) for name in value):
            self.refuse("a table of names")
        return {name: TypedReader(item, f"{self._where}.{name}") for name, item in value.items()}

    def mapping(self) -> dict[Any, Any]:
        """A dict of any keys."""
        value = self.value
        if not isinstance(value, dict):
            self.refuse("a dict")
        return value

    def __getitem__(self, name: str) -> "TypedReader":
        """What must stand under that name."""
        found = self.get(name)
        if found is None:
            raise CheckpointError(f"the manifest's {self._where} lacks {name!r}")
        return found

    def get(self, name: str) -> "TypedReader | None":
        """What stands under that name; None where nothing does."""
        value = self.value
        if not isinstance(value, dict):
            self.refuse("a table of names")
        return TypedReader(value[name], f"{self._where}.{name}") if name in value else None

    def given(self, *names: str) -> "Iterator[TypedReader]":
        """What stands under those of the names that are there and say something."""
        for name in names:
            found = self.get(name)
            if found is not None and not found.is_none:
                yield found
