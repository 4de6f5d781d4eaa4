"""The process runtime: this process's rank and device, and torch's process group, started once and resettable."""

import atexit
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.constants import default_pg_timeout

from headway import env
from headway.config.launch import DEFAULT_PATIENCE
from headway.config.load import UNSET, asked_num_processes, run_setting
from headway.errors import ConfigError, LaunchError, UnsupportedError
from headway.log import get_logger
from headway.runtime import pulse
from headway.runtime.device import CPU, Hardware, by_name, detect
from headway.runtime.store import Address, Link, check_in, host_beside, meet

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
        patience: how long a rank may keep the others waiting.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    hardware: Hardware
    device: torch.device
    owns_group: bool
    patience: timedelta = timedelta(seconds=DEFAULT_PATIENCE)

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
_link: Link | None = None
_num_groups = 0
_asked: tuple[str, timedelta] = ("gloo", default_pg_timeout)
_num_starts = 0
_MARGIN = timedelta(seconds=30)
"""How much longer than the patience an engine waits in a collective."""

FOR_EVER = timedelta(days=365)
"""The patience of a run that waits for ever (`--patience 0`)."""

_endings: list[weakref.WeakMethod[Callable[[], None]]] = []
_engines: list[weakref.WeakMethod[Callable[[], None]]] = []


def start(*, cpu: bool = False, backend: str | None = None, init_method: str | None = None,
          timeout: timedelta | None = None) -> ProcessRuntime:  # fmt: skip
    """Start this process's runtime, or return the one that runs.

    Args:
        cpu: compute on the CPU even where there is an accelerator.
        backend: as for torch's init_process_group; None: gloo for CPU tensors, and the device's own engine beside it.
        init_method: as for torch's init_process_group; None: what the launcher's environment says.
        timeout: how long a rank may keep the others waiting; None: what `--patience` or HEADWAY_PATIENCE says.

    Raises:
        LaunchError: the launcher promised another number of processes than came.
        ConfigError: a runtime on another device runs already, or code and command line differ about the patience.
        DeviceUnavailable: this machine has fewer devices than local ranks.
    """
    global _current, _num_starts
    if _current is not None:
        if cpu and _current.hardware is not CPU:
            raise ConfigError(
                f"cpu=True was asked for, but this process already computes on {_current.device}: "
                "pass cpu=True to the first Accelerator of the process"
            )
        return _current
    wanted = env.get("HEADWAY_DEVICE")
    hardware = CPU if cpu else by_name(wanted) if wanted else detect()
    rank, world_size, patience = env.rank(), env.world_size(), _patience(timeout)
    _check_contract(world_size)
    device = hardware.device(env.local_rank())
    owns_group = world_size > 1 and not dist.is_initialized()
    if owns_group:
        # With a margin, so that who watches over the run speaks before the engine does.
        limit = timeout or patience + _MARGIN
        _join(backend or hardware.backend, init_method, limit, rank, world_size, patience)
    elif dist.is_initialized():
        rank, world_size = dist.get_rank(), dist.get_world_size()
    elif hardware.is_indexed and hardware.num_devices() > 1:
        log.info_once(
            "one process on a machine with %d %s devices: `headway launch` uses all of them",
            hardware.num_devices(), hardware.kind,
        )  # fmt: skip
    _current = ProcessRuntime(
        rank,
        world_size,
        env.local_rank(),
        min(env.local_world_size(), world_size),
        hardware,
        device,
        owns_group,
        patience,
    )
    _num_starts += 1
    pulse.own().set_patience(patience.total_seconds())
    if world_size > 1:
        _host_control(_current)
    return _current


def current() -> ProcessRuntime:
    """The runtime of this process, started on first use."""
    return _current if _current is not None else start()


def is_started() -> bool:
    """Does this process have a runtime yet? Asking does not start one."""
    return _current is not None


def at_end(release: Callable[[], None], *, is_engine: bool = False) -> None:
    """Call the method `release` before the runtime ends, where its object still lives.

    Args:
        release: lets go, for example of the process group, whose threads would outlive it.
        is_engine: also when only the group ends, because what is released belongs to it (`leave_group`).
    """
    method = weakref.WeakMethod(release)
    for registered in (_endings, _engines) if is_engine else (_endings,):
        if method not in registered:
            registered.append(method)


