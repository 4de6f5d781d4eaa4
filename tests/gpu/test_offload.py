"""Offloaded weights that stream to one GPU from host memory and from files."""

import copy
import subprocess
import sys

import pytest
import torch
from torch import nn

from headway import Accelerator, cpu_offload, disk_offload, dispatch_model, offload_pace
from headway.errors import PrepareError

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

WIDTH, NUM_LAYERS = 2048, 12  # a layer is 16 MiB


def build_model():
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(NUM_LAYERS))).eval()


@pytest.mark.parametrize("place", ["cpu", "disk", "mixed"])
def test_a_streamed_model_computes_what_the_whole_one_does(tmp_path, place):
    model = build_model()
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
    assert model.headway_execution.stream.active_bytes <= model.headway_execution.stream.num_bytes


@pytest.mark.parametrize("place", ["cpu", "disk"])
def test_memory_stays_within_the_window_however_far_ahead_the_host_is(tmp_path, place):
    model = build_model()
    inputs = torch.randn(1, WIDTH, device="cuda")
    with torch.no_grad():
        expected = copy.deepcopy(model).cuda()(inputs)
    model = cpu_offload(model, 0) if place == "cpu" else disk_offload(model, tmp_path, 0)
    stream = model.headway_execution.stream
    one = stream._sizes[0]
    stream.window = 2 * one

    def fall_behind(*_):
        torch.cuda._sleep(4 * 10**7)  # cycles: 20 ms

    for layer in model:
        layer.register_forward_pre_hook(fall_behind, prepend=True)
    with torch.no_grad():
        model(inputs)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_stats()["active_bytes.all.current"] - stream.active_bytes
        outputs = [model(inputs) for _ in range(3)]
        torch.cuda.synchronize()
    assert all(torch.equal(each, expected) for each in outputs)
    assert stream.peak_bytes <= 3 * one
    # active_bytes includes freed memory that cannot be reused yet because another stream uses it.
    assert torch.cuda.memory_stats()["active_bytes.all.peak"] - before < 4 * one


def test_weights_in_host_memory_are_pinned():
    model = cpu_offload(build_model(), 0)
    assert all(parameter.is_pinned() for parameter in model.parameters())
    with torch.no_grad():
        for _ in range(3):
            model(torch.randn(1, WIDTH))
    pace = offload_pace(model)
    assert pace.num_passes == 3
    # Bytes per second. Measuring only the time to queue the copies would give a value faster than any bus.
    assert 0 < pace.bandwidth < 1e12


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_a_rank_on_the_second_device_opens_no_context_on_the_first():
    code = (
        "import torch; torch.cuda.set_device(1); from headway import cpu_offload\n"
        "model = cpu_offload(torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4))))\n"
        "[model(torch.randn(1, 64)) for _ in range(3)]; torch.cuda.synchronize()\n"
        "print(model.headway_execution.stream.device, torch._C._cuda_hasPrimaryContext(0))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.split() == ["cuda:1", "False"]


def test_an_adapter_is_trained_on_streamed_weights():
    model = build_model().requires_grad_(False)
    whole = copy.deepcopy(model).cuda()
    cpu_offload(model, 0)
    gradients = []
    for each in (model, whole):
        inputs = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(1)).cuda().requires_grad_()
        each(inputs).square().sum().backward()
        gradients.append(inputs.grad)
    assert torch.equal(*gradients)


def test_a_streamed_model_is_trained_where_it_lies():
    model = cpu_offload(build_model().requires_grad_(False), 0)
    model.append(nn.Linear(WIDTH, 1).cuda())
    with pytest.raises(PrepareError, match="dispatched over cpu"):
        Accelerator().prepare(model, device_placement=[True])
    accelerator = Accelerator()
    head = model[-1]
    optimizer = torch.optim.SGD(head.parameters(), lr=0.1)
    before = head.weight.detach().clone()
    model, optimizer = accelerator.prepare(model, optimizer)
    accelerator.backward(model(torch.randn(4, WIDTH, device="cuda")).square().mean())
    optimizer.step()
    assert {parameter.device.type for parameter in model[:-1].parameters()} == {"cpu"}
    assert not torch.equal(head.weight, before)
