"""The process runtime: this process's rank and device, and torch's process group, started once and resettable."""

import atexit
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.constants import default_pg_timeout

from headway.common import env, scope
from headway.common.callsite import Hook
from headway.common.scope import Scope
from headway.common.untrusted import Seal, UnsealedCounter, users_secret
from headway.config.launch import DEFAULT_TIMEOUT
from headway.config.load import UNSET, asked_num_processes, promised_device, run_setting
from headway.errors import ConfigError, DeviceUnavailable, LaunchError, UnsupportedError
from headway.log import get_logger
from headway.runtime import group, pulse
from headway.runtime.control_plane.store import SealedStore, StoreAddress, StoreLink, check_in, host_beside, meet
from headway.runtime.device import CPU, Hardware, by_name, detect
from headway.runtime.ending import AfterException, has_failed, is_uncaught, leave, note_failure

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
        timeout: how long a rank may keep the others waiting.
        scope: holds what ends with this runtime, such as the control plane.
        cpu_group: carries CPU tensors where torch's default group, which somebody else began, does not.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    hardware: Hardware
    device: torch.device
    owns_group: bool
    timeout: timedelta = timedelta(seconds=DEFAULT_TIMEOUT)
    scope: Scope = field(default_factory=Scope, repr=False, compare=False)
    cpu_group: dist.ProcessGroup | None = field(default=None, repr=False, compare=False)

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


