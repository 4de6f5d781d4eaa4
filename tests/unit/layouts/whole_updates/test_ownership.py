"""Test owners of parameters, and the buckets in which they are gathered."""

import torch

from headway.layouts.whole_updates.ownership import assign_buckets, assign_owners


def test_owners_share_the_work_and_keep_their_parameters():
    shapes = [(64, 64)] * 6 + [(64,)] * 3
    owners = assign_owners(shapes, 3)
    assert [owners.count(rank) for rank in range(3)] == [3, 3, 3]
    assert assign_owners([*shapes, (8, 8)], 3, owners)[:9] == owners
    assert assign_owners(shapes, 1) == [0] * 9


def test_buckets_hold_each_parameter_once_and_are_limited_in_size():
    given = [torch.empty(size, size) for size in (8, 16, 4, 16, 2, 8)]
    owners = assign_owners([p.shape for p in given], 2)
    buckets = assign_buckets(given, owners, 1000)
    assert sorted(n for bucket in buckets for n in bucket) == list(range(6))
    for bucket in buckets:
        for rank in range(2):
            own = [given[n].numel() * 4 for n in bucket if owners[n] == rank]
            assert sum(own) <= 1000 or len(own) == 1
