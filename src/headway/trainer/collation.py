"""Collation of a Trainer's rows into tensors, with the number of labels per row over which the loss is averaged."""

from collections.abc import Callable, Collection, Mapping, MutableMapping
from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy
import torch
from torch.utils.data import default_collate, get_worker_info

from headway.errors import DataError
from headway.language_data.source_index import SOURCE_KEY
from headway.trainer.columns import LABEL_NAMES, check_remaining_columns, warn_of_dropped_columns
from headway.trainer.data import Batch

NUM_ITEMS = "_num_items"
"""Key under which a batch contains the number of labels per row that are not ignored.

The entry is removed before the model receives the batch. Its value is a NumPy array, so that it is split together with
the batch's rows and stays on the host.
"""
SOURCES = "_sources"
"""Key under which a batch of a `Mixture` contains the source dataset of each row or token.

The entry is removed before the model receives the batch.
"""
Counts = numpy.ndarray[Any, Any]
"""Array with one number per row."""
Collate = Callable[[list[Any]], Batch]
"""Function that makes a batch from a list of rows."""
IGNORED = -100
"""Label that torch's and transformers' losses ignore."""
_PADDING_VALUES = {
    "special_tokens_mask": 1,
    **dict.fromkeys(LABEL_NAMES, IGNORED),
    **dict.fromkeys(
        ("attention_mask", "token_type_ids", "position_ids", "decoder_input_ids", "decoder_attention_mask"), 0
    ),
}
"""Values with which rows are padded, by column. That of `input_ids` depends on the tokenizer."""


class Collator:
    """Collate function for rows that are dicts of values. All other rows are collated by torch's default_collate.

    `label` and `label_ids` are renamed to `labels`. Columns of strings, and columns that are None in all rows, are
    dropped. If the rows of a column differ in length, they are padded: by the processing class (a tokenizer) if there
    is one, otherwise at the end with the column's default value. Labels are always padded with -100. If `input_ids` are
    padded and there is no `attention_mask`, one is added.

    Args:
        processing_class: Object with `pad(rows, return_tensors=...)`, or None.
        pad_token_id: Padding value for `input_ids`. None: `input_ids` cannot be padded.
    """

    def __init__(self, processing_class: object = None, pad_token_id: int | None = None) -> None:
        self.processing_class: Any = processing_class if callable(getattr(processing_class, "pad", None)) else None
        self.pad_token_id = pad_token_id

    def __call__(self, rows: list[Any]) -> Batch:
        """Collate a list of rows into a batch.

        Raises:
            DataError: If the rows differ in length and no padding is defined for their column, or if their values do
                not make one tensor. Also if only some of the rows have a value in a column.
        """
        if not isinstance(rows[0], Mapping):
            return default_collate(rows)
        columns = _list_columns(rows)
        for name in ("label", "label_ids"):
            if name in columns and "labels" not in columns:
                columns["labels"] = columns.pop(name)
        text_columns = [name for name, values in columns.items() if isinstance(values[0], str | bytes)]
        for name in text_columns:
            del columns[name]
        ragged = [
            name
            for name, values in columns.items()
            if _is_sequence(values[0]) and len({len(value) for value in values}) > 1
        ]
        if ragged and self.processing_class is not None:
            return self._pad_by_class(columns, ragged)
        all_columns = {**self._make_mask(columns, ragged), **columns}
        return {
            name: self._pad_column(name, values) if name in ragged else _stack_rows(name, values)
            for name, values in all_columns.items()
        }

    def _pad_by_class(self, columns: dict[str, list[Any]], ragged: list[str]) -> dict[str, Any]:
        """Pad rows with the processing class. Labels, which it cannot pad, are padded separately to the same length.

        Args:
            columns: Values of all rows by column.
            ragged: Names of the columns whose rows have different lengths.
        """
        label_columns = [name for name in columns if name in ("labels", "label") and name in ragged]
        num_rows = len(next(iter(columns.values())))
        rows = [
            {name: values[index] for name, values in columns.items() if name not in label_columns}
            for index in range(num_rows)
        ]
        batch = dict(self.processing_class.pad(rows, return_tensors="pt"))
        input_length = batch["input_ids"].shape[1] if "input_ids" in batch else 0
        for name in label_columns:
            batch[name] = self._pad_column(name, columns[name], max([input_length, *map(len, columns[name])]))
        return batch

    def _make_mask(self, columns: dict[str, list[Any]], ragged: list[str]) -> dict[str, list[Any]]:
        """Return {"attention_mask": values} if `input_ids` need padding and the rows have no attention mask, else {}.

        Args:
            columns: Values of all rows by column.
            ragged: Names of the columns whose rows have different lengths. If a mask is returned, its name is appended.
        """
        if "input_ids" in ragged and "attention_mask" not in columns:
            ragged.append("attention_mask")
            return {"attention_mask": [[1] * len(values) for values in columns["input_ids"]]}
        return {}

    def _pad_column(self, name: str, values: list[Any], length: int | None = None) -> torch.Tensor:
        """Return the values of a column as one tensor, with rows padded at the end.

        Args:
            name: Name of the column, which determines the padding value.
            values: Values of all rows.
            length: Length of the padded rows. None: that of the longest row.

        Raises:
            DataError: If no padding is defined for the column.
        """
        filler = self.pad_token_id if name == "input_ids" else _PADDING_VALUES.get(name)
        if filler is None:
            raise DataError(
                f"the rows' {name!r} have different lengths, and no padding is defined for them; give the Trainer a processing_class "
                "(a tokenizer) or a data_collator, or rows of one length"
            )
        rows = [torch.as_tensor(value) for value in values]
        nonempty = [row for row in rows if row.numel()] or rows  # an empty list becomes a float tensor
        dtype = reduce(torch.promote_types, [row.dtype for row in nonempty])
        if filler < 0 and not dtype.is_signed:
            dtype = torch.int64
        shape = (len(rows), length or max(map(len, rows)), *nonempty[0].shape[1:])
        padded = nonempty[0].new_full(shape, filler, dtype=dtype)
        for row, value in zip(padded, rows):
            if len(value):
                row[: len(value)] = value
        return padded


