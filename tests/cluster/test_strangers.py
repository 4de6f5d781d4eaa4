"""Attacks on a run: by another user of the same machine, and by a scanner on the network of two machines."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from tests.cluster.hosts import Host, find_obstacle, network

SLACK = 90
"""Timeout in seconds. It only detects hangs, so it is long enough for a busy machine."""

SECRET = "0123456789abcdef0123456789abcdef"

PROGRAM = """
import os, time
import torch, torch.distributed as dist
from headway import Accelerator
from headway.core.runtime.control_plane import control
accelerator = Accelerator(cpu=True)
plane, rank, size = control.current(), accelerator.process_index, accelerator.num_processes
update, is_over = 0, False
while not is_over:
    update += 1
    number = torch.tensor([float(rank + update)])
    dist.all_reduce(number)
    assert number.item() == size * update + sum(range(size))
    assert plane.vote([rank + update], "sum") == [size * update + sum(range(size))]
    is_over = plane.vote([os.path.exists("scanned")], "any") == [1.0]
    if update == 1:
        os.write(1, f"rank {rank} has begun\\n".encode())
    time.sleep(0.02)
os.write(1, f"rank {rank} is unharmed\\n".encode())
accelerator.end_training()
"""

STRANGER = '''
import contextlib, json, os, socket, sys, threading, time
from datetime import timedelta
from torch.distributed import TCPStore
socket.getaddrinfo("127.0.0.1", 1)  # imports modules that the user nobody may not read
os.setgroups([]); os.setgid(65534); os.setuid(65534)
reached, read, written = [], [], []

def stores(host, port):
    """Use the protocol of torch's stores: read the keys, and write values that would end the run."""
    store = TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=1))
    keys = store.list_keys()
    read.extend(keys)
    for prefix in {key.rpartition("/here/")[0] for key in keys if "/here/" in key}:
        for name, text in (("notice", "\\x1b[31mended by a stranger"), ("failed", ""), ("deaths/0", "{}"), ("deaths/1", "{}")):
            store.set(f"{prefix}/{name}", text)
            written.append(name)

def lines(host, port):
    """Attack like a scanner, and with forged lines of the launchers' protocol."""
    forged = [json.dumps(each).encode() + b"\\n" for each in (
        {"lost": "machine 1 is \\x1b[31mgone", "exit_code": 0},
        {"hello": {"machine": 1, "host": "h", "address": "a", "ranks": [1]}},
        {"leaving": True, "why": "a stranger says so", "exit_code": 0},
        {"given_up": "you"},
    )]
    word = b"0" * 32 + b"\\n"
    said = [b"GET / HTTP/1.0\\r\\n\\r\\n", os.urandom(1 << 20), b"x" * (1 << 22), b"\\n" * 1000, b"[" * 100_000 + b"\\n",
            *forged, *(word + line for line in forged), *(word + b"0" * 32 + line for line in forged)]
    for text in said:
        with socket.create_connection((host, port), timeout=0.2) as connection, contextlib.suppress(OSError):
            connection.sendall(text)
            connection.recv(4096)

slow = []
for where in sys.argv[1:]:
    host, _, port = where.rpartition(":")
    try:
        slow += [socket.create_connection((host, int(port)), timeout=3) for _ in range(20)]  # send nothing or too little
    except OSError:
        continue
    reached.append(where)
    slow[-1].sendall(b"G")
    with contextlib.suppress(Exception):
        lines(host, int(port))
    # In a thread, because torch's client waits forever if the port belongs to another program.
    threading.Thread(target=stores, args=(host, int(port)), daemon=True).start()
