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

CPU_BACKEND = "gloo"
"""Backend for CPU tensors. The handshakes before collectives use it."""

MARGIN = timedelta(seconds=30)
"""Additional time that a backend waits in a collective, beyond the run's timeout."""

_ALL_ENDING, _SOME_MISSING = b"yes", b"no"


def complete_backend(backend: str, device_type: str) -> str:
    """Return a backend string for `init_process_group` that includes a backend for CPU tensors, in lower case.

    If `backend` does not name a backend for CPU tensors, gloo is added. An unknown backend is returned without gloo,
    because torch itself reports the error later.

    Args:
        backend: Backend that the user requested, such as "nccl", "gloo" or "cpu:gloo,cuda:nccl". Case is ignored.
        device_type: Device type that this process computes on.

    Raises:
        ConfigError: If the backend supports neither CPU tensors nor tensors of that device type.
    """
    text = backend.lower().replace(" ", "")
    backends = _parse_backend(text)
    if not backends or "cpu" in backends:
        return text
    if device_type not in backends:
        raise ConfigError(
            f"InitProcessGroupKwargs(backend={backend!r}) carries tensors of {', '.join(backends)}, but this process computes on "
            f"{device_type}; leave backend out to get the one for this device"
        )
    return ",".join([f"cpu:{CPU_BACKEND}", *(f"{device}:{name}" for device, name in backends.items())])


def _parse_backend(text: str) -> dict[str, str]:
    """Parse a backend string, such as "cpu:gloo,cuda:nccl" or "nccl", into a dict from device type to backend name.

    For a single backend, the keys are the device types that it supports. The dict is empty for an unknown backend.
    """
    if ":" in text:
        pairs = [pair.partition(":") for pair in text.split(",")]
        return {device: name for device, _, name in pairs}
    return dict.fromkeys(dist.Backend.backend_capability.get(text, ()), text)


def find_backend(device: torch.device, group: dist.ProcessGroup | None = None) -> str:
    """Return the name of a process group's backend for tensors of a device, such as "nccl", or "" if it has none.

    Without `group`, torch's default group is used.
    """
    return _parse_backend(dist.get_backend_config(group)).get(device.type, "")


def can_carry_cpu(group: dist.ProcessGroup | None = None) -> bool:
    """Whether a process group (default: torch's default group) has a backend for CPU tensors."""
    return bool(find_backend(torch.device("cpu"), group))


def create_group(ranks: Sequence[int], timeout: timedelta) -> dist.ProcessGroup | None:
    """Create a subgroup with the backends of the default group, plus gloo if that group has no backend for CPU tensors.

    All ranks must call this. Ranks outside the subgroup get None.

    Args:
        ranks: Global ranks of the subgroup.
        timeout: Timeout of the new group's collectives.
    """
    backends = {"cpu": CPU_BACKEND} | _parse_backend(dist.get_backend_config())
    text = ",".join(f"{device}:{name}" for device, name in backends.items())
    group: dist.ProcessGroup = dist.new_group(list(ranks), timeout=timeout, backend=text)
    return group if dist.get_rank() in ranks else None


def choose_bound_device(device: torch.device, backend: str) -> torch.device | None:
    """Return the `device_id` for `init_process_group`, or None if the device has no index or gloo transfers its tensors.

    With a bound device, NCCL connects at once and torch does not have to guess the device.

    Args:
        device: Device that this process computes on.
        backend: Backend string of the group.
    """
    device_backend = _parse_backend(backend).get(device.type, CPU_BACKEND)
    return None if device.index is None or device_backend == CPU_BACKEND else device


def has_blocking_backend() -> bool:
    """Whether torch's default process group has a backend other than gloo, such as NCCL.

    If this process ended, the other ranks would block in a collective of such a backend. False if there is no default
    group.
    """
    try:
        backends = _parse_backend(dist.get_backend_config())
    except (ValueError, TypeError):  # another thread might destroy the group meanwhile
        return False
    return any(name != CPU_BACKEND for name in backends.values())


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
    group: dist.ProcessGroup = dist.new_group(backend=CPU_BACKEND, timeout=timeout)
    return group


class _ExtendedTimeouts(dict[str, _torch.BackendTimeout]):
    """Original and extended timeout of each backend whose timeout was extended, by group name and device type."""


def extend_timeouts(seconds: float) -> None:
    """Extend the timeouts of later collectives in all existing process groups. Do nothing if there are none.

    A later call replaces the extension instead of adding to it.

    Args:
        seconds: Seconds to add to each group's own timeout.
    """
    if dist.is_initialized():
        extended_timeouts = scope.get_or_create(_ExtendedTimeouts)
        for group in _torch.list_groups():
            _torch.extend_timeout(group, timedelta(seconds=seconds), extended_timeouts)


def destroy_group(group: dist.ProcessGroup | None) -> None:
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


def abort_cpu_backend() -> None:
    """Abort only the gloo backend of the default group. Peers that wait for this process in gloo get an error at once."""
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
        are_all_ending = wait_for_keys(store, [f"end/{each}" for each in range(world_size)], timeout)
        # The first rank that stops waiting decides for all. Otherwise a rank could time out just as the last one
        # arrives, and the others would end the group without it.
        decision = store.set_once("end/together", _ALL_ENDING if are_all_ending else _SOME_MISSING)
        return decision == _ALL_ENDING
    except DistError:  # the store's host is gone
        return False


def start_collectives(
    tensors: Iterable[torch.Tensor],
    get_group: Callable[[torch.Tensor], dist.ProcessGroup | None],
    start: Callable[[torch.Tensor], Any],
    *,
    is_sum: bool,
) -> list[Any]:
    """Start an asynchronous collective for each tensor, and return the works to wait for, as torch's collectives do.

    Tensors with equal device and dtype share one launch if their backend supports it.

    Args:
        tensors: Tensors, in the same order on all ranks.
        get_group: Function that returns the process group for a tensor, or None for the default group.
        start: Function that starts the asynchronous collective of one tensor in that group.
        is_sum: Whether the collective is an all-reduce, for which backends have a coalesced call. Other collectives are
            enclosed in a pair of calls such as `ncclGroupStart` and `ncclGroupEnd`.
    """
    batches: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for tensor in tensors:
        batches.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    works: list[Any] = []
    for (device, _), batch in batches.items():
        group = get_group(batch[0])
        if len(batch) > 1 and can_coalesce(group, device):
            # Without a device, torch merges the calls into one coalesced all-reduce. With one, it encloses them in a group.
            with _torch.coalescing_manager(group, None if is_sum else device, async_ops=True) as work:
                for tensor in batch:
                    start(tensor)
            works.append(work)
        else:
            works += [start(tensor) for tensor in batch]
    return works


def can_coalesce(group: dist.ProcessGroup | None, device: torch.device) -> bool:
    """Whether the device's backend can run the collectives of several tensors in one launch without copying them.

    gloo would have to copy them.
    """
    process_group = group if group is not None else dist.group.WORLD
    return bool(getattr(_torch.get_backend(process_group, device), "supports_coalescing", False))
