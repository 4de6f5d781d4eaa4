"""Test what `headway doctor` reports about one machine, with faked files, real sockets and real interfaces."""

import socket

import pytest

from headway.cli import machine_checks
from headway.cli.machine_checks import CheckedRun
from headway.core.runtime import network


def get_levels_and_texts(findings):
    return [(finding.level, finding.description) for finding in findings]


def test_healthy_machine_has_no_bad_findings():
    findings = list(machine_checks.examine_machine({}, CheckedRun()))
    assert [finding.format_text() for finding in findings if finding.level == "bad"] == []
    assert findings[0].description.startswith("headway ")


def test_gpu_driver_with_a_cpu_build_of_torch_is_bad(tmp_path, monkeypatch):
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/nvidiactl").touch()
    monkeypatch.setattr(machine_checks.machine, "_read_torch_build", lambda: "cpu")
    (finding,) = machine_checks.check_devices({}, tmp_path)
    assert finding.level == "bad"
    assert "install the build of torch" in finding.hint


def test_cards_whose_direct_transfers_fail_are_noted(tmp_path, monkeypatch):
    (tmp_path / "dev").mkdir()
    for name in ("nvidiactl", "nvidia0", "nvidia1"):
        (tmp_path / "dev" / name).touch()
    gpu = tmp_path / "proc/driver/nvidia/gpus/0000:01:00.0"
    gpu.mkdir(parents=True)
    (gpu / "information").write_text("Model: \t\t NVIDIA GeForce RTX 4090\nIRQ:   \t\t 92\n")
    (gpu.parents[1] / "version").write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.54.03  Tue Jun  6\n")
    monkeypatch.setattr(machine_checks.machine, "_read_torch_build", lambda: "cu130")
    _, finding = machine_checks.check_devices({"NCCL_IB_DISABLE": "1"}, tmp_path)
    assert finding.level == "note"
    assert finding.description == (
        "direct transfers between GPUs fail on NVIDIA GeForce RTX 4090 with driver 535.54.03"
    )
    assert "`headway launch`, which sets NCCL_P2P_DISABLE=1;" in finding.hint
    assert len(list(machine_checks.check_devices({"CUDA_VISIBLE_DEVICES": "0"}, tmp_path))) == 1


def test_more_threads_than_cores_is_noted(tmp_path):
    assert get_levels_and_texts(machine_checks.check_devices({"OMP_NUM_THREADS": "4096"}, tmp_path))[1][0] == "note"


def test_missing_network_interface_is_bad():
    (finding, *_) = machine_checks.check_interfaces({"GLOO_SOCKET_IFNAME": "ib77"}, CheckedRun())
    assert finding.level == "bad"
    assert finding.description == "GLOO_SOCKET_IFNAME=ib77: no interface ib77 is up here"
    assert "lo 127.0.0.1" in finding.hint


def test_occupied_port_is_bad_and_ephemeral_port_is_noted():
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        texts = get_levels_and_texts(machine_checks.check_ports(CheckedRun(2, 0, "127.0.0.1", port)))
    assert ("bad", f"port {port} cannot be taken: Address already in use") in texts
    assert ("note", f"port {port} is one of those") in texts


def test_small_range_of_ephemeral_ports_is_bad(tmp_path):
    folder = tmp_path / "proc/sys/net/ipv4"
    folder.mkdir(parents=True)
    (folder / "ip_local_port_range").write_text("40000\t40100\n")
    assert get_levels_and_texts(machine_checks.check_ports(CheckedRun(), tmp_path)) == [
        ("bad", "the system assigns ports 40000 to 40100")
    ]


def test_process_limit_of_a_container_is_noted(tmp_path):
    (tmp_path / "sys/fs/cgroup").mkdir(parents=True)
    (tmp_path / "sys/fs/cgroup/pids.max").write_text("100\n")
    assert ("note", "100 processes and threads") in get_levels_and_texts(machine_checks.check_limits(tmp_path))


def test_unresolvable_or_loopback_name_of_machine_0_is_bad():
    findings = get_levels_and_texts(machine_checks.check_names(CheckedRun(2, 1, "no-such-host.invalid", 1)))
    assert ("bad", "machine 0 is no-such-host.invalid, which this machine cannot resolve") in findings
    findings = get_levels_and_texts(machine_checks.check_names(CheckedRun(2, 1, "localhost", 1)))
    assert ("bad", "machine 0 is localhost, which is this machine's own loopback address here") in findings


@pytest.mark.parametrize(("host", "is_trap"), [("localhost", True), ("127.0.1.1", True), ("192.0.2.9", False)])
def test_loopback_names_are_recognized(host, is_trap):
    assert network.is_loopback_name(host) == is_trap


def test_unresolvable_name_is_reported_and_then_raises():
    said = []
    with pytest.raises(ConnectionError, match="cannot be resolved on"):
        network.wait_for_name("no-such-host.invalid", 0.0, said.append)
