"""Input of a Trainer: types of datasets, lengths of rows, and sampling by length."""

from collections.abc import Iterator, Mapping, Sequence, Sized
from typing import Any, Protocol

import torch
from torch.utils.data import Dataset, IterableDataset, RandomSampler, Sampler, SequentialSampler

from headway.core.runtime.collectives.tree import Tree
from headway.errors import DataError
from headway.trainer.arguments import TrainingArguments

_UPDATES_PER_CHUNK = 50
"""Number of updates whose rows `LengthGroupedSampler` sorts together."""

Batch = Tree
"""A tensor, or a dict, tuple or list of tensors."""


class IndexedRows(Protocol):
    """Interface of rows with random access: a list, or a dataset of the datasets library."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


Data = IndexedRows | Dataset[Any]
"""Dataset of a Trainer: rows with random access, or a torch dataset, which may be an iterable dataset."""

EvalData = Data | dict[str, Data]
"""Evaluation dataset, or a dict of several evaluation datasets by name."""


class LengthGroupedSampler(Sampler[int]):
    """Random sampler that groups rows of similar length, so that batches need little padding.

    The shuffled order is divided into chunks with the rows of 50 updates, each sorted by length, longest first. The
    longest row of all comes first, so that memory runs out at the first update or never. Random numbers are drawn from
    torch's global generator.

    Args:
        lengths: Length of each row.
        batch_size: Rows per update over all processes.
    """

    def __init__(self, lengths: Sequence[int], batch_size: int) -> None:
        self.lengths = list(lengths)
        self.chunk_size = batch_size * _UPDATES_PER_CHUNK

    def __len__(self) -> int:
        return len(self.lengths)

    def __iter__(self) -> Iterator[int]:
        order = torch.randperm(len(self.lengths)).tolist()
        chunks = []
        for start in range(0, len(order), self.chunk_size):
            chunk = order[start : start + self.chunk_size]
            chunks.append(sorted(chunk, key=lambda index: -self.lengths[index]))
        if chunks:
            # Each chunk begins with its longest row. Exchange the first rows so that the longest of all comes first.
            first, longest = chunks[0], max(chunks, key=lambda chunk: self.lengths[chunk[0]])
            first[0], longest[0] = longest[0], first[0]
        return iter([index for chunk in chunks for index in chunk])


def find_lengths(dataset: Any, column: str) -> list[int]:
    """Return the length of each row: the value of `column` if the rows have it, else the length of `input_ids`.

    Raises:
        DataError: If rows have neither the column nor `input_ids`.
    """
    columns = getattr(dataset, "column_names", None)
    if isinstance(columns, list):
        if column in columns:
            return [int(length) for length in dataset[column]]
        dataset = dataset.select_columns(["input_ids"]) if "input_ids" in columns else dataset
    lengths: list[int] = []
    for index in range(len(dataset)):
        row = dataset[index]
        has_columns = isinstance(row, dict) or hasattr(row, "keys")
        if has_columns and column in row:
            lengths.append(int(row[column]))
        elif has_columns and "input_ids" in row:
            lengths.append(len(row["input_ids"]))
        else:
            raise DataError(
                f"row {index} has no length: neither {column!r} (length_column_name) nor 'input_ids' is in it"
            )
    return lengths


def make_train_sampler(dataset: Data, args: TrainingArguments, batch_size: int) -> Sampler[int] | None:
    """Return the sampler of the training data for `train_sampling_strategy`, or None for an iterable dataset.

    With "random", a dataset that defines its own order, such as a `Mixture`, is read in this order.

    Args:
        dataset: Training data with all of its columns.
        args: Training arguments.
        batch_size: Rows per update over all processes.

    Raises:
        DataError: If the rows of an iterable dataset should be grouped by length, or if a row has no length.
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
    assert isinstance(dataset, Sized)  # `check_dataset` ensures it
    # A dataset with its own order, such as a Mixture, has already shuffled its sources.
    has_own_order = getattr(dataset, "orders_samples", False)
    if args.train_sampling_strategy == "sequential" or has_own_order:
        return SequentialSampler(dataset)
    return RandomSampler(dataset)


def get_length(data: object) -> int | None:
    """Return the number of rows of a dataset, or of batches of a loader; None if it has no length."""
    try:
        return len(data)  # type: ignore[arg-type]
    except TypeError:
        return None


def check_dataset(dataset: object) -> Data:
    """Return the argument if it is a dataset, and raise an error otherwise.

    Raises:
        DataError: If the argument is not a dataset.
    """
    is_indexed = isinstance(dataset, Sized) and hasattr(dataset, "__getitem__")
    if not isinstance(dataset, IterableDataset) and (not is_indexed or isinstance(dataset, str | bytes | Mapping)):
        raise DataError(
            f"a {type(dataset).__name__} is not a dataset: give one of the datasets library or of torch, or a list of rows"
        )
    return dataset  # type: ignore[return-value]
