"""Memory requests of one operation, forward and backward: from torch's allocator on a simulated device, and from a trace.

A test defines `run(*case, device, meter, mark)` as source text, for use in both processes. `run` creates inputs on the
device, passes them to `mark`, and calls `meter` with one function per direction. `meter` returns the sizes in bytes of
all requests (negative for frees), and the function's result.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
from torch._subclasses.fake_tensor import FakeTensorMode

from headway.forecasting.device.devices import find_device
from headway.forecasting.device.kernels import substitute_kernels
from headway.forecasting.tracing.storage_tracker import StorageTracker

RECORDED = """
import gc, json, sys
gc.collect(); gc.freeze(); gc.disable()
for weight in (torch.empty(64, 64, device="cuda", requires_grad=True),):
    (weight @ weight).sum().backward()  # allocates cuBLAS's workspaces for the forward and the backward thread
ours = set()
def recorded(function):
    torch.cuda.memory._record_memory_history(max_entries=100000, context=None)
    result = function()
    history = torch.cuda.memory._snapshot()["device_traces"][0]
    torch.cuda.memory._record_memory_history(enabled=None)
    found = []
    for event in history:
        if event["action"] == "alloc":
            ours.add(event["addr"])
            found.append(event["size"])
        elif event["action"] == "free_completed" and event["addr"] in ours:
            ours.discard(event["addr"])
            found.append(-event["size"])
    return found, result
answers = []
for case in json.loads(sys.argv[1]):
    gc.collect()
    ours.clear()
    answers.append(run(*case, "cuda", recorded))
print(json.dumps(answers))
"""


END_PROCESS = """
import os
sys.stdout.flush()
os._exit(0)
"""
"""Last lines of a script that runs backward passes.

Without them, a thread of autograd rarely asks for the interpreter's lock while the interpreter ends. Before Python 3.13
this ends the thread inside C++ code, which aborts the process: "terminate called without an active exception".
"""


def run_on_device(kind: str, source: str, cases: list[Any]) -> list[Any]:
    """Run `source` in a process with a simulated device of this kind, and return the result of its `run` for each case.

    The device computes no values.
    """
    pytest.importorskip("simulated_cuda")
    environment = {**os.environ, "SIMULATED_CUDA": kind, "SIMULATED_CUDA_VALUES": "0"}
    command = [sys.executable, "-c", source + RECORDED + END_PROCESS, json.dumps(cases)]
    result = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert result.returncode == 0, result.stderr[-2000:]
    found: list[Any] = json.loads(result.stdout.splitlines()[-1])
    assert len(found) == len(cases)
    return found


def trace_operation(kind: str, run: Any, case: Iterable[Any]) -> Any:
    """Trace `run` for one case on fake tensors with the forecast's model of the device, and return its result."""
    device = find_device(kind)
    with substitute_kernels(device, "no"), FakeTensorMode(allow_non_fake_inputs=True):
        tracker = StorageTracker(replace(device, cublas=0))  # the device has allocated cuBLAS's workspaces already

        def meter(function: Any) -> tuple[list[int], Any]:
            begin = len(tracker.events)
            with tracker:
                result = function()
            return [event.num_bytes for event in tracker.events[begin:]], result

        return run(*case, "cpu", meter, lambda tensors: tracker.mark_tensors(tensors, "batch"))
