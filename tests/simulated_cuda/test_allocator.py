"""The forecast's model of the caching allocator compared with torch's allocator after each of many random requests."""

import os
import subprocess
import sys

import pytest

SCRIPT = """
import random, sys, torch
from headway.forecasting.device.allocator import Allocator

def compare(seed, expandable, num_streams):
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() == 0
    model, draw = Allocator(expandable), random.Random(seed)
    streams = [torch.cuda.current_stream(), *(torch.cuda.Stream() for _ in range(num_streams - 1))]
    live = {}
    for step in range(700):
        if live and draw.random() < 0.48:
            key = draw.choice(list(live))
            del live[key]
            model.free_memory(key)
        else:
            size, stream = draw.randint(1, draw.choice([4 << 10, 1 << 20, 12 << 20, 200 << 20])), draw.randrange(num_streams)
            with torch.cuda.stream(streams[stream]):
                live[step] = torch.empty(size, dtype=torch.uint8, device="cuda")
            model.allocate_memory(step, size, stream)
        held = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
        assert held == (model.allocated, model.reserved), (seed, step, held)

for seed in range(4):
    compare(seed, sys.argv[1] == "True", 1 + seed % 2)
"""


@pytest.mark.parametrize("expandable", [False, True])
def test_model_matches_torchs_allocator_at_each_of_2800_steps(expandable: bool) -> None:
    pytest.importorskip("simulated_cuda")
    environment = {"PYTORCH_ALLOC_CONF": f"expandable_segments:{expandable}", "SIMULATED_CUDA_MIB": "80000"}
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(expandable)],
        capture_output=True,
        text=True,
        env={**os.environ, **environment, "SIMULATED_CUDA_VALUES": "0"},
    )
    assert result.returncode == 0, result.stderr
