"""Selection of the dataset columns that the model's forward accepts. Other columns are dropped."""

import inspect
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from headway.errors import DataError
from headway.log import get_logger

log = get_logger(__name__)

LABEL_NAMES = ("label", "label_ids", "labels")
"""Names of label columns that are kept for every model. The collator renames the first two to "labels"."""


def list_forward_parameters(model: torch.nn.Module) -> list[str] | None:
    """Return the parameter names of the model's forward, or None if it accepts only arbitrary keyword arguments.

    `*args`, `**kwargs` and positional-only parameters are left out.
    """
    parameters = inspect.signature(model.forward).parameters.values()
    named = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    has_kwargs = any(p.kind is p.VAR_KEYWORD for p in parameters)
    return None if has_kwargs and not named else named


def find_label_names(model: torch.nn.Module) -> list[str]:
    """Return the names of the forward's parameters that are labels; ["labels"] if the forward has no such parameter.

    Their names contain "label". The pair `start_positions` and `end_positions` counts too.
    """
    names = list_forward_parameters(model) or []
    label_names = [name for name in names if "label" in name]
    if "start_positions" in names and "end_positions" in names:
        label_names += ["start_positions", "end_positions"]
    return label_names or ["labels"]


def select_columns(model: torch.nn.Module, label_names: Sequence[str]) -> set[str] | None:
    """Return the names of the dataset's columns that a batch contains, or None for all columns.

    They are the forward's parameters, the label columns, and `LABEL_NAMES`. All columns are kept if the forward accepts
    only arbitrary keyword arguments.

    Args:
        model: Model whose forward determines the columns.
        label_names: Names of the label columns.
    """
    names = list_forward_parameters(model)
    return None if names is None else {*names, *label_names, *LABEL_NAMES}


def drop_columns(dataset: Any, kept_columns: set[str] | None, label_names: Collection[str] = LABEL_NAMES) -> Any:
    """Remove columns that the model does not use from a dataset of the `datasets` library. Warn once about them.

    A list of dicts is checked, but returned unchanged, because the collate function drops its columns. Other datasets
    are returned unchanged, without a check.

    Args:
        dataset: Dataset of the Trainer.
        kept_columns: Columns to keep. None: all, so nothing is checked.
        label_names: Names of columns that are labels, not inputs of the model. Default: `LABEL_NAMES`.

    Raises:
        DataError: If only labels would remain.
    """
    is_list = isinstance(dataset, list) and bool(dataset) and isinstance(dataset[0], Mapping)
    columns = list(dataset[0]) if is_list else getattr(dataset, "column_names", None)
    if kept_columns is None or not isinstance(columns, list) or not (is_list or hasattr(dataset, "remove_columns")):
        return dataset
    unused = [name for name in columns if name not in kept_columns]
    if unused or not is_list:
        check_remaining_columns(columns, kept_columns, label_names)
    if unused:
        warn_of_dropped_columns(unused)
    # The collator drops the unused columns of a list of rows.
    return dataset.remove_columns(unused) if unused and not is_list else dataset


def warn_of_dropped_columns(unused: Sequence[str]) -> None:
    """Warn once that columns of the dataset are dropped because the model's forward does not accept them."""
    log.warning_once(
        "columns that the model's forward does not take are left out: %s; remove_unused_columns=False keeps them",
        ", ".join(sorted(unused)),
    )


def check_remaining_columns(columns: Sequence[str], kept_columns: set[str], label_names: Collection[str]) -> None:
    """Raise an error if only labels remain after columns were dropped, so that the model has no inputs.

    Args:
        columns: Names of the dataset's columns.
        kept_columns: Names of the columns to keep.
        label_names: Names of columns that are labels, not inputs of the model.

    Raises:
        DataError: If only labels remain.
    """
    if any(name in kept_columns and name not in label_names for name in columns):
        return
    accepted = ", ".join(sorted(kept_columns - {*label_names, *LABEL_NAMES})) or "nothing but labels"
    raise DataError(
        f"of the dataset's columns ({', '.join(columns)}) the model's forward takes only labels; it takes {accepted}. Provide "
        "those (tokenize texts, for example), rename the columns, or pass remove_unused_columns=False and a data_collator"
    )
