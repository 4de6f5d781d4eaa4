"""Test the model of CUDA's caching allocator by cases computed by hand from its rules."""

import random

import pytest

from headway.errors import StateError
from headway.forecasting.device.allocator import Allocator, compute_segment_size, replay_events, round_to_block
from headway.forecasting.device.memory_events import MemoryEvent, compute_exact_peak, split_by_kind

MIB = 1 << 20


@pytest.mark.parametrize(("asked", "block"), [(1, 512), (512, 512), (513, 1024), (MIB, MIB), (MIB + 1, MIB + 512)])
def test_requests_are_rounded_to_512_bytes(asked, block):
    assert round_to_block(asked) == block


@pytest.mark.parametrize(
    ("block", "segment"),
    [(512, 2), (MIB, 2), (MIB + 512, 20), (10 * MIB - 512, 20), (10 * MIB, 10), (10 * MIB + 512, 12), (31 * MIB, 32)],
)
def test_segment_has_the_size_that_torch_reserves_for_a_block(block, segment):
    assert compute_segment_size(block) == segment * MIB


def test_small_requests_share_a_segment_until_it_is_full():
    allocator = Allocator()
    for key in range(4096):
        allocator.allocate_memory(key, 100)
    assert (allocator.allocated, allocator.reserved) == (2 * MIB, 2 * MIB)
    allocator.allocate_memory("one more", 1)
    assert (allocator.allocated, allocator.reserved) == (2 * MIB + 512, 4 * MIB)


def test_large_block_is_split_only_if_more_than_a_mebibyte_remains():
    allocator = Allocator()
    allocator.allocate_memory("a", 9 * MIB)  # segment of 20, of which 11 remain
    allocator.allocate_memory("b", 10 * MIB)  # 1 would remain, so the block takes all 11
    assert (allocator.allocated, allocator.reserved) == (20 * MIB, 20 * MIB)
    allocator.free_memory("b")
    allocator.allocate_memory("c", 10 * MIB - 512)
    assert allocator.allocated == 19 * MIB - 512


def test_small_and_large_requests_share_no_segment():
    allocator = Allocator()
    allocator.allocate_memory("a", 5 * MIB)
    allocator.allocate_memory("b", MIB)
    assert allocator.reserved == 22 * MIB


def test_smallest_block_that_fits_is_taken():
    allocator = Allocator()
    for key, size in enumerate((30, 14, 20)):
        allocator.allocate_memory(key, size * MIB)
    for key in range(3):
        allocator.free_memory(key)
    allocator.allocate_memory("x", 13 * MIB)
    assert allocator.allocated == 14 * MIB  # takes the 14, because the remaining 1 is not split off
    allocator.allocate_memory("y", 20 * MIB)
    allocator.allocate_memory("z", 30 * MIB)
    assert allocator.reserved == 64 * MIB


def test_neighbors_are_merged_but_segments_are_not():
    allocator = Allocator()
    for key in "abcd":
        allocator.allocate_memory(key, 5 * MIB)  # one segment of 20
    allocator.allocate_memory("other", 20 * MIB)
    for key in ("b", "d", "c", "other"):
        allocator.free_memory(key)
    allocator.allocate_memory("x", 15 * MIB)  # b, c and d
    assert allocator.reserved == 40 * MIB
    allocator.allocate_memory("y", 24 * MIB)  # 20 and 15 were free, but in two segments
    assert allocator.reserved == 64 * MIB


def test_fragmented_memory_is_reserved_again():
    allocator = Allocator()
    for key in range(8):
        allocator.allocate_memory(key, 5 * MIB)
    for key in range(0, 8, 2):
        allocator.free_memory(key)
    allocator.allocate_memory("x", 6 * MIB)  # 20 are free, but no 6 of them are contiguous
    assert (allocator.allocated, allocator.reserved) == (26 * MIB, 60 * MIB)


def test_expandable_segments_grow_by_pages_and_do_not_fragment_at_the_end():
    allocator = Allocator(expandable=True)
    allocator.allocate_memory("a", 30 * MIB)
    assert allocator.reserved == 40 * MIB  # pages of 20
    allocator.allocate_memory("b", 25 * MIB)  # 10 are free, and one page provides the other 15
    assert (allocator.allocated, allocator.reserved) == (55 * MIB, 60 * MIB)
    allocator.free_memory("b")
    allocator.allocate_memory("c", 45 * MIB)  # 30 are free
    assert (allocator.allocated, allocator.reserved) == (75 * MIB, 80 * MIB)
    allocator.allocate_memory("small", 100)
    assert allocator.reserved == 82 * MIB


def test_growing_block_of_an_expandable_segment_counts_as_the_largest():
    allocator = Allocator(expandable=True)
    allocator.allocate_memory("a", 24 * MIB)  # reserves 40
    allocator.allocate_memory("b", 5 * MIB)  # 11 remain, which can still grow
    allocator.free_memory("a")
    allocator.allocate_memory("c", 10 * MIB)  # taken from the 24 that cannot grow
    allocator.allocate_memory("d", 24 * MIB)  # taken from the 11, which grow by a page
    assert allocator.reserved == 60 * MIB


def test_nothing_is_lost_in_a_long_random_run():
    for expandable in (False, True):
        chance = random.Random(0)
        allocator, live = Allocator(expandable=expandable), {}
        for key in range(3000):
            if live and chance.random() < 0.5:
                allocator.free_memory(gone := chance.choice(list(live)))
                del live[gone]
            else:
                live[key] = int(2 ** chance.uniform(3, 25))
                allocator.allocate_memory(key, live[key])
        assert sum(map(round_to_block, live.values())) <= allocator.allocated <= allocator.reserved
        for key in live:
            allocator.free_memory(key)
        assert allocator.allocated == 0


def test_replay_returns_the_peak_and_its_parts():
    events = [
        MemoryEvent(1, 3 * MIB, kind="weights"),
        MemoryEvent(2, 4 * MIB, kind="activations"),
        MemoryEvent(2, -4 * MIB, kind="activations"),
        MemoryEvent(3, 2 * MIB, kind="gradients"),
    ]
    found = replay_events(events)
    assert (found.allocated, found.reserved, found.peak_index) == (7 * MIB, 20 * MIB, 1)
    assert compute_exact_peak(events) == 7 * MIB
    assert split_by_kind(events, found.peak_index) == {"weights": 3 * MIB, "activations": 4 * MIB}
    assert split_by_kind(events, 3) == {"weights": 3 * MIB, "gradients": 2 * MIB}


def test_key_in_use_is_refused():
    allocator = Allocator()
    allocator.allocate_memory(1, 5)
    with pytest.raises(StateError, match="already"):
        allocator.allocate_memory(1, 5)
