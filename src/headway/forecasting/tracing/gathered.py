"""Storages that FSDP empties and fills again: it does so past torch's dispatcher, where a trace sees no operation.

`fully_shard` makes the memory of a gathered parameter once, gives its bytes back after the unit's forward, and asks for them again
at the next gather (`UntypedStorage.resize_`). The storages are known from the operation that fills them; what has become of them is
looked up before each operation that follows.
"""

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch

from headway.forecasting.tracing.tensors import plain

Storage = torch.UntypedStorage


class GatheredStorages:
    """The storages of gathered parameters, those of one unit together: they come and go at once.

    Args:
        changed: is told of a storage whose size may have changed.
    """

    def __init__(self, changed: Callable[[Storage], None]) -> None:
        self._changed = changed
        self._units: list[tuple[list[weakref.ref[Storage]], int]] = []
        self._known: set[int] = set()

    def filled(self, tensors: Iterable[Any]) -> list[torch.Tensor]:
        """One unit's parameters are gathered into these; returns those on storages that were not known."""
        new = [
            leaf
            for each in tensors
            if isinstance(each, torch.Tensor)
            for leaf in plain(each)
            if leaf.untyped_storage()._cdata not in self._known
        ]
        if new:
            storages = [leaf.untyped_storage() for leaf in new]
            # Their memory is FSDP's for as long as the model is there, so no address is another's meanwhile.
            self._known.update(storage._cdata for storage in storages)
            self._units.append(([weakref.ref(storage) for storage in storages], storages[0].nbytes()))
        return new

    def look(self) -> None:
        """See which units were emptied or filled since the last look."""
        for index, (storages, size) in enumerate(self._units):
            first = storages[0]()
            if first is None or first.nbytes() == size:
                continue
            for reference in storages:
                storage = reference()
                if storage is not None:
                    self._changed(storage)
            self._units[index] = storages, first.nbytes()
