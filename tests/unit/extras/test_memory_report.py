"""Test the out-of-memory report for real allocation failures on the CPU: categories, names and suggestions."""

import subprocess
import sys
import types
from functools import partial

import pytest
import torch

from headway import Accelerator, memory_report
from headway.common import scope
from headway.core.memory.use import MemoryUse
from headway.extras import activation_offload, memory_suggestions
from headway.extras import memory_report as report
from headway.extras.memory_census import LiveStorage, TensorCensus, take_census
from headway.extras.memory_report import explain, find_requested_bytes
from headway.extras.memory_suggestions import list_suggestions

MIB = 1 << 20
USE = MemoryUse("cuda:0", 900, 1000, 950, 2000, 1100)


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(
            torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.GELU()) for _ in range(4)
        )
        self.register_buffer("table", torch.zeros(256, 256))

    def forward(self, inputs):
        for layer in self.layers:
            inputs = layer(inputs)
        return inputs


def select_storages(census, net):
    """Return the storages of `net` by owner, because objects of other tests may be alive."""
    addresses = {tensor.untyped_storage().data_ptr() for tensor in [*net.parameters(), *net.buffers()]}
    return {storage.owner: storage for key, storage in census.storages.items() if key[1] in addresses}


def test_each_tensor_has_its_category():
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters())
    net(torch.ones(8, 256)).sum().backward()
    optimizer.step()
    hidden = net(torch.ones(4096, 256))
    spare = torch.zeros(MIB)
    census = take_census("cpu", [sys._getframe()])
    found = select_storages(census, net)
    assert {h.category for h in found.values()} == {"parameters", "buffers"}
    assert "layers.0.0.weight of Net" in found
    assert found["table of Net"].num_bytes == 256 * 256 * 4
    owners = {storage.owner: storage for storage in census.storages.values()}
    assert owners["gradient of layers.0.0.weight of Net"].category == "gradients"
    assert owners["exp_avg of layers.3.0.bias of Net"].category == "optimizer state"
    saved = [h for h in census.storages.values() if h.category == "saved for backward" and h.shape == (4096, 256)]
    # Each linear layer and each GELU saves its own input.
    assert len(saved) == 8
    assert {h.owner for h in saved} >= {"saved by AddmmBackward0", "saved by GeluBackward0"}
    spares = [h for h in census.storages.values() if h.num_bytes == 4 * MIB and h.category == "other tensors"]
    assert any(
        h.owner.startswith("`spare` in test_each_tensor_has_its_category (extras/test_memory_report.py:")
        for h in spares
    )
    assert hidden.shape == (4096, 256)
    assert spare.numel() == MIB


def test_offloaded_activation_is_saved_for_backward(monkeypatch):
    monkeypatch.setattr(activation_offload, "_is_on_host", lambda tensor: False)
    monkeypatch.setattr(activation_offload, "CopyLane", partial(activation_offload.CopyLane, has_stream=False))
    scope.drop(activation_offload._CopyLanes)
    values = torch.ones(1000, 1024, requires_grad=True) * 1
    with activation_offload.offload_saved_tensors():
        product = values.exp()
    saved = [each for each in take_census("cpu").storages.values() if each.shape == (1000 * 1024,)]
    scope.drop(activation_offload._CopyLanes)
    assert [each.category for each in saved] == ["saved for backward"]
    assert product.shape == values.shape


def test_storage_counts_once():
    block = torch.zeros(MIB)
    views = [block[:10], block.view(1024, 1024), block.t()]
    census = take_census("cpu", [sys._getframe()])
    assert sum(key[1] == block.data_ptr() for key in census.storages) == 1
    assert len(views) == 3


def test_report_does_not_recompute_checkpointed_activations():
    accelerator, net = Accelerator(cpu=True), Net()
    calls = []
    net.layers[0][0].register_forward_hook(lambda *_: calls.append(1))
    out = accelerator.checkpoint_activations(net)(torch.ones(64, 256))
    memory_report()
    assert calls == [1]
    out.sum().backward()
    assert calls == [1, 1]


