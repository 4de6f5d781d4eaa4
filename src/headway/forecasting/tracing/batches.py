"""Replacement and listing of the tensors of a batch, also of those in objects that are no containers."""

import io
import pickle
from collections.abc import Callable
from typing import Any

import numpy
import torch

from headway.core.runtime.collectives.tree import list_leaves, map_leaves
from headway.forecasting._torch import tree_leaves, tree_map

_WITHOUT_TENSORS = (torch.nn.Module, numpy.ndarray, type, int, float, complex, str, bytes, type(None))
"""Types of values that are not searched for tensors."""


def map_batch(fn: Callable[[torch.Tensor], torch.Tensor], batch: Any) -> Any:
    """Return a copy of a batch in which `fn` has replaced every tensor.

    Tensors are found in lists, tuples, mappings, dataclasses, containers that are registered with torch's pytree, and
    objects that can be pickled, such as the batches of torch_geometric. Objects without tensors are not copied.

    Args:
        fn: Function that returns the replacement of a tensor.
        batch: Batch to copy. It is not changed.
    """

    def replace_leaf(leaf: Any) -> Any:
        return fn(leaf) if isinstance(leaf, torch.Tensor) else _copy_object(fn, leaf)

    return map_leaves(lambda leaf: tree_map(replace_leaf, leaf), batch)


def list_batch_tensors(batch: Any) -> list[torch.Tensor]:
    """Return the tensors of a batch that `map_batch` would replace, in the same order."""
    tensors: list[torch.Tensor] = []
    for container in list_leaves(batch):
        for leaf in tree_leaves(container):
            if isinstance(leaf, torch.Tensor):
                tensors.append(leaf)
            else:
                tensors += _pickle(leaf)[1]
    return tensors


def _copy_object(fn: Callable[[torch.Tensor], torch.Tensor], item: Any) -> Any:
    """Return a copy of an object in which `fn` has replaced every tensor.

    Return the object itself if it has no tensors or cannot be pickled.
    """
    data, tensors = _pickle(item)
    return _TensorUnpickler(io.BytesIO(data), [fn(tensor) for tensor in tensors]).load() if tensors else item


def _pickle(item: Any) -> tuple[bytes, list[torch.Tensor]]:
    """Return the pickled object with indices in place of its tensors, and the list of its tensors.

    The list is empty if the object's type cannot contain tensors (`_WITHOUT_TENSORS`), or if it cannot be pickled.

    pickle is used because it visits everything that an object consists of. Most batches can be pickled, because workers
    of a DataLoader pickle them, too.
    """
    buffer = io.BytesIO()
    pickler = _TensorPickler(buffer)
    if not isinstance(item, _WITHOUT_TENSORS):
        try:
            pickler.dump(item)
        except Exception:  # any error of the object's own methods
            return b"", []
    return buffer.getvalue(), pickler.tensors


class _TensorPickler(pickle.Pickler):
    """Pickler that stores the index of each tensor instead of its values.

    Args:
        buffer: Buffer to write to.

    Attributes:
        tensors: Tensors of the pickled object by index, each of them once.
    """

    def __init__(self, buffer: io.BytesIO) -> None:
        super().__init__(buffer)
        self.tensors: list[torch.Tensor] = []
        self._indices: dict[int, int] = {}  # by `id` of the tensor

    def persistent_id(self, obj: Any) -> int | None:
        """Return the index of a tensor, or None for other objects, which are pickled as usual."""
        if not isinstance(obj, torch.Tensor):
            return None
        index = self._indices.setdefault(id(obj), len(self.tensors))
        if index == len(self.tensors):
            self.tensors.append(obj)
        return index


class _TensorUnpickler(pickle.Unpickler):
    """Unpickler that puts given tensors where `_TensorPickler` has stored indices.

    Args:
        buffer: Buffer to read from.
        tensors: Tensors by index.
    """

    def __init__(self, buffer: io.BytesIO, tensors: list[torch.Tensor]) -> None:
        super().__init__(buffer)
        self._tensors = tensors

    def persistent_load(self, pid: int) -> torch.Tensor:
        """Return the tensor with an index."""
        return self._tensors[pid]
