"""Test which saved tensors leave the device, and how often. The copies themselves need a device (tests/gpu)."""

import gc
from functools import partial

import pytest
import torch
from torch import nn

from headway.common import scope
from headway.extras import activation_offload
from headway.extras.activation_checkpointing import _find_block
from headway.extras.activation_offload import offload_saved_tensors


class CountingLane:
    """Stand-in for CopyLane whose device is the CPU. Its copies are real and counted."""

    out: list[tuple[int, ...]]
    back: list[tuple[int, ...]]

    def __init__(self, device: torch.device) -> None:
        self.last_fetched = None

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
    """Replace the copy lanes by stand-ins, and return their class, which lists the copied shapes."""
    monkeypatch.setattr(activation_offload, "CopyLane", CountingLane)
    monkeypatch.setattr(activation_offload, "_is_on_host", lambda tensor: False)
    scope.drop(activation_offload._CopyLanes)
    CountingLane.out, CountingLane.back = [], []
    yield CountingLane
    scope.drop(activation_offload._CopyLanes)


def compute_gradients(run, parameters, context):
    for parameter in parameters:
        parameter.grad = None
    with context:
        out = run()
    out.sum().backward()
    return [parameter.grad.clone() for parameter in parameters]


def check_equal_gradients(run, parameters):
    """Check that gradients are equal with and without offloading."""
    expected = compute_gradients(run, parameters, torch.enable_grad())
    found = compute_gradients(run, parameters, offload_saved_tensors(min_bytes=1))
    assert all(map(torch.equal, expected, found))
    assert len(scope.get_or_create(activation_offload._ActivationCache)) == 0, (
        "copies that are no longer needed must be freed"
    )


def test_activations_are_offloaded_and_weights_stay(lane):
    layer = nn.Linear(64, 48)
    inputs = torch.randn(32, 64, requires_grad=True)
    check_equal_gradients(lambda: layer(inputs).exp(), [layer.weight, inputs])
    assert sorted(lane.out) == [
        (32 * 48,),
        (32 * 64,),
    ]  # the result of exp and the input of the layer, but not the transposed weight


def test_copies_of_weights_made_by_autocast_stay(lane):
    block = nn.Sequential(nn.Linear(64, 48), nn.GELU(), nn.Linear(48, 64, bias=False))
    weight = nn.Parameter(torch.randn(64, 32))
    inputs = torch.randn(8, 4, 64, requires_grad=True)

    def compute():
        with torch.autocast("cpu", torch.bfloat16):
            return block(inputs) @ weight

    check_equal_gradients(compute, [*block.parameters(), weight, inputs])
    sizes = {8 * 4 * width for width in (64, 48)}
    assert {size for (size,) in lane.out} == sizes
    # Inputs of the first layer, GELU, the second layer and the matrix product.
    assert sorted(size for (size,) in lane.out) == [32 * 48, 32 * 48, 32 * 64, 32 * 64]


