"""The doctor's checks of this machine: versions, devices, host names, network interfaces, ports and limits."""

import os
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

from headway.common.text import format_bytes
from headway.core.runtime import network, peer_access
from headway.launch import machine

# Values below which a check reports a problem. Memory and disk space are in bytes.
_MIN_TORCH_VERSION = (2, 11)
_MIN_OPEN_FILES = 4096
_MIN_PROCESSES = 1024
_MIN_SHARED_MEMORY = 2**30
_MIN_FREE_DISK_SPACE = 2**28
_MIN_PORTS = 2000


@dataclass(frozen=True)
class Finding:
    """Result of one check.

    Attributes:
        level: "ok", "note" (may cause problems later) or "bad" (a run fails or is slow because of it).
        description: Description of the finding.
        hint: Advice on how to fix it. Empty if there is none.
    """

    level: Literal["ok", "note", "bad"]
    description: str
    hint: str = ""

    def format_text(self) -> str:
        """Return a line with the level and the description. A hint follows on a second line."""
        mark = {"ok": "ok  ", "note": "note", "bad": "BAD "}[self.level]
        return f"{mark}  {self.description}" + (f"\n      -> {self.hint}" if self.hint else "")


def make_finding(is_good: bool, description: str, hint: str, level: Literal["note", "bad"] = "note") -> Finding:
    """Return a finding with level "ok" if the check passed. Otherwise return one with the given level and a hint.

    Args:
        is_good: Whether the check passed.
        description: Description of the finding.
        hint: Advice on how to fix it.
        level: Level of the finding if the check failed. Default: "note".
    """
    return Finding("ok", description) if is_good else Finding(level, description, hint)


@dataclass(frozen=True)
class CheckedRun:
    """Planned run for which the doctor checks this machine.

    Attributes:
        num_machines: Number of machines of the run.
        machine_rank: Index of this machine.
        address: Host name or IP address of machine 0, where the rendezvous takes place; None if not set.
        port: Port of the rendezvous; None if not set.
    """

    num_machines: int = 1
    machine_rank: int = 0
    address: str | None = None
    port: int | None = None


def examine_machine(environment: Mapping[str, str], run: CheckedRun, root: Path = Path("/")) -> Iterator[Finding]:
    """Run all checks of this machine and yield their findings.

    The checks import only Headway's own modules and connect to no other machine.

    Args:
        environment: Environment variables of the launcher.
        run: Run for which to check the machine.
        root: Folder that contains the folders `proc`, `sys` and `dev`. Default: "/".
    """
    yield from check_versions()
    yield from check_devices(environment, root)
    yield from check_names(run)
    yield from check_interfaces(environment, run)
    yield from check_ports(run, root)
    yield from check_limits(root)
    yield from check_space(root)


def check_versions() -> Iterator[Finding]:
    """Yield findings on the versions of Python, torch and Headway, and on whether this torch is supported."""
    python_version = ".".join(map(str, sys.version_info[:3]))
    headway_version = metadata.version("headway")
    try:
        torch_version = metadata.version("torch")
    except metadata.PackageNotFoundError:
        yield Finding("bad", f"headway {headway_version}, Python {python_version}, no torch", "pip install torch")
        return
    parts = torch_version.partition("+")[0].split(".")
    release = tuple(int(part) for part in parts[:2] if part.isdecimal())
    hint = f"Headway needs torch {'.'.join(map(str, _MIN_TORCH_VERSION))} or later: pip install --upgrade torch"
    yield make_finding(
        release >= _MIN_TORCH_VERSION,
        f"headway {headway_version}, Python {python_version}, torch {torch_version}",
        hint,
        "bad",
    )


