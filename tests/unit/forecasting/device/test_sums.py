"""Test the memory requested by sums on CUDA, against figures recorded by torch's allocator in its CUDA build."""

import pytest
import torch

from headway.forecasting.device.devices import find_device
from headway.forecasting.device.sums import make_sum_rules


def list_requests(device, shape, dims, dtype=torch.float32):
    card = find_device(device)
    return make_sum_rules(card.processors, card.threads)["aten::sum"](
        (torch.empty(shape, dtype=dtype, device="meta"), dims)
    )


@pytest.mark.parametrize(
    ("device", "shape", "dims", "num_bytes"),
    [
        ("h100", (6144, 768), [0], 37749248),
        ("h100", (6272, 384), [0], 19268096),
        ("h100", (16, 512, 1024), [0, 1], 67109376),
        ("h100", (8192, 10), [0], 0),
        ("h100", (1000000,), [0], 1024),
        ("h100", (3, 5000000), [1], 3072),
        ("h100", (32, 384, 196), [0, 2], 0),
        ("h100", (20000, 77), [0], 779264),
        ("t4", (6144, 768), [0], 21234176),
        ("t4", (6272, 384), [0], 19268096),
        ("t4", (16, 512, 1024), [0, 1], 20972032),
        ("t4", (8192, 10), [0], 0),
        ("t4", (1000000,), [0], 1024),
        ("t4", (3, 5000000), [1], 1024),
        ("t4", (32, 384, 196), [0, 2], 0),
        ("t4", (20000, 77), [0], 266752),
        ("rtx-3090", (6144, 768), [0], 37749248),
        ("rtx-3090", (6272, 384), [0], 19268096),
        ("rtx-3090", (16, 512, 1024), [0, 1], 65012224),
        ("rtx-3090", (8192, 10), [0], 0),
        ("rtx-3090", (1000000,), [0], 1024),
        ("rtx-3090", (3, 5000000), [1], 1536),
        ("rtx-3090", (32, 384, 196), [0, 2], 0),
        ("rtx-3090", (20000, 77), [0], 779264),
    ],
)
def test_sums_request_as_much_as_torch(device, shape, dims, num_bytes):
    """torch also counts flags of a few bytes per block, and unused bytes of allocator blocks (below 1 MiB)."""
    assert 0 <= num_bytes - sum(list_requests(device, shape, dims)) < 1 << 20
    halves = sum(list_requests(device, shape, dims, torch.bfloat16))
    assert 0 <= num_bytes - halves < 1 << 20  # sums are computed in float32


def test_sum_within_a_block_requests_nothing():
    assert list_requests("h100", (64, 64), [0]) == []
    assert list_requests("h100", (100_000, 64), [1]) == []
    assert list_requests("h100", (0, 64), [0]) == []
    assert list_requests("h100", (100_000, 0, 512), [0, 2]) == []


def test_integers_become_int64_before_they_are_summed():
    assert list_requests("h100", (64, 64), [0], torch.bool) == [64 * 64 * 8]
    assert list_requests("h100", (64, 64), [0], torch.int64) == []