def leave_group() -> None:
    """Make engines let go and end the process group, but not the runtime; `join_group` begins the next one.

    On gloo the connections close as soon as nothing holds the group any more, which wakes peers that wait in it.

    Raises:
        UnsupportedError: the group was not started by Headway, which then has no way to begin another.
    """
    if _current is None or not _current.owns_group:
        raise UnsupportedError(
            "the process group has to be renewed, but was started outside Headway, by init_process_group or another library; leave "
            "that call out, and Headway starts the group"
        )
    for each in list(_engines):
        release = each()
        if release is not None:
            release()
    if dist.is_initialized():
        # Engines that can end an operation in flight do so; ending the group would wait for it.
        dist.group.WORLD.abort()  # type: ignore[union-attr]
        dist.destroy_process_group()


def join_group() -> None:
    """Begin the next process group, with the settings of the first; every rank calls it, after `leave_group`."""
    assert _current is not None
    _join(_asked[0], None, _asked[1], _current.rank, _current.world_size, _current.patience)


def group_timeout() -> timedelta:
    """How long a collective waits for a missing rank."""
    return _asked[1]


def reset() -> None:
    """End the runtime, and the process group where Headway started it; at the process's exit at the latest."""
    global _current, _link
    while _endings:
        release = _endings.pop()()
        if release is not None:
            release()
    if _link is not None and _current is not None:
        _link.close(_current.rank, _current.world_size)
    if _current is not None and _current.owns_group and dist.is_initialized():
        dist.destroy_process_group()
    _current = _link = None


def _join(backend: str, init_method: str | None, timeout: timedelta, rank: int, world_size: int,
          patience: timedelta) -> None:  # fmt: skip
    """Join the group; a later group of this process meets under keys of its own, where no stale address can be read."""
    global _store, _num_groups, _asked
    _asked = backend, timeout
    # Its functions have the default group as a default argument: imported later, they would keep it alive for ever.
    import torch.distributed.nn.functional  # noqa: F401

    if _store is None:
        launched = _launched_link(patience)
        if launched is not None:  # who is missing is told there with names, where a group only says how many
            check_in(launched.store, rank, world_size, patience)
        _store, rank, world_size = meet(init_method, rank, world_size, patience)
        if launched is None:
            check_in(PrefixStore("headway/roll", _store), rank, world_size, patience)
        # A thread of the engine that drops a tensor while Python shuts down would abort the process.
        atexit.register(reset)
    store = PrefixStore(f"headway/{_num_groups}", _store)
    _num_groups += 1
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)


def _patience(timeout: timedelta | None) -> timedelta:
    """How long a rank may keep the others waiting: the one setting that all waits derive from."""
    said = UNSET if timeout is None else timeout.total_seconds()
    origin = f"InitProcessGroupKwargs(timeout={timeout!r})"
    seconds, _ = run_setting("patience", said, DEFAULT_PATIENCE, code_origin=origin)
    return timedelta(seconds=seconds) if seconds else FOR_EVER


def _launched_link(timeout: timedelta) -> Link | None:
    """The way to the control plane that the launcher hosts; None without a launcher."""
    global _link
    text = env.get(env.CONTROL)
    if _link is None and text:
        _link = Link(Address.decode(text), timeout)
    return _link


def _host_control(runtime: ProcessRuntime) -> None:
    """Without a launcher rank 0 opens the control plane and tells where; nobody waits here."""
    global _link
    if _launched_link(runtime.patience) is None and runtime.rank == 0:
        is_alone = runtime.local_world_size == runtime.world_size
        _link = host_beside(_group_store(), runtime.rank, is_alone, runtime.patience)
        atexit.register(reset)  # says goodbye


def control_link() -> Link | None:
    """The way to the control plane; None on one process.

    Raises:
        ControlPlaneError: rank 0 has not said in time where it is.
        LaunchError: it cannot be reached.
    """
    global _link
    runtime = current()
    if runtime.world_size > 1 and _link is None:
        _link = host_beside(_group_store(), runtime.rank, False, runtime.patience)
    return _link


def _group_store() -> Store:
    """The store at which the group has met."""
    if _store is not None:
        return PrefixStore(f"headway/beside/{_num_starts}", _store)
    store: Store = dist.distributed_c10d._get_default_store()
    return PrefixStore(f"headway/beside/{_num_starts}", store)


def _check_contract(world_size: int) -> None:
    asked = asked_num_processes()
    if asked is not None and world_size not in asked:
        fewest = f"{asked[0]} to " if len(asked) > 1 else ""
        raise LaunchError(
            f"`headway launch` was asked for {fewest}{asked[-1]} processes, but this one finds itself in a world of {world_size}; "
            "start it with `headway launch`, and do not change WORLD_SIZE or unset RANK on the way"
        )