def check_devices(environment: Mapping[str, str], root: Path = Path("/")) -> Iterator[Finding]:
    """Yield findings on whether there are accelerators, and whether the installed torch can use them.

    Also report OMP_NUM_THREADS if it exceeds the number of CPU cores.

    Args:
        environment: Environment variables of the launcher.
        root: Folder that contains the folders `proc`, `sys` and `dev`. Default: "/".
    """
    this_machine = machine.inspect_machine(environment, root)
    cores = f"{this_machine.num_cores} CPU core{'s' if this_machine.num_cores > 1 else ''}"
    if this_machine.accelerator is not None:
        yield Finding(
            "ok",
            f"{len(this_machine.device_ids)} x {this_machine.accelerator} ({', '.join(this_machine.device_ids)}), {cores}",
        )
    elif (root / "dev/nvidiactl").exists() or (root / "dev/kfd").exists():
        yield Finding(
            "bad",
            f"the driver of an accelerator is loaded, but this torch cannot use an accelerator; {cores}",
            "install the build of torch for it (see the version above); see that no CUDA_VISIBLE_DEVICES hides it",
        )
    else:
        yield Finding("ok", f"no accelerator, {cores}")
    if this_machine.broken_transfers and len(this_machine.device_ids) > 1:
        missing = peer_access.choose_variables(environment)
        settings = (
            ", which sets " + " and ".join(f"{name}={value}" for name, value in missing.items()) if missing else ""
        )
        yield Finding(
            "note",
            f"direct transfers between GPUs fail on {this_machine.broken_transfers}",
            f"install driver 550.40.07 or later, or start with `headway launch`{settings}; a model that is spread over several GPUs "
            "of one process needs the driver",
        )
    threads = environment.get("OMP_NUM_THREADS", "")
    if threads.isdecimal() and int(threads) > this_machine.num_cores:
        yield Finding(
            "note", f"OMP_NUM_THREADS={threads} on {cores}", "unset it: `headway launch` gives each process its share"
        )


def check_names(run: CheckedRun) -> Iterator[Finding]:
    """Yield findings on whether the host names of this machine and of machine 0 resolve to usable addresses.

    Machine 0 is checked only if the run has several machines and names its address. Gloo uses the name of this machine
    unless a network interface is set.
    """
    host = socket.gethostname()
    addresses = network.resolve_name(host)
    if not network.is_loopback_name(host):
        yield Finding("ok", f"host name {host} leads to {', '.join(addresses)}")
    else:
        if addresses:
            problem = f"resolves to {', '.join(addresses)}, which only this machine can reach"
        else:
            problem = "is not known to this machine"
        own_address = network.find_own_address(run.address or "")
        is_relevant = run.num_machines > 1 and own_address is not None and run.address is None
        hint = f"give other machines {own_address} as --main_process_ip, not the name; "
        hint += "`headway launch` sets the interface of gloo itself"
        reached = f"; others reach it as {own_address}" if own_address else ""
        yield make_finding(not is_relevant, f"host name {host} {problem}{reached}", hint)
    if run.num_machines == 1 or run.address is None:
        return
    if not network.resolve_name(run.address):
        hint = "add it to /etc/hosts or give its address"
        yield Finding("bad", f"machine 0 is {run.address}, which this machine cannot resolve", hint)
    elif run.machine_rank and network.is_loopback_name(run.address):
        hint = "give machine 0's address on the network instead"
        yield Finding("bad", f"machine 0 is {run.address}, which is this machine's own loopback address here", hint)
    else:
        yield Finding("ok", f"machine 0 is {run.address} ({', '.join(network.resolve_name(run.address))})")


def check_interfaces(environment: Mapping[str, str], run: CheckedRun) -> Iterator[Finding]:
    """Yield findings on the network interface that gloo will use between machines.

    Also report interfaces that GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME names and this machine lacks. For a run on one
    machine, only report whether there is any interface.

    Args:
        environment: Environment variables of the launcher.
        run: Run for which to check the machine.
    """
    interfaces = network.list_interfaces()
    interface_list = ", ".join(f"{interface.name} {interface.addresses[0]}" for interface in interfaces) or "none"
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        value = environment.get(variable, "")
        requested_names = [part for part in value.lstrip("^=").split(",") if part]
        missing = [
            part for part in requested_names if not any(interface.name.startswith(part) for interface in interfaces)
        ]
        if missing and not value.startswith("^"):
            hint = f"unset it or name one of: {interface_list}"
            yield Finding("bad", f"{variable}={value}: no interface {', '.join(missing)} is up here", hint)
    if run.num_machines == 1:
        yield make_finding(bool(interfaces), f"interfaces: {interface_list}", "bring up lo: ip link set lo up", "bad")
        return
    own_address = network.find_own_address(run.address or "")
    if own_address is None:
        yield Finding(
            "bad",
            f"no interface leads to other machines ({interface_list})",
            "connect this machine, or look at `ip addr`",
        )
        return
    interface_name = environment.get("GLOO_SOCKET_IFNAME") or network.find_interface(own_address)
    yield Finding("ok", f"gloo will use {interface_name} ({own_address}) of: {interface_list}")


