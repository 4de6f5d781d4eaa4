"""What a Trainer reads: datasets, their lengths, and the sampler that puts rows of similar length into one batch."""

from collections.abc import Iterator, Sequence, Sized
from typing import Any, Protocol

import torch
from torch.utils.data import Dataset, IterableDataset, RandomSampler, Sampler, SequentialSampler

from headway.errors import DataError
from headway.trainer.settings.arguments import TrainingArguments

_BATCHES_AT_ONCE = 50


class IndexedRows(Protocol):
    """IndexedRows that are found by their number: a list, or a dataset of the datasets library."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


Data = IndexedRows | Dataset[Any]
"""What a Trainer trains on or evaluates: rows, torch's datasets, streams among them."""

EvalData = Data | dict[str, Data]
"""One evaluation's data, or that of several by name."""


class LengthGroupedSampler(Sampler[int]):
    """A random order in which neighbours have about the same length, so that batches need little padding.

    The shuffled order is cut into pieces of 50 global batches, each sorted by length, longest first; the longest row of all
    comes first, so that memory runs out at once or never. It draws from torch's global stream.

    Args:
        lengths: of each row.
        batch_size: rows of an update, over all processes.
    """

    def __init__(self, lengths: Sequence[int], batch_size: int) -> None:
        self.lengths = list(lengths)
        self.piece = batch_size * _BATCHES_AT_ONCE

    def __len__(self) -> int:
        return len(self.lengths)

    def __iter__(self) -> Iterator[int]:
        order = torch.randperm(len(self.lengths)).tolist()
        pieces = [order[start : start + self.piece] for start in range(0, len(order), self.piece)]
        pieces = [sorted(piece, key=lambda index: -self.lengths[index]) for piece in pieces]
        if pieces:
            tallest = max(range(len(pieces)), key=lambda number: self.lengths[pieces[number][0]])
            first, other = pieces[0], pieces[tallest]
            first[0], other[0] = other[0], first[0]
        return iter([index for piece in pieces for index in piece])


def find_lengths(dataset: Any, column: str) -> list[int]:
    """The length of each row.

    Raises:
        DataError: rows have neither that column nor `input_ids`.
    """
    columns = getattr(dataset, "column_names", None)
    if isinstance(columns, list):
        if column in columns:
            return [int(length) for length in dataset[column]]
        rows: Any = dataset.select_columns(["input_ids"]) if "input_ids" in columns else dataset
    else:
        rows = dataset
    found: list[int] = []
    for index in range(len(rows)):
        row = rows[index]
        if not isinstance(row, dict) and not hasattr(row, "keys"):
            break
        if column in row:
            found.append(int(row[column]))
        elif "input_ids" in row:
            found.append(len(row["input_ids"]))
        else:
            break
    if len(found) != len(rows):
        raise DataError(
            f"grouping by length needs the rows' length: a column {column!r} (length_column_name), or 'input_ids'; neither is in "
            f"row {len(found)}"
        )
    return found


def train_sampler(dataset: Data, args: TrainingArguments, batch_size: int) -> Sampler[int] | None:
    """The order of the training data, by `train_sampling_strategy`; None for a stream.

    Args:
        dataset: the training data, with all of its columns.
        args: the strategy.
        batch_size: rows of an update, over all processes.

    Raises:
        DataError: a stream is to be grouped, or rows have no length.
    """
    if isinstance(dataset, IterableDataset):
        if args.train_sampling_strategy == "group_by_length":
            raise DataError(
                "train_sampling_strategy='group_by_length' sorts rows, and a stream has no length and no rows to choose from; group "
                "them in the stream, or give a dataset with a length"
            )
        return None
    if args.train_sampling_strategy == "group_by_length":
        return LengthGroupedSampler(find_lengths(dataset, args.length_column_name), batch_size)
    assert isinstance(dataset, Sized)  # `check_dataset` has seen to it
    return (SequentialSampler if args.train_sampling_strategy == "sequential" else RandomSampler)(dataset)


def length_of(data: object) -> int | None:
    """How many rows a dataset, or batches a loader has; None for a stream."""
    try:
        return len(data)  # type: ignore[arg-type]
    except TypeError:
        return None


def check_dataset(dataset: object) -> Data:
    """Give back what can be read as rows, and refuse anything else.

    Raises:
        DataError: this is not a dataset.
    """
    if not isinstance(dataset, IterableDataset) and not (
        isinstance(dataset, Sized) and hasattr(dataset, "__getitem__")
    ):
        raise DataError(
            f"a {type(dataset).__name__} is not a dataset: give one of the datasets library, a torch Dataset or IterableDataset, or "
            "a list of rows"
        )
    return dataset  # type: ignore[return-value]
