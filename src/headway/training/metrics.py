"""Gathering per-sample results: each rank drops its padding, then rows are joined in the data's order."""

from typing import Any

import numpy
import torch

from headway.data.loader import PreparedLoader
from headway.errors import MetricError
from headway.ops.collectives import Collectives
from headway.ops.tree import Tree


def gather_for_metrics(
    tree: Tree, loader: PreparedLoader | None, collectives: Collectives, use_gather_object: bool
) -> Tree:
    """Join one entry per sample from all ranks, without the samples that only padded the batch.

    Args:
        tree: tuples and dicts of tensors or arrays with one row per sample, or lists with one item per sample. A list of
            tensors whose length is not the batch's, or whose tensors all have the batch's length, is a structure.
        loader: the loader whose batch these are; None: nothing is known about padding, everything is joined.
        collectives: the door.
        use_gather_object: take every list as one item per sample.

    Raises:
        MetricError: a leaf that does not have one entry per sample of the batch.
    """
    num_rows = None if loader is None else loader.num_rows
    num_valid = None if loader is None else loader.num_valid
    plan = _Plan(num_rows, num_valid, use_gather_object)
    shape = plan.read(tree)
    tensors = collectives.gather(plan.tensors)
    parts = collectives.gather_objects(plan.sequences) if plan.sequences else []
    return _rebuild(shape, tensors, parts)


class _Plan:
    """What to gather, and how to put it back: tensors in one list, per-sample sequences in another."""

    def __init__(self, num_rows: int | None, num_valid: int | None, is_list_per_sample: bool) -> None:
        self.num_rows = num_rows
        self.num_valid = num_valid
        self.is_list_per_sample = is_list_per_sample
        self.tensors: list[torch.Tensor] = []
        self.sequences: list[Any] = []

    def read(self, tree: Tree) -> Any:
        """The tree with each leaf replaced by where its gathered value will be."""
        if isinstance(tree, torch.Tensor):
            self._check(tree.shape[0] if tree.ndim else None, f"a tensor of shape {tuple(tree.shape)}")
            self.tensors.append(tree[: self.num_valid])
            return ("tensor", len(self.tensors) - 1)
        if isinstance(tree, numpy.ndarray):
            self._check(tree.shape[0] if tree.ndim else None, f"an array of shape {tree.shape}")
            return self._sequence(tree)
        if isinstance(tree, dict):
            return ("dict", {key: self.read(value) for key, value in tree.items()})
        if isinstance(tree, tuple):
            return ("tuple", [self.read(value) for value in tree], type(tree))
        if isinstance(tree, list):
            if self._is_structure(tree):
                return ("list", [self.read(value) for value in tree])
            self._check(len(tree), f"a list of {len(tree)} items")
            return self._sequence(tree)
        raise MetricError(
            f"gather_for_metrics got a {type(tree).__name__} ({tree!r:.40}), which is no entry per sample; give tensors, arrays or "
            "lists with one row per sample. For a number per rank use reduce_mean(total, weight)"
        )

    def _is_structure(self, values: list[Any]) -> bool:
        if (
            self.is_list_per_sample
            or not values
            or not all(isinstance(v, torch.Tensor | list | dict | tuple) for v in values)
        ):
            return False
        if len(values) != self.num_rows:
            return all(isinstance(value, torch.Tensor) for value in values) or self.num_rows is not None
        return all(
            isinstance(value, torch.Tensor) and value.ndim and value.shape[0] == self.num_rows for value in values
        )

    def _check(self, length: int | None, what: str) -> None:
        if length is None:
            raise MetricError(
                f"gather_for_metrics got {what}, which is one value for the whole batch; it would be joined as if it were a sample. "
                "Use reduce_mean(total, weight) for a mean, or gather() for one value per rank"
            )
        if self.num_rows is not None and length != self.num_rows:
            raise MetricError(
                f"gather_for_metrics got {what} for a batch of {self.num_rows} samples; give one entry per sample, or use gather() "
                "for values that are not per sample"
            )

    def _sequence(self, values: Any) -> Any:
        self.sequences.append(values[: self.num_valid])
        return ("sequence", len(self.sequences) - 1)


def _rebuild(shape: Any, tensors: list[torch.Tensor], parts: list[list[Any]]) -> Any:
    kind, inner = shape[0], shape[1]
    if kind == "tensor":
        return tensors[inner]
    if kind == "dict":
        return {key: _rebuild(value, tensors, parts) for key, value in inner.items()}
    if kind == "list":
        return [_rebuild(value, tensors, parts) for value in inner]
    if kind == "tuple":
        values = [_rebuild(value, tensors, parts) for value in inner]
        return shape[2](*values) if hasattr(shape[2], "_fields") else shape[2](values)
    pieces = [part[inner] for part in parts]
    if isinstance(pieces[0], numpy.ndarray):
        return numpy.concatenate(pieces)
    return [item for piece in pieces for item in piece]