def test_line_is_reported_in_anomaly_mode():
    with torch.autograd.set_detect_anomaly(True, check_nan=False):
        inputs = torch.ones(3000, 1000, requires_grad=True)
        product = inputs.exp()
        owners = [storage.owner for storage in take_census("cpu").storages.values()]
    assert any("saved by ExpBackward0, made by File" in owner and "test_memory_report.py" in owner for owner in owners)
    assert product.shape == (3000, 1000)


def real_failure():
    """Allocate a tensor, then fail to allocate a second one."""
    hidden = torch.ones(4, MIB, requires_grad=True) * 2
    return hidden, torch.empty(1 << 52)


def test_failed_allocation_is_explained():
    with pytest.raises(RuntimeError) as exc_info:
        real_failure()
    text = explain(exc_info.value)
    assert text.startswith("headway: memory ran out on cpu: 16384.0 TiB were asked for\n")
    assert "`hidden` in real_failure (extras/test_memory_report.py:" in text
    assert "float32[4, 1048576]" in text
    assert "half the micro-batch" in text
    assert explain(exc_info.value) is text  # written once
    assert explain(KeyError("out of memory")) == ""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 23.69 GiB", 2 << 30),
        ("CUDA out of memory. Tried to allocate 20.00 MiB (GPU 1; 15.78 GiB total capacity)", 20 * MIB),
        ("DefaultCPUAllocator: can't allocate memory: you tried to allocate 12345 bytes. Error code 12", 12345),
        ("unable to mmap 64 bytes from file </torch_1>: Cannot allocate memory (12)", 64),
        ("Unable to allocate 7.45 GiB for an array with shape (1000000000,)", int(7.45 * 2**30)),
        ("Invalid buffer size: 24.00 GiB", 24 << 30),
        (
            "NCCL error in: NCCLUtils.cpp:94, unhandled cuda error\nLast error:\nFailed to CUDA calloc 10485760 bytes",
            10485760,
        ),
        ("std::bad_alloc", None),
    ],
)
def test_requested_size_is_read_from_the_error(text, expected):
    assert find_requested_bytes(RuntimeError(text)) == expected
    outer = RuntimeError("training failed")
    outer.__cause__ = RuntimeError(text)
    assert find_requested_bytes(outer) == expected


def test_out_of_memory_error_in_the_report_is_reported(monkeypatch):
    monkeypatch.setattr("headway.extras.memory_census._count_tensors", lambda *_: (_ for _ in ()).throw(MemoryError))
    assert "too little memory left" in memory_report().text()
    monkeypatch.setattr(report, "memory_use", lambda *_: (_ for _ in ()).throw(MemoryError))
    assert "too little was left to report" in explain(MemoryError())


def build_census(**sizes):
    """Return a census with the given MiB per category, on a device."""
    census = TensorCensus("cuda")
    for number, (category, size) in enumerate(sizes.items()):
        category = category.replace("_", " ")
        census.storages["cuda:0", number + 1] = LiveStorage(category, size * MIB, (1,), torch.float32, "somebody")
    return census


def index_suggestions(census, use=USE, asked=None, frames=()):
    """Return the suggestions by their first word."""
    return {
        lever.what.split(" ")[0].split("=")[0]: lever for lever in list_suggestions(census, use, asked, list(frames))
    }


def test_suggestions_name_the_bytes_that_each_change_of_activations_saves():
    census = build_census(saved_for_backward=800, parameters=10)
    census.roots = [Net()]
    found = index_suggestions(census, asked=200 * MIB)
    assert found["half"].saves == 500 * MIB
    assert found["accelerator.checkpoint_activations(model)"].saves == 750 * MIB  # four blocks
    assert found["mixed_precision"].saves == 400 * MIB
    Accelerator(cpu=True).checkpoint_activations(census.roots[0])
    assert "accelerator.checkpoint_activations(model)" not in index_suggestions(census)
    assert next(iter(index_suggestions(census).values())).saves >= 400 * MIB  # the largest first
    census.roots = [Net().eval()]
    assert "torch.no_grad()" in index_suggestions(census)["the"].what
    assert index_suggestions(build_census(parameters=800)) == {}


