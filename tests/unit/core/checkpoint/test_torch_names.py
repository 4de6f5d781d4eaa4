"""Test that the private names of torch that `headway.core.checkpoint` uses exist and work in the installed torch."""

import torch

from headway.core.checkpoint import _torch


def test_quantized_tensors_are_rebuilt_from_codes():
    whole = torch.quantize_per_tensor(torch.tensor([0.5, 1.0]), 0.1, 3, torch.qint8)
    assert torch.equal(_torch.make_per_tensor_quantized(whole.int_repr(), 0.1, 3).int_repr(), whole.int_repr())
    scales, points = torch.tensor([0.1, 0.2]), torch.tensor([0, 1])
    rows = torch.quantize_per_channel(torch.ones(2, 3), scales, points, 0, torch.qint8)
    made = _torch.make_per_channel_quantized(rows.int_repr(), scales, points, 0)
    assert torch.equal(made.dequantize(), rows.dequantize())


def test_in_place_changes_are_counted():
    tensor = torch.zeros(2)
    before = _torch.read_version(tensor)
    tensor.add_(1)
    assert _torch.read_version(tensor) == before + 1


def test_uncoalesced_tensor_shows_its_parts():
    tensor = torch.sparse_coo_tensor([[0, 0]], [1.0, 2.0], (3,))
    indices, values = _torch.read_sparse_parts(tensor)
    assert indices.tolist() == [[0, 0]]
    assert values.tolist() == [1.0, 2.0]


def test_distributed_tensors_have_a_local_tensor():
    from torch.distributed.tensor import DTensor

    # The attribute is set in DTensor.__new__, and declared by the class.
    assert "_local_tensor" in DTensor.__annotations__ or hasattr(DTensor, "_local_tensor")