class _Process:
    """What this process holds of its runtime, and what outlives one: where ranks have met, and how often.

    Attributes:
        runtime: the one that runs.
        link: the way to the control plane.
        store: where the ranks of every group of this process meet.
        asked: the group's engines, how long they wait in a collective, and the device they are bound to.
        after: ends the process after an exception that nobody catches, where peers cannot be left otherwise.
        endings: called before the runtime ends.
        engines: called before the group ends.
    """

    def __init__(self) -> None:
        self.runtime: ProcessRuntime | None = None
        self.link: StoreLink | None = None
        self.store: Store | None = None
        self.asked: tuple[str, timedelta, torch.device | None] = (group.CPU_ENGINE, default_pg_timeout, None)
        self.after: AfterException | None = None
        self.endings: list[weakref.WeakMethod[Callable[[], None]]] = []
        self.engines: list[weakref.WeakMethod[Callable[[], None]]] = []
        self._num_groups = self._num_starts = 0
        self._strangers = UnsealedCounter(log.warning)

    def begin(self, runtime: ProcessRuntime) -> None:
        """This is the runtime from now on."""
        self.runtime = runtime
        self._num_starts += 1

    def ask(self, backend: str, timeout: timedelta, device: torch.device) -> None:
        """The groups of this process have these engines."""
        self.asked = backend, timeout, group.bound(device, backend)

    def join(self, init_method: str | None, rank: int, world_size: int, timeout: timedelta) -> None:
        """Join the group; a later group of this process meets under keys of its own, where no stale address can be read."""
        backend, engine_timeout, device = self.asked
        # Its functions have the default group as a default argument: imported later, they would keep it alive for ever.
        import torch.distributed.nn.functional  # noqa: F401

        if self.store is None:
            launched = self.launched_link(timeout)
            if launched is not None:  # who is missing is told there with names, where a group only says how many
                check_in(launched.store, rank, world_size, timeout)
            self.store, rank, world_size = meet(init_method, rank, world_size, timeout)
            if launched is None:
                roll = SealedStore(PrefixStore("headway/roll", self.store), "roll call", self.seal)
                check_in(roll, rank, world_size, timeout)
            # A thread of the engine that drops a tensor while Python shuts down would abort the process.
            atexit.register(_end_at_exit)
        store = PrefixStore(f"headway/{self._num_groups}", self.store)
        self._num_groups += 1
        dist.init_process_group(
            backend, store=store, rank=rank, world_size=world_size, timeout=engine_timeout, device_id=device
        )

    @property
    def seal(self) -> Seal:
        """Of the launcher's run, else the user's, for what ranks tell each other before there is a control plane."""
        return (
            self.link.seal if self.link is not None and self.link.is_launched else Seal(users_secret(), self._strangers)
        )

    def launched_link(self, timeout: timedelta) -> StoreLink | None:
        """The way to the control plane that the launcher hosts; None without a launcher."""
        text = env.get(env.CONTROL)
        if self.link is None and text:
            self.link = StoreLink(StoreAddress.decode(text), timeout, strangers=self._strangers)
        return self.link

    def host_control(self, runtime: ProcessRuntime) -> None:
        """Without a launcher rank 0 opens the control plane and tells where; nobody waits here."""
        if self.launched_link(runtime.timeout) is None and runtime.rank == 0:
            is_alone = runtime.local_world_size == runtime.world_size
            self.link = host_beside(self.group_store(), self.seal, runtime.rank, is_alone, runtime.timeout)
            atexit.register(_end_at_exit)  # says goodbye

    def group_store(self) -> SealedStore:
        """The store at which the group has met."""
        store: Store = self.store if self.store is not None else dist.distributed_c10d._get_default_store()
        name = f"headway/beside/{self._num_starts}"
        return SealedStore(PrefixStore(name, store), name, self.seal)

    def end(self, *, is_exit: bool = False) -> None:
        """Release what hangs on the runtime, then the runtime itself.

        Args:
            is_exit: the process ends too, perhaps alone: then no engine may make it wait for its peers.
        """
        while self.endings:
            release = self.endings.pop()()
            if release is not None:
                release()
        runtime, link = self.runtime, self.link
        has_group = runtime is not None and runtime.owns_group and dist.is_initialized()
        is_left = (
            is_exit and runtime is not None and has_group and self.is_at_mercy() and not self._is_together(runtime)
        )
        if link is not None and runtime is not None:
            link.close(runtime.rank, runtime.world_size)
        if is_left:
            group.close_cpu_engine()
        elif has_group:
            dist.destroy_process_group()
        elif runtime is not None:
            group.end(runtime.cpu_group)
        if self.after is not None:
            self.after.take_out()
        self.runtime = self.link = self.after = None
        scope.own(Hook).take_out()

    def guard(self) -> None:
        """Stand above all hooks for exceptions, torch's of the present group among them, where peers cannot be left otherwise."""
        if self.after is not None:
            self.after.take_out()
        self.after = AfterException(_end_after) if self.is_at_mercy() else None

    def is_at_mercy(self) -> bool:
        """Would ending the group, which Headway began, wait for the other ranks?"""
        owns_group = self.runtime is not None and self.runtime.owns_group
        return owns_group and group.waits_for_peers()

    def _is_together(self, runtime: ProcessRuntime) -> bool:
        """Are all ranks at their end?"""
        if has_failed():
            return False
        return group.have_all_come(self.group_store(), runtime.rank, runtime.world_size, _TOGETHER)


_TOGETHER = timedelta(seconds=10)
"""How long a process that ends waits for the other ranks to end too, before it leaves a group that only all can end."""

INTERRUPTED = 130
"""The exit code of a process that Ctrl-C has ended, as shells tell it."""

FOR_EVER = timedelta(days=365)
"""The timeout of a run that waits for ever (`--timeout 0`)."""