def _list_columns(rows: list[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return the values of all rows by column, for the columns of the first row. Columns without values are left out.

    Raises:
        DataError: If only some of the rows have a value in a column.
    """
    columns = {name: [row.get(name) for row in rows] for name in rows[0]}
    for name, values in list(columns.items()):
        num_missing = sum(value is None for value in values)
        if num_missing == len(values):
            del columns[name]
        elif num_missing:
            raise DataError(
                f"{num_missing} of the {len(rows)} rows of a batch have no {name!r}; give a value in every row or in none, or give "
                "the Trainer a data_collator"
            )
    return columns


def _is_sequence(value: Any) -> bool:
    """Whether a value is a list, a tuple, or an array or tensor with at least one dimension."""
    if isinstance(value, torch.Tensor | numpy.ndarray):
        return value.ndim > 0
    return isinstance(value, list | tuple)


def _stack_rows(name: str, values: list[Any]) -> torch.Tensor:
    """Return the values of one column, stacked to a tensor whose dimension 0 is the row.

    Args:
        name: Name of the column.
        values: Value of each row: a tensor, an array, a number or a list.

    Raises:
        DataError: If the values do not have the same shape.
    """
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
class LoaderCollator:
    """Collate function of the Trainer's loaders.

    It drops columns, collates rows, and counts labels before the batch is moved to the device.

    Attributes:
        collate: The user's collate function, or a `Collator`.
        kept_columns: Columns to keep. None: all.
        count_labels: Function from a batch to the number of labels in each row that are not ignored. None: the loss is a
            mean over samples.
        label_names: Names of the label columns.
        collate_sources: Function that returns the source dataset of each row or token. The batch contains its result
            under the key `SOURCES`. None: the batch contains no sources.
    """

    collate: Collate
    kept_columns: set[str] | None
    count_labels: Callable[[Batch], Counts | None] | None
    label_names: Collection[str] = LABEL_NAMES
    collate_sources: Callable[[list[Any]], torch.Tensor | None] | None = None

    def __call__(self, rows: list[Any]) -> Batch:
        """Collate a list of rows into a batch.

        A batch that is a dict has an entry `NUM_ITEMS` if its labels can be counted, and an entry `SOURCES` if the rows
        have sources.

        Raises:
            DataError: If only label columns would be kept.
        """
        kept_columns = self.kept_columns
        sources = None if self.collate_sources is None else self.collate_sources(rows)
        if sources is not None and (kept_columns is None or SOURCE_KEY not in kept_columns):
            rows = [{name: value for name, value in row.items() if name != SOURCE_KEY} for row in rows]
        if kept_columns is not None and isinstance(rows[0], Mapping):
            unused = [name for name in rows[0] if name not in kept_columns]
            if unused:
                check_remaining_columns(list(rows[0]), kept_columns, self.label_names)
                if get_worker_info() is None:  # otherwise each worker would warn in each epoch
                    warn_of_dropped_columns(unused)
                rows = [{name: value for name, value in row.items() if name in kept_columns} for row in rows]
        batch = self.collate(rows)
        if self.count_labels is not None and isinstance(batch, MutableMapping):
            counts = self.count_labels(batch)
            if counts is not None:
                batch[NUM_ITEMS] = counts
        if sources is not None and isinstance(batch, MutableMapping):
            # Packing for variable-length attention puts all sequences into one row.
            input_ids = batch.get("input_ids")
            is_one_row = isinstance(input_ids, torch.Tensor) and len(input_ids) != len(sources)
            batch[SOURCES] = sources.reshape(1, -1) if is_one_row else sources
        return batch


@dataclass(frozen=True)
class LabelCount:
    """Callable that counts, in each row of a batch, the labels over which the loss is averaged: integers except -100.

    Attributes:
        is_shifted: Whether the model predicts each label from the tokens before it. The first label of each row is then
            not counted.
    """

    is_shifted: bool

    def __call__(self, batch: Batch) -> Counts | None:
        """Return the number of labels in each row that are not -100, or None if the batch has no integer labels.

        If the batch contains `shift_labels`, these are counted instead of `labels`, from the first one on.
        """
        if not isinstance(batch, Mapping):
            return None
        labels = batch.get("shift_labels")
        if labels is None:
            labels = batch.get("labels")
            if self.is_shifted and isinstance(labels, torch.Tensor) and labels.ndim > 1:
                labels = labels[..., 1:]
        if not isinstance(labels, torch.Tensor) or labels.is_floating_point() or labels.dtype == torch.bool:
            return None
        return (labels != IGNORED).reshape(len(labels) if labels.ndim else 1, -1).sum(1).cpu().numpy()


def is_shifted(model: torch.nn.Module) -> bool:
    """Whether the model's own loss compares each output with the next label, as causal language models do."""
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        return False
    return getattr(model, "loss_type", None) in ("ForCausalLM", "ForConditionalGeneration")
