"""Test with a simulated device that runs behind its host that memory stays within the window and values are correct."""

import gc
import random
import time

import pytest
import torch
from torch import nn

from headway.core.weights.locations import TensorLocation
from headway.offload.stream import DeviceStream
from headway.offload.transport import RingTransport
from tests.unit.offload.simulated import SimulatedLane

NUM_UNITS, ONE = 40, 16 * 4


def build_stream(lane, window=2, chunk=1 << 20, is_pinned=True):
    """Return a stream over NUM_UNITS weights of ONE bytes each, with their number as value, and its units."""
    units = []
    for number in range(NUM_UNITS):
        module = nn.Linear(4, 4, bias=False)
        weight = lane.allocate_pinned(ONE).view(torch.float32).view(4, 4) if is_pinned else torch.empty(4, 4)
        module.weight = nn.Parameter(weight.fill_(number), requires_grad=False)
        units.append([TensorLocation(module, "weight", True)])
    return units, DeviceStream(units, torch.device("cpu"), window * ONE, RingTransport(lane, chunk))


def use_units(stream, units, lane, order, expected=None):
    """Queue a use of the units in `order`. Return the list of values that the device will read."""
    read = []
    for number in order:
        stream.enter_unit(number)
        value = float(number if expected is None else expected[number])
        lane.compute(units[number][0].tensor, lambda found, value=value: read.append((value, found)))
        stream.leave_unit(number)
    return read


def assert_values(read, num):
    assert len(read) == num
    assert all((found == value).all() for value, found in read)


@pytest.mark.parametrize("seed", range(8))
def test_copies_wait_for_the_unit_that_leaves_the_window(seed):
    lane = SimulatedLane(seed)
    units, stream = build_stream(lane, window=2)
    read = use_units(stream, units, lane, [*range(NUM_UNITS)] * 3)
    assert read == []  # the host has queued three passes, and the device has not started
    assert stream.peak_bytes <= 3 * ONE
    lane.run()
    assert_values(read, 3 * NUM_UNITS)
    assert lane.num_bytes <= 3 * ONE  # window, and the unit in use
    assert 1 < lane.most_ahead <= 3  # copied during the computation, and not further ahead


@pytest.mark.parametrize("chunk", [1 << 20, 24], ids=["whole", "in pieces"])
def test_pageable_weights_are_copied_through_the_ring(chunk):
    lane = SimulatedLane(1)
    units, stream = build_stream(lane, window=2, chunk=chunk, is_pinned=False)
    read = use_units(stream, units, lane, [*range(NUM_UNITS)] * 2)
    lane.run()
    assert_values(read, 2 * NUM_UNITS)
    assert lane.num_bytes <= 3 * ONE


@pytest.mark.parametrize("seed", range(6))
def test_changed_order_discards_pending_copies(seed):
    lane, draws = SimulatedLane(seed), random.Random(seed)
    units, stream = build_stream(lane, window=4)
    order = [draws.randrange(NUM_UNITS) for _ in range(200)]
    read = use_units(stream, units, lane, order)
    lane.run()
    assert_values(read, len(order))
    assert stream.active_bytes <= 5 * ONE
    assert lane.num_bytes <= 10 * ONE  # plus pending copies that are no longer needed


@pytest.mark.parametrize("seed", range(4))
def test_deleted_stream_writes_nothing_more(seed):
    lane = SimulatedLane(seed)
    units, stream = build_stream(lane, window=6)
    use_units(stream, units, lane, range(3))
    del stream  # copies for the next units are pending
    gc.collect()
    for _ in range(200):  # the copying thread may still be running
        if not lane.queues["copies"]:
            break
        time.sleep(0.01)
    # Memory that is reused now keeps its new values.
    others = [lane.allocate(torch.zeros(4, 4)) for _ in range(8)]
    for other in others:
        lane.put("compute", None, lambda other=other: other.fill_(-1))
    lane.run()
    assert all((other == -1).all() for other in others)


def test_changed_values_are_copied_again():
    lane = SimulatedLane(2)
    units, stream = build_stream(lane, window=NUM_UNITS)
    expected = {number: number for number in range(NUM_UNITS)}
    for _ in range(3):
        read = use_units(stream, units, lane, range(NUM_UNITS), expected)
        lane.run()
        assert_values(read, NUM_UNITS)
        with torch.no_grad():
            for number, places in enumerate(units):
                places[0].tensor.add_(100)
                expected[number] += 100


def test_memory_freed_after_the_copies_holds_the_whole_model():
    """For comparison, the transport allocates on the copy stream and frees by `record_stream`."""

    class FollowingLane(SimulatedLane):
        def give_back(self, kind, block):
            self.put("compute", None, lambda: self.free.setdefault(kind, []).append(block))

        def begin_copies(self, after):
            return self.point("copies")

    lane = FollowingLane(0)
    units, stream = build_stream(lane, window=2)
    read = use_units(stream, units, lane, range(NUM_UNITS))
    lane.run()
    assert_values(read, NUM_UNITS)
    assert lane.num_bytes >= NUM_UNITS * ONE  # although the stream counted three at any time
    assert stream.peak_bytes <= 3 * ONE


def test_simulation_detects_a_copy_that_does_not_wait():
    class HastyLane(SimulatedLane):
        def begin_copies(self, after):
            return self.point("copies")

    wrong = 0
    for seed in range(8):
        lane = HastyLane(seed)
        units, stream = build_stream(lane)
        read = use_units(stream, units, lane, range(NUM_UNITS))
        lane.run()
        wrong += sum(not bool((found == value).all()) for value, found in read)
    assert wrong > 0


def test_copying_thread_binds_the_device():
    lane = SimulatedLane()
    units, stream = build_stream(lane)
    use_units(stream, units, lane, [0, 1])
    stream._worker.shutdown()
    assert len(lane.bound) == 1  # SimulatedLane refuses copies from an unbound thread


def test_without_pinned_memory_there_is_one_warning_and_correct_values(caplog):
    lane = SimulatedLane(can_pin=False)
    units, stream = build_stream(lane, is_pinned=False)
    read = use_units(stream, units, lane, [*range(NUM_UNITS)] * 2)
    lane.run()
    assert_values(read, 2 * NUM_UNITS)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "could not be pinned (CUDA error: out of memory)" in caplog.text


def test_out_of_memory_ahead_of_use_ends_prefetching_only():
    class SmallLane(SimulatedLane):
        def allocate(self, like):
            if self.num_bytes >= 2 * ONE and not self.free.get((like.dtype, like.numel())):
                raise torch.OutOfMemoryError("CUDA out of memory")
            return super().allocate(like)

    lane = SmallLane()
    units, stream = build_stream(lane, window=8)
    read = use_units(stream, units, lane, [*range(NUM_UNITS)] * 2)
    lane.run()
    assert_values(read, 2 * NUM_UNITS)
    assert lane.num_bytes == 2 * ONE


def test_bandwidth_is_that_of_the_copies():
    lane = SimulatedLane(bandwidth=12345.0)
    units, stream = build_stream(lane)
    for _ in range(2):
        use_units(stream, units, lane, range(NUM_UNITS))
        lane.run()
    assert stream.traffic.bandwidth == pytest.approx(12345.0)
    assert stream.traffic.num_bytes >= 2 * NUM_UNITS * ONE
