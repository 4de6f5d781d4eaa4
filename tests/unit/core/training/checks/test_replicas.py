"""Test the checksum of parameters, and the distance between two parameters, for all dtypes."""

import math

import pytest
import torch

from headway.core.training.checks.replicas import (
    _are_close,
    _compute_distance,
    _get_tolerance,
)
from headway.core.training.checksums import compute_checksums, has_bits

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.float8_e4m3fn)
DTYPES = (*FLOATS, torch.complex64, torch.int64, torch.uint8)


@pytest.mark.parametrize("dtype", DTYPES)
def test_changing_one_value_changes_the_checksum(dtype: torch.dtype) -> None:
    one = torch.arange(12).reshape(3, 4).to(dtype)
    other = one.clone()
    assert compute_checksums([one, other]) == [compute_checksums([one])[0]] * 2
    other[1, 2] = 1
    assert compute_checksums([one])[0] != compute_checksums([other])[0]
    assert _compute_distance(one, one.clone()) == 0.0
    assert _compute_distance(one, other) == pytest.approx(5 / 11, rel=0.1)
    assert _compute_distance(one, other) > _get_tolerance(one)


def test_memory_order_makes_no_difference() -> None:
    one = torch.randn(2, 3, 4, 5)
    assert compute_checksums([one]) == compute_checksums([one.to(memory_format=torch.channels_last)])


def test_empty_and_non_finite_tensors_are_compared() -> None:
    assert compute_checksums([torch.empty(0), torch.tensor(1.0)])[0] == 0
    assert _compute_distance(torch.empty(0), torch.empty(0)) == 0.0
    spoilt = torch.tensor([math.nan, math.inf, 1.0])
    assert _compute_distance(spoilt, spoilt.clone()) == 0.0
    assert _compute_distance(spoilt, torch.ones(3)) == math.inf
    assert _compute_distance(torch.tensor([0.0]), torch.tensor([-0.0])) == 0.0


def test_tensors_without_own_values_are_left_out() -> None:
    assert has_bits(torch.ones(2))
    assert not has_bits(torch.ones(2, device="meta"))
    assert not has_bits(torch.eye(2).to_sparse())


def test_hyperparameters_are_compared_with_a_tolerance() -> None:
    assert _are_close(0.1, 0.1 * (1 + 1e-9))
    assert not _are_close(0.1, 0.1001)
    assert _are_close((0.9, 0.999), (0.9, 0.999))
    assert not _are_close((0.9, 0.999), (0.9, 0.99))
    assert not _are_close(None, 0.1)
    assert _are_close("linear", "linear")
