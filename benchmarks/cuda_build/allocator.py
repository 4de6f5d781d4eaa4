"""What torch's own allocator takes for training steps, beside what headway.forecast says.

`python -m benchmarks.cuda_build.allocator [KIND ...]`, on the simulated runtime (`make cuda` sets it up), for all kinds of device or
for those named. Without values, where a model has no convolutions: nothing is computed, so models of full size take seconds. The
loops are written by hand (`LOOPS`), the models are `models.py`'s. One process for each kind of device, which the simulated runtime
takes from its environment; between cases its allocator gives everything back. `layouts.py` has the table of NCCL ranks.
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
    """One row."""

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
        """Of its sequences, up to the model's longest, in an order that is no order; empty: all batches are alike."""
        longest = MODELS[self.model].longest if self.varies else 0
        return tuple(longest // 8 + 37 * each % (longest - longest // 8) for each in range(1, 17)) if longest else ()


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


def cases() -> list[Case]:
    """Every model with seven settings, in turn over the settings and the kinds of device."""
    settings, kinds = cycle(SETTINGS), cycle(KINDS)
    found = []
    for name, model in MODELS.items():
        for _ in range(7):
            given = next(settings)
            while (given.get("recompute") or given.get("lora")) and not model.is_transformers:
                given = next(settings)
            found.append(Case(name, next(kinds), **given))
    varying = [name for name, model in MODELS.items() if model.longest]
    found += [Case(name, kind, precision, varies=True) for name in varying for kind, precision in _VARYING]
    return found


ATTENTION = ("q_proj", "v_proj", "query", "value", "q", "v", "q_lin", "v_lin", "query_key_value")


class Adapter(nn.Module):
    """LoRA by hand: a frozen layer, and two thin ones beside it."""

    def __init__(self, layer: nn.Linear, rank: int = 8) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        placed = {"device": layer.weight.device, "dtype": layer.weight.dtype}
        self.down = nn.Linear(layer.in_features, rank, bias=False, **placed)
        self.up = nn.Linear(rank, layer.out_features, bias=False, **placed)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Both together."""
        return self.layer(x) + self.up(self.down(x))  # type: ignore[no-any-return]


def make(case: Case) -> nn.Module:
    """The model, prepared for training."""
    model = MODELS[case.model].make()
    if case.lora:
        model.requires_grad_(False)
        for module in list(model.modules()):
            for name, child in list(module.named_children()):
                if isinstance(child, nn.Linear) and name in (
                    "q_proj",
                    "v_proj",
                    "query",
                    "value",
                    "q",
                    "v",
                    "q_lin",
                    "v_lin",
                    "query_key_value",
                    "c_attn",
                ):
                    setattr(module, name, Adapter(child))
    if case.recompute:
        model.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
    # Without values transformers cannot see that no token is masked, and would build masks that a run does not.
    return skip_causal_mask(model).train() if hasattr(model, "set_attn_implementation") else model.train()


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "sgd": torch.optim.SGD,
    "momentum": lambda parameters: torch.optim.SGD(parameters, momentum=0.9),
    "adafactor": torch.optim.Adafactor,
}


@dataclass
class Run:
    """What a loop needs."""

    case: Case
    model: nn.Module
    optimizer: torch.optim.Optimizer
    scaler: Any

    def batches(self) -> Iterator[dict[str, torch.Tensor]]:
        """Of three updates, or one for each length."""
        model = MODELS[self.case.model]
        for asked in [(length,) for length in self.case.lengths] or [()] * (3 * self.case.accumulation):
            yield model.batch(model.size, "cuda", *asked)

    def autocast(self) -> Any:
        """Of the case's precision."""
        dtype = torch.float16 if self.case.precision == "fp16" else torch.bfloat16
        return torch.autocast("cuda", dtype, enabled=self.case.precision != "no")


def plain(run: Run) -> None:
    """Names live until they are assigned again."""
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


def zero_grad_before_backward(run: Run) -> None:
    """Gradients of the last update are there during forward."""
    for batch in run.batches():
        with run.autocast():
            outputs = run.model(**batch)
            loss = outputs["loss"]
        run.optimizer.zero_grad()
        run.scaler.scale(loss).backward()
        run.scaler.step(run.optimizer)
        run.scaler.update()


def loss_function(run: Run) -> None:
    """Outputs go when the function returns."""

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


LOOPS = {"plain": plain, "zero_grad_before_backward": zero_grad_before_backward, "loss_function": loss_function}


def real(case: Case) -> tuple[int, int]:
    """What the allocator took at most: allocated and reserved."""
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_allocated() == 0
    torch.cuda.reset_peak_memory_stats()
    with torch.device("cuda"):
        model = make(case)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    learning = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = OPTIMIZERS[case.optimizer](learning)
    LOOPS[case.loop](
        Run(case, model, optimizer, torch.amp.GradScaler("cuda", init_scale=1.0, enabled=case.precision == "fp16"))
    )
    return torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()


def forecast(case: Case) -> tuple[int, int, int]:
    """The same, and the most that the process may take without the device's overhead."""
    import headway
    from headway.forecasting.device.devices import find_device

    model, own = MODELS[case.model], case.optimizer == "adafactor"
    found = headway.forecast(
        lambda: make(case), lambda size, *asked: model.batch(size, "cpu", *asked), batch_size=model.size,
        loss=lambda outputs, _: outputs["loss"],
        optimizer="adafactor" if own else OPTIMIZERS[case.optimizer], device=case.device, precision=case.precision,
        accumulation=case.accumulation, loop=case.loop, lengths=case.lengths, largest=False,
    )  # fmt: skip
    return int(found.allocated), int(found.reserved), int(found.most) - find_device(case.device).overhead[2]


def of_device(device: str, with_values: bool) -> None:
    """Print a line for each case of a device."""
    for case in cases():
        if case.device == device and MODELS[case.model].has_convolutions == with_values:
            try:
                found = {"real": real(case), "forecast": forecast(case)}
            except Exception as error:
                found = {"error": f"{type(error).__name__}: {str(error)[:200]}"}  # type: ignore[dict-item]
            print(json.dumps([asdict(case), found]), flush=True)


def table(kinds: Sequence[str]) -> None:
    """Run all cases of these kinds of device and print the table and its summary."""
    if unknown := set(kinds) - set(KINDS):
        sys.exit(f"no rows for {', '.join(sorted(unknown))}; there are some for {', '.join(KINDS)}")
    heads = [
        *(each.name for each in fields(Case)),
        "allocated",
        "forecast",
        "",
        "reserved",
        "forecast",
        "",
        "`most` covers",
    ]
    print("| " + " | ".join(heads) + " |\n" + "|---" * len(heads) + "|", flush=True)
    errors: list[tuple[float, float]] = []
    above = 0
    for device, values in product(kinds, "01"):
        simulated = {"SIMULATED_CUDA": device, "SIMULATED_CUDA_VALUES": values, "SIMULATED_CUDA_MIB": "200000"}
        command = [sys.executable, "-m", "benchmarks.cuda_build.allocator", "--rows", device, values]
        environment = {**os.environ, **simulated}
        ran = subprocess.run(command, env=environment, capture_output=True, text=True)
        if ran.returncode:
            print(ran.stderr[-2000:], file=sys.stderr)
        for line in ran.stdout.splitlines():
            case, found = json.loads(line)
            named = " | ".join(str(value) for value in case.values())
            if "error" in found:
                print(f"| {named} | {found['error']} |", flush=True)
                continue
            (allocated, reserved), (wanted, held, most) = found["real"], found["forecast"]
            errors.append((wanted / allocated - 1, held / reserved - 1))
            above += most < reserved
            cells = " | ".join(f"{a:,} | {b:,} | {b / a - 1:+.2%}" for a, b in ((allocated, wanted), (reserved, held)))
            print(f"| {named} | {cells} | {'yes' if most >= reserved else 'NO'} |", flush=True)
    tensors, taken = ([abs(each[index]) for each in errors] for index in (0, 1))
    print(
        f"\n{len(errors)} rows; worst: allocated {max(tensors):.2%}, reserved {max(taken):.2%}; above `most`: {above}"
    )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rows"]:
        of_device(sys.argv[2], sys.argv[3] == "1")
    else:
        table(sys.argv[1:] or KINDS)
