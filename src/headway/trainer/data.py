"""What a Trainer reads: datasets, their lengths, the sampler by length, and how rows become a batch with its labels counted.

From rows to a batch: columns that forward takes, padding, and the count of labels that a loss is a mean over.
"""

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping, Sequence, Sized
from dataclasses import dataclass
from typing import Any, Protocol

import numpy
import torch
from torch.utils.data import (
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    default_collate,
    get_worker_info,
)

from headway.errors import DataError
from headway.log import get_logger
from headway.runtime.collectives.tree import Tree
from headway.trainer.arguments import TrainingArguments

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
    comes first, so that memory runs out at once or never. It draws from torch's global generator.

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
        dataset = dataset.select_columns(["input_ids"]) if "input_ids" in columns else dataset
    found: list[int] = []
    for index in range(len(dataset)):
        row = dataset[index]
        is_named = isinstance(row, dict) or hasattr(row, "keys")
        if is_named and column in row:
            found.append(int(row[column]))
        elif is_named and "input_ids" in row:
            found.append(len(row["input_ids"]))
        else:
            raise DataError(
                f"row {index} has no length: neither {column!r} (length_column_name) nor 'input_ids' is in it"
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
            f"a {type(dataset).__name__} is not a dataset: give one of the datasets library or of torch, or a list of rows"
        )
    return dataset  # type: ignore[return-value]


log = get_logger(__name__)

NUM_ITEMS = "_num_items"
"""The batch's key for the number of each row's labels that count; taken out before the model sees the batch.

A numpy array: it is cut with the batch's rows, and stays on the host.
"""

Batch = Tree
"""A dict, tuple or list of tensors, or a tensor."""

Counts = numpy.ndarray[Any, Any]
"""One number a row."""

Collate = Callable[[list[Any]], Batch]
"""From a list of rows to a batch."""

IGNORED = -100
_LABELS = ("label", "label_ids", "labels")
_PADDING = {
    "special_tokens_mask": 1,
    **dict.fromkeys(_LABELS, IGNORED),
    **dict.fromkeys(
        ("attention_mask", "token_type_ids", "position_ids", "decoder_input_ids", "decoder_attention_mask"), 0
    ),
}


# ---------------------------------------------------------------- what forward takes


def forward_parameters(model: torch.nn.Module) -> list[str] | None:
    """The names that the model's forward takes; None where it takes any."""
    parameters = inspect.signature(model.forward).parameters.values()
    named = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    return None if takes_any and not named else named


def find_label_names(model: torch.nn.Module) -> list[str]:
    """Which of a batch's keys are labels, by what forward calls its parameters."""
    names = forward_parameters(model) or []
    found = [name for name in names if "label" in name]
    if "start_positions" in names and "end_positions" in names:
        found += ["start_positions", "end_positions"]
    return found or ["labels"]


def kept_columns(model: torch.nn.Module, label_names: Sequence[str]) -> set[str] | None:
    """The columns that go into a batch; None: all of them."""
    names = forward_parameters(model)
    return None if names is None else {*names, *label_names, *_LABELS}


def drop_columns(dataset: Any, kept: set[str] | None, labels: Collection[str] = _LABELS) -> Any:
    """A dataset of the `datasets` library without the columns that are not kept; anything else is given back as it is.

    Args:
        dataset: the rows.
        kept: the columns that stay; None: all.
        labels: the names of labels.

    Raises:
        DataError: nothing would be left but labels.
    """
    is_list = isinstance(dataset, list) and bool(dataset) and isinstance(dataset[0], Mapping)
    columns = list(dataset[0]) if is_list else getattr(dataset, "column_names", None)
    if kept is None or not isinstance(columns, list) or not (is_list or hasattr(dataset, "remove_columns")):
        return dataset
    unused = [name for name in columns if name not in kept]
    if unused or not is_list:
        _check_inputs_left(columns, kept, labels)
    if unused:
        _warn_of_dropped(unused)
    # The collator leaves those of a list out.
    return dataset.remove_columns(unused) if unused and not is_list else dataset


def _warn_of_dropped(unused: Sequence[str]) -> None:
    log.warning_once(
        "columns that the model's forward does not take are left out: %s; remove_unused_columns=False keeps them",
        ", ".join(sorted(unused)),
    )


def _check_inputs_left(columns: Sequence[str], kept: set[str], labels: Collection[str]) -> None:
    """Is anything left that a model can predict from?"""
    if any(name in kept and name not in labels for name in columns):
        return
    wanted = ", ".join(sorted(kept - {*labels, *_LABELS})) or "nothing but labels"
    raise DataError(
        f"of the dataset's columns ({', '.join(columns)}) the model's forward takes only labels; it takes {wanted}. Provide "
        "those (tokenise texts, for example), rename the columns, or pass remove_unused_columns=False and a data_collator"
    )


# ---------------------------------------------------------------- rows to tensors