time.sleep(3)
print(json.dumps({"reached": reached, "read": read, "written": written}), flush=True)
os._exit(0)
'''


@pytest.fixture(scope="module")
def hosts() -> Iterator[Sequence[Host]]:
    reason = find_obstacle()
    if reason:
        pytest.skip(reason)
    with network(3) as made:
        yield made


@pytest.fixture(autouse=True)
def set_up_and_clean_hosts(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[None]:
    """Write the scripts of each test, and kill all processes on the hosts after it."""
    (tmp_path / "train.py").write_text(PROGRAM)
    (tmp_path / "stranger.py").write_text(STRANGER)
    yield
    for host in request.getfixturevalue("hosts"):
        host.send(signal.SIGKILL)
        host.wait_for_processes()


def wait_for(condition: Callable[[], object], what: Callable[[], object]) -> None:
    deadline = time.monotonic() + SLACK
    while not condition():
        assert time.monotonic() < deadline, what()
        time.sleep(0.05)


def read_output(folder: Path, host: Host) -> str:
    return (folder / f"{host.name}.txt").read_text()


def list_ports(host: Host) -> list[int]:
    """Return the TCP ports on which programs of this host listen."""
    command = ["ip", "netns", "exec", host.namespace, "ss", "-ltnH"]
    lines = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.splitlines()
    return sorted({int(line.split()[3].rpartition(":")[2]) for line in lines})


def attack(folder: Path, host: Host, targets: Sequence[str]) -> dict[str, list[str]]:
    """Run the attack script on `host` as user nobody, and return which addresses it reached and which keys it read and wrote."""
    out = folder / "stranger.json"
    # Not through `Host.start`, because its output file belongs to the run.
    command = f"{sys.executable} stranger.py {' '.join(targets)} > {out} 2> stranger.err"
    inside = subprocess.run(
        ["ip", "netns", "exec", host.namespace, "sh", "-c", command], cwd=folder, timeout=SLACK, check=False
    )
    assert inside.returncode == 0, (folder / "stranger.err").read_text()
    return json.loads(out.read_text())


def start_run(folder: Path, hosts: Sequence[Host], *flags: str, **more: str) -> list[subprocess.Popen[str]]:
    """Start a run with two ranks on one or two hosts, and wait until both ranks have started."""
    where = f"--num_machines 2 --main_process_ip {hosts[0].address} --main_process_port 29400 --machine_timeout 600"
    where = where if len(hosts) > 1 else ""
    line = " ".join(["exec headway launch -q -n 2 --cpu", where, *flags])
    started = [
        host.start(f"{line} {f'--machine_rank {rank}' if where else ''} train.py", folder, **more)
        for rank, host in enumerate(hosts)
    ]
    wait_for(
        lambda: sum(read_output(folder, host).count("has begun") for host in hosts) == 2,
        lambda: [read_output(folder, host) for host in hosts],
    )
    return started


def finish_run(folder: Path, hosts: Sequence[Host], started: Sequence[subprocess.Popen[str]]) -> list[str]:
    """Let the run finish, check that it was not affected by the attack, and return each host's output."""
    (folder / "scanned").touch()
    codes = [process.wait(SLACK) for process in started]
    texts = [read_output(folder, host) for host in hosts]
    assert codes == [0] * len(hosts), texts
    assert sum(text.count("is unharmed") for text in texts) == 2, texts
    assert not any("\x1b" in text or "ended by a stranger" in text for text in texts), texts
    return texts


def test_other_user_cannot_connect_through_the_machines_address(hosts: Sequence[Host], tmp_path: Path) -> None:
    started = start_run(tmp_path, hosts[:1])
    found = list_ports(hosts[0])
    assert len(found) >= 3  # two stores and gloo
    got = attack(tmp_path, hosts[0], [f"{hosts[0].address}:{port}" for port in found])
    assert got == {"reached": [], "read": [], "written": []}
    assert attack(tmp_path, hosts[2], [f"{hosts[0].address}:{port}" for port in found])["reached"] == []
    assert "was not sent by a process of this run" not in finish_run(tmp_path, hosts[:1], started)[0]


def test_values_that_another_user_writes_through_loopback_are_ignored(hosts: Sequence[Host], tmp_path: Path) -> None:
    started = start_run(tmp_path, hosts[:1])
    got = attack(tmp_path, hosts[0], [f"127.0.0.1:{port}" for port in list_ports(hosts[0])])
    assert (
        "notice" in got["written"]
    )  # every user of a machine can reach loopback ports, and torch's store has no authentication
    text = finish_run(tmp_path, hosts[:1], started)[0]
    assert (
        text.count(
            "of another program or with another HEADWAY_SECRET, was not sent by a process of this run, so it is dropped"
        )
        == 1
    )


@pytest.mark.parametrize("secret", [SECRET, ""], ids=["with a secret", "without one"])
@pytest.mark.parametrize("backend", ["static", "c10d"])
def test_scanner_does_not_affect_a_run_on_two_machines(
    hosts: Sequence[Host], tmp_path: Path, backend: str, secret: str
) -> None:
    started = start_run(tmp_path, hosts[:2], f"--rdzv_backend {backend}", HEADWAY_SECRET=secret)
    found = [f"{host.address}:{port}" for host in hosts[:2] for port in list_ports(host)]
    got = attack(tmp_path, hosts[2], found)
    assert f"{hosts[0].address}:29400" in got["reached"]
    assert "notice" in got["written"]
    texts = finish_run(tmp_path, hosts[:2], started)
    assert texts[0].count("was not sent by a process of this run, so it is dropped") == 1
    assert "lines, values and connections of others were dropped in all" in texts[0]


def test_dead_machine_is_still_reported_while_a_scanner_interferes(hosts: Sequence[Host], tmp_path: Path) -> None:
    started = start_run(tmp_path, hosts[:2], HEADWAY_SECRET=SECRET)
    attack(tmp_path, hosts[2], [f"{host.address}:{port}" for host in hosts[:2] for port in list_ports(host)])
    hosts[1].send(signal.SIGKILL)
    assert started[0].wait(SLACK) == 1
    text = read_output(tmp_path, hosts[0])
    assert "machine 1 (host host-b, 10.77.0.2) is gone: its launcher ended without a message" in text
    assert "\x1b" not in text


PICKLE = """
import base64, os, pickle, sys
from datetime import timedelta
from torch.distributed import TCPStore
class Evil:
    def __reduce__(self):
        return os.mkdir, (sys.argv[2],)
store = TCPStore(sys.argv[1], 29400, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=10))
store.set("torch.rendezvous.headway", base64.b64encode(pickle.dumps(Evil())))
"""


def test_torchs_rendezvous_unpickles_nothing_from_strangers(hosts: Sequence[Host], tmp_path: Path) -> None:
    (tmp_path / "stranger.py").write_text(PICKLE)
    started = start_run(tmp_path, hosts[:2], "--rdzv_backend c10d --max_restarts 1", HEADWAY_SECRET=SECRET)
    made = tmp_path / "made_by_a_stranger"
    stranger = hosts[2].start(f"python stranger.py {hosts[0].address} {made}", tmp_path)
    assert stranger.wait(SLACK) == 0, read_output(tmp_path, hosts[2])
    # The attack overwrites torch's rendezvous state permanently, so the run cannot continue. It must explain why.
    codes = [process.wait(SLACK) for process in started]
    assert 0 not in codes
    assert not made.exists()
    assert any(
        "the state of the meeting was not written by this run" in read_output(tmp_path, host) for host in hosts[:2]
    )


@pytest.mark.parametrize("backend", ["static", "c10d"])
def test_machines_with_different_secrets_do_not_connect(hosts: Sequence[Host], tmp_path: Path, backend: str) -> None:
    where = f"--num_machines 2 --main_process_ip {hosts[0].address} --main_process_port 29400"
    where += f" --timeout 15 --rdzv_backend {backend}"
    started = [
        host.start(
            f"exec headway launch -q -n 2 --cpu {where} --machine_rank {rank} train.py",
            tmp_path, HEADWAY_SECRET=SECRET + str(rank),
        )
        for rank, host in enumerate(hosts[:2])
    ]  # fmt: skip
    assert [process.wait(SLACK) for process in started] == [1, 1]
    for host in hosts[:2]:
        assert "HEADWAY_SECRET" in read_output(tmp_path, host)
        assert SECRET not in read_output(tmp_path, host)
