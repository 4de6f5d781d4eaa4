"""Process runtime: rank, device and torch process group of this process, started once and resettable."""

import atexit
import socket
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]
from torch.distributed.constants import default_pg_timeout

from headway.common import env, scope
from headway.common.scope import Scope
from headway.common.sealing import Seal, UnsealedCounter, read_secret
from headway.common.tracebacks import ExceptionHook
from headway.core.config.launch import DEFAULT_TIMEOUT
from headway.core.config.load import UNSET, read_promised_device, read_requested_num_processes, resolve_run_setting
from headway.core.runtime import _torch, group, heartbeat_file, peer_access
from headway.core.runtime.control_plane.roll_call import check_in
from headway.core.runtime.control_plane.sealed_store import SealedStore
from headway.core.runtime.control_plane.store import (
    StoreAddress,
    StoreLink,
    host_control_plane,
    join_control_plane,
    open_group_store,
)
from headway.core.runtime.device import CPU, Hardware, detect_hardware, find_hardware
from headway.core.runtime.ending import UncaughtExceptionHook, end_process, has_failed, is_uncaught, record_failure
from headway.core.runtime.separate_tasks import warn_of_separate_tasks
from headway.errors import ConfigError, DeviceUnavailable, LaunchError, UnsupportedError
from headway.log import get_logger

log = get_logger(__name__)

INTERRUPTED = 130
"""Exit code of a process that was ended by Ctrl-C, as shells report it."""
NO_TIMEOUT = timedelta(days=365)
"""Timeout that means no time limit (`--timeout 0`)."""
_EXIT_TIMEOUT = timedelta(seconds=10)
"""Maximum time that an exiting process waits for the other ranks to exit, too.

It waits only if all ranks must end the process group together, as is the case with NCCL.
"""
_FAKE_BACKEND = "fake"
"""torch's backend for process groups without other processes, whose store cannot exchange values."""