class Collator:
    """Makes a batch of rows: dicts to a dict of tensors, anything else as torch's default_collate does.

    `label` and `label_ids` become `labels`. Sequences of different lengths are padded at the end: by the processing class
    (a tokenizer) where there is one, else by known values for known names.

    Args:
        processing_class: something with `pad(rows, return_tensors=...)`; None: there is none.
        pad_token_id: for `input_ids`; None: they cannot be padded.
    """

    def __init__(self, processing_class: object = None, pad_token_id: int | None = None) -> None:
        self.processing_class: Any = processing_class if callable(getattr(processing_class, "pad", None)) else None
        self.pad_token_id = pad_token_id

    def __call__(self, rows: list[Any]) -> Batch:
        """The batch.

        Raises:
            DataError: rows that do not fit together.
        """
        if not isinstance(rows[0], Mapping):
            return default_collate(rows)
        columns = {name: [row[name] for row in rows] for name in rows[0] if rows[0][name] is not None}
        for name in _LABELS[:2]:
            if name in columns and "labels" not in columns:
                columns["labels"] = columns.pop(name)
        texts = [name for name, values in columns.items() if isinstance(values[0], str | bytes)]
        for name in texts:
            del columns[name]
        lengths = {name: {len(v) for v in values} for name, values in columns.items() if _is_sequence(values[0])}
        ragged = [name for name, found in lengths.items() if len(found) > 1]
        if ragged and self.processing_class is not None:
            return self._pad_by_class(columns, ragged)
        return {
            name: self._pad(name, values) if name in ragged else _stack(name, values)
            for name, values in {**self._mask(columns, ragged), **columns}.items()
        }

    def _pad_by_class(self, columns: dict[str, list[Any]], ragged: list[str]) -> dict[str, Any]:
        apart = [name for name in columns if name in ("labels", "label") and name in ragged]
        rows = [
            {name: values[i] for name, values in columns.items() if name not in apart}
            for i in range(len(next(iter(columns.values()))))
        ]
        batch = dict(self.processing_class.pad(rows, return_tensors="pt"))
        length = batch["input_ids"].shape[1] if "input_ids" in batch else None
        for name in apart:
            batch[name] = self._pad(name, columns[name], max([length or 0, *map(len, columns[name])]))
        return batch

    def _mask(self, columns: dict[str, list[Any]], ragged: list[str]) -> dict[str, list[Any]]:
        """The attention mask that rows of different lengths need and do not have."""
        if "input_ids" in ragged and "attention_mask" not in columns:
            ragged.append("attention_mask")
            return {"attention_mask": [[1] * len(values) for values in columns["input_ids"]]}
        return {}

    def _pad(self, name: str, values: list[Any], length: int | None = None) -> torch.Tensor:
        filler = self.pad_token_id if name == "input_ids" else _PADDING.get(name)
        if filler is None:
            raise DataError(
                f"the rows' {name!r} have different lengths, and nothing says how to pad them; give the Trainer a processing_class "
                "(a tokenizer) or a data_collator, or rows of one length"
            )
        rows = [torch.as_tensor(value) for value in values]
        made = rows[0].new_full((len(rows), length or max(map(len, rows)), *rows[0].shape[1:]), filler)
        for row, value in zip(made, rows):
            row[: len(value)] = value
        return made


def _is_sequence(value: Any) -> bool:
    if isinstance(value, torch.Tensor | numpy.ndarray):
        return value.ndim > 0
    return isinstance(value, list | tuple)


def _stack(name: str, values: list[Any]) -> torch.Tensor:
    first = values[0]
    try:
        if isinstance(first, torch.Tensor):
            return torch.stack(values)
        if isinstance(first, numpy.ndarray | numpy.generic):
            return torch.as_tensor(numpy.stack(values))
        return torch.tensor(values)
    except (RuntimeError, TypeError, ValueError) as error:
        raise DataError(
            f"the rows' {name!r} do not make one tensor: {error}; give the Trainer a data_collator"
        ) from error


@dataclass(frozen=True)
class Collating:
    """What the Trainer's loaders call: drops columns, collates, and counts labels while they are on the host.

    Attributes:
        collate: the user's collator, or a `Collator`.
        kept: the columns that stay; None: all.
        count: from a batch to the number of each row's labels that count; None: a mean over samples.
        labels: the names of labels.
    """

    collate: Collate
    kept: set[str] | None
    count: Callable[[Batch], Counts | None] | None
    labels: Collection[str] = _LABELS

    def __call__(self, rows: list[Any]) -> Batch:
        """The batch, with `NUM_ITEMS` where labels are counted."""
        kept = self.kept
        if kept is not None and isinstance(rows[0], Mapping):
            unused = [name for name in rows[0] if name not in kept]
            if unused:
                _check_inputs_left(list(rows[0]), kept, self.labels)
                if get_worker_info() is None:  # each worker would say it, in each epoch
                    _warn_of_dropped(unused)
                rows = [{name: value for name, value in row.items() if name in kept} for row in rows]
        batch = self.collate(rows)
        if self.count is not None and isinstance(batch, MutableMapping):
            counts = self.count(batch)
            if counts is not None:
                batch[NUM_ITEMS] = counts
        return batch


@dataclass(frozen=True)
class LabelCount:
    """Counts the labels of a batch that its loss is a mean over: integers that are not -100.

    Attributes:
        is_shifted: the model predicts each label from what stands before it, so a row's first one does not count.
    """

    is_shifted: bool

    def __call__(self, batch: Batch) -> Counts | None:
        """The number in each row; None where the batch has no integer labels."""
        labels = batch.get("shift_labels") if isinstance(batch, Mapping) else None
        if labels is None:
            labels = batch.get("labels") if isinstance(batch, Mapping) else None
            if self.is_shifted and isinstance(labels, torch.Tensor) and labels.ndim > 1:
                labels = labels[..., 1:]
        if not isinstance(labels, torch.Tensor) or labels.is_floating_point() or labels.dtype == torch.bool:
            return None
        return (labels != IGNORED).reshape(len(labels) if labels.ndim else 1, -1).sum(1).cpu().numpy()


def is_shifted(model: torch.nn.Module) -> bool:
    """Does the model's own loss shift labels, as those of transformers that predict the next token do?"""
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        return False
    return getattr(model, "loss_type", None) in ("ForCausalLM", "ForConditionalGeneration")
