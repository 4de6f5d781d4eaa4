"""Simulate several hosts on one machine: network namespaces connected by a bridge, each with its own name, address and
/etc/hosts.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil


def find_obstacle() -> str:
    """Return why network namespaces cannot be created here, or an empty string if they can."""
    if not hasattr(os, "geteuid") or os.geteuid() != 0:
        return "making network namespaces needs root"
    if shutil.which("ip") is None or shutil.which("unshare") is None:
        return "the commands ip (iproute2) and unshare are not installed"
    name = f"hw{os.getpid()}probe"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if made.returncode:
        return f"this system allows no network namespaces: {made.stderr.strip()}"
    _run_ip("netns", "delete", name)
    return ""


def _run_ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True, timeout=30)


class Host:
    """A simulated host with its own network namespace, name and address.

    Attributes:
        name: Host name. This host's /etc/hosts maps it to 127.0.1.1, like Debian's installer does.
        address: IP address on the network that all hosts share.
    """

    def __init__(self, index: int, switch: str) -> None:
        self.name = f"host-{'abcd'[index]}"
        self.address = f"10.77.0.{index + 1}"
        self.namespace = f"hw{os.getpid()}{'abcd'[index]}"
        self._switch, self._port = switch, f"port{index}"
        self._etc = Path("/etc/netns") / self.namespace

    def build(self, names: dict[str, str]) -> None:
        _run_ip("netns", "add", self.namespace)
        wire = ("link", "add", self._port, "type", "veth", "peer", "name", "eth0", "netns", self.namespace)
        _run_ip("-n", self._switch, *wire)
        _run_ip("-n", self._switch, "link", "set", self._port, "master", "switch", "up")
        _run_ip("-n", self.namespace, "address", "add", f"{self.address}/24", "dev", "eth0")
        _run_ip("-n", self.namespace, "link", "set", "eth0", "up")
        _run_ip("-n", self.namespace, "link", "set", "lo", "up")
        self._etc.mkdir(parents=True)
        others = [f"{address} {name}" for name, address in names.items() if name != self.name]
        (self._etc / "hosts").write_text("\n".join(["127.0.0.1 localhost", f"127.0.1.1 {self.name}", *others, ""]))
        (self._etc / "resolv.conf").write_text("# no name server\n")

    def start(self, command: str, folder: Path, **more: str) -> subprocess.Popen[str]:
        """Start a shell command on this host and write its output to `folder/<host name>.txt`."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("HEADWAY_", "OMP_", "GLOO_"))}
        path = f"{Path(sys.executable).parent}:{kept.get('PATH', '')}"
        inside = 'hostname "$0" && exec sh -c "$1"'
        with open(folder / f"{self.name}.txt", "w") as output:
            return subprocess.Popen(
                ["ip", "netns", "exec", self.namespace, "unshare", "--uts", "sh", "-c", inside, self.name, command],
                cwd=folder, stdout=output, stderr=subprocess.STDOUT, text=True, start_new_session=True,
                env={**kept, "HEADWAY_HOME": str(folder), "PATH": path, **more},
            )  # fmt: skip

    def list_pids(self) -> list[int]:
        """Return the IDs of all processes on this host."""
        result = subprocess.run(["ip", "netns", "pids", self.namespace], capture_output=True, text=True, timeout=30)
        return [int(pid) for pid in result.stdout.split()]

    def send(self, number: signal.Signals) -> None:
        """Send a signal to every process on this host, like a power failure or a paused virtual machine."""
        for pid in self.list_pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def set_link(self, state: str) -> None:
        """Disconnect this host's network cable ("down") or reconnect it ("up") at the bridge.

        The host's own network interface stays up.
        """
        _run_ip("-n", self._switch, "link", "set", self._port, state)

    def wait_for_processes(self, seconds: float = 10) -> list[str]:
        """Wait up to `seconds` for all processes on this host to end; return the command lines of those that remain."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and self.list_pids():
            time.sleep(0.1)
        left = set(self.list_pids())
        return [" ".join(one.info["cmdline"] or ()) for one in psutil.process_iter(["cmdline"]) if one.pid in left]

    def destroy(self) -> None:
        """Kill all processes on this host and delete its namespace."""
        self.send(signal.SIGKILL)
        self.wait_for_processes(5)
        subprocess.run(["ip", "netns", "delete", self.namespace], capture_output=True, timeout=30)
        shutil.rmtree(self._etc, ignore_errors=True)


@contextlib.contextmanager
def network(num_hosts: int) -> Iterator[Sequence[Host]]:
    """Create `num_hosts` hosts on one network, and delete them when the context exits, even after an error."""
    switch = f"hw{os.getpid()}switch"
    hosts = [Host(index, switch) for index in range(num_hosts)]
    try:
        _run_ip("netns", "add", switch)
        _run_ip("-n", switch, "link", "add", "switch", "type", "bridge")
        _run_ip("-n", switch, "link", "set", "switch", "up")
        for host in hosts:
            host.build({other.name: other.address for other in hosts})
        yield hosts
    finally:
        for host in hosts:
            host.destroy()
        subprocess.run(["ip", "netns", "delete", switch], capture_output=True, timeout=30)
