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


@pytest.mark.parametrize(
    ("header", "described"),
    [
        ('[["weight", "float32", [-2, 3]]]', r"'weight' has the shape \[-2, 3\]"),
        ('[["weight", "float32", [-2, -3]]]', r"'weight' has the shape \[-2, -3\]"),
        ('[["weight", "float32", [2.0]]]', r"'weight' has the shape \[2.0\]"),
        ('[["weight", "float32", [true]]]', r"'weight' has the shape \[True\]"),
        ('[["weight", "float32", "23"]]', "'weight' has the shape '23'"),
        ('[["weight", "float32", 4]]', "'weight' has the shape 4"),
        ('[["weight", "float31", [2]]]', "'float31' is not a dtype"),
        ('[["weight", "Tensor", [2]]]', "'Tensor' is not a dtype"),
        ('[["weight", 7, [2]]]', "7 is not a dtype"),
        ('[[7, "float32", [2]]]', r"\[7, 'float32', \[2\]\] is not \[name, dtype, shape\]"),
        ('[["weight", "float32"]]', r"\['weight', 'float32'\] is not \[name, dtype, shape\]"),
        ('["abc"]', r"'abc' is not \[name, dtype, shape\]"),
        ('{"weight": 1}', "is not a list"),
        ("{}", "is not a list"),
        ('""', "is not a list"),
        ("null", "is not a list"),
        ("not JSON", "Expecting value"),
        ("[" * 100_000, "nested too deep"),
        (b"\xff\xfe\xff", "codec can't decode"),
        ('[["weight", "float32", [4611686018427387904, 4]]]', "cannot allocate"),
        ('[["weight", "float32", [1' + "0" * 30 + "]]]", "cannot allocate"),
        ('[["weight", "float32", [1' + "0" * 5000 + "]]]", "integer string conversion"),
    ],
)
def test_corrupt_header_is_an_error_that_shows_it(ends, header, described):
    trainer, generator = ends
    content = header if isinstance(header, bytes) else header.encode()
    trainer.sendall(len(content).to_bytes(8, "little") + content)
    with pytest.raises(StateError, match=rf"^the trainer sent .*{described}") as caught:
        next(WeightChannel(generator, "the trainer", timeout=5).receive())
    assert all(part in str(caught.value) for part in ("[name, dtype, shape]", "at least 0", "send all weights again"))
    assert len(str(caught.value)) < 900


def test_header_that_is_too_long_is_an_error_before_it_is_read(ends):
    trainer, generator = ends
    trainer.sendall(b"GET / HT")
    with pytest.raises(StateError, match=r"a header of 6,\d+,\d+,.* bytes \(allowed: 100,000,000\)"):
        next(WeightChannel(generator, "the trainer").receive())


@pytest.mark.parametrize("shape", [(), (0,), (2, 0), (1,)])
def test_empty_tensors_and_scalars_arrive(ends, shape):
    trainer, generator = ends
    generator.sendall(_ACKNOWLEDGED)
    WeightChannel(trainer, "the generator").send([("weight", torch.full(shape, 3.0))])
    ((_, received),) = next(WeightChannel(generator, "the trainer").receive())
    assert torch.equal(received, torch.full(shape, 3.0))
