"""Typed access to JSON values of a manifest, which may be damaged, written by another program, or malicious.

Values are read by type and range. A wrong value raises an error that contains the value's path in the manifest, before
any object has been changed.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

from headway.errors import CheckpointError

T = TypeVar("T")

LARGEST = 2**53
"""Largest accepted count. Ranks exchange counts as floats, which represent integers exactly up to this limit."""


@dataclass(frozen=True)
class TypedReader:
    """Typed access to one JSON value of a manifest. Error messages contain the value's path in the manifest.

    Attributes:
        value: JSON value, or the result of `values.decode_value`. It has not been checked yet.
        where: Path of the value in the manifest, for messages.
    """

    value: Any
    where: str

    def raise_error(self, expected: str) -> NoReturn:
        """Raise `CheckpointError` because the value is not what is expected.

        Args:
            expected: Description of the expected value.

        Raises:
            CheckpointError: Always. The message contains the path of the value in the manifest.
        """
        text = repr(self.value)
        text = text if len(text) <= 80 else text[:80] + "..."
        raise CheckpointError(f"the manifest's {self.where} is {text}, where {expected} belongs")

    def read_integer(self, least: int = 0, most: int = LARGEST) -> int:
        """Return the value as an integer from `least` to `most`.

        Raises:
            CheckpointError: If the value is not such an integer.
        """
        value = self.value
        if type(value) is not int or not least <= value <= most:
            self.raise_error(f"a whole number from {least} to {most}")
        return value

    def read_number(self, least: float = -math.inf, most: float = math.inf) -> float:
        """Return the value as a finite float from `least` to `most`. Integers are accepted.

        Raises:
            CheckpointError: If the value is not such a number.
        """
        value = self.value
        # An integer above the largest float cannot be converted.
        is_sound = type(value) in (int, float) and -1e308 <= value <= 1e308
        if not is_sound or not least <= value <= most:
            self.raise_error(
                "a finite number" + (f" from {least} to {most}" if (least, most) != (-math.inf, math.inf) else "")
            )
        return float(value)

    def read_text(self) -> str:
        """Return the value as a string.

        Raises:
            CheckpointError: If the value is not a string.
        """
        value = self.value
        if not isinstance(value, str):
            self.raise_error("text")
        return value

    def read_flag(self) -> bool:
        """Return the value as a bool.

        Raises:
            CheckpointError: If the value is not a bool.
        """
        value = self.value
        if not isinstance(value, bool):
            self.raise_error("true or false")
        return value

    @property
    def is_none(self) -> bool:
        """Whether the value is null."""
        return self.value is None

    def count_items(self) -> int:
        """Return the number of items of a list or tuple.

        Raises:
            CheckpointError: If the value is not a list or tuple.
        """
        return len(self._read_sequence(None))

    def read_items(self, count: int | None = None) -> "list[TypedReader]":
        """Return readers for the items of a list or tuple.

        Args:
            count: Required number of items. Default: None, any number.

        Raises:
            CheckpointError: If the value is not a list or tuple, or has another length.
        """
        return [TypedReader(item, f"{self.where}[{index}]") for index, item in enumerate(self._read_sequence(count))]

    def read_integers(self, least: int = 0, most: int = LARGEST, count: int | None = None) -> list[int]:
        """Return the value as a list of integers from `least` to `most`.

        Args:
            least: Minimum of the integers.
            most: Maximum of the integers.
            count: Required number of items. Default: None, any number.

        Raises:
            CheckpointError: If the value is not such a list. The message names the first wrong item.
        """
        values = self._read_sequence(count)
        if not _are_integers(values, least, most):
            self._refuse_item(lambda item: item.read_integer(least, most))
        return list(values)

    def read_optional_integers(self, least: int = 0, most: int = LARGEST, count: int | None = None) -> list[int | None]:
        """Return the value as a list whose items are None or integers from `least` to `most`.

        Args:
            least: Minimum of the integers.
            most: Maximum of the integers.
            count: Required number of items. Default: None, any number.

        Raises:
            CheckpointError: If the value is not such a list. The message names the first wrong item.
        """
        values = self._read_sequence(count)
        if not _are_integers([value for value in values if value is not None], least, most):
            self._refuse_item(lambda item: None if item.is_none else item.read_integer(least, most))
        return list(values)

    def read_texts(self, count: int | None = None) -> list[str]:
        """Return the value as a list of strings.

        Args:
            count: Required number of items. Default: None, any number.

        Raises:
            CheckpointError: If the value is not such a list. The message names the first wrong item.
        """
        values = self._read_sequence(count)
        if not set(map(type, values)) <= {str}:
            self._refuse_item(lambda item: item.read_text())
        return list(values)

    def _refuse_item(self, read: Callable[["TypedReader"], Any]) -> None:
        """Raise the error of the first wrong item of a list, with the item's path.

        Args:
            read: Function that reads one item, and raises `CheckpointError` if the item is wrong.
        """
        for item in self.read_items():
            read(item)

    def _read_sequence(self, count: int | None) -> Sequence[Any]:
        """Return the value if it is a list or tuple with `count` items; None for any number. Raise `CheckpointError` if not."""
        value = self.value
        if not isinstance(value, list | tuple):
            self.raise_error("a list")
        if count is not None and len(value) != count:
            self.raise_error(f"a list of {count}")
        return value

    def read_table(self) -> "dict[str, TypedReader]":
        """Return readers for the values of a JSON object, by key.

        Raises:
            CheckpointError: If the value is not a dict with string keys.
        """
        value = self.value
        if not isinstance(value, dict) or not set(map(type, value)) <= {str}:
            self.raise_error("a table of names")
        return {name: TypedReader(item, f"{self.where}.{name}") for name, item in value.items()}

    def read_mapping(self) -> dict[Any, Any]:
        """Return the value as a dict with keys of any type.

        Raises:
            CheckpointError: If the value is not a dict.
        """
        value = self.value
        if not isinstance(value, dict):
            self.raise_error("a dict")
        return value

    def __getitem__(self, name: str) -> "TypedReader":
        """Return a reader for the value under a required key.

        Raises:
            CheckpointError: If this value is not a dict, or the key is missing.
        """
        value = self.value
        if not isinstance(value, dict):
            self.raise_error("a table of names")
        if name not in value:
            raise CheckpointError(f"the manifest's {self.where} lacks {name!r}")
        return TypedReader(value[name], f"{self.where}.{name}")

    def get(self, name: str) -> "TypedReader | None":
        """Return a reader for the value under an optional key, or None if the key is missing or its value is null.

        Raises:
            CheckpointError: If this value is not a dict.
        """
        value = self.value
        if not isinstance(value, dict):
            self.raise_error("a table of names")
        return None if value.get(name) is None else TypedReader(value[name], f"{self.where}.{name}")

    def read_if_present(self, name: str, read: "Callable[[TypedReader], T]", default: T) -> T:
        """Return the value of an optional key in a JSON object.

        Args:
            name: Key, which checkpoints of older versions may lack.
            read: Function that returns the value from its reader, and raises `CheckpointError` if it is wrong.
            default: Result if the key is missing or its value is null.

        Raises:
            CheckpointError: If this value is not a dict, or `read` raises it.
        """
        reader = self.get(name)
        return default if reader is None else read(reader)


def _are_integers(values: Sequence[Any], least: int, most: int) -> bool:
    """Whether all values are integers from `least` to `most`. Bools do not count as integers."""
    return not values or (set(map(type, values)) == {int} and least <= min(values) and max(values) <= most)
