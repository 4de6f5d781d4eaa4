"""The forecast's model of the caching allocator beside torch's own: random requests, compared after each of them."""

import os
import subprocess
import sys

import pytest

COMPARED = """
import random, sys, torch
from headway.forecasting.device.allocator import Allocator, DeviceFull

def allocates(make):
    try:
        make()
    except (DeviceFull, torch.OutOfMemoryError):
        return False
    return True

def compare(seed, expandable, capacity, num_streams):
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() == 0
    model, draw = Allocator(capacity, expandable), random.Random(seed)
    streams = [torch.cuda.current_stream(), *(torch.cuda.Stream() for _ in range(num_streams - 1))]
    live, full = {}, 0
    for step in range(700):
        if live and draw.random() < 0.48:
            key = draw.choice(list(live))
            del live[key]
            model.free(key)
        else:
            size, stream = draw.randint(1, draw.choice([4 << 10, 1 << 20, 12 << 20, 200 << 20])), draw.randrange(num_streams)
            def make():
                with torch.cuda.stream(streams[stream]):
                    live[step] = torch.empty(size, dtype=torch.uint8, device="cuda")
            fits = allocates(make)
            assert allocates(lambda: model.allocate(step, size, stream)) is fits, (seed, step)
            full += not fits
        held = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
        assert held == (model.allocated, model.reserved), (seed, step, held)
    return full

expandable, capacity = sys.argv[1] == "True", torch.cuda.mem_get_info()[0]
full = sum(compare(seed, expandable, capacity, 1 + seed % 2) for seed in range(4))
assert (full > 0) is (capacity < 4 << 30), full
"""


@pytest.mark.parametrize("mib", [80000, 1500])
@pytest.mark.parametrize("expandable", [False, True])
def test_no_step_of_2800_differs(expandable: bool, mib: int) -> None:
    pytest.importorskip("simulated_cuda")
    told = {"PYTORCH_ALLOC_CONF": f"expandable_segments:{expandable}", "SIMULATED_CUDA_MIB": str(mib)}
    ran = subprocess.run(
        [sys.executable, "-c", COMPARED, str(expandable)],
        capture_output=True,
        text=True,
        env={**os.environ, **told, "SIMULATED_CUDA_VALUES": "0"},
    )
    assert ran.returncode == 0, ran.stderr