def start(
    *, cpu: bool = False, backend: str | None = None, init_method: str | None = None, timeout: timedelta | None = None
) -> ProcessRuntime:
    """Start this process's runtime, or return the one that runs.

    Args:
        cpu: compute on the CPU even where there is an accelerator.
        backend: as for torch's init_process_group; None: gloo for CPU tensors, and the device's own engine beside it.
        init_method: as for torch's init_process_group; None: what the launcher's environment says.
        timeout: how long a rank may keep the others waiting; None: what `--timeout` or HEADWAY_TIMEOUT says.

    Raises:
        LaunchError: the launcher promised another number of processes than came.
        ConfigError: a runtime on another device runs already, or code and command line differ about the timeout.
        DeviceUnavailable: this machine has fewer devices than local ranks, or not the kind that the launcher found.
    """
    here = scope.own(_Process)
    if here.runtime is not None:
        if cpu and here.runtime.hardware is not CPU:
            raise ConfigError(
                f"cpu=True was asked for, but this process computes on {here.runtime.device}: give it to the first Accelerator"
            )
        return here.runtime
    wanted = env.get("HEADWAY_DEVICE")
    hardware = CPU if cpu else by_name(wanted) if wanted else detect()
    if not cpu and not wanted:
        _check_promise(hardware)
    rank, world_size, waits = env.rank(), env.world_size(), _timeout(timeout)
    _check_contract(world_size)
    device = hardware.device(env.local_rank())
    owns_group = world_size > 1 and not dist.is_initialized()
    cpu_group = None
    if owns_group:
        # With a margin, so that who watches over the run speaks before the engine does.
        limit = timeout or waits + group.MARGIN
        here.ask(group.engines(backend, hardware.kind) if backend else hardware.backend, limit, device)
        here.join(init_method, rank, world_size, waits)
    elif dist.is_initialized():
        rank, world_size = dist.get_rank(), dist.get_world_size()
        cpu_group = group.beside(waits + group.MARGIN) if world_size > 1 else None
        if cpu_group is not None:
            atexit.register(_end_at_exit)
    elif hardware.is_indexed and hardware.num_devices() > 1:
        log.info_once(
            "one process on a machine with %d %s devices: `headway launch` uses all of them",
            hardware.num_devices(),
            hardware.kind,
        )
    num_local = min(env.local_world_size(), world_size)
    runtime = ProcessRuntime(
        rank, world_size, env.local_rank(), num_local, hardware, device, owns_group, waits, cpu_group=cpu_group
    )
    here.begin(runtime)
    here.guard()
    pulse.own().set_timeout(waits.total_seconds())
    if world_size > 1:
        here.host_control(runtime)
    return runtime


def current() -> ProcessRuntime:
    """The runtime of this process, started on first use."""
    runtime = scope.own(_Process).runtime
    return runtime if runtime is not None else start()


def is_started() -> bool:
    """Does this process have a runtime yet? Asking does not start one."""
    return scope.own(_Process).runtime is not None


def at_end(release: Callable[[], None], *, is_engine: bool = False) -> None:
    """Call the method `release` before the runtime ends, where its object still lives.

    Args:
        release: lets go, for example of the process group, whose threads would outlive it.
        is_engine: also when only the group ends, because what is released belongs to it (`leave_group`).
    """
    here, method = scope.own(_Process), weakref.WeakMethod(release)
    for registered in (here.endings, here.engines) if is_engine else (here.endings,):
        if method not in registered:
            registered.append(method)


def leave_group() -> None:
    """Make engines let go and end the process group, but not the runtime; `join_group` begins the next one.

    On gloo the connections close as soon as nothing holds the group any more, which wakes peers that wait in it.

    Raises:
        UnsupportedError: the group was not started by Headway, which then has no way to begin another.
    """
    here = scope.own(_Process)
    if here.runtime is None or not here.runtime.owns_group:
        raise UnsupportedError(
            "the process group has to be renewed, but was started outside Headway, by init_process_group or another library; leave "
            "that call out, and Headway starts the group"
        )
    for each in list(here.engines):
        release = each()
        if release is not None:
            release()
    # Engines that can end an operation in flight do so; ending the group would wait for it.
    group.abort()


def abort_group() -> None:
    """End the process group that Headway began, with what it has in flight; from any thread, on all ranks at the same time."""
    group.abort()