def test_suggestions_name_the_bytes_that_each_optimizer_saves():
    census = build_census(optimizer_state=200, parameters=100)
    census.optimizers = [torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))])]
    found = index_suggestions(census)
    assert found["torch.optim.Adafactor"].saves == 198 * MIB
    assert found["torch.optim.SGD"].saves == 100 * MIB
    in_step = types.SimpleNamespace(f_code=types.SimpleNamespace(co_filename="/x/torch/optim/adamw.py"))
    assert index_suggestions(census, frames=[in_step], asked=500 * MIB)["fused"].saves == 100 * MIB
    assert "half" not in index_suggestions(census, frames=[in_step], asked=500 * MIB)
    assert "torch.optim.Adafactor" not in index_suggestions(build_census(optimizer_state=50, parameters=100))


def test_suggestions_name_fragmented_memory_and_other_processes():
    crowded = MemoryUse("cuda:0", 4 << 30, 9 << 30, 0, 24 << 30, 20 << 30)
    found = index_suggestions(TensorCensus("cuda"), crowded, asked=1 << 30)
    assert found["PYTORCH_CUDA_ALLOC_CONF"].saves == 5 << 30
    assert found["another"].saves == 11 << 30
    assert index_suggestions(TensorCensus("cpu"), MemoryUse("cpu", 1, 9 << 30, 0, 24 << 30, 20 << 30), asked=1) == {}


def test_losses_that_hold_their_graphs_are_counted():
    weight = torch.ones(4, requires_grad=True)
    losses = [(weight * index).sum() for index in range(40)]
    text = memory_report().text()
    assert "scalars keep their graphs alive" in text
    assert len(losses) == 40
    assert memory_suggestions._MANY_LOSSES < 40


def test_recorded_allocations_are_reported(monkeypatch):
    frames = [{"filename": "lib.so", "line": 1, "name": "malloc"}, {"filename": "/x/torch/nn.py", "line": 2, "name": "linear"},
              {"filename": "/x/net.py", "line": 7, "name": "forward"}]  # fmt: skip
    blocks = [
        {"state": "active_allocated", "size": size * MIB, "frames": frames if size > 1 else []} for size in (1, 2, 3)
    ]
    memory = types.SimpleNamespace(_snapshot=lambda device: {"segments": [{"blocks": blocks}]})
    monkeypatch.setattr(torch, "get_device_module", lambda kind: types.SimpleNamespace(memory=memory))
    found = report._list_allocation_sites(torch.device("cuda", 0), TensorCensus("cuda"), 8)
    assert [line.split() for line in found] == [
        [size, "MiB", "/x/net.py:7", "in", "forward"] for size in ("3.0", "2.0")
    ]


SCRIPT = """
import resource
import torch
from headway import Accelerator

accelerator = Accelerator(cpu=True)
model = torch.nn.Sequential(*[torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.GELU()) for _ in range(20)])
model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
accelerator.backward(model(torch.ones(8, 512)).sum())
optimizer.step()
size = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (size + (200 << 20),) * 2)
print("limited", flush=True)
hidden = model(torch.ones(8192, 512))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="limits the address space by RLIMIT_AS")
def test_uncaught_error_ends_a_script_with_the_report(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    result = subprocess.run([sys.executable, "train.py"], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert (result.returncode, result.stdout) == (1, "limited\n")
    assert "can't allocate memory" in result.stderr
    text = result.stderr[result.stderr.index("headway: memory ran out on cpu: 16.0 MiB were asked for") :]
    assert "optimizer state" in text
    assert "saved by GeluBackward0" in text
    assert "accelerator.checkpoint_activations(model): up to" in text
    assert "torch.optim.Adafactor in place of AdamW: up to 39.7 MiB" in text
