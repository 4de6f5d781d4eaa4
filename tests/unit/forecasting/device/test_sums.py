"""What sums ask for on CUDA: figures of torch's own kernels, as its allocator recorded them in the CUDA build (kinds.h's devices)."""

import pytest
import torch

from headway.forecasting.device.devices import find_device
from headway.forecasting.device.sums import make_sum_rules


def asked(device, shape, dims, dtype=torch.float32):
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
def test_sums_ask_for_what_torch_asks_for(device, shape, dims, num_bytes):
    """torch also counts flags of a few bytes per block, and unused bytes of allocator blocks (below 1 MiB)."""
    assert 0 <= num_bytes - sum(asked(device, shape, dims)) < 1 << 20
    halves = sum(asked(device, shape, dims, torch.bfloat16))
    assert 0 <= num_bytes - halves < 1 << 20  # sums are made in float32


def test_a_sum_that_a_block_can_do_asks_for_nothing():
    assert asked("h100", (64, 64), [0]) == []
    assert asked("h100", (100_000, 64), [1]) == []
    assert asked("h100", (0, 64), [0]) == []


def test_numbers_that_are_not_floating_become_int64_before_they_are_summed():
    assert asked("h100", (64, 64), [0], torch.bool) == [64 * 64 * 8]
    assert asked("h100", (64, 64), [0], torch.int64) == []
