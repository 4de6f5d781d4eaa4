"""Runs beside others who mean harm: another user of the machine, and a scanner on the network of two machines."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from tests.cluster.hosts import Host, network, why_not

SLACK = 90
"""What a loaded machine may add before a test gives up: a bound for a hang, not a measure."""

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
socket.getaddrinfo("127.0.0.1", 1)  # imports what nobody may not read
os.setgroups([]); os.setgid(65534); os.setuid(65534)
reached, read, written = [], [], []

def stores(host, port):
    """As somebody who speaks the protocol of torch's stores: reads the keys, and writes what would end the run."""
    store = TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=1))
    keys = store.list_keys()
    read.extend(keys)
    for prefix in {key.rpartition("/here/")[0] for key in keys if "/here/" in key}:
        for name, text in (("notice", "\\x1b[31mended by a stranger"), ("failed", ""), ("deaths/0", "{}"), ("deaths/1", "{}")):
            store.set(f"{prefix}/{name}", text)
            written.append(name)

def lines(host, port):
    """As a scanner, and as somebody who knows the lines of the launchers."""
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
        slow += [socket.create_connection((host, int(port)), timeout=3) for _ in range(20)]  # that say nothing, or too little
    except OSError:
        continue
    reached.append(where)
    slow[-1].sendall(b"G")
    with contextlib.suppress(Exception):
        lines(host, int(port))
    # On a thread, as torch's client waits for ever where something else listens.
    threading.Thread(target=stores, args=(host, int(port)), daemon=True).start()
