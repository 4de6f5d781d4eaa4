"""Tests that tensors that are not row-major keep their strides, as with torch.save, so that resumed runs are bit-identical."""

import os

import numpy
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from headway import Accelerator, ProjectConfiguration, set_seed
from headway.core.checkpoint.format.values import decode_value, encode_value
from headway.core.checkpoint.loading.rollback import copy_state
from headway.errors import CheckpointError
from tests.distributed.ranks import run_ranks
from tests.stores import server

STOP, UPDATES = 3, 6


class Rotated(torch.optim.Optimizer):
    """An optimizer like SOAP with momentum in the eigenbasis of the second moment. Its state contains many kinds of views."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.05})

    @torch.no_grad()
    def step(self, closure=None):
        for parameter in (each for group in self.param_groups for each in group["params"] if each.grad is not None):
            state, gradient = self.state[parameter], parameter.grad
            local = gradient.to_local() if hasattr(gradient, "to_local") else gradient
            flat = local.reshape(len(local), -1).contiguous()
            if "factor" not in state:
                state["factor"] = torch.eye(len(flat))
                state["momentum"] = torch.zeros_like(flat.t()).t()
                state["expanded"] = torch.ones(len(flat), 1).expand(-1, 3)
                state["columns"] = torch.randn(8, 6, generator=torch.Generator().manual_seed(1))[:, ::2]
                state["nested"] = [torch.randn(3, 5, generator=torch.Generator().manual_seed(2)).t()]
                if local.ndim == 2:
                    state["turned"] = parameter.detach().t().contiguous().t()  # a DTensor under fsdp
                if local.ndim == 4:
                    state["image"] = torch.zeros_like(local, memory_format=torch.channels_last)
            if local.ndim == 4:
                state["image"].lerp_(local, 0.3)
                local.add_(state["image"], alpha=0.1 * float(state["image"].sum()))
            state["factor"].lerp_(flat @ flat.t() + 0.01 * torch.eye(len(flat)), 0.4)
            state["basis"] = torch.linalg.eigh(state["factor"]).eigenvectors
            state["momentum"].lerp_(state["basis"].t() @ flat, 0.2)
            step = (state["basis"] @ state["momentum"]).reshape(local.shape)
            local_parameter = parameter.to_local() if hasattr(parameter, "to_local") else parameter
            local_parameter.sub_(step * (0.05 + 1e-4 * float(state["columns"].sum() + state["expanded"].sum())))


class Averages:
    """A registered object with a transposed tensor and an array in Fortran order."""

    def __init__(self):
        self.tensor = torch.randn(7, 33, generator=torch.Generator().manual_seed(3)).t()
        self.array = numpy.asfortranarray(numpy.random.default_rng(3).normal(size=(33, 7)))

    def state_dict(self):
        return {"tensor": self.tensor, "array": self.array}

    def load_state_dict(self, state):
        self.tensor, self.array = state["tensor"], state["array"]


class Network(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.convolution = torch.nn.Conv2d(3, 16, 3)
        self.linear = torch.nn.Linear(16, 24)
        self.register_buffer("turned", torch.randn(24, 24).t())

    def forward(self, images):
        return self.linear(self.convolution(images).mean((2, 3))) @ self.turned


def describe_memory(value):
    """Return the shape, strides and bytes of each tensor and array in a nested value."""
    if isinstance(value, dict):
        return {key: describe_memory(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [describe_memory(each) for each in value]
    if hasattr(value, "to_local"):
        value = value.to_local()
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.stride(), value.detach().contiguous().numpy().tobytes()
    if isinstance(value, numpy.ndarray):
        return value.shape, value.strides, value.tobytes()
    return value


def train(folder, path, strategy, blocking, is_resumed, settings):
    """Train from the start or from the checkpoint. Return the weights, and the state at the save as torch.save would keep it."""
    os.environ.update(settings)
    set_seed(5)
    accelerator = Accelerator(cpu=True, strategy=strategy, project_config=ProjectConfiguration(folder))
    model = Network()
    if strategy != "fsdp":  # FSDP requires contiguous parameters
        model = model.to(memory_format=torch.channels_last)
    optimizer, averages = Rotated(model.parameters()), Averages()
    data = TensorDataset(torch.randn(UPDATES * 4, 3, 6, 6, generator=torch.Generator().manual_seed(1)))
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=2))
    accelerator.register_for_checkpointing(averages)
    if is_resumed:
        averages.tensor, averages.array = torch.zeros(33, 7), numpy.zeros((33, 7))
        accelerator.load_state(path)
    state_at_save = describe_memory([dict(model.named_parameters()), optimizer.state_dict(), averages.state_dict()])
    number = STOP if is_resumed else 0
    for (images,) in loader:
        accelerator.backward(model(images).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        number += 1
        if number == STOP and not is_resumed:
            torch.save([optimizer.state_dict(), averages.state_dict()], f"{folder}/torch-{accelerator.process_index}")
            states = torch.load(f"{folder}/torch-{accelerator.process_index}", weights_only=False)
            state_at_save = describe_memory([dict(model.named_parameters()), *states])
            accelerator.save_state(path, blocking=blocking)
        if number == UPDATES:
            break
    accelerator.wait_for_save()
    return describe_memory(dict(model.named_parameters())), state_at_save


@pytest.mark.parametrize(
    ("strategy", "world_size", "blocking"),
    [
        ("ddp", 2, False),
        pytest.param("ddp", 1, True, marks=pytest.mark.matrix),
        pytest.param("ddp", 2, True, marks=pytest.mark.matrix),
        pytest.param("fsdp", 1, True, marks=pytest.mark.matrix),
    ],
)
def test_resumed_run_is_bit_identical_to_uninterrupted_run(strategy, world_size, blocking, tmp_path):
    check_resumed(world_size, str(tmp_path), f"{tmp_path}/saved", strategy, blocking)


@pytest.mark.slow
def test_object_store_keeps_strides(tmp_path):
    with server.running() as port:
        check_resumed(1, str(tmp_path), "s3://bucket/saved", "ddp", True, server.environment(port))


def check_resumed(world_size, folder, path, strategy, blocking, settings=None):
    """Check that the resumed run loads the state that torch.save keeps, and ends with the uninterrupted run's weights."""
    whole, resumed = (
        run_ranks(train, world_size, folder, path, strategy, blocking, is_resumed, settings or {})
        for is_resumed in (False, True)
    )
    for (weights, saved), (resumed_weights, loaded) in zip(whole, resumed, strict=True):
        assert loaded == saved
        assert resumed_weights == weights


