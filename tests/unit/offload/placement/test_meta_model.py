"""Test meta models: nothing is allocated, no value is lost, and torch is restored."""

import threading
from contextlib import contextmanager

import pytest
import torch
from torch import nn
from torch.nn.modules import module as torch_module
from torch.overrides import _get_current_function_mode_stack

from headway import init_empty_weights, init_on_device
from headway.errors import MetaModelError
from tests.unit.offload.placement.models import MODELS, build_model


@contextmanager
def check_torch_is_restored():
    before = (nn.Module.register_parameter, nn.Module.register_buffer, torch.get_default_device())
    yield
    assert (nn.Module.register_parameter, nn.Module.register_buffer, torch.get_default_device()) == before
    assert not torch_module._global_parameter_registration_hooks
    assert not torch_module._global_buffer_registration_hooks
    assert not _get_current_function_mode_stack()


@pytest.fixture(autouse=True)
def torch_is_restored():
    with check_torch_is_restored():
        yield


@pytest.mark.parametrize("include_buffers", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_meta_model_has_the_tensors_and_ties_of_a_real_one(name, include_buffers):
    torch.manual_seed(0)
    real = build_model(name)
    with init_empty_weights(include_buffers=include_buffers):
        empty = build_model(name)
    for (ours, parameter), (theirs, value) in zip(
        empty.named_parameters(remove_duplicate=False), real.named_parameters(remove_duplicate=False), strict=True
    ):
        assert ours == theirs
        assert parameter.is_meta
        assert (parameter.shape, parameter.dtype, type(parameter), parameter.requires_grad) == (
            value.shape, value.dtype, type(value), value.requires_grad,
        )  # fmt: skip
    assert len(list(empty.parameters())) == len(list(real.parameters()))
    for (ours, buffer), (theirs, value) in zip(empty.named_buffers(), real.named_buffers(), strict=True):
        assert ours == theirs
        assert buffer.is_meta if include_buffers else torch.equal(buffer, value)


class Mixed(nn.Module):
    """Large tensors: a parameter, a computed buffer, a plain attribute, and one written in place."""

    def __init__(self):
        super().__init__()
        ones = torch.ones(300, 300)
        self.register_buffer("mask", torch.tril(ones))
        self.register_buffer("direct", torch.full((300, 300), 2.0), persistent=False)
        self.plain = torch.full((300, 300), 3.0)
        self.weight = nn.Parameter(torch.randn(300, 300))
        marked = torch.zeros(300, 300)
        marked[0, 0] = 1
        self.register_buffer("marked", marked)
        shaped = torch.ones(300, 300)
        assert shaped.shape == (300, 300)
        self.listed = [shaped]


def test_only_parameters_lose_their_values():
    with init_empty_weights():
        model = Mixed()
    assert model.weight.is_meta
    assert torch.equal(model.mask, torch.tril(torch.ones(300, 300)))
    assert torch.equal(model.direct, torch.full((300, 300), 2.0))
    assert torch.equal(model.plain, torch.full((300, 300), 3.0))
    assert (model.marked[0, 0], model.marked.sum()) == (1, 1)
    assert torch.equal(model.listed[0], torch.ones(300, 300))


def test_large_parameters_are_never_allocated():
    class Huge(nn.Module):
        def __init__(self):
            super().__init__()
            self.drawn = nn.Parameter(torch.randn(1 << 21, 1 << 21))
            self.kept = nn.Parameter(torch.ones(size=(1 << 21, 1 << 21)))
            self.linear = nn.Linear(1 << 21, 1 << 21)

    with init_empty_weights():
        model = Huge()
    assert all(parameter.is_meta for parameter in model.parameters())
    assert sum(parameter.numel() for parameter in model.parameters()) > 3 << 42


def test_parameter_registered_twice_stays_one():
    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            weight = nn.Parameter(torch.ones(3, 3), requires_grad=False)
            weight.note = "kept"
            self.one = nn.Linear(3, 3)
            self.other = nn.Linear(3, 3)
            self.one.weight = weight
            self.other.weight = weight

    with init_empty_weights():
        model = Shared()
    assert model.one.weight is model.other.weight
    assert model.one.weight.note == "kept"
    assert not model.one.weight.requires_grad


class Rates(nn.Module):
    def __init__(self):
        super().__init__()
        # Not linspace, because transformers replaces it on all threads while it loads a model.
        self.rates = [rate.item() for rate in torch.arange(3) / 2]


class Outer(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner()


class FromParameter(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("doubled", self.weight.detach() * 2)


class Branching(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        if self.weight.sum() > 0:
            self.flag = True


def test_constructor_that_reads_a_value_is_named():
    with init_empty_weights():
        assert Outer(Rates).inner.rates == [0.0, 0.5, 1.0]
    with (
        pytest.raises(
            MetaModelError, match=r"Outer > Rates at .*test_meta_model.py:\d+ called .*item.*include_buffers=False"
        ),
        init_empty_weights(include_buffers=True),
    ):
        Outer(Rates)
    with (
        pytest.raises(MetaModelError, match=r"buffer 'doubled' of FromParameter .*Outer > FromParameter at"),
        init_empty_weights(),
    ):
        Outer(FromParameter)
    with init_empty_weights(include_buffers=True):
        assert Outer(FromParameter).inner.doubled.is_meta
    with pytest.raises(MetaModelError, match="Outer > Branching at"), init_empty_weights():
        Outer(Branching)


@pytest.mark.parametrize("kind", [list, tuple])
def test_value_read_through_a_container_class_is_named(kind):
    class Values(kind):
        pass

    class Reader(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()), requires_grad=False)
            self.sizes = torch.tensor(Values([self.scale]))

    with pytest.raises(MetaModelError, match="Reader at"), init_empty_weights():
        Reader()


@pytest.mark.parametrize("read", ["tolist", "numpy", "cpu"])
def test_every_way_to_read_a_value_gives_the_same_error(read):
    class Reader(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3), requires_grad=False)
            self.value = getattr(self.weight, read)()

    with pytest.raises(MetaModelError, match="Reader at"), init_empty_weights():
        Reader()


def test_other_errors_are_raised_unchanged():
    with pytest.raises(KeyError, match="mine"), init_empty_weights():
        raise KeyError("mine")
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"), init_empty_weights():
        torch.ones(2, 3) @ torch.ones(2, 3)


def test_innermost_block_applies():
    with init_empty_weights():
        outer = nn.Linear(2, 2)
        with init_on_device("cpu"):
            inner = nn.Linear(2, 2)
        again = nn.Linear(2, 2)
        with init_empty_weights(include_buffers=True):
            whole = nn.BatchNorm1d(2)
        batch = nn.BatchNorm1d(2)
    assert (outer.weight.is_meta, inner.weight.is_meta, again.weight.is_meta) == (True, False, True)
    assert whole.running_mean.is_meta
    assert not batch.running_mean.is_meta
    assert batch.weight.is_meta


def test_innermost_block_may_be_a_real_device():
    with init_empty_weights(include_buffers=True), init_on_device("cpu", include_buffers=True):
        inner = nn.BatchNorm1d(2)
    assert not inner.weight.is_meta
    assert torch.equal(inner.weight, torch.ones(2))


def test_other_threads_are_unaffected():
    inside, done, found = threading.Event(), threading.Event(), []

    def build_elsewhere():
        inside.wait(20)
        found.append(nn.Linear(300, 300))
        done.set()

    thread = threading.Thread(target=build_elsewhere)
    thread.start()
    with init_empty_weights():
        inside.set()
        assert done.wait(20)
        assert nn.Linear(300, 300).weight.is_meta
    thread.join()
    assert found[0].weight.device.type == "cpu"
    assert found[0].weight.std() > 0


def test_environment_sets_the_default(monkeypatch):
    monkeypatch.setenv("HEADWAY_INIT_INCLUDE_BUFFERS", "1")
    with init_empty_weights():
        assert nn.BatchNorm1d(2).running_mean.is_meta
    with init_empty_weights(include_buffers=False):
        assert not nn.BatchNorm1d(2).running_mean.is_meta


def test_real_modules_keep_their_values_in_a_meta_model():
    real = nn.Linear(2, 2)
    with init_empty_weights():
        model = nn.Sequential(real, nn.Linear(2, 2))
    assert not model[0].weight.is_meta
    assert model[1].weight.is_meta


def test_recurrent_layers_and_lists_of_parameters():
    with init_empty_weights():
        lstm = nn.LSTM(300, 300, num_layers=2)
        group = nn.ParameterList([nn.Parameter(torch.randn(300, 300)) for _ in range(2)])
    assert all(weight.is_meta for weight in [*lstm._flat_weights, *lstm.parameters(), *group.parameters()])


def test_lazy_layers_stay_lazy():
    with init_empty_weights():
        model = nn.LazyLinear(4)
        assert model.weight.device.type == "meta"
        model.initialize_parameters(torch.empty(1, 3))
    assert (model.weight.is_meta, model.weight.shape) == (True, (4, 3))
