"""What a device can still give, by a simulated allocator and a driver's library in place of NVML's: there is no GPU here."""

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
    """NVML's four functions, as C has them: results through pointers, zero for success."""

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
    """Eight GPUs; this process works on the fourth."""
    allocator = SimulatedAllocator(80 * GIB, num_devices=8, current=3)
    allocator.malloc(2 * GIB)
    allocator.use(GIB)
    monkeypatch.setattr(torch, "get_device_module", lambda kind: allocator)
    return allocator


def test_a_budget_of_all_gpus_opens_no_context_on_the_others(machine, monkeypatch):
    driver = Driver()
    monkeypatch.setattr(nvml, "_load_nvml", lambda: driver)
    found = budget._measure_budgets(CUDA)
    assert machine.contexts == {3}
    assert found[3] == (80 - 3) * GIB + GIB  # by its own word, and what the cache holds
    assert found[0] == 69 * GIB - CONTEXT_BYTES
    assert driver.num_open == 0


def test_listing_all_devices_opens_no_context_either(machine, monkeypatch):
    monkeypatch.setattr(nvml, "_load_nvml", Driver)
    found = [use._device(CUDA, torch.device("cuda", index)) for index in range(8)]
    assert machine.contexts == {3}
    assert (found[1].total, found[1].free) == (80 * GIB, 68 * GIB)


def test_without_the_drivers_library_cuda_is_asked(machine, monkeypatch):
    monkeypatch.setattr(nvml, "_load_nvml", lambda: None)
    assert read_free_bytes(CUDA, torch.device("cuda", 0)) == 77 * GIB
    monkeypatch.setattr(nvml, "_load_nvml", lambda: Driver(unknown=("1",)))
    read_free_bytes(CUDA, torch.device("cuda", 1))
    read_free_bytes(CUDA, torch.device("cuda", 2))
    assert machine.contexts == {0, 1}


def test_a_part_left_to_this_process_is_respected(machine):
    machine.get_per_process_memory_fraction = lambda device: 0.05
    assert read_free_bytes(CUDA, torch.device("cuda", 3)) == 4 * GIB - 3 * GIB
    assert budget._measure_budgets(CUDA)[3] == 2 * GIB


def test_a_module_that_counts_nothing_is_asked_for_what_is_free(monkeypatch):
    module = SimpleNamespace(mem_get_info=lambda device: (3, 5), is_available=lambda: False)
    monkeypatch.setattr(torch, "get_device_module", lambda kind: module)
    assert read_free_bytes(CUDA, torch.device("cuda", 0)) == 3


def test_the_real_library_is_missing_here_or_answers(machine):
    assert nvml._load_nvml() is None or isinstance(nvml._load_nvml(), ctypes.CDLL)
    machine.get_device_properties = lambda device: None  # as of a kind that has no ids
    assert nvml.read_memory_by_driver(CUDA, torch.device("cuda", 0)) is None