def check_ports(run: CheckedRun, root: Path = Path("/")) -> Iterator[Finding]:
    """Yield findings on the number of ports that the system can assign, and on the rendezvous port.

    The rendezvous port is checked only for several machines. The system must not assign it to another connection, and
    on machine 0 it must be free now.
    """
    try:
        first_port, last_port = map(int, (root / "proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    except (OSError, ValueError):
        first_port, last_port = 32768, 60999
    description = f"the system assigns ports {first_port} to {last_port}"
    if last_port - first_port < _MIN_PORTS:
        hint = "widen net.ipv4.ip_local_port_range: a rank opens a connection to each of the others"
        yield Finding("bad", description, hint)
    elif run.num_machines > 1:
        yield Finding(
            "ok", f"{description}; between machines all of them must be open, and port {run.port} of machine 0"
        )
    else:
        yield Finding("ok", f"{description}; `headway launch` takes a free one and needs no fixed port")
    if run.num_machines == 1 or not run.port:
        return
    if first_port <= run.port <= last_port:
        hint = f"take one below {first_port}, which no outgoing connection can occupy in between"
        yield Finding("note", f"port {run.port} is one of those", hint)
    if run.machine_rank == 0:
        with socket.socket() as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                listener.bind(("", run.port))
            except OSError as error:
                hint = "end the program that listens on it (`ss -ltnp` names it), or give another --main_process_port to all machines"
                yield Finding("bad", f"port {run.port} cannot be taken: {error.strerror}", hint)


def check_limits(root: Path = Path("/")) -> Iterator[Finding]:
    """Yield findings on whether the limits on open files, processes and locked memory are high enough for a run.

    Locked memory is checked only if there is an InfiniBand adapter. On Windows nothing is checked.
    """
    if sys.platform == "win32":
        return
    import resource

    open_files, max_open_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    is_enough = open_files == resource.RLIM_INFINITY or open_files >= _MIN_OPEN_FILES
    advised = max_open_files if max_open_files > 0 else 65535  # a hard limit of -1 means unlimited
    hint = f"ulimit -n {advised} before the launch: tensors of loading workers and connections take one each"
    yield make_finding(is_enough, f"{_format_limit(open_files)} open files", hint)
    process_limits = [resource.getrlimit(resource.RLIMIT_NPROC)[0]]
    pids_max = _read_text(root / "sys/fs/cgroup/pids.max")
    process_limits += [int(pids_max)] if pids_max.isdecimal() else []
    process_limit = min((limit for limit in process_limits if limit >= 0), default=-1)  # -1: unlimited
    hint = "raise ulimit -u, or the container's pids limit: every thread counts, and a rank has dozens"
    yield make_finding(
        not 0 <= process_limit < _MIN_PROCESSES, f"{_format_limit(process_limit)} processes and threads", hint
    )
    locked_memory = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    if (root / "sys/class/infiniband").exists() and locked_memory != resource.RLIM_INFINITY:
        hint = "ulimit -l unlimited, or NCCL cannot register memory with the adapter"
        yield Finding("bad", f"InfiniBand, but only {format_bytes(locked_memory)} may be locked", hint)


def check_space(root: Path = Path("/")) -> Iterator[Finding]:
    """Yield findings on the size of shared memory and the free space of the temporary folder.

    Data loading workers pass batches through shared memory.
    """
    shared_memory = root / "dev/shm"
    if shared_memory.exists():
        shared_bytes = shutil.disk_usage(shared_memory).total
        hint = "start the container with --shm-size=8g (or mount an emptyDir with medium Memory), or loading workers die of SIGBUS"
        yield make_finding(
            shared_bytes >= _MIN_SHARED_MEMORY, f"{format_bytes(shared_bytes)} of shared memory (/dev/shm)", hint
        )
    folder = tempfile.gettempdir()
    free_bytes = shutil.disk_usage(folder).free
    is_good = free_bytes >= _MIN_FREE_DISK_SPACE and os.access(folder, os.W_OK)
    hint = "clean it up, or set TMPDIR to a folder with free space"
    yield make_finding(is_good, f"{format_bytes(free_bytes)} free in {folder}", hint, "bad")


def _format_limit(limit: int) -> str:
    return "any number of" if limit < 0 else f"{limit:,}"


def _read_text(path: Path) -> str:
    """Return the content of a file without surrounding white space. Empty if it cannot be read."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""