def make_rows(count):
    return torch.randn(count, 6, generator=torch.Generator().manual_seed(count))


LAYOUTS = {
    "transposed": lambda: make_rows(4).t(),
    "a row as a column": lambda: make_rows(1).t().t(),
    "channels_last": lambda: torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
    "channels_last with one channel": lambda: torch.randn(2, 1, 4, 4).to(memory_format=torch.channels_last),
    "expanded": lambda: make_rows(1).expand(4, 6),
    "expanded and transposed": lambda: make_rows(1).expand(4, 6).t(),
    "every second column": lambda: make_rows(4)[:, ::2],
    "a diagonal": lambda: make_rows(6).diagonal(),
    "windows that overlap": lambda: torch.arange(10.0).as_strided((4, 4), (1, 2)),
    "without elements": lambda: torch.empty(0, 3).t(),
    "booleans": lambda: (make_rows(4) > 0).t(),
    "complex": lambda: torch.complex(make_rows(4), make_rows(4)).mH,
    "bfloat16": lambda: make_rows(4).bfloat16().t(),
    "a parameter": lambda: torch.nn.Parameter(make_rows(4).t()),
    "eigenvectors of one value": lambda: torch.linalg.eigh(torch.ones(1, 1)).eigenvectors,
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_layout_is_restored(layout):
    tensor, tensors = LAYOUTS[layout](), {}
    encoded = encode_value({"value": tensor}, "x", tensors)
    stored = {name: each.detach().contiguous().clone() for name, each in tensors.items()}
    for restored in (decode_value(encoded, stored)["value"], copy_state({"value": tensor})()["value"]):
        assert restored.stride() == tensor.stride()
        assert torch.equal(restored, tensor)
        assert type(restored) is type(tensor)


def test_narrow_view_of_a_large_tensor_becomes_contiguous():
    """A loaded checkpoint takes about as much memory as its files have bytes."""
    column, tensors = torch.randn(4000, 3000)[:, 7], {}
    encoded = encode_value(column, "x", tensors)
    assert decode_value(encoded, {"x": column.clone()}).stride() == (1,)


@pytest.mark.parametrize("stride", [[1], [1, 2, 3], [-1, 1], [1.0, 1], ["a", 1], [2**63, 1], [10**9, 1], "ab", None])
def test_invalid_stride_is_refused(stride):
    with pytest.raises(CheckpointError):
        decode_value({"!": "tensor", "name": "x", "stride": stride}, {"x": torch.ones(4, 3)})
