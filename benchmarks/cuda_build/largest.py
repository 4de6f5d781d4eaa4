"""The largest batch that a forecast gives, and what really fits: torch's allocator runs out on a device of that size.

`python -m benchmarks.cuda_build.largest`, on the simulated runtime, without values. The device has 8 GiB, of which a context takes
the most that the forecast allows for.
"""

import json
import os
import subprocess
import sys
from dataclasses import replace

import torch

from benchmarks.cuda_build.allocator import LOOPS, MODELS, OPTIMIZERS, Case, Run, make

GIB = 8
CASES = (
    Case("GPT-2", "a100-80gb", "bf16"),
    Case("Llama", "h100", "bf16", recompute=True),
    Case("Qwen2", "h100"),
    Case("BERT", "a100-80gb", "fp16", loop="zero_grad_before_backward"),
    Case("DistilBERT", "t4"),
    Case("T5", "a100-80gb", "bf16", loop="loss_function"),
    Case("BART", "rtx-3090", accumulation=2),
    Case("MLP-Mixer", "b200", "bf16"),
    Case("nn.Transformer", "h100"),
    Case("graph", "a100-80gb", optimizer="sgd"),
)


def fits(case: Case, size: int) -> bool:
    """Do three updates with a batch of that size end without running out?"""
    MODELS[case.model] = replace(MODELS[case.model], size=size)
    try:
        with torch.device("cuda"):
            model = make(case)
        optimizer = OPTIMIZERS[case.optimizer]([each for each in model.parameters() if each.requires_grad])
        scaler = torch.amp.GradScaler("cuda", init_scale=1.0, enabled=case.precision == "fp16")
        LOOPS[case.loop](Run(case, model, optimizer, scaler))
    except torch.OutOfMemoryError:
        return False
    return int(torch.cuda.memory_stats()["num_alloc_retries"]) == 0  # where it had to empty its cache, it was full


def forecast(case: Case) -> tuple[int, int]:
    """The largest batch, and the MiB of a context."""
    import headway
    from headway.forecasting.device.devices import find_device

    model = MODELS[case.model]
    found = headway.forecast(
        lambda: make(case), lambda size: model.batch(size, "cpu"), batch_size=model.size, loss=lambda outputs, _: outputs["loss"],
        optimizer=OPTIMIZERS[case.optimizer], device=case.device, budget=f"{GIB}GiB", precision=case.precision,
        accumulation=case.accumulation, loop=case.loop,
    )  # fmt: skip
    return found.largest_batch or 0, find_device(case.device).overhead[2] >> 20


def ask(*arguments: object, **simulated: str) -> object:
    """What a process of its own says."""
    command = [sys.executable, "-m", "benchmarks.cuda_build.largest", *map(str, arguments)]
    ran = subprocess.run(command, env=os.environ | simulated, capture_output=True, text=True, timeout=600)
    return json.loads(ran.stdout.splitlines()[-1]) if ran.returncode == 0 else sys.exit(ran.stderr[-2000:])


def main() -> None:
    """Print the table."""
    if len(sys.argv) > 1:
        case = CASES[int(sys.argv[2])]
        print(json.dumps(fits(case, int(sys.argv[3])) if sys.argv[1] == "fits" else forecast(case)))
        return
    print(
        "| model | device | precision | loop | forecast | fits | the largest that fits | |\n|---|---|---|---|---|---|---|---|"
    )
    for index, case in enumerate(CASES):
        simulated = {"SIMULATED_CUDA": case.device, "SIMULATED_CUDA_VALUES": "0"}
        found, context = ask("forecast", index, 0, **simulated)  # type: ignore[misc]
        simulated |= {"SIMULATED_CUDA_MIB": str(GIB * 1024), "SIMULATED_CUDA_CONTEXT_MIB": str(context)}
        does_fit = ask("fits", index, found, **simulated)
        low, high = found, found + max(1, found // 5)
        while high - low > 1 and does_fit:
            middle = (low + high) // 2
            low, high = (middle, high) if ask("fits", index, middle, **simulated) else (low, middle)
        named = f"{case.model} | {case.device} | {case.precision} | {case.loop}"
        print(f"| {named} | {found} | {'yes' if does_fit else 'NO'} | {low} | {found / low - 1:+.1%} |", flush=True)


if __name__ == "__main__":
    main()
