"""Memory that torch's own allocator takes for training steps, compared with headway.forecast.

`python -m benchmarks.cuda_build.allocator [KIND ...]` runs on the simulated runtime (`make cuda` sets it up), for all kinds of GPU or
those named. Models without convolutions run without values: nothing is computed, so models of full size take seconds. The models are
in `models.py`, and the training loops are plain PyTorch (`LOOPS`). Each kind of GPU has a separate process, because the simulated
runtime reads the kind from the environment. All memory is freed between cases. `layouts.py` has the table of NCCL ranks.
"""

import gc
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import cycle, product
from typing import Any

import torch
from torch import nn

from benchmarks.cuda_build.models import MODELS
from headway.forecasting.tracing.attention_masks import skip_causal_mask


@dataclass(frozen=True)
class Case:
    """One row: a model of `MODELS`, a kind of GPU, and how it is trained.

    Attributes:
        model: Name of the model.
        device: Kind of GPU.
        precision: "no", "bf16" or "fp16".
        optimizer: Name of an optimizer of `OPTIMIZERS`.
        loop: Name of a loop of `LOOPS`.
        accumulation: Micro-batches of one update.
        recompute: Whether activations are recomputed in the backward.
        lora: Whether the model is frozen and has LoRA adapters.
        varies: Whether batches have different sequence lengths.
    """

    model: str
    device: str
    precision: str = "no"
    optimizer: str = "adamw"
    loop: str = "plain"
    accumulation: int = 1
    recompute: bool = False
    lora: bool = False
    varies: bool = False

    @property
    def lengths(self) -> tuple[int, ...]:
        """Sequence lengths of the batches in mixed order, or empty if all batches are alike."""
        longest = MODELS[self.model].longest if self.varies else 0
        return tuple(longest // 8 + 37 * index % (longest - longest // 8) for index in range(1, 17)) if longest else ()


KINDS = ("t4", "a100-80gb", "rtx-3090", "rtx-4090", "h100", "b200")
SETTINGS: tuple[dict[str, Any], ...] = (
    {},
    {"precision": "bf16"},
    {"precision": "bf16", "loop": "zero_grad_before_backward"},
    {"loop": "loss_function", "optimizer": "sgd"},
    {"precision": "bf16", "accumulation": 2},
    {"recompute": True},
    {"precision": "bf16", "recompute": True, "loop": "loss_function"},
    {"optimizer": "momentum", "loop": "zero_grad_before_backward"},
    {"precision": "bf16", "lora": True},
    {"optimizer": "adafactor", "accumulation": 2},
    {"precision": "fp16"},
)


_VARYING = (("a100-80gb", "no"), ("h100", "bf16"), ("b200", "bf16"))


def list_cases() -> list[Case]:
    """Return seven settings for every model, cycling through settings and kinds of GPU, and the cases with varying lengths."""
    settings, kinds = cycle(SETTINGS), cycle(KINDS)
    cases = []
    for name, model in MODELS.items():
        for _ in range(7):
            setting = next(settings)
            while (setting.get("recompute") or setting.get("lora")) and not model.is_transformers:
                setting = next(settings)
            cases.append(Case(name, next(kinds), **setting))
    varying = [name for name, model in MODELS.items() if model.longest]
    cases += [Case(name, kind, precision, varies=True) for name in varying for kind, precision in _VARYING]
    return cases


LORA_LAYERS = ("q_proj", "v_proj", "query", "value", "q", "v", "q_lin", "v_lin", "query_key_value", "c_attn")
"""Names of the attention layers that get an adapter."""


class Adapter(nn.Module):
    """LoRA in plain PyTorch: a frozen layer, and two thin layers in parallel."""

    def __init__(self, layer: nn.Linear, rank: int = 8) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        options = {"device": layer.weight.device, "dtype": layer.weight.dtype}
        self.down = nn.Linear(layer.in_features, rank, bias=False, **options)
        self.up = nn.Linear(rank, layer.out_features, bias=False, **options)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of both outputs."""
        return self.layer(x) + self.up(self.down(x))  # type: ignore[no-any-return]


def build_model(case: Case) -> nn.Module:
    """Build the model of a case in training mode, with adapters and recomputation if the case has them."""
    model = MODELS[case.model].make()
    if case.lora:
        model.requires_grad_(False)
        for module in list(model.modules()):
            for name, child in list(module.named_children()):
                if isinstance(child, nn.Linear) and name in LORA_LAYERS:
                    setattr(module, name, Adapter(child))
    if case.recompute:
        model.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
    # Without values, transformers cannot see that no token is masked, and would build masks that a real run does not build.
    return skip_causal_mask(model).train() if hasattr(model, "set_attn_implementation") else model.train()


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "sgd": torch.optim.SGD,
    "momentum": lambda parameters: torch.optim.SGD(parameters, momentum=0.9),
    "adafactor": torch.optim.Adafactor,
}


@dataclass
class Run:
    """The objects that a loop uses."""

    case: Case
    model: nn.Module
    optimizer: torch.optim.Optimizer
    scaler: Any

    def batches(self) -> Iterator[dict[str, torch.Tensor]]:
        """Yield the batches of three updates, or one batch for each length."""
        model = MODELS[self.case.model]
        for length_argument in [(length,) for length in self.case.lengths] or [()] * (3 * self.case.accumulation):
            yield model.batch(model.size, "cuda", *length_argument)

    def autocast(self) -> Any:
        """Return an autocast context for the case's precision."""
        dtype = torch.float16 if self.case.precision == "fp16" else torch.bfloat16
        return torch.autocast("cuda", dtype, enabled=self.case.precision != "no")


def train_plainly(run: Run) -> None:
    """Train; outputs and loss live until the next step assigns them again."""
    for index, batch in enumerate(run.batches()):
        with run.autocast():
            outputs = run.model(**batch)
            loss = outputs["loss"]
        if run.case.accumulation > 1:
            loss = loss / run.case.accumulation
        run.scaler.scale(loss).backward()
        if (index + 1) % run.case.accumulation == 0:
            run.scaler.step(run.optimizer)
            run.scaler.update()
            run.optimizer.zero_grad()


def train_zeroing_before_backward(run: Run) -> None:
    """Train; gradients are zeroed before the backward, so those of the last update exist during the forward."""
    for batch in run.batches():
        with run.autocast():
            outputs = run.model(**batch)
            loss = outputs["loss"]
        run.optimizer.zero_grad()
        run.scaler.scale(loss).backward()
        run.scaler.step(run.optimizer)
        run.scaler.update()


def train_with_loss_function(run: Run) -> None:
    """Train; a function computes the loss, so the outputs are freed when it returns."""

    def compute(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        with run.autocast():
            loss: torch.Tensor = run.model(**batch)["loss"]
        return loss / run.case.accumulation if run.case.accumulation > 1 else loss

    for index, batch in enumerate(run.batches()):
        run.scaler.scale(compute(batch)).backward()
        if (index + 1) % run.case.accumulation == 0:
            run.scaler.step(run.optimizer)
            run.scaler.update()
            run.optimizer.zero_grad()


LOOPS = {
    "plain": train_plainly,
    "zero_grad_before_backward": train_zeroing_before_backward,
    "loss_function": train_with_loss_function,
}


def measure_run(case: Case) -> tuple[int, int]:
    """Train, and return the allocator's peaks: (allocated bytes, reserved bytes)."""
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_allocated() == 0
    torch.cuda.reset_peak_memory_stats()
    with torch.device("cuda"):
        model = build_model(case)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = OPTIMIZERS[case.optimizer](trainable)
    LOOPS[case.loop](
        Run(case, model, optimizer, torch.amp.GradScaler("cuda", init_scale=1.0, enabled=case.precision == "fp16"))
    )
    return torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()


def forecast_run(case: Case) -> tuple[int, int, int]:
    """Return the forecast's (allocated bytes, reserved bytes, upper bound without the device's overhead)."""
    import headway
    from headway.forecasting.device.devices import find_device

    model = MODELS[case.model]
    optimizer = "adafactor" if case.optimizer == "adafactor" else OPTIMIZERS[case.optimizer]
    forecast = headway.forecast(
        lambda: build_model(case), lambda size, *length: model.batch(size, "cpu", *length), batch_size=model.size,
        loss=lambda outputs, _: outputs["loss"], optimizer=optimizer, device=case.device, precision=case.precision,
        accumulation=case.accumulation, loop=case.loop, lengths=case.lengths, largest=False,
    )  # fmt: skip
    return int(forecast.allocated), int(forecast.reserved), int(forecast.most) - find_device(case.device).overhead.most


def print_rows(device: str, with_values: bool) -> None:
    """Print a line of JSON for each case of a kind of GPU: [case, result].

    Args:
        device: Kind of GPU.
        with_values: Whether the runtime computes values. Only models with convolutions need them.
    """
    for case in list_cases():
        if case.device == device and MODELS[case.model].has_convolutions == with_values:
            try:
                result = {"real": measure_run(case), "forecast": forecast_run(case)}
            except Exception as error:
                result = {"error": f"{type(error).__name__}: {str(error)[:200]}"}  # type: ignore[dict-item]
            print(json.dumps([asdict(case), result]), flush=True)


def print_table(kinds: Sequence[str]) -> None:
    """Run all cases of these kinds of device and print the table and its summary."""
    if unknown := set(kinds) - set(KINDS):
        sys.exit(f"unknown kind of GPU: {', '.join(sorted(unknown))}; choose from {', '.join(KINDS)}")
    columns = [
        *(field.name for field in fields(Case)),
        "allocated",
        "forecast",
        "error",
        "reserved",
        "forecast",
        "error",
        "within `most`",
    ]
    print("| " + " | ".join(columns) + " |\n" + "|---" * len(columns) + "|", flush=True)
    errors: list[tuple[float, float]] = []
    num_above = 0
    for device, values in product(kinds, "01"):
        simulated = {"SIMULATED_CUDA": device, "SIMULATED_CUDA_VALUES": values, "SIMULATED_CUDA_MIB": "200000"}
        command = [sys.executable, "-m", "benchmarks.cuda_build.allocator", "--rows", device, values]
        environment = {**os.environ, **simulated}
        finished = subprocess.run(command, env=environment, capture_output=True, text=True)
        if finished.returncode:
            print(finished.stderr[-2000:], file=sys.stderr)
        for line in finished.stdout.splitlines():
            case, result = json.loads(line)
            case_cells = " | ".join(str(value) for value in case.values())
            if "error" in result:
                print(f"| {case_cells} | {result['error']} |", flush=True)
                continue
            (allocated, reserved), (forecast_allocated, forecast_reserved, most) = result["real"], result["forecast"]
            errors.append((forecast_allocated / allocated - 1, forecast_reserved / reserved - 1))
            num_above += most < reserved
            pairs = ((allocated, forecast_allocated), (reserved, forecast_reserved))
            cells = " | ".join(f"{a:,} | {b:,} | {b / a - 1:+.2%}" for a, b in pairs)
            print(f"| {case_cells} | {cells} | {'yes' if most >= reserved else 'NO'} |", flush=True)
    worst_allocated, worst_reserved = (max(abs(pair[index]) for pair in errors) for index in (0, 1))
    print(
        f"\n{len(errors)} rows; largest error: allocated {worst_allocated:.2%}, reserved {worst_reserved:.2%}; "
        f"above `most`: {num_above}"
    )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rows"]:
        print_rows(sys.argv[2], sys.argv[3] == "1")
    else:
        print_table(sys.argv[1:] or KINDS)
