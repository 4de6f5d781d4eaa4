"""Test streaming with copies within host memory instead of to a device: order, budget, ties, gradients and errors."""

import copy

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from headway import dispatch_model
from headway.offload.execution import Execution, undispatch_model
from headway.offload.placement.device_map import DeviceMap
from headway.offload.placement.storage_devices import Placement
from headway.offload.stream import DeviceStream
from headway.offload.transport import HostTransport

CPU = torch.device("cpu")


def stream_model(model, preload=(), transport=None):
    """Let every tensor of the model be copied for each use, as if to a device. Return the stream."""
    undispatch_model(model)
    storage_devices = {
        name: "disk" for name, _ in [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]
    }
    placement = Placement(DeviceMap({"": "disk"}), CPU, storage_devices)
    execution = Execution(model, placement, [], list(preload), transport or HostTransport())
    execution.attach_hooks()
    assert isinstance(execution.stream, DeviceStream)
    return execution.stream


class ReusedBlocks(nn.Module):
    """Blocks used twice and out of order, one shared, one tied, and one within another."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.alias = self.a
        self.tied = nn.Linear(4, 4)
        self.tied.weight = self.a.weight
        self.own = nn.Parameter(torch.randn(4))
        self.rnn = nn.LSTM(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.attention = nn.MultiheadAttention(4, 2)

    def forward(self, x, swap=False):
        order = [self.c, self.a, self.b, self.a, self.alias, self.tied]
        for part in reversed(order) if swap else order:
            x = torch.tanh(part(x)) + self.own
        x = self.norm(self.rnn(x)[0])
        return self.attention(x, x, x)[0]


@pytest.fixture
def pair():
    """Whole model, and a copy to be streamed."""
    torch.manual_seed(0)
    whole = ReusedBlocks().eval()
    return whole, copy.deepcopy(whole)


INPUTS = torch.randn(3, 4, generator=torch.Generator().manual_seed(1))


def test_outputs_equal_the_whole_model_in_any_order_of_use(pair):
    whole, model = pair
    stream = stream_model(model)
    with torch.no_grad():
        for swap in (False, False, True, False, True, True):
            assert torch.equal(model(INPUTS, swap), whole(INPUTS, swap))
    assert stream.active_bytes <= stream.num_bytes
    with torch.inference_mode():
        assert torch.equal(model(INPUTS), whole(INPUTS))
    assert all(isinstance(parameter, nn.Parameter) for parameter in model.parameters())


def test_copies_stay_within_the_window_and_shared_tensors_are_copied_once():
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(12)))
    model[9].weight = model[2].weight
    stream = stream_model(model)
    one = 16 * 16 * 4
    stream.window = 2 * one
    seen = []
    for part in model:
        part.register_forward_hook(lambda *_: seen.append(stream.active_bytes))
    with torch.no_grad():
        for _ in range(3):
            model(torch.randn(1, 16))
    # window, the module in use, and the tensor that two modules use
    assert max(seen) <= 4 * one
    # 11 tensors, one of which is never copied again. Each pass ends with pending copies for the next one.
    assert stream.traffic.num_bytes <= (1 + 10 * 3 + 2) * one


def test_changed_weights_are_used(pair):
    whole, model = pair
    stream_model(model)
    with torch.no_grad():
        model(INPUTS)
        for each in (whole, model):
            for parameter in each.parameters():
                parameter.mul_(0.5)
        assert torch.equal(model(INPUTS), whole(INPUTS))
    other = ReusedBlocks().state_dict()
    for each in (whole, model):
        each.load_state_dict(other)
    with torch.no_grad():
        assert torch.equal(model(INPUTS), whole(INPUTS))


def test_adapter_on_a_streamed_frozen_model_trains_as_on_a_whole_one(pair):
    whole, model = pair
    for each in (whole, model):
        each.requires_grad_(False)
        each.adapter = nn.Linear(4, 4)
        each.adapter.load_state_dict({"weight": torch.eye(4), "bias": torch.ones(4)})
    stream_model(model)
    for each in (whole, model):
        optimizer = torch.optim.Adam(each.adapter.parameters(), lr=0.1)
        for _ in range(3):
            each(each.adapter(INPUTS)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert torch.equal(model.adapter.weight, whole.adapter.weight)
    assert not torch.equal(model.adapter.weight, torch.eye(4))


def test_backward_copies_weights_again_instead_of_keeping_them():
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(8))).requires_grad_(False)
    stream = stream_model(model)
    stream.window = 2 * 16 * 17 * 4
    inputs = torch.randn(2, 16, requires_grad=True)
    loss = model(inputs).sum()
    moved = stream.traffic.num_bytes
    assert stream.active_bytes <= 3 * 16 * 17 * 4
    loss.backward()
    assert stream.traffic.num_bytes >= moved + 8 * 16 * 16 * 4


def test_full_training_accumulates_gradients_on_the_host(pair):
    whole, model = pair
    stream_model(model)
    for each in (whole, model):
        each(INPUTS).square().sum().backward()
    for (name, expected), found in zip(whole.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(expected.grad, found.grad), name


def test_error_in_forward_leaves_real_weights(pair):
    whole, model = pair
    stream_model(model)
    with pytest.raises(RuntimeError):
        model(torch.randn(3, 5))
    assert torch.equal(model(INPUTS), whole(INPUTS))
    state = model.state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in whole.state_dict().items())


class Interrupted(nn.Module):
    """Linear layer whose forward can be interrupted as by Ctrl-C."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))
        self.is_interrupted = False

    def forward(self, x):
        if self.is_interrupted:
            raise KeyboardInterrupt
        return x @ self.weight


