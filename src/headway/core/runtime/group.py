"""torch process groups: the choice of backends per device, and ending a group whose backend might wait for its peers.

gloo closes its connections when a process releases the group, which wakes its peers. NCCL's kernels wait on the
device. Ending an NCCL group is itself a collective: if a rank is gone, the other ranks block in it.

`start_collectives` runs the collectives of many tensors in one launch. With hundreds of tensors, one NCCL kernel per
tensor costs more than the transfer itself.
"""

import contextlib
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import DistError

from headway.common import scope
from headway.core.runtime import _torch, flight_recorder
from headway.core.runtime.control_plane.sealed_store import SealedStore
from headway.core.runtime.control_plane.store import wait_for_keys
from headway.errors import ConfigError

CPU_ENGINE = "gloo"
"""Backend for CPU tensors. The handshakes before collectives use it."""

MARGIN = timedelta(seconds=30)
"""Additional time that a backend waits in a collective, beyond the run's timeout."""

_YES, _NO = b"yes", b"no"


def map_engines(backend: str, kind: str) -> str:
    """Return a backend string for `init_process_group` that includes a backend for CPU tensors.

    An unknown backend is returned without a CPU backend, because torch itself reports the error later. All results are
    in lower case.

    Args:
        backend: Backend that the user requested, such as "nccl", "gloo" or "cpu:gloo,cuda:nccl". Case is ignored.
        kind: Device type that this process computes on.

    Raises:
        ConfigError: If the backend does not support tensors of that device type.
    """
    text = backend.lower().replace(" ", "")
    named = _split_by_device(text)
    if not named or "cpu" in named:
        return text
    if kind not in named:
        raise ConfigError(
            f"InitProcessGroupKwargs(backend={backend!r}) carries tensors of {', '.join(named)}, but this process computes on "
            f"{kind}; leave backend out to get the one for this device"
        )
    return ",".join([f"cpu:{CPU_ENGINE}", *(f"{device}:{engine}" for device, engine in named.items())])


def _split_by_device(text: str) -> dict[str, str]:
    """Parse a backend string into a dict from device type to backend.

    The dict is empty for an unknown backend, because torch itself reports the error later.
    """
    if ":" in text:
        pairs = [pair.partition(":") for pair in text.split(",")]
        return {device: engine for device, _, engine in pairs}
    return dict.fromkeys(dist.Backend.backend_capability.get(text, ()), text)


def find_engine(device: torch.device, group: dist.ProcessGroup | None = None) -> str:
    """Return a process group's backend for tensors of a device, or "" if it has none.

    Without `group`, torch's default group is used.
    """
    return _split_by_device(dist.get_backend_config(group)).get(device.type, "")


def can_carry_cpu(group: dist.ProcessGroup | None = None) -> bool:
    """Whether a process group (default: torch's default group) has a backend for CPU tensors."""
    return bool(find_engine(torch.device("cpu"), group))


def create_group(ranks: Sequence[int], timeout: timedelta) -> dist.ProcessGroup | None:
    """Create a subgroup with the backends of the default group, plus gloo for CPU tensors.

    All ranks must call this. Ranks outside the subgroup get None.

    Args:
        ranks: Ranks of the subgroup.
        timeout: Timeout of the new group's collectives.
    """
    found = {"cpu": CPU_ENGINE} | _split_by_device(dist.get_backend_config())
    text = ",".join(f"{device}:{engine}" for device, engine in found.items())
    made: dist.ProcessGroup = dist.new_group(list(ranks), timeout=timeout, backend=text)
    return made if dist.get_rank() in ranks else None


def bind_device(device: torch.device, backend: str) -> torch.device | None:
    """Return the device to bind the process group to, or None if its backend needs no device.

    With a bound device, a group connects at once and torch does not have to guess the device.

    Args:
        device: Device that this process computes on.
        backend: Backend string of the group.
    """
    engine = _split_by_device(backend).get(device.type, CPU_ENGINE)
    return None if device.index is None or engine == CPU_ENGINE else device


def has_waiting_engine() -> bool:
    """Whether the other ranks would block in a backend of torch's default group, such as NCCL, if this process ended.

    False if there is no group.
    """
    try:
        engines_here = _split_by_device(dist.get_backend_config())
    except (ValueError, TypeError):  # another thread might destroy the group meanwhile
        return False
    return any(engine != CPU_ENGINE for engine in engines_here.values())


