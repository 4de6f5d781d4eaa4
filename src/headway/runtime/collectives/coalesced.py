"""Many tensors in one launch: a kernel of NCCL's for each tensor costs more than what it carries, where there are hundreds."""

from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _coalescing_manager


class Waitable(Protocol):
    """What is under way: one exchange, or several."""

    def wait(self) -> Any:
        """Return when it is done; on a device, when its stream waits for that."""


def start_all(
    found: Iterable[torch.Tensor],
    group_of: Callable[[torch.Tensor], dist.ProcessGroup | None],
    start: Callable[[torch.Tensor], Any],
    *,
    is_sum: bool,
) -> list[Waitable]:
    """Start an exchange of each tensor; those of one device and type in one launch, where their engine can.

    Args:
        found: the same number, in the same order, on all ranks.
        group_of: in which group a tensor travels.
        start: begins the asynchronous exchange of one tensor in that group.
        is_sum: an all-reduce, for which engines have an operation of its own; of others they bracket the launches.
    """
    alike: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for tensor in found:
        alike.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    under_way: list[Waitable] = []
    for (device, _), tensors in alike.items():
        group = group_of(tensors[0])
        if len(tensors) > 1 and can_coalesce(group, device):
            with _coalescing_manager(group, None if is_sum else device, async_ops=True) as several:
                for tensor in tensors:
                    start(tensor)
            under_way.append(several)
        else:
            under_way += [start(tensor) for tensor in tensors]
    return under_way


def can_coalesce(group: dist.ProcessGroup | None, device: torch.device) -> bool:
    """Does the engine of this device take several tensors at once? gloo would copy them into one, for which nobody has asked."""
    whole = group if group is not None else dist.group.WORLD
    return bool(getattr(whole._get_backend(device), "supports_coalescing", False))  # type: ignore[union-attr]
