"""torch.compile with inductor on the simulated device: Triton compiles real kernels, whose launches compute nothing."""

import os
import subprocess
import sys

import pytest
import torch

from headway import Accelerator, TorchDynamoPlugin

simulated_cuda = pytest.importorskip("simulated_cuda", reason="needs torch over the simulated runtime: make cuda")
pytest.importorskip("triton")


def measure_peak(backend: str) -> tuple[int, int]:
    """Return the peak bytes of forward and backward above the initial memory, and the number of kernels that forward launches."""
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
def test_compiled_model_uses_less_memory_and_fewer_launches() -> None:
    (plain, many), (compiled, few) = measure_peak("no"), measure_peak("inductor")
    assert compiled < 0.85 * plain
    assert few < many


SCRIPT = """
import torch
print(torch.compile(lambda x: x.sin() * 2)(torch.ones(8, device="cuda")))
"""


def test_compiled_kernel_is_an_error_if_values_are_computed() -> None:
    variables = {**os.environ, "SIMULATED_CUDA_VALUES": "1"}
    result = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, env=variables)
    assert result.returncode == 1
    assert result.stdout == ""
    assert "Triton's kernels compute nothing here, so they only run with SIMULATED_CUDA_VALUES=0" in result.stderr
