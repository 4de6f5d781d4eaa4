"""Test hashes, norms and samples of tensors: padding, complex values and nested tensors."""

import pytest
import torch

from headway.verify.fingerprints import hash_rows, measure_norm, reverse_rows, sample_values


@pytest.mark.parametrize("padding", [0, 1, -100])
@pytest.mark.parametrize("row", [[5, 7, 9], [5, 9, 9], [9, 9], [5, 9, 9, 1, 0], [7]])
def test_usual_padding_does_not_change_a_row(row: list[int], padding: int) -> None:
    short = torch.tensor([row])
    long = torch.tensor([row + [padding] * 3])
    assert hash_rows((short,), 1)[1] == hash_rows((long,), 1)[1]


def test_unusual_padding_does_not_change_a_row_that_ends_with_two_tokens() -> None:
    assert hash_rows((torch.tensor([[5, 7]]),), 1)[1] == hash_rows((torch.tensor([[5, 7, 99, 99]]),), 1)[1]


def test_different_tokens_are_a_different_row() -> None:
    assert hash_rows((torch.tensor([[5, 7, 0]]),), 1)[1] != hash_rows((torch.tensor([[5, 8, 0]]),), 1)[1]


def test_complex_values_count_with_both_parts() -> None:
    values = torch.tensor([3j, 4.0])
    assert measure_norm(values) == 5.0
    assert measure_norm(values.conj()) == 5.0
    assert sample_values(values.conj()).tolist() == [0.0, -3.0, 4.0, 0.0]


def test_rows_of_a_nested_tensor_are_reversed() -> None:
    rows = torch.nested.nested_tensor([torch.zeros(2, 3), torch.ones(4, 3)], layout=torch.jagged)
    first, second = reverse_rows({"rows": rows}, 2)["rows"].unbind()
    assert torch.equal(first, torch.ones(4, 3))
    assert torch.equal(second, torch.zeros(2, 3))
