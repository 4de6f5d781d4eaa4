"""torch's process group: which engine carries which device's tensors, and what to do where an engine waits for its peers.

gloo's connections close when a process lets go of them, which wakes its peers. NCCL's kernels wait on the device: to end such a
group is an exchange of its own, and a rank that is gone leaves the others inside.

Many tensors in one launch: a kernel of NCCL's for each tensor costs more than what it carries, where there are hundreds.
"""

import contextlib
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import DistError
from torch.distributed.distributed_c10d import _coalescing_manager

from headway.errors import ConfigError
from headway.runtime import heartbeat as recorder
from headway.runtime.control_plane.store import SealedStore, wait_for

CPU_ENGINE = "gloo"
"""What carries CPU tensors, handshakes among them."""

MARGIN = timedelta(seconds=30)
"""How much longer than the timeout an engine waits in a collective."""

_YES, _NO = b"yes", b"no"


def engines(backend: str, kind: str) -> str:
    """A group's engines as init_process_group takes them, one for CPU tensors always among them.

    Args:
        backend: "nccl", "gloo", "cpu:gloo,cuda:nccl" and the like, in any case.
        kind: the type of device that this process computes on.

    Raises:
        ConfigError: the engine carries no tensors of that device.
    """
    text = backend.lower().replace(" ", "")
    named = _by_device(text)
    if not named or "cpu" in named:
        return text
    if kind not in named:
        raise ConfigError(
            f"InitProcessGroupKwargs(backend={backend!r}) carries tensors of {', '.join(named)}, but this process computes on "
            f"{kind}; leave backend out to get the one for this device"
        )
    return ",".join([f"cpu:{CPU_ENGINE}", *(f"{device}:{engine}" for device, engine in named.items())])


def _by_device(text: str) -> dict[str, str]:
    """Engine by device; empty for one that torch does not know, which torch then says."""
    if ":" in text:
        pairs = [pair.partition(":") for pair in text.split(",")]
        return {device: engine for device, _, engine in pairs}
    return dict.fromkeys(dist.Backend.backend_capability.get(text, ()), text)


def engine_of(device: torch.device, group: dist.ProcessGroup | None = None) -> str:
    """The engine that carries this device's tensors in a group; "" where none does."""
    return _by_device(dist.get_backend_config(group)).get(device.type, "")


def carries_cpu(group: dist.ProcessGroup | None = None) -> bool:
    """Can CPU tensors travel in it?"""
    return bool(engine_of(torch.device("cpu"), group))


def part(ranks: Sequence[int], timeout: timedelta) -> dist.ProcessGroup | None:
    """A group of some ranks, with the engines of all, and one for CPU tensors; None on the others, which call it too."""
    found = {"cpu": CPU_ENGINE} | _by_device(dist.get_backend_config())
    text = ",".join(f"{device}:{engine}" for device, engine in found.items())
    made: dist.ProcessGroup = dist.new_group(list(ranks), timeout=timeout, backend=text)
    return made if dist.get_rank() in ranks else None


def bound(device: torch.device, backend: str) -> torch.device | None:
    """The device to bind the group to, so that its engine connects at once and guesses none; None where it needs no device."""
    engine = _by_device(backend).get(device.type, CPU_ENGINE)
    return None if device.index is None or engine == CPU_ENGINE else device


def waits_for_peers() -> bool:
    """Is there an engine in which peers wait on when this process ends? False where there is no group."""
    try:
        engines_here = _by_device(dist.get_backend_config())
    except (ValueError, TypeError):  # it may end meanwhile, in another thread
        return False
    return any(engine != CPU_ENGINE for engine in engines_here.values())


def beside(timeout: timedelta) -> dist.ProcessGroup | None:
    """A gloo group of all ranks, for what a group that others began cannot carry; None where it carries CPU tensors."""
    if carries_cpu():
        return None
    group: dist.ProcessGroup = dist.new_group(backend=CPU_ENGINE, timeout=timeout)
    return group


def end(group: dist.ProcessGroup | None) -> None:
    """End a group that may have ended with the others."""
    if group is not None and dist.is_initialized():
        with contextlib.suppress(ValueError):
            dist.destroy_process_group(group)


def abort() -> None:
    """End all groups, with what they have in flight; from any thread. NCCL wants all ranks to do so at about the same time."""
    if dist.is_initialized():
        recorder.forget()  # nothing may ask for the events of what is aborted
        dist.distributed_c10d._abort_process_group()


def close_cpu_engine() -> None:
    """Wake the peers that wait for this process in gloo, where the rest of the group is left as it is."""
    with contextlib.suppress(RuntimeError):
        dist.group.WORLD._get_backend(torch.device("cpu")).abort()  # type: ignore[union-attr]


def have_all_come(store: SealedStore, rank: int, world_size: int, timeout: timedelta) -> bool:
    """Say that this rank is at its end, and wait for the others to be there too; the answer is the same on all ranks."""
    try:
        store.set(f"end/{rank}", b"")
        come = wait_for(store, [f"end/{each}" for each in range(world_size)], timeout)
        # Who knows first decides: one that gives up as the last one comes must not leave the others to end the group.
        return store.set_once("end/together", _YES if come else _NO) == _YES
    except DistError:  # its host is gone
        return False


def start_all(
    found: Iterable[torch.Tensor],
    group_of: Callable[[torch.Tensor], dist.ProcessGroup | None],
    start: Callable[[torch.Tensor], Any],
    *,
    is_sum: bool,
) -> list[Any]:
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
    under_way: list[Any] = []
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
