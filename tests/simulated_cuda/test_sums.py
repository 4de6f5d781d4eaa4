"""Scratch memory of sums and norms: torch's kernels and allocator compared with the forecast's rules."""

import json
import os
import subprocess
import sys

import pytest
import torch

from headway.forecasting.device.devices import find_device
from headway.forecasting.device.sums import make_sum_rules

SHAPES: list[tuple[list[int], list[int]]] = [
    ([6144, 768], [0]), ([6272, 384], [0]), ([4096, 3072], [0]), ([16, 512, 1024], [0, 1]), ([8192, 10], [0]),
    ([100000, 64], [1]), ([64, 64], [0]), ([1000000], [0]), ([3, 5000000], [1]), ([32, 196, 384], [0]),
    ([32, 384, 196], [0, 2]), ([2048, 6], [0]), ([16384, 2], [0]), ([20000, 77], [0]), ([512, 512, 3], [0, 1]),
    ([7, 9, 4096], [2]), ([4, 1048576], [1]),
]  # fmt: skip
MEASURE = """
import json, sys, torch
found = []
for shape, dims in json.loads(sys.argv[1]):
    for dtype in (torch.float32, torch.bfloat16):
        values = torch.zeros(shape, device="cuda", dtype=dtype)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        name = sys.argv[2]
        result = torch.linalg.vector_norm(values, 2, dims) if "norm" in name else getattr(torch, name)(values, dims)
        rounded = -(-result.nbytes // 512) * 512
        found.append(torch.cuda.max_memory_allocated() - before - rounded)
        del values, result
print(json.dumps(found))
"""


@pytest.mark.parametrize("name", ["sum", "linalg_vector_norm", "var"])
@pytest.mark.parametrize("kind", ["h100", "a100-80gb", "t4", "rtx-3090"])
def test_predicted_scratch_memory_of_sums_matches_torchs_kernels(kind: str, name: str) -> None:
    pytest.importorskip("simulated_cuda")
    environment = {**os.environ, "SIMULATED_CUDA": kind, "SIMULATED_CUDA_VALUES": "0"}
    command = [sys.executable, "-c", MEASURE, json.dumps(SHAPES), name]
    result = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert result.returncode == 0, result.stderr[-2000:]
    card = find_device(kind)
    rule = make_sum_rules(card.processors, card.threads)[f"aten::{name}"]
    real = json.loads(result.stdout.splitlines()[-1])
    cases = [(shape, dims, dtype) for shape, dims in SHAPES for dtype in (torch.float32, torch.bfloat16)]
    for (shape, dims, dtype), num_bytes in zip(cases, real, strict=True):
        values = torch.empty(shape, dtype=dtype, device="meta")
        predicted = sum(rule((values, 2.0, dims) if "norm" in name else (values, dims)))
        # torch also allocates a few bytes of flags per block, and the allocator rounds blocks up.
        assert 0 <= num_bytes - predicted < (1 << 20) + (1 << 12) if predicted else num_bytes < 1 << 12, (
            shape,
            dims,
            dtype,
        )
