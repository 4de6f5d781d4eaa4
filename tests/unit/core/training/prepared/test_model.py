"""Test the prepared model on one process: the same object, copies of the original class, compilation and mixed precision."""

import copy
import io
import pickle

import pytest
import torch

from headway import Accelerator
from headway.core.training.prepared import model as prepared_model
from headway.errors import PrepareError


class Net(torch.nn.Module):
    """Linear layer with a buffer, an attribute and a method that calls the model."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)
        self.register_buffer("seen", torch.zeros(1))
        self.note = "mine"

    def forward(self, x, fail=False):
        if fail:
            raise KeyError("inside")
        return self.layer(x)

    def twice(self, x):
        return self(self(x))


def build_prepared(precision="bf16", net=None):
    net = net or Net()
    return net, Accelerator(cpu=True, mixed_precision=precision).prepare(net)


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_prepare_returns_the_same_object(precision):
    net, model = build_prepared(precision)
    assert model is net
    assert isinstance(model, Net)
    assert type(model).__name__ == "Net"
    assert type(model).__module__ == Net.__module__
    assert (model.note, model.layer is net.layer) == ("mine", True)
    assert list(model.state_dict()) == ["seen", "layer.weight", "layer.bias"]
    assert "forward" not in model.__dict__
    assert type(model).forward is Net.forward
    assert repr(model) == repr(Net())
    assert list(model.modules()) == [model, model.layer]


def test_calls_and_methods_use_autocast_once():
    _, model = build_prepared()
    x = torch.ones(2, 4)
    assert model(x).dtype is torch.bfloat16
    assert model.twice(x).dtype is torch.bfloat16
    with pytest.raises(KeyError, match="inside"):
        model(x, fail=True)
    assert model(x).dtype is torch.bfloat16  # the state was restored after the error
    with torch.no_grad():
        assert model(x).dtype is torch.bfloat16
    assert model.layer(x).dtype is torch.float32


def test_users_hooks_run_once():
    _, model = build_prepared()
    calls = []
    model.register_forward_hook(lambda *args: calls.append(1))
    model(torch.ones(2, 4))
    assert calls == [1]


def test_copies_have_the_original_class():
    net, model = build_prepared()
    twins = [copy.deepcopy(model), copy.copy(model), pickle.loads(pickle.dumps(model))]
    store = io.BytesIO()
    torch.save(model, store)
    store.seek(0)
    twins.append(torch.load(store, weights_only=False))
    for twin in twins:
        assert type(twin) is Net
        assert not isinstance(twin, prepared_model.PreparedModel)
        assert twin(torch.ones(1, 4)).dtype is torch.float32
        assert torch.equal(twin.layer.weight, net.layer.weight)
    nested = copy.deepcopy({"ema": model})["ema"]
    assert type(nested) is Net
    assert isinstance(model, prepared_model.PreparedModel)


def test_free_memory_restores_the_class():
    acc = Accelerator(cpu=True, mixed_precision="bf16")
    model = acc.prepare(Net())
    assert type(model) is not Net
    acc.free_memory()
    assert type(model) is Net
    assert model.__dict__.keys() == Net().__dict__.keys()


def test_class_that_cannot_be_extended_is_refused():
    class Closed(Net):
        def __init_subclass__(cls, **kwargs):
            raise TypeError("closed for good")

    with pytest.raises(PrepareError, match=r"Closed.*closed for good"):
        build_prepared(net=Closed())


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize("order", ["before", "after"])
def test_torch_compile_before_and_after_prepare(order, precision):
    torch._dynamo.reset()
    torch.manual_seed(0)
    net, acc = Net(), Accelerator(cpu=True, mixed_precision=precision)
    x = torch.randn(3, 4)
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
        expected = net(x)
    frames = []

    def backend(graph, inputs):
        frames.append(graph)
        from torch._dynamo.backends.debugging import aot_eager

        return aot_eager(graph, inputs)

    if order == "before":
        made = torch.compile(net, backend=backend)
        model = acc.prepare(made)
        assert model is made
    else:
        model = torch.compile(acc.prepare(net), backend=backend)
    out = model(x)
    assert out.dtype is expected.dtype
    assert torch.allclose(out, expected)
    acc.backward(out.float().square().mean())
    assert net.layer.weight.grad is not None
    num_frames = len(frames)
    assert num_frames >= 1
    model(x)
    assert len(frames) == num_frames  # no further compilation
    assert list(acc.get_state_dict(model)) == ["seen", "layer.weight", "layer.bias"]
    assert acc.unwrap_model(model, keep_torch_compile=False) is net
    if order == "before":
        assert acc.unwrap_model(model) is model


def test_module_compile_in_place():
    torch._dynamo.reset()
    _, model = build_prepared()
    model.compile(backend="aot_eager")
    assert model(torch.ones(2, 4)).dtype is torch.bfloat16
