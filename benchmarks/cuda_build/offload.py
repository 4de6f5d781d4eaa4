"""What offloading takes at the peak, with a device that is near the host and one that is far behind it.

`python -m benchmarks.cuda_build.offload`, on the simulated runtime (`make cuda` sets it up), without values and with its virtual
clock: copies and kernels at the rates of the device, then each of them slowed down. Each case runs in a process of its own.
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
    "as the table says": {},
    "copies 16 times slower": {"SIMULATED_CUDA_COPY_TIME": "16"},
    "kernels 16 times slower": {"SIMULATED_CUDA_KERNEL_TIME": "16"},
    "both, and a host 10 times faster": {
        "SIMULATED_CUDA_COPY_TIME": "16", "SIMULATED_CUDA_KERNEL_TIME": "16", "SIMULATED_CUDA_HOST_US": "0.5",
    },
}  # fmt: skip
ACTIVATIONS = {
    "kept on the device": None,
    "recomputed": {},
    "recomputed, blocks' inputs in host memory": {"offload": True},
    "all in host memory": {"policy": "keep_all", "offload": True},
    "a control: all that autograd saves, by hand, with record_stream": None,
}
WEIGHTS = {"all on the device": None, "in host memory": headway.cpu_offload}


def peaks(before: int, begin: float) -> list[float]:
    """In MiB, above what was there: allocated, in use by any stream, reserved; pinned; ms."""
    torch.cuda.synchronize()
    found = torch.cuda.memory_stats()
    names = ("allocated_bytes.all.peak", "active_bytes.all.peak", "reserved_bytes.all.peak")
    mib = [(found[name] - before) / MIB for name in names] + [simulated_cuda.pinned_bytes(peak=True) / MIB]
    return [*map(round, mib), round(simulated_cuda.clock() - begin, 1)]


def ready() -> tuple[int, float]:
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_reserved(), simulated_cuda.clock()


class ByHand:
    """What offloading must not be: copies on a stream of their own, and `record_stream` both ways."""

    def __init__(self) -> None:
        self._side = torch.cuda.Stream()

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_cuda or tensor.nbytes < MIB or isinstance(tensor, torch.nn.Parameter):
            return tensor
        self._side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._side):
            host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
        tensor.record_stream(self._side)
        return host

    def unpack(self, saved: torch.Tensor) -> torch.Tensor:
        if saved.is_cuda:
            return saved
        with torch.cuda.stream(self._side):
            tensor = saved.to("cuda", non_blocking=True)
        torch.cuda.current_stream().wait_stream(self._side)
        tensor.record_stream(torch.cuda.current_stream())
        return tensor


def activations(name: str) -> list[float]:
    """Of GPT-2 (124M), 16 x 1024 tokens in bf16: the second forward and backward."""
    from transformers import GPT2Config, GPT2LMHeadModel

    accelerator = Accelerator(mixed_precision="bf16")
    model = GPT2LMHeadModel(GPT2Config())
    kind = ACTIVATIONS[name]
    if kind is not None:
        accelerator.checkpoint_activations(model, **kind)
    model = accelerator.prepare(model)
    ids = torch.zeros(16, 1024, dtype=torch.long, device="cuda")
    by_hand = ByHand()
    around = torch.autograd.graph.saved_tensors_hooks(by_hand.pack, by_hand.unpack) if "hand" in name else nullcontext()
    for _ in range(2):
        before = ready()
        with around:
            loss = model(input_ids=ids, labels=ids).loss
        accelerator.backward(loss)
    return peaks(*before)


def weights(name: str) -> list[float]:
    """Of 24 layers of 64 MiB in float32: the second pass over 512 rows."""
    model = torch.nn.Sequential(*(torch.nn.Linear(4096, 4096, bias=False) for _ in range(24))).eval()
    before = ready()
    offload = WEIGHTS[name]
    model = offload(model, torch.device("cuda:0")) if offload else model.cuda()
    rows = torch.zeros(512, 4096, device="cuda")
    with torch.no_grad():
        for _ in range(2):
            torch.cuda.synchronize()
            begin = simulated_cuda.clock()
            model(rows)
    return peaks(before[0], begin)


CASES = {"activations": (activations, ACTIVATIONS), "weights": (weights, WEIGHTS)}


def main() -> None:
    if len(sys.argv) > 1:
        what, name = sys.argv[1:]
        print(json.dumps(CASES[what][0](name)), flush=True)
        os._exit(0)  # autograd's threads may abort a process that ends while they let go of Python's hooks (torch 2.14)
    told = {**os.environ, "SIMULATED_CUDA": "a100-80gb", "SIMULATED_CUDA_VALUES": "0", "SIMULATED_CUDA_CLOCK": "1"}
    for what, (_, kinds) in CASES.items():
        print(f"\n| {what} | clock | allocated, MiB | active | reserved | pinned | ms |\n|---|---|---|---|---|---|---|")
        for name in kinds:
            for clock, environment in CLOCKS.items():
                command = [sys.executable, "-m", "benchmarks.cuda_build.offload", what, name]
                ran = subprocess.run(command, env={**told, **environment}, capture_output=True, text=True, timeout=300)
                if ran.returncode:
                    sys.exit(ran.stderr[-2000:])
                found = json.loads(ran.stdout.splitlines()[-1])
                print(f"| {name} | {clock} | " + " | ".join(f"{each:,}" for each in found) + " |", flush=True)


if __name__ == "__main__":
    main()
