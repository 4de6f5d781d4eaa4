"""One operation, forward and backward: what torch's allocator is asked for in a process with a device, and a trace of it.

A test's source for both sides defines `run(*case, device, meter, mark)`: it makes inputs on the device, marks them, and calls `meter`
with a function for each direction, which answers with the bytes asked for (negative: given back) and the function's result.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from typing import Any

import pytest
from torch._subclasses.fake_tensor import FakeTensorMode

from headway.forecasting.device.devices import find_device
from headway.forecasting.device.kernels import substitute_kernels
from headway.forecasting.tracing.trace import StorageTracker

RECORDED = """
import gc, json, sys
gc.collect(); gc.freeze(); gc.disable()
for weight in (torch.empty(64, 64, device="cuda", requires_grad=True),):
    (weight @ weight).sum().backward()  # cuBLAS's workspaces, of both threads
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


def on_device(kind: str, source: str, cases: list[Any]) -> list[Any]:
    """What `run` of the source returns for each case where torch has a simulated device of that kind; nothing is computed."""
    pytest.importorskip("simulated_cuda")
    environment = {**os.environ, "SIMULATED_CUDA": kind, "SIMULATED_CUDA_VALUES": "0"}
    command = [sys.executable, "-c", source + RECORDED, json.dumps(cases)]
    ran = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert ran.returncode == 0, ran.stderr[-2000:]
    found: list[Any] = json.loads(ran.stdout.splitlines()[-1])
    assert len(found) == len(cases)
    return found


def traced(kind: str, run: Any, case: Iterable[Any]) -> Any:
    """The same of a trace for that kind of device."""
    device = find_device(kind)
    with substitute_kernels(device, "no"), FakeTensorMode(allow_non_fake_inputs=True):
        tracker = StorageTracker(device)
        tracker._threads = {"forward", "backward"}  # both have cuBLAS's workspace

        def meter(function: Any) -> tuple[list[int], Any]:
            begin = len(tracker.events)
            with tracker:
                result = function()
            return [event.num_bytes for event in tracker.events[begin:]], result

        return run(*case, "cpu", meter, lambda tensors: tracker.mark_tensors(tensors, "batch"))
