"""Test memory in use: figures of the host, limits of control groups, a stub of NVML, and the summary for notebooks."""

import subprocess
import sys
import types

import pytest
import torch

from headway import MemoryMonitor, all_memory_use, memory_use, print_gpu_utilization, print_summary
from headway.common import optional
from headway.core.memory import use
from headway.core.runtime.device import HARDWARE
from headway.errors import ConfigError, DeviceUnavailable

NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="tests the output on a machine without a GPU")


HOST = """
import subprocess, sys, torch
from headway import memory_use
child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
try:
    before = memory_use("cpu")
    block = torch.ones(64 << 20)  # 256 MiB
    after = memory_use("cpu")
finally:
    child.communicate(b"\\n")
assert after.used - before.used > 200 << 20, (before, after)
assert after.used <= after.peak, after
assert after.used <= after.reserved, after
assert after.used < after.occupied < after.total, after
assert after.free == after.total - after.occupied, after
assert set(after.processes) >= {__import__("os").getpid(), child.pid}, after
assert 0 <= after.utilization <= 1, after
assert after.utilisation == after.utilization, after
"""


@pytest.mark.slow
def test_use_of_the_host_is_that_of_this_process_and_its_children():
    # A new process, because memory of earlier tests can be freed at any moment.
    result = subprocess.run([sys.executable, "-c", HOST], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr


def test_every_device_is_listed():
    devices = [found.device for found in all_memory_use()]
    assert devices[0] == "cpu"
    assert len(devices) == 1 + (torch.cuda.device_count() if torch.cuda.is_available() else 0)


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/b/memory.max": "max", "sys/fs/cgroup/a/b/memory.current": "5",
          "sys/fs/cgroup/a/memory.max": "1000", "sys/fs/cgroup/a/memory.current": "70"}, (1000, 70)),
        ({"proc/self/cgroup": "0::/on/the/host\n", "sys/fs/cgroup/memory.max": "800", "sys/fs/cgroup/memory.current": "9"},
         (800, 9)),
        ({"proc/self/cgroup": "3:cpu:/x\n4:memory:/x\n", "sys/fs/cgroup/memory/x/memory.limit_in_bytes": "500",
          "sys/fs/cgroup/memory/x/memory.usage_in_bytes": "300"}, (500, 300)),
        ({"proc/self/cgroup": "4:memory:/x\n", "sys/fs/cgroup/memory/x/memory.limit_in_bytes": "9223372036854771712"},
         (None, 0)),
        ({}, (None, 0)),
    ],
)  # fmt: skip
def test_lowest_limit_of_the_control_groups_counts(tmp_path, files, expected):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert use.read_control_group(tmp_path) == expected


def test_limit_of_a_control_group_is_the_total(monkeypatch):
    monkeypatch.setattr(use, "read_control_group", lambda: (1 << 30, 1 << 20))
    found = memory_use("cpu")
    assert (found.total, found.occupied) == (1 << 30, 1 << 20)
    assert "control group" in found.source


class Refused(Exception):
    """Error of the stubbed NVML."""


def make_nvml(**changes):
    """Return a stub of pynvml with two GPUs of 24 GiB each, of which 3 and 5 GiB are in use."""
    sizes = [3 << 30, 5 << 30]
    library = types.ModuleType("pynvml")
    library.NVMLError = Refused
    library.closed = 0
    library.nvmlInit = lambda: None
    library.nvmlShutdown = lambda: setattr(library, "closed", library.closed + 1)
    library.nvmlDeviceGetCount = lambda: 2
    library.nvmlDeviceGetHandleByIndex = lambda index: index
    library.nvmlDeviceGetHandleByUUID = lambda name: ["GPU-aa", "GPU-bb"].index(name)
    library.nvmlDeviceGetMemoryInfo = lambda handle: types.SimpleNamespace(used=sizes[handle], total=24 << 30)
    library.nvmlDeviceGetUtilizationRates = lambda handle: types.SimpleNamespace(gpu=40)
    library.nvmlDeviceGetComputeRunningProcesses = lambda handle: [
        types.SimpleNamespace(pid=7, usedGpuMemory=2 << 30), types.SimpleNamespace(pid=8, usedGpuMemory=None),
    ]  # fmt: skip
    for name, function in changes.items():
        setattr(library, name, function)
    return library


