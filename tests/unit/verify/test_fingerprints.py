"""Test that hashes of rows without padding do not depend on the padded length of a batch."""

import pytest
import torch

from headway.verify.fingerprints import hash_rows


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
