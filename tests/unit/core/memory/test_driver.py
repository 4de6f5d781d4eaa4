"""Test the free memory of a device with a simulated allocator and a stub of NVML, because there is no GPU here."""

import ctypes
from types import SimpleNamespace

import pytest
import torch

from headway.core.memory import driver as nvml
from headway.core.memory import use
from headway.core.memory.use import CONTEXT_BYTES, read_free_bytes
from headway.core.runtime.device import HARDWARE
from headway.offload.placement import budget
from tests.unit.core.memory.simulated import SimulatedAllocator

CUDA = HARDWARE["cuda"]
GIB = 1 << 30


class Driver:
    """Four functions of NVML with the interface of C: results through pointers, 0 for success."""

    def __init__(self, unknown: tuple[str, ...] = ()) -> None:
        self.unknown, self.num_open = unknown, 0

    def nvmlInit_v2(self) -> int:
        self.num_open += 1
        return 0

    def nvmlShutdown(self) -> int:
        self.num_open -= 1
        return 0

    def nvmlDeviceGetHandleByUUID(self, uuid, handle) -> int:
        name = uuid.decode().removeprefix("GPU-id-")
        if name in self.unknown:
            return 6  # NVML_ERROR_NOT_FOUND
        handle._obj.value = int(name) + 1
        return 0

    def nvmlDeviceGetMemoryInfo(self, handle, memory) -> int:
        found = memory._obj
        found.total, found.free, found.used = 80 * GIB, (70 - handle.value) * GIB, (10 + handle.value) * GIB
        return 0


@pytest.fixture
def machine(monkeypatch):
    """Simulate eight GPUs of 80 GiB, of which the fourth is the current device, and return the allocator."""
    allocator = SimulatedAllocator(80 * GIB, num_devices=8, current=3)
    allocator.malloc(2 * GIB)
    allocator.use(GIB)
    monkeypatch.setattr(torch, "get_device_module", lambda kind: allocator)
    return allocator


def test_budget_of_all_gpus_opens_no_context_on_the_others(machine, monkeypatch):
    driver = Driver()
    monkeypatch.setattr(nvml, "_load_nvml", lambda: driver)
    found = budget._measure_budgets(CUDA)
    assert machine.contexts == {3}
    assert found[3] == (80 - 3) * GIB + GIB  # free memory by the device's own figures, plus the cache
    assert found[0] == 69 * GIB - CONTEXT_BYTES
    assert driver.num_open == 0


def test_listing_all_devices_opens_no_context_on_the_others(machine, monkeypatch):
    monkeypatch.setattr(nvml, "_load_nvml", Driver)
    found = [use._measure_device(CUDA, torch.device("cuda", index)) for index in range(8)]
    assert machine.contexts == {3}
    assert (found[1].total, found[1].free) == (80 * GIB, 68 * GIB)


def test_without_nvml_the_device_is_asked(machine, monkeypatch):
    monkeypatch.setattr(nvml, "_load_nvml", lambda: None)
    assert read_free_bytes(CUDA, torch.device("cuda", 0)) == 77 * GIB
    monkeypatch.setattr(nvml, "_load_nvml", lambda: Driver(unknown=("1",)))
    read_free_bytes(CUDA, torch.device("cuda", 1))
    read_free_bytes(CUDA, torch.device("cuda", 2))
    assert machine.contexts == {0, 1}


def test_memory_fraction_of_this_process_is_respected(machine):
    machine.get_per_process_memory_fraction = lambda device: 0.05
    assert read_free_bytes(CUDA, torch.device("cuda", 3)) == 4 * GIB - 3 * GIB
    assert budget._measure_budgets(CUDA)[3] == 2 * GIB


def test_module_without_counters_is_asked_for_free_memory(monkeypatch):
    module = SimpleNamespace(mem_get_info=lambda device: (3, 5), is_available=lambda: False)
    monkeypatch.setattr(torch, "get_device_module", lambda kind: module)
    assert read_free_bytes(CUDA, torch.device("cuda", 0)) == 3


def test_real_nvml_is_missing_or_loaded(machine):
    assert nvml._load_nvml() is None or isinstance(nvml._load_nvml(), ctypes.CDLL)
    machine.get_device_properties = lambda device: None  # like a device type without IDs
    assert nvml.read_memory_by_driver(CUDA, torch.device("cuda", 0)) is None
