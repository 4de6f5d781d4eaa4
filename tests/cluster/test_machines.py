"""Runs on two and three simulated machines: the printed launch commands, broken links, paused machines, and killed ranks."""

import json
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.cluster.hosts import Host, find_obstacle, network

TIMEOUT = 4
"""Seconds without a sign of life after which a machine counts as lost."""

SLACK = 60
"""Timeout in seconds. It only detects hangs, so it is long enough for a busy machine."""

PROGRAM = """
import json, os, socket, time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
rank, num_updates = dist.get_rank(), int(os.environ["NUM_UPDATES"])
for update in range(num_updates):
    total = torch.tensor([float(rank)])
    dist.all_reduce(total)
    if update == 0:
        told = {"rank": rank, "world": dist.get_world_size(), "host": socket.gethostname(), "total": total.item()}
        os.write(1, (json.dumps(told) + "\\n").encode())
    if rank == 0 and num_updates == 7:
        time.sleep(3600)  # outside of collectives, so gloo cannot report that the other rank is gone
    if num_updates == 7:
        raise OSError("the disk of this machine is full")
    time.sleep(0.1)
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def hosts() -> Iterator[Sequence[Host]]:
    reason = find_obstacle()
    if reason:
        pytest.skip(reason)
    with network(3) as made:
        yield made


@pytest.fixture(autouse=True)
def clean_up_hosts(request: pytest.FixtureRequest) -> Iterator[None]:
    """Kill all processes and reconnect all links after each test."""
    yield
    for host in request.getfixturevalue("hosts"):
        host.send(signal.SIGKILL)
        host.wait_for_processes()
        host.set_link("up")


class Run:
    """A run on several hosts, started with the commands that the first host's launcher prints."""

    def __init__(self, hosts: Sequence[Host], folder: Path, num_updates: int, *flags: str) -> None:
        self.hosts, self.folder = hosts, folder
        (folder / "train.py").write_text(PROGRAM)
        words = f"headway launch -n {len(hosts)} --cpu --num_machines {len(hosts)} --machine_timeout {TIMEOUT}"
        asked = hosts[0].start(" ".join([words, *flags, "train.py"]), folder)
        assert asked.wait(SLACK) == 2
        lines = self.read_output(hosts[0]).splitlines()
        self.commands = [line for line in lines if line.startswith("headway launch")]
        (secret,) = [line for line in lines if line.startswith("export HEADWAY_SECRET=")]
        assert len(self.commands) == len(hosts)
        self.processes = [
            host.start(f"{secret}; exec {command}", folder, NUM_UPDATES=str(num_updates))
            for host, command in zip(hosts, self.commands)
        ]

    def read_output(self, host: Host) -> str:
        return (self.folder / f"{host.name}.txt").read_text()

    def read_records(self, host: Host) -> list[dict]:
        return [json.loads(line) for line in self.read_output(host).splitlines() if line.startswith("{")]

    def wait_for_the_first_update(self) -> None:
        deadline = time.monotonic() + SLACK
        while not all(self.read_records(host) for host in self.hosts):
            assert time.monotonic() < deadline, [self.read_output(host) for host in self.hosts]
            assert all(process.poll() is None for process in self.processes), [
                self.read_output(host) for host in self.hosts
            ]
            time.sleep(0.05)

    def wait_for_exit(self, index: int, seconds: float = SLACK) -> int:
        """Return the exit code of a host's launcher, and check that no process of the run remains on this host."""
        try:
            code = self.processes[index].wait(seconds)
        except subprocess.TimeoutExpired:
            pytest.fail(f"{self.hosts[index].name} does not end: {self.read_output(self.hosts[index])}")
        assert self.hosts[index].wait_for_processes() == []
        return code


def test_two_machines_connect_although_their_own_names_are_loopback(hosts: Sequence[Host], tmp_path: Path) -> None:
    run = Run(hosts[:2], tmp_path, 2)
    assert f"--main_process_ip {hosts[0].address} " in run.commands[1]
    assert [run.wait_for_exit(0), run.wait_for_exit(1)] == [0, 0], [run.read_output(host) for host in run.hosts]
    assert run.read_records(hosts[0]) == [{"rank": 0, "world": 2, "host": "host-a", "total": 1.0}]
    assert run.read_records(hosts[1]) == [{"rank": 1, "world": 2, "host": "host-b", "total": 1.0}]


