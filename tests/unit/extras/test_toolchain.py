"""Test that prepare() refuses a backend that cannot compile on this machine, with advice."""

import importlib

import pytest
import torch

from headway import Accelerator, TorchDynamoPlugin
from headway.errors import ConfigError, OptionalDependencyMissing
from headway.extras import compiling

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


def test_unknown_backend_is_named_with_the_known_ones():
    words = r"dynamo_backend='fx2trt': torch .* has no such backend here. It has .*aot_eager.*inductor"
    with pytest.raises(ConfigError, match=words):
        Accelerator(cpu=True, dynamo_backend="fx2trt").prepare(torch.nn.Linear(1, 1))


def test_backend_for_another_device_is_refused():
    with pytest.raises(ConfigError, match="'cudagraphs' needs a CUDA device, not cpu"):
        Accelerator(cpu=True, dynamo_backend="cudagraphs").prepare(torch.nn.Linear(1, 1))
    compiling.check_toolchain(TorchDynamoPlugin("cudagraphs"), CUDA)


def test_missing_cpp_compiler_is_named():
    config = importlib.import_module("torch._inductor.config")
    words = r"C\+\+ compiler on a CPU.*apt-get install g\+\+.*aot_eager"
    with config.patch({"cpp.cxx": ("no-such-compiler",)}), pytest.raises(OptionalDependencyMissing, match=words):
        Accelerator(cpu=True, dynamo_backend="inductor").prepare(torch.nn.Linear(1, 1))


@pytest.mark.parametrize(("triton", "cc", "words"), [
    (False, True, "needs triton on cuda, which is not installed: pip install triton"),
    (True, False, r"triton needs a C compiler.*apt-get install gcc"),
])  # fmt: skip
def test_missing_triton_or_c_compiler_is_named(monkeypatch, triton, cc, words):
    """Replace the two functions that look for packages and programs on this machine."""
    monkeypatch.setattr(compiling, "is_available", lambda package: triton)
    monkeypatch.setattr(compiling.shutil, "which", lambda name: f"/usr/bin/{name}" if cc else None)
    monkeypatch.delenv("CC", raising=False)
    with pytest.raises(OptionalDependencyMissing, match=words):
        compiling.check_toolchain(TorchDynamoPlugin("inductor"), CUDA)
    monkeypatch.setattr(compiling, "is_available", lambda package: True)
    monkeypatch.setenv("CC", "/opt/cc")
    compiling.check_toolchain(TorchDynamoPlugin("inductor"), CUDA)


def test_cuda_graphs_on_a_cpu_are_logged_as_having_no_effect(caplog):
    compiling.check_toolchain(TorchDynamoPlugin("inductor", mode="reduce-overhead"), CPU)
    assert "has no effect here" in caplog.text


def test_callable_backend_is_accepted():
    compiling.check_toolchain(TorchDynamoPlugin(lambda graph, inputs: graph.forward), CPU)


# tests/gpu/test_compiled.py tests on a GPU that the copies are enough.
@pytest.mark.parametrize(
    ("settings", "accumulates", "num_hooks"),
    [
        ({"mode": "reduce-overhead"}, True, 2),
        ({"mode": "max-autotune"}, True, 2),
        ({"options": {"triton.cudagraphs": True}}, True, 2),
        ({"mode": "reduce-overhead"}, False, 0),
        ({"mode": "max-autotune-no-cudagraphs"}, True, 0),
        ({}, True, 0),
    ],
    ids=str,
)
def test_gradients_in_memory_of_cuda_graphs_are_copied_when_accumulated(monkeypatch, settings, accumulates, num_hooks):
    monkeypatch.setattr(compiling, "check_toolchain", lambda *_: None)
    model = torch.nn.Linear(2, 2)
    compiling.compile_model(model, TorchDynamoPlugin("inductor", **settings), CUDA, accumulates=accumulates)
    assert sum(len(parameter._backward_hooks or ()) for parameter in model.parameters()) == num_hooks
