"""Test styles of tensor parallelism on one rank."""

from typing import Any

import pytest
import torch

from headway.layouts.tensor.crossings import SplitAxis
from headway.layouts.tensor.styles import EmbeddingRowwise, SplitModule


def look_up(ids: Any, rank: int) -> list[float]:
    """Return what one of two ranks finds for token IDs in its rows of an embedding of 5 rows with the values 1 to 5."""
    module = torch.nn.Embedding.from_pretrained(torch.arange(1.0, 6.0)[:, None])
    split_module = SplitModule(module, "tokens", SplitAxis(None, None, rank, 2), EmbeddingRowwise())
    (local,), _ = split_module.style.convert_inputs(split_module, (torch.tensor(ids),), {})
    module.weight = torch.nn.Parameter(module.weight[3:] if rank else module.weight[:3])
    found = module(local).masked_fill(split_module.saved_values["is_elsewhere"].unsqueeze(-1), 0)
    return [float(row) for row in found.detach()]


def test_ranks_look_up_their_own_rows():
    assert look_up([0, 2, 3, 4], 0) == [1, 3, 0, 0]
    assert look_up([0, 2, 3, 4], 1) == [0, 0, 4, 5]


@pytest.mark.parametrize("token", [-1, 5, 100])
def test_id_that_the_embedding_lacks_is_an_error_on_all_ranks(token):
    for rank in (0, 1):
        with pytest.raises(IndexError):
            look_up([0, token], rank)
