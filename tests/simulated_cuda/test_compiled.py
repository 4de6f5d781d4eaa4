"""torch.compile with inductor: Triton compiles real kernels for the device, which are launched and compute nothing."""

import os
import subprocess
import sys

import pytest
import torch

from headway import Accelerator, TorchDynamoPlugin

simulated_cuda = pytest.importorskip("simulated_cuda", reason="needs torch over the simulated runtime: make cuda")
pytest.importorskip("triton")


def peak(backend: str) -> tuple[int, int]:
    """Of forward and backward, above what was there; and the kernels that the forward launches."""
    accelerator = Accelerator(dynamo_plugin=TorchDynamoPlugin(backend=backend))
    blocks = (
        torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.GELU(), torch.nn.LayerNorm(512)) for _ in range(2)
    )
    model = accelerator.prepare(torch.nn.Sequential(*blocks))
    x = torch.empty(1 << 14, 512, device="cuda")
    for _ in range(2):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before, launched = torch.cuda.memory_allocated(), simulated_cuda.counts().get("kernel", 0)
        y = model(x)
        num_kernels = simulated_cuda.counts().get("kernel", 0) - launched
        accelerator.backward(y.square().mean())
    found = torch.cuda.max_memory_allocated() - before, num_kernels
    accelerator.free_memory()
    return found


@pytest.mark.sizes
def test_a_compiled_model_takes_less_and_launches_less() -> None:
    (plain, many), (compiled, few) = peak("no"), peak("inductor")
    assert compiled < 0.85 * plain
    assert few < many


COMPILED = """
import torch
print(torch.compile(lambda x: x.sin() * 2)(torch.ones(8, device="cuda")))
"""


def test_with_values_a_compiled_kernel_is_an_error_and_no_number() -> None:
    told = {**os.environ, "SIMULATED_CUDA_VALUES": "1"}
    ran = subprocess.run([sys.executable, "-c", COMPILED], capture_output=True, text=True, env=told)
    assert ran.returncode == 1
    assert ran.stdout == ""
    assert "Triton's kernels compute nothing here, so they only run with SIMULATED_CUDA_VALUES=0" in ran.stderr
