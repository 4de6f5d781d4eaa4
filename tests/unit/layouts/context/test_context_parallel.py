"""Test partial logits, which refuse every use."""

import copy

import pytest
import torch

from headway.errors import UnsupportedError
from headway.layouts.context.context_parallel import PartialOutput


def test_partial_logits_refuse_every_use() -> None:
    part = PartialOutput(torch.Size((2, 6, 50)), 12)
    for use in (
        lambda: part.shape,
        lambda: part[0],
        lambda: part.float(),
        lambda: len(part),
        lambda: part + 1,
        lambda: list(part),
    ):
        with pytest.raises(UnsupportedError, match=r"each rank has 6 of 12 tokens.*call the model without labels"):
            use()
    assert isinstance(copy.copy(part), PartialOutput)