class Masked(nn.Module):
    """Block with a frozen weight, an adapter and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.adapter = nn.Linear(64, 48).requires_grad_(False), nn.Linear(64, 48)
        self.register_buffer("mask", torch.randn(48, 48))

    def forward(self, hidden):
        return (self.base(hidden) + self.adapter(hidden)) @ self.mask


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_tensors_that_belong_to_a_block_stay(lane, dtype):
    block = Masked()
    inputs = torch.randn(32, 64, requires_grad=True)
    expected = None
    for context in (torch.enable_grad(), offload_saved_tensors(min_bytes=1, block=block)):
        inputs.grad = None
        with torch.autocast("cpu", dtype, enabled=dtype is not None), context:
            out = block(inputs)
        out.sum().backward()
        expected = inputs.grad if expected is None else expected
    assert torch.equal(inputs.grad, expected)
    # The adapter's input. Under autocast also the copy of the mask, which cannot be recognized as a constant.
    assert len(lane.out) == (1 if dtype is None else 2), lane.out


def test_block_of_a_callable_is_found():
    block = Masked()
    ways = (
        block.forward,
        partial(block.__call__, x=1),
        partial(partial(block.forward)),
        partial(Masked.forward, block),
    )
    assert [_find_block(run) for run in (*ways, len)] == [block, block, block, block, None]


def test_tensor_saved_by_several_operations_is_copied_once(lane):
    query, key, value = (nn.Linear(64, 64) for _ in range(3))
    inputs = torch.randn(8, 4, 64, requires_grad=True)
    parameters = [*query.parameters(), *key.parameters(), *value.parameters(), inputs]

    def compute():
        hidden = inputs * 2  # saves only the number
        return query(hidden) + key(hidden) + value(hidden.transpose(0, 1)).transpose(0, 1)

    check_equal_gradients(compute, parameters)
    # Linear copies a transposed input into a new storage.
    assert lane.out == [(8 * 4 * 64,)] * 2
    assert lane.back == [(8 * 4 * 64,)] * 2


def test_views_share_one_copied_storage(lane):
    inputs = torch.randn(64, 64, requires_grad=True)

    def compute():
        hidden = inputs * 2
        return (hidden.exp() * 0 + hidden.sin() + hidden.t().cos() + hidden[1:].tanh().sum()).view(-1)

    check_equal_gradients(compute, [inputs])
    saved = [shape for shape in lane.out if shape == (64 * 64,)]
    assert len(saved) == 2  # `hidden` for sin, cos and the slice for tanh, and the result of exp
    assert len(lane.out) == 3  # and the result of tanh


def test_input_shared_by_all_blocks_is_copied_once(lane):
    blocks = [nn.Linear(64, 64) for _ in range(4)]
    shared = torch.randn(32, 64)
    inputs = torch.randn(32, 64, requires_grad=True)
    hidden = inputs
    for block in blocks:
        with offload_saved_tensors(min_bytes=1):
            hidden = block(hidden + shared * hidden)
    assert len(lane.out) == 1 + 4  # `shared`, and the input of each Linear
    hidden.sum().backward()


def test_changed_tensor_is_copied_again(lane):
    inputs = torch.randn(64, 64, requires_grad=True)

    def compute():
        state = torch.full((64, 64), 2.0)
        first = inputs * state
        state.add_(1)  # plain torch refuses this, because it saves no copy
        return first + inputs * state

    grads = compute_gradients(compute, [inputs], offload_saved_tensors(min_bytes=1))
    assert torch.equal(grads[0], torch.full((64, 64), 5.0))
    assert len(lane.out) == 2


def test_small_part_of_a_storage_is_copied_alone(lane):
    large = torch.randn(64, 64)
    inputs = torch.randn(64, requires_grad=True)
    check_equal_gradients(lambda: inputs * large[3], [inputs])
    assert lane.out == [(64,)]
    lane.out.clear()
    row = torch.randn(64)
    check_equal_gradients(lambda: inputs * row.expand(5, 64), [inputs])
    assert lane.out == [(64,)], "only the storage of an expanded tensor must be copied"


def test_lazy_conjugate_is_materialized(lane):
    inputs = torch.randn(16, dtype=torch.complex64, requires_grad=True)
    factor = torch.randn(16, dtype=torch.complex64)
    expected = compute_gradients(lambda: (inputs * factor.conj() + inputs * factor).real, [inputs], torch.enable_grad())
    found = compute_gradients(
        lambda: (inputs * factor.conj() + inputs * factor).real, [inputs], offload_saved_tensors(min_bytes=1)
    )
    assert all(map(torch.equal, expected, found))


def test_reused_address_is_not_mistaken_for_the_earlier_tensor(lane):
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


def test_at_most_one_fetched_copy_stays_on_the_device(lane):
    inputs = torch.randn(64, 64, requires_grad=True)
    with offload_saved_tensors(min_bytes=1):
        out = inputs.exp().sin().cos().tan()  # each operation saves its input or its result, which is the next input
    copies = list(scope.get_or_create(activation_offload._ActivationCache).values())
    assert len(copies) == 3
    for copy in copies:
        copy.fetch()
    assert [copy._fetched is not None for copy in copies] == [False, False, True]
    del out


def test_small_tensors_are_not_copied(lane):
    inputs = torch.ones(32, 64, requires_grad=True)
    with offload_saved_tensors(min_bytes=32 * 64 * 4 + 1):
        inputs.exp()
    assert lane.out == []
    with offload_saved_tensors(min_bytes=32 * 64 * 4):
        inputs.exp()
    assert lane.out == [(32 * 64,)]


def test_tensors_on_the_cpu_are_not_copied():
    inputs = torch.ones(1024, 1024, requires_grad=True)
    with offload_saved_tensors(min_bytes=1):
        out = inputs.exp()
    assert len(scope.get_or_create(activation_offload._ActivationCache)) == 0
    out.sum().backward()
    assert torch.equal(inputs.grad, out)