def waits_for_peers() -> bool:
    """Has the process group, if Headway began it, an engine in which peers wait on for a rank that has left?"""
    return scope.own(_Process).is_at_mercy()


def join_group() -> None:
    """Begin the next process group, with the settings of the first; every rank calls it, after `leave_group`."""
    here = scope.own(_Process)
    assert here.runtime is not None
    here.join(None, here.runtime.rank, here.runtime.world_size, here.runtime.timeout)
    here.guard()


def group_timeout() -> timedelta:
    """How long a collective waits for a missing rank."""
    return scope.own(_Process).asked[1]


def reset() -> None:
    """End the runtime, and the process group where Headway started it; at the process's exit at the latest."""
    scope.own(_Process).end()


def _end_at_exit() -> None:
    scope.own(_Process).end(is_exit=True)


def _end_after(error: BaseException, is_said: bool) -> None:
    """End this process at once where Python ends it by an exception, and peers may be inside a collective on the device."""
    if not is_uncaught(error) or not scope.own(_Process).is_at_mercy():
        return
    is_interrupt = not isinstance(error, Exception)
    if is_said and not is_interrupt:
        leave(1)
    # Python ends it: by the signal, which shells ask for, or when a hook above has said what it has to say.
    note_failure(INTERRUPTED if is_interrupt else 1)


def _timeout(timeout: timedelta | None) -> timedelta:
    """How long a rank may keep the others waiting: the one setting that all waits derive from."""
    said = UNSET if timeout is None else timeout.total_seconds()
    origin = f"InitProcessGroupKwargs(timeout={timeout!r})"
    seconds, _ = run_setting("timeout", said, DEFAULT_TIMEOUT, code_origin=origin)
    return timedelta(seconds=seconds) if seconds else FOR_EVER


def control_link() -> StoreLink | None:
    """The way to the control plane; None on one process.

    Raises:
        ControlPlaneError: rank 0 has not said in time where it is.
        LaunchError: it cannot be reached.
    """
    runtime, here = current(), scope.own(_Process)
    if runtime.world_size > 1 and here.link is None:
        here.link = host_beside(here.group_store(), here.seal, runtime.rank, False, runtime.timeout)
    return here.link


def has_control_link() -> bool:
    """Is there a way to the control plane already? Asking opens none."""
    here = scope.own(_Process)
    return here.runtime is not None and here.link is not None


def _check_promise(hardware: Hardware) -> None:
    """Is the device the one that the launcher counted on? Else the run would go on another one, and nothing would say so."""
    promised = promised_device()
    if promised in (None, hardware.kind):
        return
    if promised == CPU.kind:
        raise DeviceUnavailable(
            "`headway launch` found no accelerator on this machine and started this process for the CPU, but torch "
            f"{torch.__version__} finds {hardware.num_devices()} of {hardware.kind} here. Start with HEADWAY_DEVICE={hardware.kind} "
            "in the environment, and the launcher counts what torch finds; --cpu computes on the CPU"
        )
    names = [name for name in env.snapshot() if name.endswith("VISIBLE_DEVICES") or name == "ZE_AFFINITY_MASK"]
    said = ", ".join(f"{name}={env.get(name)!r}" for name in sorted(names)) or "no variable hides it"
    raise DeviceUnavailable(
        f"`headway launch` started this process for a {promised} device, but torch {torch.__version__} finds none ({said}). "
        "Check that the driver responds, torch is built for the device and the variables name devices that exist; --cpu runs without"
    )


def _check_contract(world_size: int) -> None:
    asked = asked_num_processes()
    if asked is not None and world_size not in asked:
        fewest = f"{asked[0]} to " if len(asked) > 1 else ""
        raise LaunchError(
            f"`headway launch` was asked for {fewest}{asked[-1]} processes, but this one finds itself in a world of {world_size}; "
            "start it with `headway launch`, and do not change WORLD_SIZE or unset RANK on the way"
        )
