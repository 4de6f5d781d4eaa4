"""Watch the storages of gathered parameters, which FSDP resizes without torch's dispatcher.

`fully_shard` creates the storage of a gathered parameter once. After the forward of the FSDP unit, it frees the
storage's bytes, and at the next gather it allocates them again (`UntypedStorage.resize_`). A trace sees no operation.
"""

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from headway.forecasting.tracing.tensors import iterate_plain_tensors

Storage = torch.UntypedStorage


@dataclass
class _GatheredUnit:
    """Storages of one FSDP unit's gathered parameters.

    Attributes:
        storages: Weak references to the storages.
        first_bytes: Bytes of the first storage at the last check. 0 while the unit is not gathered.
    """

    storages: list[weakref.ref[Storage]]
    first_bytes: int


class GatheredStorages:
    """Storages of gathered parameters, grouped by FSDP unit. All storages of a unit are allocated and freed together.

    Args:
        record_resize: Function that is called with each storage whose size has changed.
    """

    def __init__(self, record_resize: Callable[[Storage], None]) -> None:
        self._record_resize = record_resize
        self._units: list[_GatheredUnit] = []
        self._addresses: set[int] = set()

    def register_unit(self, tensors: Iterable[Any]) -> list[torch.Tensor]:
        """Register the storages of an FSDP unit's tensors, and return the tensors whose storages are new."""
        new = [
            leaf
            for each in tensors
            if isinstance(each, torch.Tensor)
            for leaf in iterate_plain_tensors(each)
            if leaf.untyped_storage()._cdata not in self._addresses
        ]
        if new:
            storages = [leaf.untyped_storage() for leaf in new]
            # FSDP keeps these storages as long as the model exists, so their addresses are not reused.
            self._addresses.update(storage._cdata for storage in storages)
            self._units.append(_GatheredUnit([weakref.ref(storage) for storage in storages], storages[0].nbytes()))
        return new

    def check_sizes(self) -> None:
        """Find the FSDP units whose parameters were gathered or freed since the last check.

        The function `record_resize` is called with each storage of these units.
        """
        for unit in self._units:
            first = unit.storages[0]()
            if first is None or first.nbytes() == unit.first_bytes:
                continue
            for reference in unit.storages:
                storage = reference()
                if storage is not None:
                    self._record_resize(storage)
            unit.first_bytes = first.nbytes()
