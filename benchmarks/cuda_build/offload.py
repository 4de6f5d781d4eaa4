"""Peak memory of offloading, with a device as fast as the host's copies, and with one that is far behind or ahead.

`python -m benchmarks.cuda_build.offload` runs on the simulated runtime (`make cuda` sets it up), without values and with its virtual
clock: copies and kernels run at the device's rates, then each of them is slowed down. Each case runs in a separate process.
"""

import json
import os
import subprocess
import sys
from contextlib import nullcontext

import simulated_cuda
import torch

import headway
from headway import Accelerator

MIB = 1 << 20
CLOCKS = {
    "the device's rates": {},
    "copies 16 times slower": {"SIMULATED_CUDA_COPY_TIME": "16"},
    "kernels 16 times slower": {"SIMULATED_CUDA_KERNEL_TIME": "16"},
    "both 16 times slower, and the host 10 times faster": {
        "SIMULATED_CUDA_COPY_TIME": "16", "SIMULATED_CUDA_KERNEL_TIME": "16", "SIMULATED_CUDA_HOST_US": "0.5",
    },
}  # fmt: skip
RECORD_STREAM = "for comparison: hand-written offload of all saved tensors with record_stream"
ACTIVATIONS = {
    "kept on the device": None,
    "recomputed": {},
    "recomputed, block inputs in host memory": {"offload": True},
    "all in host memory": {"policy": "keep_all", "offload": True},
    RECORD_STREAM: None,
}
WEIGHTS = {"all on the device": None, "in host memory": headway.cpu_offload}


def measure_peaks(before: int, start: float) -> list[float]:
    """Return MiB above `before` (allocated, in use by any stream, reserved), MiB of pinned memory, and milliseconds."""
    torch.cuda.synchronize()
    stats = torch.cuda.memory_stats()
    names = ("allocated_bytes.all.peak", "active_bytes.all.peak", "reserved_bytes.all.peak")
    mib = [(stats[name] - before) / MIB for name in names] + [simulated_cuda.pinned_bytes(peak=True) / MIB]
    return [*map(round, mib), round(simulated_cuda.clock() - start, 1)]


def reset_peaks() -> tuple[int, float]:
    """Reset the peaks, and return (reserved bytes, time of the virtual clock)."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_reserved(), simulated_cuda.clock()


class RecordStreamOffload:
    """The usual hand-written offload, for comparison: copies on a side stream, with `record_stream` in both directions."""

    def __init__(self) -> None:
        self._side = torch.cuda.Stream()

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        """Start a copy to pinned host memory; small tensors and parameters stay on the device."""
        if not tensor.is_cuda or tensor.nbytes < MIB or isinstance(tensor, torch.nn.Parameter):
            return tensor
        self._side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._side):
            host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
        tensor.record_stream(self._side)
        return host

    def unpack(self, saved: torch.Tensor) -> torch.Tensor:
        """Copy a tensor back to the device."""
        if saved.is_cuda:
            return saved
        with torch.cuda.stream(self._side):
            tensor = saved.to("cuda", non_blocking=True)
        torch.cuda.current_stream().wait_stream(self._side)
        tensor.record_stream(torch.cuda.current_stream())
        return tensor


def measure_activations(name: str) -> list[float]:
    """Measure the second forward and backward of GPT-2 (124M) with 16 x 1024 tokens in bf16."""
    from transformers import GPT2Config, GPT2LMHeadModel

    accelerator = Accelerator(mixed_precision="bf16")
    model = GPT2LMHeadModel(GPT2Config())
    options = ACTIVATIONS[name]
    if options is not None:
        accelerator.checkpoint_activations(model, **options)
    model = accelerator.prepare(model)
    ids = torch.zeros(16, 1024, dtype=torch.long, device="cuda")
    offload = RecordStreamOffload()
    hooks = torch.autograd.graph.saved_tensors_hooks(offload.pack, offload.unpack)
    context = hooks if name == RECORD_STREAM else nullcontext()
    for _ in range(2):
        before = reset_peaks()
        with context:
            loss = model(input_ids=ids, labels=ids).loss
        accelerator.backward(loss)
    return measure_peaks(*before)


def measure_weights(name: str) -> list[float]:
    """Measure the second forward of 24 linear layers of 64 MiB in float32, with 512 rows."""
    model = torch.nn.Sequential(*(torch.nn.Linear(4096, 4096, bias=False) for _ in range(24))).eval()
    before = reset_peaks()
    offload = WEIGHTS[name]
    model = offload(model, torch.device("cuda:0")) if offload else model.cuda()
    rows = torch.zeros(512, 4096, device="cuda")
    with torch.no_grad():
        for _ in range(2):
            torch.cuda.synchronize()
            start = simulated_cuda.clock()
            model(rows)
    return measure_peaks(before[0], start)


CASES = {"activations": (measure_activations, ACTIVATIONS), "weights": (measure_weights, WEIGHTS)}


def main() -> None:
    """Print the tables, or the result of one case if there are arguments."""
    if len(sys.argv) > 1:
        subject, name = sys.argv[1:]
        print(json.dumps(CASES[subject][0](name)), flush=True)
        os._exit(0)  # an ordinary exit may abort while autograd's threads release Python hooks (torch 2.14)
    common = {**os.environ, "SIMULATED_CUDA": "a100-80gb", "SIMULATED_CUDA_VALUES": "0", "SIMULATED_CUDA_CLOCK": "1"}
    for subject, (_, names) in CASES.items():
        print(
            f"\n| {subject} | clock | allocated, MiB | active | reserved | pinned | ms |\n|---|---|---|---|---|---|---|"
        )
        for name in names:
            for clock, environment in CLOCKS.items():
                command = [sys.executable, "-m", "benchmarks.cuda_build.offload", subject, name]
                finished = subprocess.run(
                    command, env={**common, **environment}, capture_output=True, text=True, timeout=300
                )
                if finished.returncode:
                    sys.exit(finished.stderr[-2000:])
                figures = json.loads(finished.stdout.splitlines()[-1])
                print(f"| {name} | {clock} | " + " | ".join(f"{figure:,}" for figure in figures) + " |", flush=True)


if __name__ == "__main__":
    main()
