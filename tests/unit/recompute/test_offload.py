"""Which saved tensors leave the device, decided on torch's meta device; the copies themselves need one (tests/gpu)."""

import pytest
import torch

from headway.recompute import offload


@pytest.fixture
def parked(monkeypatch):
    """The shapes of what would be copied to the host."""
    found = []
    monkeypatch.setattr(offload, "_park", lambda tensor: found.append(tuple(tensor.shape)) or tensor)
    return found


def test_activations_go_and_weights_stay(parked):
    layer = torch.nn.Linear(64, 48, device="meta")
    inputs = torch.empty(32, 64, device="meta", requires_grad=True)
    with offload.offloading(min_bytes=1):
        out = layer(inputs).exp()
    assert sorted(parked) == [(32, 48), (32, 64)]  # exp's result and the layer's input, not the (transposed) weight
    out.sum().backward()
    assert layer.weight.grad.shape == layer.weight.shape


def test_small_tensors_stay(parked):
    inputs = torch.empty(32, 64, device="meta", requires_grad=True)
    with offload.offloading(min_bytes=32 * 64 * 4 + 1):
        inputs.exp()
    assert parked == []
    with offload.offloading(min_bytes=32 * 64 * 4):
        inputs.exp()
    assert parked == [(32, 64)]


def test_nothing_leaves_the_cpu(parked):
    inputs = torch.ones(1024, 1024, requires_grad=True)
    with offload.offloading(min_bytes=1):
        out = inputs.exp()
    out.sum().backward()
    assert parked == []
    assert torch.equal(inputs.grad, out)
