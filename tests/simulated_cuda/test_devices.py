"""Properties and memory limits of a simulated device."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from headway.forecasting.device.devices import DEVICES

TABLE = (Path(__file__).parent / "libraries/kinds.h").read_text()
KINDS = re.findall(r'\{"([\w-]+)", "[^"]+", (\d+), (\d+), (\d+), (\d+), ([\d.]+), ([\d.]+), (\d+), \d+\}', TABLE)
MIB = 1 << 20


def test_kinds_of_devices_match_those_of_a_forecast() -> None:
    ours = {
        name: (int(mib) * MIB, (int(major), int(minor)), int(processors), [float(rate) for rate in rates])
        for name, mib, major, minor, processors, *rates in KINDS
    }
    assert ours == {
        name: (
            kind.memory,
            kind.capability,
            kind.processors,
            [rate.full / 1e12, rate.half / 1e12, rate.bandwidth / 1e9],
        )
        for name, kind in DEVICES.items()
        if kind.is_cuda and name != "mi300x" and (rate := kind.rates)
    }


def run_on_devices(code: str, **environment: str) -> Any:
    """Run code in a process with simulated devices, and return the JSON that it prints."""
    pytest.importorskip("simulated_cuda")
    result = subprocess.run(
        [sys.executable, "-c", "import json, torch\n" + code],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def test_process_sees_the_configured_devices() -> None:
    code = """
names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
properties = torch.cuda.get_device_properties(0)
print(json.dumps([names, torch.cuda.get_device_capability(), properties.total_memory, properties.multi_processor_count]))
"""
    names, capability, memory, processors = run_on_devices(
        code, SIMULATED_CUDA="t4", SIMULATED_CUDA_DEVICES="4", CUDA_VISIBLE_DEVICES="2,1"
    )
    assert (names, capability, memory, processors) == (["Tesla T4"] * 2, [7, 5], 15360 * MIB, 40)


@pytest.mark.parametrize("expandable", [False, True])
def test_allocations_end_at_the_devices_memory(expandable: bool) -> None:
    code = """
held = []
try:
    while True:
        held.append(torch.empty(64 << 20, dtype=torch.uint8, device="cuda"))
except torch.OutOfMemoryError as error:
    text = str(error)
free = torch.cuda.mem_get_info()[0]
num = len(held)
del held
torch.cuda.empty_cache()
print(json.dumps([num, free, torch.cuda.mem_get_info()[0], text]))
"""
    allocator_setting = f"expandable_segments:{expandable}"
    num, full, empty, text = run_on_devices(
        code, SIMULATED_CUDA_MIB="1024", SIMULATED_CUDA_CONTEXT_MIB="300", PYTORCH_ALLOC_CONF=allocator_setting
    )
    assert num == (1024 - 300) // 64
    assert full == (1024 - 300) % (20 if expandable else 64) * MIB  # a segment grows by 20 MiB
    assert empty == (1024 - 300) * MIB
    assert "Tried to allocate 64.00 MiB. GPU 0 has a total capacity of 1024.00 MiB" in text


def test_context_is_created_by_the_first_use_of_a_device() -> None:
    code = """
has = torch._C._cuda_hasPrimaryContext
torch.cuda.set_device(1)
torch.ones(1, device="cuda")
print(json.dumps([has(0), has(1)]))
"""
    assert run_on_devices(code, SIMULATED_CUDA_DEVICES="2") == [False, True]


def test_launcher_counts_devices_without_torch() -> None:
    pytest.importorskip("simulated_cuda")
    code = "import sys, json\nfrom headway.launch import machine\nfrom pathlib import Path\n"
    code += "print(json.dumps([machine._count_nvidia(Path('/')), 'torch' in sys.modules]))"
    environment = {**os.environ, "SIMULATED_CUDA_DEVICES": "3"}
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    assert json.loads(result.stdout) == [3, False]


def test_torch_is_built_for_cuda() -> None:
    pytest.importorskip("simulated_cuda")
    assert torch.version.cuda is not None
    assert torch.cuda.is_available()
    assert torch.distributed.is_nccl_available()
