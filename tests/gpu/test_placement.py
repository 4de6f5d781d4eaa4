"""Device maps, memory budgets and models built on a device, on a machine with an accelerator."""

import subprocess
import sys

import pytest
import torch
from torch import nn

from headway import get_max_memory, init_on_device
from headway.offload.placement.automatic_map import resolve_device_map

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; this machine shows none"),
]


def test_free_memory_counts_what_the_allocator_holds_unused():
    torch.zeros(1, device="cuda:0")  # creates the context; before that, its size is an estimate
    before = get_max_memory()[0]
    block = torch.empty(1 << 28, dtype=torch.int8, device="cuda:0")
    held = get_max_memory()[0]
    del block
    assert before - held >= 1 << 28
    assert get_max_memory()[0] - held >= 1 << 28


READ_MEMORY = """
import torch
from headway.core.memory.use import read_device_memory
from headway.core.runtime.device import HARDWARE

told = read_device_memory(HARDWARE["cuda"], torch.device("cuda", torch.cuda.device_count() - 1))
print(torch._C._cuda_hasPrimaryContext(torch.cuda.device_count() - 1), *told)
"""


def test_the_driver_tells_what_is_free_and_opens_no_context():
    result = subprocess.run([sys.executable, "-c", READ_MEMORY], capture_output=True, text=True, check=True)
    has_context, free, total = result.stdout.split()
    last = torch.cuda.device_count() - 1
    torch.cuda.empty_cache()
    by_cuda = torch.cuda.mem_get_info(last)
    assert has_context == "False"
    assert abs(int(free) - by_cuda[0]) < 2 << 30  # contexts, and allocations of other processes in the meantime
    assert int(total) == pytest.approx(by_cuda[1], rel=0.05)


def test_cuda_without_an_index_is_the_current_device():
    last = torch.cuda.device_count() - 1
    torch.cuda.set_device(last)
    try:
        assert get_max_memory({"cuda": "1GB"}) == {last: 10**9}
    finally:
        torch.cuda.set_device(0)


def test_a_model_is_built_on_the_device_with_its_ties():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.head = nn.Embedding(300, 300), nn.Linear(300, 300, bias=False)
            self.head.weight = self.embedding.weight
            self.register_buffer("steps", torch.arange(3))

    with init_on_device("cuda"):
        model = Tied()
    assert model.head.weight is model.embedding.weight
    assert (model.head.weight.device, model.steps.device) == (torch.device("cuda:0"), torch.device("cpu"))


def test_a_small_model_goes_to_the_accelerators():
    found = resolve_device_map(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), "sequential")
    assert found == {"": 0}
    assert found.main_device == 0
