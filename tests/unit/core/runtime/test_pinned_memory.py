"""Test arenas of pinned memory: registered while in use, not inherited by forks, with torch's allocation as a fallback.

A stub of CUDA's runtime records what is registered. tests/gpu tests the same with a device.
"""

import gc
import os
import threading

import pytest
import torch

from headway.core.runtime import pinned_memory

SIZE = 1 << 26


class Runtime:
    """Stub of CUDA's runtime that records registered memory. `error` is the result of each registration."""

    def __init__(self, error=0):
        self.error, self.registered, self.threads = error, {}, set()

    def cudaHostRegister(self, address, num_bytes, flags):
        assert flags == 1
        self.threads.add(threading.get_ident())
        if not self.error:
            self.registered[address] = num_bytes
        return self.error

    def cudaHostUnregister(self, address):
        del self.registered[address]
        assert _is_mapped(address)


def _is_mapped(address):
    with open("/proc/self/maps") as file:
        ranges = [line.split()[0].split("-") for line in file]
    return any(int(start, 16) <= address < int(end, 16) for start, end in ranges)


@pytest.fixture
def runtime(monkeypatch):
    """Install the stub of CUDA's runtime, and return it."""
    made = Runtime()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)  # a CUDA build would look for a driver
    monkeypatch.setattr(torch.cuda, "cudart", lambda: made)
    monkeypatch.setattr(
        pinned_memory, "allocate_pinned", lambda num_bytes: torch.full((num_bytes,), 7, dtype=torch.uint8)
    )
    return made


def test_arena_is_registered_while_a_part_of_it_is_in_use(runtime):
    arena = pinned_memory.allocate_arena(SIZE)
    assert runtime.registered == {arena.data_ptr(): SIZE}
    assert arena.dtype == torch.uint8
    assert not arena.any()
    part = arena[SIZE // 2 :].view(torch.float32)
    del arena
    gc.collect()
    part.fill_(3)
    assert len(runtime.registered) == 1
    assert part.sum() == 3 * SIZE // 8
    del part
    gc.collect()
    assert runtime.registered == {}


@pytest.mark.parametrize(("num_bytes", "error"), [(1000, 0), (SIZE, 1)])
def test_torch_allocates_small_memory_and_after_failed_registrations(runtime, num_bytes, error):
    runtime.error = error
    arena = pinned_memory.allocate_arena(num_bytes)
    assert (len(arena), int(arena[0]), runtime.registered) == (num_bytes, 7, {})


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_fork_does_not_move_the_pages(runtime):
    arena = pinned_memory.allocate_arena(SIZE)
    address = arena.data_ptr()
    pid = os.fork()
    if pid == 0:
        os._exit(1 if _is_mapped(address) else 0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_arenas_come_in_order_from_several_threads(runtime, monkeypatch):
    monkeypatch.setattr(pinned_memory, "choose_num_threads", lambda: 3)
    barrier = threading.Barrier(3, timeout=20)

    def allocate(num_bytes):
        barrier.wait()  # passes only if three run at the same time
        return pinned_memory.allocate_arena(num_bytes)

    sizes = [SIZE, SIZE // 2, SIZE]
    arenas = [future.result() for future in pinned_memory.start_allocations(sizes, allocate)]
    assert [len(arena) for arena in arenas] == sizes
    assert len(runtime.threads) == 3


def test_without_sizes_no_thread_is_started():
    before = threading.active_count()
    assert pinned_memory.start_allocations([]) == []
    assert threading.active_count() == before