def test_interrupted_forward_does_not_leave_old_weights():
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4), Interrupted()), nn.Linear(4, 4))
    whole, x = copy.deepcopy(model), torch.randn(2, 4)
    stream_model(model)
    weights = list(model.parameters())
    model[0][1].is_interrupted = True
    with pytest.raises(KeyboardInterrupt):
        model(x)
    model[0][1].is_interrupted = False
    for _ in range(2):  # Ctrl-C in a notebook, and then the cell again
        for each, streamed in [(whole, list(whole.parameters())), (model, weights)]:
            each(x).square().sum().backward()
            torch.optim.SGD(streamed, 0.1).step()
    assert all(ours is theirs for ours, theirs in zip(model.parameters(), weights))
    torch.testing.assert_close(model.state_dict(), whole.state_dict())
    # The hooks on saved tensors outlive the interrupted forward (`_end_interrupted_uses`). Later tests must not call them.
    torch._C._autograd._pop_saved_tensors_default_hooks()


class ChangedBuffers(nn.Module):
    """Module whose forward changes a buffer in place and assigns another."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("last", torch.zeros(1))

    def forward(self, x):
        self.last = x.detach().mean(0)
        return self.norm(x)


def test_buffers_keep_the_changes_of_a_forward():
    model = ChangedBuffers()
    whole = copy.deepcopy(model)
    stream_model(model)
    for _ in range(2):
        x = torch.randn(8, 4)
        torch.testing.assert_close(model(x), whole(x))
    torch.testing.assert_close(model.state_dict(), whole.state_dict())
    assert int(model.norm.num_batches_tracked) == 2


def test_copy_of_the_model_is_independent(pair):
    whole, model = pair
    stream_model(model)
    model(INPUTS)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    assert not torch.equal(other(INPUTS), whole(INPUTS))
    assert torch.equal(model(INPUTS), whole(INPUTS))


def test_modules_that_use_weights_of_others(pair):
    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x):
            return nn.functional.linear(x, self.inner.weight)

    whole = Outer()
    model = copy.deepcopy(whole)
    stream = stream_model(model, preload=["Outer"])
    with torch.no_grad():
        assert torch.equal(model(INPUTS), whole(INPUTS))
    assert stream.traffic.num_bytes == 20 * 4


def test_hooks_are_removed(pair, tmp_path):
    whole, model = pair
    stream_model(model)
    undispatch_model(model)
    assert not any(part._forward_pre_hooks or part._forward_hooks for part in model.modules())
    save_file({"w": torch.zeros(1)}, tmp_path / "x.safetensors")
    dispatch_model(model, {"": "cpu"})
    assert torch.equal(model(INPUTS), whole(INPUTS))


class FailingTransport(HostTransport):
    """Transport whose copies fail a given number of times, as with a full device or an unreadable page."""

    def __init__(self):
        super().__init__()
        self.num_failures = 0

    def start_copy(self, source, copy, after):
        if self.num_failures:
            self.num_failures -= 1
            raise OSError("no copy")
        return super().start_copy(source, copy, after)


def test_failed_copy_is_repeated(pair):
    whole, model = pair
    transport = FailingTransport()
    stream_model(model, transport=transport)
    with torch.no_grad():
        model(INPUTS)
        transport.num_failures = 1000
        with pytest.raises(OSError, match="no copy"):
            model(INPUTS)
        transport.num_failures = 0
        assert torch.equal(model(INPUTS), whole(INPUTS))


def test_all_failed_copies_of_a_unit_are_repeated():
    whole = nn.Linear(4, 4)
    model, transport = copy.deepcopy(whole), FailingTransport()
    stream_model(model, transport=transport)
    with torch.no_grad():
        transport.num_failures = 2  # for weight and bias
        with pytest.raises(OSError):
            model(INPUTS)
        model.headway_execution.stream._worker.submit(int).result()  # wait until the second one has failed, too
        assert torch.equal(model(INPUTS), whole(INPUTS))


def test_copy_that_failed_ahead_of_its_use_is_repeated():
    whole = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(6)))
    model, transport = copy.deepcopy(whole), FailingTransport()
    stream_model(model, transport=transport).window = 2 * 4 * 4 * 4
    with torch.no_grad():
        for num_failures in (0, 1, 1, 1):
            transport.num_failures = num_failures
            assert torch.equal(model(INPUTS), whole(INPUTS))
            assert transport.num_failures == 0
