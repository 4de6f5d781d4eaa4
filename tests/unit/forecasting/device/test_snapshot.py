"""Test the replay of a GPU's allocator history, written by hand in torch's format."""

import pytest

from benchmarks.forecast.snapshot import compare_with_model
from headway.errors import DataError

MIB = 1 << 20


def make_entry(action, addr, size, stream=0):
    return {"action": action, "addr": addr, "size": size, "stream": stream, "frames": []}


def test_record_and_model_agree():
    record = [
        make_entry("segment_alloc", 0, 20 * MIB),
        make_entry("alloc", 0, 5 * MIB - 100),
        make_entry("alloc", 5 * MIB, 8 * MIB),
        make_entry("free_requested", 0, 5 * MIB - 100),
        make_entry("free_completed", 0, 5 * MIB - 100),
        make_entry("segment_alloc", 100 * MIB, 2 * MIB, 7),
        make_entry("alloc", 100 * MIB, 10, 7),
    ]
    found = compare_with_model({"device_traces": [record]})
    assert (found.allocated, found.reserved) == (13 * MIB, 22 * MIB)
    assert (found.model_allocated, found.model_reserved, found.error) == (13 * MIB, 22 * MIB, 0.0)
    assert (found.num_events, found.unknown) == (4, 0)


def test_streams_share_no_memory():
    record = [make_entry("segment_alloc", 0, 2 * MIB), make_entry("alloc", 0, 10), make_entry("alloc", 512, 10, 3)]
    found = compare_with_model({"device_traces": [record]})
    assert (found.reserved, found.model_reserved, found.error) == (2 * MIB, 4 * MIB, 1.0)


def test_block_from_before_the_record_is_counted():
    assert compare_with_model({"device_traces": [[make_entry("free_completed", 0, 5)]]}).unknown == 1


@pytest.mark.parametrize("snapshot", [{}, {"device_traces": []}, {"device_traces": [[]]}])
def test_missing_record_is_reported(snapshot):
    with pytest.raises(DataError, match="_record_memory_history"):
        compare_with_model(snapshot)
