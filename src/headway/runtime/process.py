"""The process runtime: this process's rank and device, and torch's process group, started once and resettable."""

import atexit
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from headway import env
from headway.config.load import asked_num_processes
from headway.errors import ConfigError, LaunchError
from headway.log import get_logger
from headway.runtime.device import CPU, Hardware, by_name, detect

log = get_logger(__name__)


@dataclass(frozen=True)
class ProcessRuntime:
    """What this process is among the others.

    Attributes:
        rank: its number among all processes, from 0.
        world_size: the number of all processes.
        local_rank: its number among those of its machine.
        local_world_size: the number of processes on its machine.
        hardware: the kind of device it computes on.
        device: that device.
        owns_group: did Headway start torch's process group (and so ends it)?
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    hardware: Hardware
    device: torch.device
    owns_group: bool

    @property
    def is_main_process(self) -> bool:
        """Is this rank 0?"""
        return self.rank == 0

    @property
    def is_local_main_process(self) -> bool:
        """Is this the first process of its machine?"""
        return self.local_rank == 0

    @property
    def is_last_process(self) -> bool:
        """Is this the highest rank?"""
        return self.rank == self.world_size - 1


_current: ProcessRuntime | None = None
_store: Store | None = None
_num_groups = 0
_endings: list[weakref.WeakMethod[Callable[[], None]]] = []


def start(*, cpu: bool = False, backend: str | None = None, init_method: str | None = None,
          timeout: timedelta | None = None) -> ProcessRuntime:  # fmt: skip
    """Start this process's runtime, or return the one that runs.

    Args:
        cpu: compute on the CPU even where there is an accelerator.
        backend: as for torch's init_process_group; None: gloo for CPU tensors, and the device's own engine beside it.
        init_method: as for torch's init_process_group; None: what the launcher's environment says.
        timeout: how long a collective waits for a missing rank; None: torch's default.

    Raises:
        LaunchError: the launcher promised another number of processes than came.
        ConfigError: a runtime on another device runs already.
        DeviceUnavailable: this machine has fewer devices than local ranks.
    """
    global _current
    if _current is not None:
        if cpu and _current.hardware is not CPU:
            raise ConfigError(
                f"cpu=True was asked for, but this process already computes on {_current.device}: "
                "pass cpu=True to the first Accelerator of the process"
            )
        return _current
    wanted = env.get("HEADWAY_DEVICE")
    hardware = CPU if cpu else by_name(wanted) if wanted else detect()
    rank, world_size = env.rank(), env.world_size()
    _check_contract(world_size)
    device = hardware.device(env.local_rank())
    owns_group = world_size > 1 and not dist.is_initialized()
    if owns_group:
        _join(backend or hardware.backend, init_method, timeout, rank, world_size)
    elif dist.is_initialized():
        rank, world_size = dist.get_rank(), dist.get_world_size()
    elif hardware.is_indexed and hardware.num_devices() > 1:
        log.info_once(
            "one process on a machine with %d %s devices: `headway launch` uses all of them",
            hardware.num_devices(), hardware.kind,
        )  # fmt: skip
    _current = ProcessRuntime(
        rank, world_size, env.local_rank(), min(env.local_world_size(), world_size), hardware, device, owns_group
    )
    return _current


def current() -> ProcessRuntime:
    """The runtime of this process, started on first use."""
    return _current if _current is not None else start()


def is_started() -> bool:
    """Does this process have a runtime yet? Asking does not start one."""
    return _current is not None


def at_end(release: Callable[[], None]) -> None:
    """Call the method `release` before the process group ends, where its object still lives.

    Engines must let go of the group, or its threads outlive it.
    """
    _endings.append(weakref.WeakMethod(release))


def reset() -> None:
    """End the runtime, and the process group where Headway started it; at the process's exit at the latest."""
    global _current
    while _endings:
        release = _endings.pop()()
        if release is not None:
            release()
    if _current is not None and _current.owns_group and dist.is_initialized():
        dist.destroy_process_group()
    _current = None


def _join(backend: str, init_method: str | None, timeout: timedelta | None, rank: int, world_size: int) -> None:
    """Join the group; a later group of this process meets under keys of its own, where no stale address can be read."""
    global _store, _num_groups
    limit = {} if timeout is None else {"timeout": timeout}
    # Its functions have the default group as a default argument: imported later, they would keep it alive for ever.
    import torch.distributed.nn.functional  # noqa: F401

    if _store is None:
        _store, rank, world_size = next(rendezvous(init_method or "env://", rank, world_size, **limit))
        # A thread of the engine that drops a tensor while Python shuts down would abort the process.
        atexit.register(reset)
    store = PrefixStore(f"headway/{_num_groups}", _store)
    _num_groups += 1
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, **limit)  # type: ignore[arg-type]


def _check_contract(world_size: int) -> None:
    asked = asked_num_processes()
    if asked is not None and asked != world_size:
        raise LaunchError(
            f"`headway launch` was asked for {asked} processes, but this one finds itself in a world of {world_size}; "
            "start it with `headway launch`, and do not change WORLD_SIZE or unset RANK on the way"
        )
