"""`RowTokenizer`: interface of `ChatTokenizer` and `PreferenceTokenizer`, and their shared methods."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, Literal

from headway.errors import DataError


class RowTokenizer(ABC):
    """Callable that turns a row with conversations into token IDs and labels.

    Attributes:
        max_length: Maximum number of tokens of a conversation. None: no limit.
        too_long: Treatment of longer conversations: "error", "drop" or "truncate".
    """

    max_length: int | None
    too_long: Literal["error", "drop", "truncate"]

    @abstractmethod
    def __call__(self, row: Any, index: int | None = None) -> dict[str, list[int]]:
        """Return the sample of a row.

        Args:
            row: Row with one or several conversations.
            index: Index of the row, for error messages. None (the default): they quote the beginning of the row.

        Raises:
            DataError: If the row cannot be used, or a conversation is too long.
        """

    @abstractmethod
    def encode_unless_dropped(self, row: Any, index: int | None = None) -> dict[str, list[int]] | None:
        """Return what a call returns, or None if a conversation is too long and `too_long` is "drop".

        Args:
            row: Row with one or several conversations.
            index: Index of the row, for error messages. None (the default): they quote the beginning of the row.

        Raises:
            DataError: As for a call.
        """

    @abstractmethod
    def count_tokens(self, sample: Mapping[str, Any]) -> int:
        """Return the number of tokens that a sample takes in a batch."""

    @abstractmethod
    def mark_trained(self, sample: Mapping[str, Any]) -> str:
        """Return the decoded tokens of a sample, with the trained parts between `[train]` and `[/train]`."""

    def find_problem(self, row: Any) -> str | None:
        """Return the message of the error that a call with this row raises, or None if it raises none.

        For example, `rows.filter(lambda row: tokenizer.find_problem(row) is None)` keeps the usable rows.
        """
        try:
            self(row)
        except DataError as error:
            return str(error)
        return None

    def show(self, row: Any) -> str:
        """Return the text of a row's conversations, with the trained parts between `[train]` and `[/train]`.

        Raises:
            DataError: As for a call.
        """
        return self.mark_trained(self(row))