@pytest.fixture
def nvml(monkeypatch):
    """Return a function that installs a stub of pynvml with changed functions."""

    def install(**changes):
        library = make_nvml(**changes)
        monkeypatch.setitem(sys.modules, "pynvml", library)
        monkeypatch.setattr(optional, "is_available", lambda name: True)
        return library

    return install


def raise_refused(*_):
    raise Refused


def test_notebook_summary_prints_time_speed_and_gpu_memory(nvml, capsys):
    library = nvml()
    result = types.SimpleNamespace(metrics={"train_runtime": 63.279, "train_samples_per_second": 8.091, "epoch": 1.0})
    print_summary(result)
    assert capsys.readouterr().out == "Time: 63.28\nSamples/second: 8.09\nGPU memory occupied: 8192 MB.\n"
    print_gpu_utilization()
    assert capsys.readouterr().out == "GPU memory occupied: 8192 MB.\n"
    assert library.closed == 2


@NO_GPU
@pytest.mark.parametrize("driver", ["missing", "package missing"])
def test_without_a_gpu_the_summary_shows_host_memory(nvml, monkeypatch, capsys, driver):
    nvml(nvmlInit=raise_refused)
    if driver == "package missing":
        monkeypatch.setattr(optional, "is_available", lambda name: False)
    print_summary({"train_runtime": 1, "train_samples_per_second": 2})
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["Time: 1.00", "Samples/second: 2.00"]
    assert lines[2].startswith("GPU memory occupied: none, there is no GPU here. Host memory of this process: ")
    assert lines[2].endswith(" MB.")


@NO_GPU
def test_missing_devices_are_errors():
    for ask in (memory_use, lambda device: MemoryMonitor(device).__enter__()):
        with pytest.raises(DeviceUnavailable, match="this machine has no cuda:0; it has cpu"):
            ask("cuda:0")
        with pytest.raises(ConfigError, match="device='gpu' is not a device"):
            ask("gpu")
        with pytest.raises(ConfigError, match=r"device='meta' is not measured; allowed: .*cpu"):
            ask("meta")


@pytest.mark.parametrize("result", [{"train_runtime": 1.0}, None, types.SimpleNamespace(metrics=[1])])
def test_summary_of_another_object_is_refused(result):
    with pytest.raises(ConfigError, match="needs train_runtime and train_samples_per_second; it got "):
        print_summary(result)


def simulate_device(monkeypatch):
    """Replace `torch.cuda` by a stub of a machine with GPUs, and return its hardware and device."""
    module = types.SimpleNamespace(
        is_available=lambda: False,  # for torch, which calls it in a CUDA build
        current_device=lambda: 0,
        memory_allocated=lambda device: 100, memory_reserved=lambda device: 150, max_memory_allocated=lambda device: 120,
        get_device_properties=lambda device: types.SimpleNamespace(uuid="bb"), mem_get_info=lambda device: (600, 1000),
    )  # fmt: skip
    monkeypatch.setattr(torch, "get_device_module", lambda kind: module)
    return HARDWARE["cuda"], torch.device("cuda", 0)


def test_use_of_a_device_by_allocator_and_nvml(nvml, monkeypatch):
    nvml()
    found = use._measure_device(*simulate_device(monkeypatch))
    assert (found.device, found.used, found.reserved, found.peak) == ("cuda:0", 100, 150, 120)
    assert (found.total, found.occupied, found.utilization) == (24 << 30, 5 << 30, 0.4)
    assert found.processes == {7: 2 << 30, 8: 0}
    assert found.source == "torch's allocator and NVML"


@pytest.mark.parametrize("what", ["nvmlInit", "nvmlDeviceGetHandleByUUID"])
def test_use_of_a_device_without_nvml(nvml, monkeypatch, what):
    nvml(**{what: raise_refused})
    found = use._measure_device(*simulate_device(monkeypatch))
    assert (found.used, found.total, found.occupied, found.utilization) == (100, 1000, 400, None)
    assert found.source == "torch's allocator"


def test_values_that_nvml_refuses_are_none(nvml, monkeypatch):
    nvml(nvmlDeviceGetUtilizationRates=raise_refused, nvmlDeviceGetComputeRunningProcesses=raise_refused)
    found = use._measure_device(*simulate_device(monkeypatch))
    assert (found.occupied, found.utilization, found.processes) == (5 << 30, None, {})