def create_cpu_group(timeout: timedelta) -> dist.ProcessGroup | None:
    """Create a gloo group of all ranks if the default group has no backend for CPU tensors.

    This can happen only if other code created the default group, because groups that Headway creates include gloo. All
    ranks must call this.

    Args:
        timeout: Timeout of the new group's collectives.

    Returns:
        The group, or None if none is needed.
    """
    if can_carry_cpu():
        return None
    group: dist.ProcessGroup = dist.new_group(backend=CPU_ENGINE, timeout=timeout)
    return group


class _ExtendedTimeouts(dict[str, tuple[timedelta, timedelta]]):
    """Original and extended timeout of each backend whose timeout was extended, by group name and device type."""


def extend_timeouts(seconds: float) -> None:
    """Extend the timeouts of later collectives in all existing process groups. Do nothing if there are none.

    A later call replaces the extension instead of adding to it.

    Args:
        seconds: Seconds to add to each group's own timeout.
    """
    if dist.is_initialized():
        known = scope.get_or_create(_ExtendedTimeouts)
        for group in _torch.list_groups():
            _torch.extend_timeout(group, timedelta(seconds=seconds), known)


def end_group(group: dist.ProcessGroup | None) -> None:
    """Destroy a process group. Do nothing if it is None, or has already been destroyed together with all groups."""
    if group is not None and dist.is_initialized():
        with contextlib.suppress(ValueError):
            dist.destroy_process_group(group)


def abort_groups() -> None:
    """Abort all process groups and their pending operations. This function can be called on any thread.

    NCCL requires all ranks to call it at about the same time.
    """
    if dist.is_initialized():
        flight_recorder.reset_recorders()  # the events of aborted collectives must not be queried
        _torch.abort_process_group()


def close_cpu_engine() -> None:
    """Abort only the gloo backend of the default group. Peers that wait for this process in gloo wake up."""
    with contextlib.suppress(RuntimeError):
        _torch.get_backend(dist.group.WORLD, torch.device("cpu")).abort()


def wait_for_all_to_end(store: SealedStore, rank: int, world_size: int, timeout: timedelta) -> bool:
    """Announce that this rank is ending, and wait until all other ranks have announced that they are ending, too.

    Args:
        store: Store that all ranks share.
        rank: Rank of this process.
        world_size: Number of ranks.
        timeout: Maximum time to wait.

    Returns:
        Whether all ranks have announced their end before the timeout. The result is equal on all ranks, except that it
            is False on a rank that has lost its connection to the store.
    """
    try:
        store.set(f"end/{rank}", b"")
        come = wait_for_keys(store, [f"end/{each}" for each in range(world_size)], timeout)
        # The first rank decides. Otherwise a rank could give up just as the last one arrives, and the others would end
        # the group without it.
        return store.set_once("end/together", _YES if come else _NO) == _YES
    except DistError:  # the store's host is gone
        return False


def start_collectives(
    found: Iterable[torch.Tensor],
    group_of: Callable[[torch.Tensor], dist.ProcessGroup | None],
    start: Callable[[torch.Tensor], Any],
    *,
    is_sum: bool,
) -> list[Any]:
    """Start an asynchronous collective for each tensor, and return the pending work.

    Tensors with equal device and dtype share one launch if their backend supports it.

    Args:
        found: Tensors, in the same order on all ranks.
        group_of: Function that returns the process group for a tensor.
        start: Function that starts the asynchronous collective of one tensor in that group.
        is_sum: Whether the collective is an all-reduce, for which backends have a coalesced call. Other collectives are
            enclosed in a pair of calls such as `ncclGroupStart` and `ncclGroupEnd`.
    """
    alike: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for tensor in found:
        alike.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    under_way: list[Any] = []
    for (device, _), tensors in alike.items():
        group = group_of(tensors[0])
        if len(tensors) > 1 and can_coalesce(group, device):
            with _torch.coalescing_manager(group, None if is_sum else device, async_ops=True) as several:
                for tensor in tensors:
                    start(tensor)
            under_way.append(several)
        else:
            under_way += [start(tensor) for tensor in tensors]
    return under_way


def can_coalesce(group: dist.ProcessGroup | None, device: torch.device) -> bool:
    """Whether the device's backend can run the collectives of several tensors in one launch without copying them.

    gloo would have to copy them.
    """
    whole = group if group is not None else dist.group.WORLD
    return bool(getattr(_torch.get_backend(whole, device), "supports_coalescing", False))