@dataclass(frozen=True)
class ProcessRuntime:
    """Rank, device and settings of this process, from `start()` until `reset()`.

    Attributes:
        rank: Rank among all processes, from 0.
        world_size: Number of processes.
        local_rank: Rank among the processes of this machine.
        local_world_size: Number of processes on this machine.
        hardware: Device type that this process computes on.
        device: Device that this process computes on.
        owns_group: Whether Headway started torch's process group and therefore ends it.
        timeout: Maximum time that a rank may keep the others waiting.
        scope: Container for objects that end with this runtime, such as the control plane.
        cpu_group: Process group for CPU tensors. It exists only if other code created the default group and that group
            has no backend for CPU tensors; otherwise None.
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
        """Whether this process is rank 0."""
        return self.rank == 0

    @property
    def is_local_main_process(self) -> bool:
        """Whether this process has local rank 0, the lowest rank on its machine."""
        return self.local_rank == 0

    @property
    def is_last_process(self) -> bool:
        """Whether this process has the highest rank."""
        return self.rank == self.world_size - 1


# -------------------------------------------------------------------- start and end of the runtime


def start(
    *, cpu: bool = False, backend: str | None = None, init_method: str | None = None, timeout: timedelta | None = None
) -> ProcessRuntime:
    """Start the runtime of this process, or return the one that is running.

    With several processes, all ranks must call this, because it creates the process group. A runtime that is already
    running ignores all arguments except `cpu`.

    Args:
        cpu: Whether to compute on the CPU even if there is an accelerator.
        backend: Backend for `init_process_group`. Default: gloo for CPU tensors plus the device's own backend.
        init_method: URL as for torch's `init_process_group`. Default: None, for "env://".
        timeout: Maximum time that a rank may keep the others waiting. A collective stops waiting after this time, or
            30 seconds later if `timeout` is None. Default: `--timeout` or HEADWAY_TIMEOUT, else 10 minutes.

    Raises:
        LaunchError: If the number of processes differs from the number that the launcher was asked for. Also if ranks
            are missing at the timeout, or if two processes have the same rank.
        ConfigError: If `cpu` is True and the running runtime uses an accelerator. Also if `backend` does not support
            the device, or if code and command line disagree about the timeout.
        DeviceUnavailable: If this machine has fewer devices than local ranks, or lacks the device type that the
            launcher found or HEADWAY_DEVICE names.
        UnsupportedError: If `backend` is None and torch has no default backend for the device.
    """
    state = scope.get_or_create(_Process)
    if state.runtime is not None:
        if cpu and state.runtime.hardware is not CPU:
            raise ConfigError(
                f"cpu=True was asked for, but this process computes on {state.runtime.device}: give it to the first Accelerator"
            )
        return state.runtime
    hardware = _choose_hardware(cpu)
    rank, world_size, peer_timeout = env.get_rank(), env.get_world_size(), _choose_timeout(timeout)
    _check_num_processes(world_size)
    local_rank, num_local = env.get_local_rank(), env.get_local_world_size()
    has_script_group = dist.is_initialized()  # the script has created the process group itself
    if has_script_group:
        rank, world_size = dist.get_rank(), dist.get_world_size()
        if world_size > 1 and env.get("LOCAL_RANK") is None and dist.get_backend() != _FAKE_BACKEND:
            local_rank, num_local = state.find_local_rank(rank, world_size)
    device = hardware.select_device(local_rank)
    owns_group = world_size > 1 and not has_script_group
    cpu_group = None
    if owns_group:
        # With a margin, so that the hang watch reports before the backend times out.
        collective_timeout = timeout or peer_timeout + group.MARGIN
        backends = group.complete_backend(backend, hardware.kind) if backend else hardware.backend_string
        state.set_group_options(backends, collective_timeout, device)
        if hardware.kind == "cuda" and num_local > 1:
            peer_access.avoid_broken_transfers()
        state.join_group(init_method, rank, world_size, peer_timeout)
    elif has_script_group and world_size > 1:
        cpu_group = group.create_cpu_group(peer_timeout + group.MARGIN)
        if cpu_group is not None:
            atexit.register(_end_at_exit)
    elif not has_script_group and hardware.is_indexed and hardware.count_devices() > 1:
        log.info_once(
            "one process on a machine with %d %s devices: `headway launch` uses all of them",
            hardware.count_devices(),
            hardware.kind,
        )
    if world_size == 1 and not has_script_group:
        warn_of_separate_tasks(env.copy_variables())
    num_local = min(num_local, world_size)
    runtime = ProcessRuntime(
        rank, world_size, local_rank, num_local, hardware, device, owns_group, peer_timeout, cpu_group=cpu_group
    )
    state.set_runtime(runtime)
    state.install_exception_hook()
    heartbeat_file.get_own_file().set_timeout(peer_timeout.total_seconds())
    if world_size > 1:
        state.host_control(runtime)
    return runtime


def _choose_hardware(cpu: bool) -> Hardware:
    """Return the device type that this process computes on.

    HEADWAY_DEVICE takes precedence over the accelerator that torch finds.

    Args:
        cpu: Whether to use the CPU in any case.

    Raises:
        DeviceUnavailable: If HEADWAY_DEVICE names a device type that this machine lacks. Also if the detected device type
            differs from the one that the launcher found.
    """
    if cpu:
        return CPU
    device_type = env.get("HEADWAY_DEVICE")
    if device_type:
        return find_hardware(device_type)
    hardware = detect_hardware()
    _check_promised_device(hardware)
    return hardware


def _check_promised_device(hardware: Hardware) -> None:
    """Raise `DeviceUnavailable` if this process's device type differs from the one that the launcher found.

    Without this check the run would continue on another device without an error.
    """
    promised = read_promised_device()
    if promised in (None, hardware.kind):
        return
    if promised == CPU.kind:
        raise DeviceUnavailable(
            "`headway launch` found no accelerator on this machine and started this process for the CPU, but torch "
            f"{torch.__version__} finds {hardware.count_devices()} of {hardware.kind} here. Start with "
            f"HEADWAY_DEVICE={hardware.kind} in the environment, and the launcher counts what torch finds; --cpu computes on the CPU"
        )
    names = [name for name in env.copy_variables() if name.endswith("VISIBLE_DEVICES") or name == "ZE_AFFINITY_MASK"]
    variables = ", ".join(f"{name}={env.get(name)!r}" for name in sorted(names)) or "no variable hides it"
    raise DeviceUnavailable(
        f"`headway launch` started this process for a {promised} device, but torch {torch.__version__} finds none ({variables}). "
        "Check that the driver responds, torch is built for the device and the variables name devices that exist; --cpu runs without"
    )


def _choose_timeout(timeout: timedelta | None) -> timedelta:
    """Return the maximum time that a rank may keep the others waiting. All other time limits derive from it.

    Args:
        timeout: Value from the user's code; None to use the launcher's setting or the default. Zero means no limit.

    Raises:
        ConfigError: If code and command line disagree about the timeout.
    """
    requested = UNSET if timeout is None else timeout.total_seconds()
    origin = f"InitProcessGroupKwargs(timeout={timeout!r})"
    seconds, _ = resolve_run_setting("timeout", requested, DEFAULT_TIMEOUT, code_origin=origin)
    return timedelta(seconds=seconds) if seconds else NO_TIMEOUT


def _check_num_processes(world_size: int) -> None:
    """Raise `LaunchError` if the number of processes differs from what `headway launch` was asked for."""
    allowed = read_requested_num_processes()
    if allowed is not None and world_size not in allowed:
        fewest = f"{allowed[0]} to " if len(allowed) > 1 else ""
        raise LaunchError(
            f"`headway launch` was asked for {fewest}{allowed[-1]} processes, but this one finds itself in a world of {world_size}; "
            "start it with `headway launch`, and do not change WORLD_SIZE or unset RANK on the way"
        )


def current() -> ProcessRuntime:
    """Return the runtime of this process. If it has none, start one with default settings (see `start`)."""
    runtime = scope.get_or_create(_Process).runtime
    return runtime if runtime is not None else start()


def is_started() -> bool:
    """Whether this process has a runtime. This function does not start one."""
    return scope.get_or_create(_Process).runtime is not None


def release_at_end(release: Callable[[], None], *, ends_with_group: bool = False) -> None:
    """Register a method to call before the runtime ends. Only a weak reference to its object is kept.

    Args:
        release: Method that releases a resource, such as a thread, that would otherwise outlive the runtime.
        ends_with_group: Whether to also call the method when only the process group ends (`leave_group`), because the
            resource belongs to the group.
    """
    state, method = scope.get_or_create(_Process), weakref.WeakMethod(release)
    registries = [state.release_methods]
    if ends_with_group:
        registries.append(state.group_release_methods)
    for registry in registries:
        if method not in registry:
            registry.append(method)


def reset() -> None:
    """End the runtime, and the process group if Headway started it. At process exit, this happens automatically."""
    scope.get_or_create(_Process).end()


def _end_at_exit() -> None:
    scope.get_or_create(_Process).end(is_exit=True)


def _end_after_exception(error: BaseException, is_printed: bool) -> None:
    """End this process at once after an uncaught exception, because peers might be inside a collective on the device.

    After an interrupt such as Ctrl-C, or if the traceback has not been printed yet, only record the exit code with
    which Python then ends the process. Do nothing if the exception does not end the process, or if its end would not
    wait for peers.

    Args:
        error: The uncaught exception.
        is_printed: Whether the error's traceback has been printed.
    """
    if not is_uncaught(error) or not scope.get_or_create(_Process).has_blocking_end():
        return
    is_interrupt = not isinstance(error, Exception)
    if is_printed and not is_interrupt:
        end_process(1)
    # Let Python end the process: an interrupt by its signal, as shells expect, and others after the outer hooks have
    # printed the traceback.
    record_failure(INTERRUPTED if is_interrupt else 1)


# -------------------------------------------------------------------- process groups of a running runtime


def leave_group() -> None:
    """Abort the process group and release everything that belongs to it, but keep the runtime.

    Call `join_group` to create the next group. gloo's connections close as soon as the group is no longer referenced,
    which wakes peers that wait in a gloo collective.

    Raises:
        UnsupportedError: If other code started the group, because Headway could then not create a new one.
    """
    state = scope.get_or_create(_Process)
    if state.runtime is None or not state.runtime.owns_group:
        raise UnsupportedError(
            "the process group has to be renewed, but was started outside Headway, by init_process_group or another library; leave "
            "that call out, and Headway starts the group"
        )
    for each in list(state.group_release_methods):
        release = each()
        if release is not None:
            release()
    # Backends that can abort a pending operation do so; destroying the group would wait for it.
    group.abort_groups()


def join_group() -> None:
    """Create the next process group with the settings of the first one. All ranks call this after `leave_group`."""
    state = scope.get_or_create(_Process)
    assert state.runtime is not None
    state.join_group(None, state.runtime.rank, state.runtime.world_size, state.runtime.timeout)
    state.install_exception_hook()


def abort_group() -> None:
    """Abort the process group and its pending operations. This function may be called on any thread.

    All ranks must call it at about the same time.
    """
    group.abort_groups()


def does_exit_block_peers() -> bool:
    """Whether the other ranks would block in the backend of the process group, such as NCCL, if only this rank exited.

    False if other code started the process group.
    """
    return scope.get_or_create(_Process).has_blocking_end()


def get_group_timeout() -> timedelta:
    """Return the timeout of the collectives in the process groups that Headway creates.

    It is torch's default timeout of the backend if Headway has created no group.
    """
    return scope.get_or_create(_Process).group_options.timeout


# -------------------------------------------------------------------- the control plane


def get_control_link() -> StoreLink | None:
    """Return the connection to the control plane, or None in a run with a single process.

    The first call opens the connection. Without a launcher, it waits until rank 0 has published the address.

    Raises:
        ControlPlaneError: If rank 0 does not publish the control plane's address before the timeout.
        LaunchError: If the control plane cannot be reached.
    """
    runtime, state = current(), scope.get_or_create(_Process)
    if runtime.world_size > 1 and state.link is None:
        state.link = join_control_plane(state.get_group_store(), state.seal, runtime.timeout)
    return state.link


def has_control_link() -> bool:
    """Whether there is a connection to the control plane. This function does not open one."""
    state = scope.get_or_create(_Process)
    return state.runtime is not None and state.link is not None


# -------------------------------------------------------------------- process-wide state


class _GroupOptions(NamedTuple):
    """Options of the process groups that Headway creates.

    Attributes:
        backend: Backend string, such as "cpu:gloo,cuda:nccl".
        timeout: Time after which a collective stops waiting for a rank.
        device: Device to bind the groups to (`device_id` of `init_process_group`); None for no device.
    """

    backend: str
    timeout: timedelta
    device: torch.device | None


class _Process:
    """Process-wide state: the current runtime, and objects that outlive it, such as the rendezvous store.

    Attributes:
        runtime: Current runtime; None if none is running.
        link: Connection to the control plane; None if there is none.
        store: Store for the rendezvous of every process group that Headway creates; None before the first.
        group_options: Options of the process groups that Headway creates.
        exit_hook: Exception hook that ends the process after an uncaught exception. None if the process can end without
            waiting for its peers.
        release_methods: Methods that are called before the runtime ends.
        group_release_methods: Methods that are also called in `leave_group`, before only the process group ends.
    """

    def __init__(self) -> None:
        self.runtime: ProcessRuntime | None = None
        self.link: StoreLink | None = None
        self.store: Store | None = None
        self.group_options = _GroupOptions(group.CPU_BACKEND, default_pg_timeout, None)
        self.exit_hook: UncaughtExceptionHook | None = None
        self.release_methods: list[weakref.WeakMethod[Callable[[], None]]] = []
        self.group_release_methods: list[weakref.WeakMethod[Callable[[], None]]] = []
        self._num_groups = 0  # process groups that Headway has created
        self._num_starts = 0  # runtimes that were started
        self._unsealed_counter = UnsealedCounter(log.warning)

    def set_runtime(self, runtime: ProcessRuntime) -> None:
        """Set the current runtime."""
        self.runtime = runtime
        self._num_starts += 1

    def set_group_options(self, backend: str, timeout: timedelta, device: torch.device) -> None:
        """Set backends, timeout and device of the process groups that `join_group` creates.

        Args:
            backend: Backends as in torch's `init_process_group`, such as "cpu:gloo,cuda:nccl".
            timeout: Time after which a collective stops waiting.
            device: Device of this process.
        """
        self.group_options = _GroupOptions(backend, timeout, group.choose_bound_device(device, backend))

    def join_group(self, init_method: str | None, rank: int, world_size: int, timeout: timedelta) -> None:
        """Create the process group together with the other ranks.

        A process can create several groups in turn. Each group uses a different key prefix in the store, so that no
        rank reads the addresses of an earlier group. The first call also opens the store and waits for all ranks.

        Args:
            init_method: URL as for torch's `init_process_group`; None for "env://". Used only by the first call.
            rank: Rank of this process.
            world_size: Number of processes.
            timeout: Maximum time that the first call waits for the other ranks.

        Raises:
            LaunchError: If ranks are missing at the timeout, two processes have the same rank, or the launcher's store
                cannot be reached.
        """
        options = self.group_options
        # The functions of this torch module take the current default group as a default argument. If it were imported
        # later, they would keep the group alive forever.
        import torch.distributed.nn.functional  # noqa: F401

        if self.store is None:
            launched = self.get_launched_link(timeout)
            if launched is not None:  # a check-in names the missing ranks; a process group only reports their number
                check_in(launched.store, rank, world_size, timeout)
            self.store, rank, world_size = open_group_store(init_method, rank, world_size, timeout)
            if launched is None:
                roll = SealedStore(PrefixStore("headway/roll", self.store), "roll call", self.seal)
                check_in(roll, rank, world_size, timeout)
            # A backend thread that frees a tensor while Python shuts down would abort the process.
            atexit.register(_end_at_exit)
        store = PrefixStore(f"headway/{self._num_groups}", self.store)
        self._num_groups += 1
        dist.init_process_group(
            options.backend,
            store=store,
            rank=rank,
            world_size=world_size,
            timeout=options.timeout,
            device_id=options.device,
        )

    @property
    def seal(self) -> Seal:
        """Object that computes and checks HMACs for values in the rendezvous store, before the control plane exists.

        If a connection to a launcher is open, it uses the launcher's secret. Otherwise it uses the user's secret
        (HEADWAY_SECRET), which is empty if the user has set none. HMACs with an empty secret do not stop an attacker.

        Raises:
            ConfigError: If the user's secret is too short.
        """
        if self.link is not None and self.link.is_launched:
            return self.link.seal
        return Seal(read_secret(), self._unsealed_counter)

    def get_launched_link(self, timeout: timedelta) -> StoreLink | None:
        """Return the connection to the control plane. Open it first if a launcher hosts the control plane.

        Args:
            timeout: Maximum time for connecting.

        Returns:
            The connection; None if there is no launcher and no connection is open.
        """
        text = env.get(env.CONTROL)
        if self.link is None and text:
            self.link = StoreLink(StoreAddress.decode(text), timeout, unsealed_counter=self._unsealed_counter)
        return self.link

    def host_control(self, runtime: ProcessRuntime) -> None:
        """Host the control plane and publish its address, if this is rank 0 and there is no launcher.

        Do nothing on other ranks. They connect in `get_control_link`, and rank 0 does not wait for them.
        """
        if self.get_launched_link(runtime.timeout) is None and runtime.rank == 0:
            is_on_one_machine = runtime.local_world_size == runtime.world_size
            self.link = host_control_plane(self.get_group_store(), self.seal, is_on_one_machine, runtime.timeout)
            atexit.register(_end_at_exit)  # the link's end announces the exit of rank 0

    def get_group_store(self) -> SealedStore:
        """Return the process group's rendezvous store, wrapped so that keys have a prefix and values carry an HMAC.

        The prefix counts the runtimes that this process has started, so that no value of an earlier runtime is read.
        """
        store: Store = self.store if self.store is not None else _torch.get_default_store()
        name = f"headway/beside/{self._num_starts}"
        return SealedStore(PrefixStore(name, store), name, self.seal)

    def find_local_rank(self, rank: int, world_size: int) -> tuple[int, int]:
        """Return this process's rank on its machine, and the number of processes there, from the host names of all ranks.

        This is needed if a script has created the process group itself, without a launcher that sets LOCAL_RANK. All
        ranks must call it.

        Args:
            rank: Rank of this process.
            world_size: Number of processes.
        """
        store = self.get_group_store()
        store.set(f"host/{rank}", socket.gethostname().encode())
        hosts = [store.get(f"host/{each}") for each in range(world_size)]
        local_ranks = [each for each, host in enumerate(hosts) if host == hosts[rank]]
        return local_ranks.index(rank), len(local_ranks)

    def end(self, *, is_exit: bool = False) -> None:
        """Call the registered release methods, then end the runtime and the process group if Headway started it.

        Args:
            is_exit: Whether the process exits as well. The other ranks might then be gone or continue to run. So this
                process destroys a group with a backend such as NCCL only if all ranks exit at about the same time.
                Otherwise it only aborts the gloo backend.
        """
        while self.release_methods:
            release = self.release_methods.pop()()
            if release is not None:
                release()
        runtime, link = self.runtime, self.link
        has_group = runtime is not None and runtime.owns_group and dist.is_initialized()
        must_not_wait = (
            is_exit
            and runtime is not None
            and has_group
            and self.has_blocking_end()
            and not self._are_all_ending(runtime)
        )
        if link is not None and runtime is not None:
            link.close(runtime.rank, runtime.world_size)
        if must_not_wait:
            group.abort_cpu_backend()
        elif has_group:
            dist.destroy_process_group()
        elif runtime is not None:
            group.destroy_group(runtime.cpu_group)
        if self.exit_hook is not None:
            self.exit_hook.uninstall()
        self.runtime = None
        self.link = None
        self.exit_hook = None
        scope.get_or_create(ExceptionHook).uninstall()

    def install_exception_hook(self) -> None:
        """Install the exception hook as the outermost one, if ending the process group would wait for peers.

        Otherwise, only uninstall the hook that an earlier call installed. torch installs its own hook for each process group, so
        this method is called for each group.
        """
        if self.exit_hook is not None:
            self.exit_hook.uninstall()
        self.exit_hook = UncaughtExceptionHook(_end_after_exception) if self.has_blocking_end() else None

    def has_blocking_end(self) -> bool:
        """Whether Headway started the process group and ending this group would wait for the other ranks."""
        owns_group = self.runtime is not None and self.runtime.owns_group
        return owns_group and group.has_blocking_backend()

    def _are_all_ending(self, runtime: ProcessRuntime) -> bool:
        """Announce that this rank is ending, and return whether all ranks announce their end within the time limit.

        If this process exits because of an error, announce nothing and return False at once.
        """
        if has_failed():
            return False
        return group.wait_for_all_to_end(self.get_group_store(), runtime.rank, runtime.world_size, _EXIT_TIMEOUT)