def test_broken_link_is_reported_on_both_sides(hosts: Sequence[Host], tmp_path: Path) -> None:
    run = Run(hosts, tmp_path, 5000)
    run.wait_for_the_first_update()
    assert [entry["total"] for host in hosts for entry in run.read_records(host)] == [3.0, 3.0, 3.0]
    hosts[2].set_link("down")
    began = time.monotonic()
    assert [run.wait_for_exit(0), run.wait_for_exit(1), run.wait_for_exit(2)] == [1, 1, 1]
    # torch's own timeout, which would end it otherwise, is 30 minutes.
    assert time.monotonic() - began < SLACK
    for host in hosts[:2]:
        output = run.read_output(host)
        assert "headway: machine 2 (host host-c, 10.77.0.3) has sent no heartbeat for " in output
        assert "; rank 2 was on it" in output
    assert "headway: machine 0 (host host-a, 10.77.0.1) has sent no heartbeat for " in run.read_output(hosts[2])
    assert "headway: machine 2 has ended its processes" in run.read_output(hosts[2])


def test_paused_machine_is_reported_and_exits_when_it_continues(hosts: Sequence[Host], tmp_path: Path) -> None:
    run = Run(hosts[:2], tmp_path, 5000)
    run.wait_for_the_first_update()
    hosts[1].send(signal.SIGSTOP)
    assert run.wait_for_exit(0) == 1
    assert "headway: machine 1 (host host-b, 10.77.0.2) has sent no heartbeat for " in run.read_output(hosts[0])
    hosts[1].send(signal.SIGCONT)
    assert run.wait_for_exit(1) == 1
    assert "headway: the other machines went on without this one: machine 1 " in run.read_output(hosts[1])


def test_dead_machine_is_reported_at_once(hosts: Sequence[Host], tmp_path: Path) -> None:
    run = Run(hosts[:2], tmp_path, 5000, "--machine_timeout", "600")
    run.wait_for_the_first_update()
    hosts[0].send(signal.SIGKILL)
    assert run.wait_for_exit(1) == 1
    output = run.read_output(hosts[1])
    assert "headway: machine 0 (host host-a, 10.77.0.1) is gone: its launcher ended without a message" in output
    assert output.count("Traceback") == 0


def test_failed_rank_ends_the_run_on_all_machines_with_one_exit_code(hosts: Sequence[Host], tmp_path: Path) -> None:
    run = Run(hosts[:2], tmp_path, 7, "--log_dir", "logs")
    assert [run.wait_for_exit(0), run.wait_for_exit(1)] == [1, 1]
    for host in run.hosts:
        output = run.read_output(host)
        assert "headway: rank 1 of 2 failed first, at train.py:" in output
        assert "(host host-b, pid " in output
        assert output.count("\nOSError: the disk of this machine is full") == 1


def test_missing_machine_is_reported_on_the_machines_that_wait(hosts: Sequence[Host], tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PROGRAM)
    where = f"--num_machines 3 --main_process_ip {hosts[0].address} --main_process_port 29400"
    command = f"exec headway launch -q -n 3 --cpu {where} --timeout 12 --machine_rank"
    second = hosts[1].start(f"{command} 1 train.py", tmp_path)
    deadline = time.monotonic() + SLACK
    while "waits for machine 0" not in (tmp_path / "host-b.txt").read_text():
        assert time.monotonic() < deadline
        assert second.poll() is None
        time.sleep(0.05)
    first = hosts[0].start(f"{command} 0 train.py", tmp_path)
    assert [first.wait(SLACK), second.wait(SLACK)] == [1, 1]
    said = [(tmp_path / f"{host.name}.txt").read_text().splitlines() for host in hosts[:2]]
    assert said[0][0].startswith("headway: machine 0 of 3 waits at 10.77.0.1:29400 for machine")
    assert "10.77.0.1:29400: machine 2 did not come within 12 s (--timeout" in said[0][-1]
    assert said[1][0].startswith(
        "headway: machine 1 of 3 waits for machine 0 to open 10.77.0.1:29400 (connection refused so far)"
    )
    assert all(line.startswith("headway: ") for lines in said for line in lines), said
