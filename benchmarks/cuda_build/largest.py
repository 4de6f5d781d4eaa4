"""Largest batch of a forecast compared with the batch that fits when torch's allocator runs out on a device of that size.

`python -m benchmarks.cuda_build.largest` runs on the simulated runtime without values. The device has 8 GiB. Its context takes as
much as the forecast assumes at most.
"""

import json
import os
import subprocess
import sys
from dataclasses import replace

import torch

from benchmarks.cuda_build.allocator import LOOPS, OPTIMIZERS, Case, Run, build_model
from benchmarks.cuda_build.models import MODELS

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


def does_fit(case: Case, size: int) -> bool:
    """Whether three updates with a batch of `size` samples end without running out of memory."""
    MODELS[case.model] = replace(MODELS[case.model], size=size)
    try:
        with torch.device("cuda"):
            model = build_model(case)
        optimizer = OPTIMIZERS[case.optimizer](
            [parameter for parameter in model.parameters() if parameter.requires_grad]
        )
        scaler = torch.amp.GradScaler("cuda", init_scale=1.0, enabled=case.precision == "fp16")
        LOOPS[case.loop](Run(case, model, optimizer, scaler))
    except torch.OutOfMemoryError:
        return False
    return int(torch.cuda.memory_stats()["num_alloc_retries"]) == 0  # a retry means that memory was full


def forecast_largest(case: Case) -> tuple[int, int]:
    """Return (largest batch of the forecast, MiB of a context)."""
    import headway
    from headway.forecasting.device.devices import find_device

    model = MODELS[case.model]
    forecast = headway.forecast(
        lambda: build_model(case), lambda size: model.batch(size, "cpu"), batch_size=model.size,
        loss=lambda outputs, _: outputs["loss"], optimizer=OPTIMIZERS[case.optimizer], device=case.device,
        budget=f"{GIB}GiB", precision=case.precision, accumulation=case.accumulation, loop=case.loop,
    )  # fmt: skip
    return forecast.largest_batch or 0, find_device(case.device).overhead.most >> 20


def run_in_new_process(*arguments: object, **simulated: str) -> object:
    """Run this file in a separate process with the simulated device's settings, and return its answer."""
    command = [sys.executable, "-m", "benchmarks.cuda_build.largest", *map(str, arguments)]
    finished = subprocess.run(command, env=os.environ | simulated, capture_output=True, text=True, timeout=600)
    return (
        json.loads(finished.stdout.splitlines()[-1]) if finished.returncode == 0 else sys.exit(finished.stderr[-2000:])
    )


def main() -> None:
    """Print the table, or one answer if there are arguments."""
    if len(sys.argv) > 1:
        case = CASES[int(sys.argv[2])]
        print(json.dumps(does_fit(case, int(sys.argv[3])) if sys.argv[1] == "fits" else forecast_largest(case)))
        return
    print(
        "| model | device | precision | loop | forecast | fits | largest batch that fits | error |\n|---|---|---|---|---|---|---|---|"
    )
    for index, case in enumerate(CASES):
        simulated = {"SIMULATED_CUDA": case.device, "SIMULATED_CUDA_VALUES": "0"}
        predicted, context = run_in_new_process("forecast", index, 0, **simulated)  # type: ignore[misc]
        simulated |= {"SIMULATED_CUDA_MIB": str(GIB * 1024), "SIMULATED_CUDA_CONTEXT_MIB": str(context)}
        forecast_fits = run_in_new_process("fits", index, predicted, **simulated)
        low, high = predicted, predicted + max(1, predicted // 5)
        while high - low > 1 and forecast_fits:
            middle = (low + high) // 2
            low, high = (middle, high) if run_in_new_process("fits", index, middle, **simulated) else (low, middle)
        case_cells = f"{case.model} | {case.device} | {case.precision} | {case.loop}"
        print(
            f"| {case_cells} | {predicted} | {'yes' if forecast_fits else 'NO'} | {low} | {predicted / low - 1:+.1%} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
