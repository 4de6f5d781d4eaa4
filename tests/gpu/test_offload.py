"""Weights that stream to one GPU from host memory and from files."""

import copy

import pytest
import torch
from torch import nn

from headway import Accelerator, cpu_offload, disk_offload, dispatch_model
from headway.errors import PrepareError

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

WIDTH, NUM_LAYERS = 2048, 12  # a layer is 16 MiB


def build():
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(NUM_LAYERS))).eval()


@pytest.mark.parametrize("place", ["cpu", "disk", "mixed"])
def test_a_streamed_model_computes_what_the_whole_one_does(tmp_path, place):
    model = build()
    whole = copy.deepcopy(model).cuda()
    if place == "cpu":
        cpu_offload(model, 0)
    elif place == "disk":
        disk_offload(model, tmp_path, 0)
    else:
        kinds = (0, "cpu", "disk")
        dispatch_model(model, {str(n): kinds[n % 3] for n in range(NUM_LAYERS)}, offload_dir=tmp_path)
    inputs = torch.randn(4, WIDTH)
    with torch.no_grad():
        for _ in range(3):
            outputs = model(inputs)
            assert outputs.device == inputs.device
            assert torch.equal(outputs, whole(inputs.cuda()).cpu())
    assert model.headway_execution.stream.bytes_on_device <= model.headway_execution.stream.num_bytes


def test_memory_stays_within_the_window(tmp_path):
    model = cpu_offload(build(), 0)
    stream = model.headway_execution.stream
    stream.window = 2 * stream._sizes[0]
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with torch.no_grad():
        for _ in range(2):
            model(torch.randn(1, WIDTH))
    assert torch.cuda.max_memory_allocated() - before < 5 * stream._sizes[0]


def test_an_adapter_is_trained_on_streamed_weights():
    model = build().requires_grad_(False)
    whole = copy.deepcopy(model).cuda()
    cpu_offload(model, 0)
    gradients = []
    for each in (model, whole):
        inputs = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(1)).cuda().requires_grad_()
        each(inputs).square().sum().backward()
        gradients.append(inputs.grad)
    assert torch.equal(*gradients)


def test_a_streamed_model_is_refused_by_prepare_and_trained_where_it_lies():
    model = cpu_offload(build().requires_grad_(False), 0)
    model.append(nn.Linear(WIDTH, 1).cuda())
    with pytest.raises(PrepareError, match="dispatched over cpu"):
        Accelerator().prepare(model)
    accelerator = Accelerator()
    head = model[-1]
    optimizer = torch.optim.SGD(head.parameters(), lr=0.1)
    before = head.weight.detach().clone()
    model, optimizer = accelerator.prepare(model, optimizer, device_placement=[False, True])
    accelerator.backward(model(torch.randn(4, WIDTH, device="cuda")).square().mean())
    optimizer.step()
    assert {parameter.device.type for parameter in model[:-1].parameters()} == {"cpu"}
    assert not torch.equal(head.weight, before)
