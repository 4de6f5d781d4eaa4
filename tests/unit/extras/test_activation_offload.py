"""Which saved tensors leave the device, and how often. The copies themselves need a device (tests/gpu)."""

import gc
from functools import partial

import pytest
import torch
from torch import nn

from headway.common import scope
from headway.extras import activation_offload
from headway.extras.activation_checkpointing import _find_block
from headway.extras.activation_offload import offload_saved_tensors


class Lane:
    """CopyLane whose device is the CPU. The copies are real and counted."""

    out: list[tuple[int, ...]]
    back: list[tuple[int, ...]]

    def __init__(self, device: torch.device) -> None:
        self.last = None

    def to_host(self, tensor: torch.Tensor) -> tuple[torch.Tensor, None]:
        self.out.append(tuple(tensor.shape))
        return tensor.clone(), None

    def to_device(self, host: torch.Tensor, ready: None) -> torch.Tensor:
        self.back.append(tuple(host.shape))
        return host.clone()

    def await_arrival(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor


@pytest.fixture
def lane(monkeypatch):
    monkeypatch.setattr(activation_offload, "CopyLane", Lane)
    monkeypatch.setattr(activation_offload, "_is_on_host", lambda tensor: False)
    scope.drop(activation_offload._CopyLanes)
    Lane.out, Lane.back = [], []
    yield Lane
    scope.drop(activation_offload._CopyLanes)


def gradients(run, parameters, context):
    for parameter in parameters:
        parameter.grad = None
    with context:
        out = run()
    out.sum().backward()
    return [parameter.grad.clone() for parameter in parameters]


def agree(run, parameters):
    """Check that gradients are equal with and without offloading."""
    wanted = gradients(run, parameters, torch.enable_grad())
    found = gradients(run, parameters, offload_saved_tensors(min_bytes=1))
    assert all(map(torch.equal, wanted, found))
    assert len(scope.own(activation_offload._Copies)) == 0, "what nobody needs any more is let go"


def test_activations_are_offloaded_and_weights_stay(lane):
    layer = nn.Linear(64, 48)
    inputs = torch.randn(32, 64, requires_grad=True)
    agree(lambda: layer(inputs).exp(), [layer.weight, inputs])
    assert sorted(lane.out) == [
        (32 * 48,),
        (32 * 64,),
    ]  # exp's result and the layer's input, not the (transposed) weight


def test_copies_of_weights_that_autocast_made_stay(lane):
    block = nn.Sequential(nn.Linear(64, 48), nn.GELU(), nn.Linear(48, 64, bias=False))
    weight = nn.Parameter(torch.randn(64, 32))
    inputs = torch.randn(8, 4, 64, requires_grad=True)

    def run():
        with torch.autocast("cpu", torch.bfloat16):
            return block(inputs) @ weight

    agree(run, [*block.parameters(), weight, inputs])
    sizes = {8 * 4 * width for width in (64, 48)}
    assert {size for (size,) in lane.out} == sizes
    # Into the first layer, into GELU, into the second layer, into the product.
    assert sorted(size for (size,) in lane.out) == [32 * 48, 32 * 48, 32 * 64, 32 * 64]


class Masked(nn.Module):
    """A frozen weight and a buffer, as a block with an adapter has them."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.adapter = nn.Linear(64, 48).requires_grad_(False), nn.Linear(64, 48)
        self.register_buffer("mask", torch.randn(48, 48))

    def forward(self, hidden):
        return (self.base(hidden) + self.adapter(hidden)) @ self.mask


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_tensors_that_a_block_holds_anyway_stay(lane, dtype):
    block = Masked()
    inputs = torch.randn(32, 64, requires_grad=True)
    wanted = None
    for context in (torch.enable_grad(), offload_saved_tensors(min_bytes=1, block=block)):
        inputs.grad = None
        with torch.autocast("cpu", dtype, enabled=dtype is not None), context:
            out = block(inputs)
        out.sum().backward()
        wanted = inputs.grad if wanted is None else wanted
    assert torch.equal(inputs.grad, wanted)
    # The adapter's input; under autocast also the mask's copy, a constant like any other for all that is known.
    assert len(lane.out) == (1 if dtype is None else 2), lane.out


def test_the_block_is_found_behind_its_method():
    block = Masked()
    ways = (
        block.forward,
        partial(block.__call__, x=1),
        partial(partial(block.forward)),
        partial(Masked.forward, block),
    )
    assert [_find_block(run) for run in (*ways, len)] == [block, block, block, block, None]


def test_what_several_operations_save_is_parked_and_fetched_once(lane):
    query, key, value = (nn.Linear(64, 64) for _ in range(3))
    inputs = torch.randn(8, 4, 64, requires_grad=True)
    parameters = [*query.parameters(), *key.parameters(), *value.parameters(), inputs]

    def run():
        hidden = inputs * 2  # saves nothing but the number
        return query(hidden) + key(hidden) + value(hidden.transpose(0, 1)).transpose(0, 1)

    agree(run, parameters)
    # A transposed input is copied by Linear itself, into a storage of its own.
    assert lane.out == [(8 * 4 * 64,)] * 2
    assert lane.back == [(8 * 4 * 64,)] * 2


def test_one_storage_serves_its_views(lane):
    inputs = torch.randn(64, 64, requires_grad=True)

    def run():
        hidden = inputs * 2
        return (hidden.exp() * 0 + hidden.sin() + hidden.t().cos() + hidden[1:].tanh().sum()).view(-1)

    agree(run, [inputs])
    saved = [shape for shape in lane.out if shape == (64 * 64,)]
    assert len(saved) == 2  # `hidden` for sin, cos and tanh's slice; exp's result
    assert len(lane.out) == 3  # and tanh's result


def test_inputs_that_all_blocks_share_are_parked_once(lane):
    blocks = [nn.Linear(64, 64) for _ in range(4)]
    shared = torch.randn(32, 64)
    inputs = torch.randn(32, 64, requires_grad=True)
    hidden = inputs
    for block in blocks:
        with offload_saved_tensors(min_bytes=1):
            hidden = block(hidden + shared * hidden)
    assert len(lane.out) == 1 + 4  # `shared`, and the input of each Linear
    hidden.sum().backward()


def test_a_changed_tensor_is_parked_again(lane):
    inputs = torch.randn(64, 64, requires_grad=True)

    def run():
        state = torch.full((64, 64), 2.0)
        first = inputs * state
        state.add_(1)  # plain torch forbids this: it saves no copy
        return first + inputs * state

    grads = gradients(run, [inputs], offload_saved_tensors(min_bytes=1))
    assert torch.equal(grads[0], torch.full((64, 64), 5.0))
    assert len(lane.out) == 2


def test_a_small_part_of_a_storage_goes_alone(lane):
    large = torch.randn(64, 64)
    inputs = torch.randn(64, requires_grad=True)
    agree(lambda: inputs * large[3], [inputs])
    assert lane.out == [(64,)]
    lane.out.clear()
    row = torch.randn(64)
    agree(lambda: inputs * row.expand(5, 64), [inputs])
    assert lane.out == [(64,)], "an expanded tensor is no larger than what it lies in"


def test_a_lazy_conjugate_is_materialized(lane):
    inputs = torch.randn(16, dtype=torch.complex64, requires_grad=True)
    factor = torch.randn(16, dtype=torch.complex64)
    wanted = gradients(lambda: (inputs * factor.conj() + inputs * factor).real, [inputs], torch.enable_grad())
    found = gradients(
        lambda: (inputs * factor.conj() + inputs * factor).real, [inputs], offload_saved_tensors(min_bytes=1)
    )
    assert all(map(torch.equal, wanted, found))


def test_an_address_that_is_used_again_is_not_taken_for_the_former_tensor(lane):
    inputs = torch.randn(64, 64, requires_grad=True)
    outputs = []
    with offload_saved_tensors(min_bytes=1):
        for number in range(50):
            factor = torch.full((64, 64), float(number))
            outputs.append((inputs * factor).sum())
            del factor
            gc.collect()
    torch.stack(outputs).sum().backward()
    assert torch.equal(inputs.grad, torch.full((64, 64), float(sum(range(50)))))


def test_at_most_one_fetched_copy_waits_on_the_device(lane):
    inputs = torch.randn(64, 64, requires_grad=True)
    with offload_saved_tensors(min_bytes=1):
        out = inputs.exp().sin().cos().tan()  # each saves its input or its result, which is the next one's input
    copies = list(scope.own(activation_offload._Copies).values())
    assert len(copies) == 3
    for copy in copies:
        copy.fetch()
    assert [copy._fetched is not None for copy in copies] == [False, False, True]
    del out


def test_small_tensors_stay(lane):
    inputs = torch.ones(32, 64, requires_grad=True)
    with offload_saved_tensors(min_bytes=32 * 64 * 4 + 1):
        inputs.exp()
    assert lane.out == []
    with offload_saved_tensors(min_bytes=32 * 64 * 4):
        inputs.exp()
    assert lane.out == [(32 * 64,)]


def test_nothing_leaves_the_cpu():
    inputs = torch.ones(1024, 1024, requires_grad=True)
    with offload_saved_tensors(min_bytes=1):
        out = inputs.exp()
    assert len(scope.own(activation_offload._Copies)) == 0
    out.sum().backward()
    assert torch.equal(inputs.grad, out)
