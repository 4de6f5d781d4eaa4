"""Test which process the errors of a weight channel name, and whose weights they call a mixture of two updates."""

import socket

import pytest
import torch

from headway import WeightChannel
from headway.core.weights.channel import _ACKNOWLEDGED
from headway.errors import StateError


@pytest.fixture
def ends():
    first, second = socket.socketpair()
    yield first, second
    first.close()
    second.close()


def test_sender_says_that_the_receiver_may_hold_a_mixture(ends):
    trainer, generator = ends
    generator.close()
    with pytest.raises(
        StateError, match=r"^the generator is gone .* while it received weights.*its weights may be a mixture"
    ):
        WeightChannel(trainer, "the generator").send([("weight", torch.ones(2))])


def test_receiver_says_that_its_own_weights_may_be_a_mixture(ends):
    trainer, generator = ends
    generator.sendall(_ACKNOWLEDGED)
    WeightChannel(trainer, "the generator").send([("weight", torch.ones(2))])
    buckets = WeightChannel(generator, "the trainer").receive()
    assert [name for name, _ in next(buckets)] == ["weight"]
    trainer.close()
    with pytest.raises(
        StateError, match=r"^the trainer is gone .* while it sent weights.*this process may have a mixture"
    ):
        next(buckets)


def test_sender_that_ends_between_updates_leaves_complete_weights(ends):
    trainer, generator = ends
    trainer.close()
    with pytest.raises(StateError, match=r"^the trainer is gone .* before it sent an update.*have not changed"):
        next(WeightChannel(generator, "the trainer").receive())


def test_sender_that_stops_within_a_bucket_is_named(ends):
    trainer, generator = ends
    trainer.sendall((20).to_bytes(8, "little"))  # the length of a header that never comes
    with pytest.raises(StateError, match=r"^the trainer has done nothing for 0.1 s while it sent weights"):
        next(WeightChannel(generator, "the trainer", timeout=0.1).receive())


@pytest.mark.parametrize("dtype", [torch.complex128, torch.bfloat16, torch.float8_e4m3fn, torch.uint4, torch.bool])
def test_tensors_of_every_dtype_arrive_bit_for_bit(ends, dtype):
    trainer, generator = ends
    data = torch.arange(64, dtype=torch.uint8) % 2
    sent = data.view(dtype)
    generator.sendall(_ACKNOWLEDGED)
    WeightChannel(trainer, "the generator").send([("weight", sent.reshape(2, -1))])
    ((name, received),) = next(WeightChannel(generator, "the trainer").receive())
    assert (name, received.dtype, received.shape) == ("weight", dtype, sent.reshape(2, -1).shape)
    assert torch.equal(received.view(torch.uint8).reshape(-1), data)