time.sleep(3)
print(json.dumps({"reached": reached, "read": read, "written": written}), flush=True)
os._exit(0)
'''


@pytest.fixture(scope="module")
def hosts() -> Iterator[Sequence[Host]]:
    reason = why_not()
    if reason:
        pytest.skip(reason)
    with network(3) as made:
        yield made


@pytest.fixture(autouse=True)
def nothing_is_left(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[None]:
    """Each test begins on whole, empty hosts."""
    (tmp_path / "train.py").write_text(PROGRAM)
    (tmp_path / "stranger.py").write_text(STRANGER)
    yield
    for host in request.getfixturevalue("hosts"):
        host.send(signal.SIGKILL)
        host.orphans()


def wait_for(condition: Callable[[], object], what: Callable[[], object]) -> None:
    deadline = time.monotonic() + SLACK
    while not condition():
        assert time.monotonic() < deadline, what()
        time.sleep(0.05)


def said(folder: Path, host: Host) -> str:
    return (folder / f"{host.name}.txt").read_text()


def ports(host: Host) -> list[int]:
    """Where programs of this host listen."""
    command = ["ip", "netns", "exec", host.namespace, "ss", "-ltnH"]
    lines = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.splitlines()
    return sorted({int(line.split()[3].rpartition(":")[2]) for line in lines})


def meddle(folder: Path, host: Host, targets: Sequence[str]) -> dict[str, list[str]]:
    """What a stranger on this host gets at these addresses and ports, as the user nobody."""
    out = folder / "stranger.json"
    # Not by `start`, whose output belongs to the run.
    command = f"{sys.executable} stranger.py {' '.join(targets)} > {out} 2> stranger.err"
    inside = subprocess.run(
        ["ip", "netns", "exec", host.namespace, "sh", "-c", command], cwd=folder, timeout=SLACK, check=False
    )
    assert inside.returncode == 0, (folder / "stranger.err").read_text()
    return json.loads(out.read_text())


def begin(folder: Path, hosts: Sequence[Host], *flags: str, **more: str) -> list[subprocess.Popen[str]]:
    """A run with two ranks on one or two hosts, once it is under way."""
    where = f"--num_machines 2 --main_process_ip {hosts[0].address} --main_process_port 29400 --machine_timeout 600"
    where = where if len(hosts) > 1 else ""
    line = " ".join(["exec headway launch -q -n 2 --cpu", where, *flags])
    started = [
        host.start(f"{line} {f'--machine_rank {rank}' if where else ''} train.py", folder, **more)
        for rank, host in enumerate(hosts)
    ]
    wait_for(
        lambda: sum(said(folder, host).count("has begun") for host in hosts) == 2,
        lambda: [said(folder, host) for host in hosts],
    )
    return started


def end(folder: Path, hosts: Sequence[Host], started: Sequence[subprocess.Popen[str]]) -> list[str]:
    """Let the run end; what each host has said, of a run that was not harmed."""
    (folder / "scanned").touch()
    codes = [process.wait(SLACK) for process in started]
    texts = [said(folder, host) for host in hosts]
    assert codes == [0] * len(hosts), texts
    assert sum(text.count("is unharmed") for text in texts) == 2, texts
    assert not any("\x1b" in text or "ended by a stranger" in text for text in texts), texts
    return texts


def test_another_user_gets_nothing_through_the_machines_address(hosts: Sequence[Host], tmp_path: Path) -> None:
    started = begin(tmp_path, hosts[:1])
    found = ports(hosts[0])
    assert len(found) >= 3  # both stores, and gloo
    got = meddle(tmp_path, hosts[0], [f"{hosts[0].address}:{port}" for port in found])
    assert got == {"reached": [], "read": [], "written": []}
    assert meddle(tmp_path, hosts[2], [f"{hosts[0].address}:{port}" for port in found])["reached"] == []
    assert "was not sent by a process of this run" not in end(tmp_path, hosts[:1], started)[0]


def test_what_another_user_writes_through_loopback_counts_as_nothing(hosts: Sequence[Host], tmp_path: Path) -> None:
    started = begin(tmp_path, hosts[:1])
    got = meddle(tmp_path, hosts[0], [f"127.0.0.1:{port}" for port in ports(hosts[0])])
    assert (
        "notice" in got["written"]
    )  # a port of loopback is everybody's on this machine, and torch's store asks nobody
    text = end(tmp_path, hosts[:1], started)[0]
    assert (
        text.count(
            "of another program or with another HEADWAY_SECRET, was not sent by a process of this run, so it is dropped"
        )
        == 1
    )


@pytest.mark.parametrize("secret", [SECRET, ""], ids=["with a secret", "without one"])
@pytest.mark.parametrize("backend", ["static", "c10d"])
def test_a_scanner_beside_two_machines(hosts: Sequence[Host], tmp_path: Path, backend: str, secret: str) -> None:
    started = begin(tmp_path, hosts[:2], f"--rdzv_backend {backend}", HEADWAY_SECRET=secret)
    found = [f"{host.address}:{port}" for host in hosts[:2] for port in ports(host)]
    got = meddle(tmp_path, hosts[2], found)
    assert f"{hosts[0].address}:29400" in got["reached"]
    assert "notice" in got["written"]
    texts = end(tmp_path, hosts[:2], started)
    assert texts[0].count("was not sent by a process of this run, so it is dropped") == 1
    assert "lines, values and connections of others were dropped in all" in texts[0]


def test_a_run_that_is_lost_beside_a_scanner_does_not_end_well(hosts: Sequence[Host], tmp_path: Path) -> None:
    started = begin(tmp_path, hosts[:2], HEADWAY_SECRET=SECRET)
    meddle(tmp_path, hosts[2], [f"{host.address}:{port}" for host in hosts[:2] for port in ports(host)])
    hosts[1].send(signal.SIGKILL)
    assert started[0].wait(SLACK) == 1
    text = said(tmp_path, hosts[0])
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


def test_torchs_meeting_unpickles_nothing_of_others(hosts: Sequence[Host], tmp_path: Path) -> None:
    (tmp_path / "stranger.py").write_text(PICKLE)
    started = begin(tmp_path, hosts[:2], "--rdzv_backend c10d --max_restarts 1", HEADWAY_SECRET=SECRET)
    made = tmp_path / "made_by_a_stranger"
    stranger = hosts[2].start(f"python stranger.py {hosts[0].address} {made}", tmp_path)
    assert stranger.wait(SLACK) == 0, said(tmp_path, hosts[2])
    # What torch keeps there is overwritten for good, so the run cannot go on; it says why.
    codes = [process.wait(SLACK) for process in started]
    assert 0 not in codes
    assert not made.exists()
    assert any("the state of the meeting was not written by this run" in said(tmp_path, host) for host in hosts[:2])


@pytest.mark.parametrize("backend", ["static", "c10d"])
def test_machines_with_different_secrets_do_not_meet(hosts: Sequence[Host], tmp_path: Path, backend: str) -> None:
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
        assert "HEADWAY_SECRET" in said(tmp_path, host)
        assert SECRET not in said(tmp_path, host)
