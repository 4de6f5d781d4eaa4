"""Forecasts for the CPU beside real runs: eight models, three ways to train each."""

import json
import time
from collections.abc import Callable, Iterable
from datetime import date
from functools import partial
from pathlib import Path

import torch
from torch import nn

from benchmarks.forecast.models import CASES, Case
from benchmarks.forecast.truth import peak
from benchmarks.timing import machine
from headway.core.config.activation_checkpointing import ActivationCheckpointing
from headway.extras.activation_checkpointing import checkpoint_activations
from headway.forecasting.device.allocator import compute_exact_peak
from headway.forecasting.device.devices import MIB, find_device
from headway.forecasting.tracing.attention_masks import skip_causal_mask
from headway.forecasting.tracing.fake import trace_step
from headway.forecasting.tracing.step import StepRecipe

FOLDER = Path(__file__).parent
BATCH = 8


def _adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters)


def _momentum(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-3, momentum=0.9)


def _checkpointed(model: nn.Module) -> None:
    checkpoint_activations(model, ActivationCheckpointing(), torch.device("cpu"))


SETTINGS: dict[str, tuple[Callable[..., torch.optim.Optimizer], str, int, bool]] = {
    "AdamW": (_adamw, "no", 1, False),
    "SGD, bf16, clipped": (_momentum, "bf16", 1, False),
    "AdamW, recomputed, accumulated": (_adamw, "no", 2, True),
}


def _made(case: Case) -> nn.Module:
    model = case.make()
    return skip_causal_mask(model) if hasattr(model, "set_attn_implementation") else model


def compare(case: Case, setting: str) -> tuple[int, int, float]:
    """Bytes forecast, bytes taken, and the seconds that the forecast took."""
    make_optimizer, precision, accumulation, is_recomputed = SETTINGS[setting]
    recipe = StepRecipe(make_optimizer, case.loss, precision, accumulation, 1.0 if "clipped" in setting else None)
    batch = partial(case.batch, BATCH)
    began = time.perf_counter()
    prepare = _checkpointed if is_recomputed else None
    traced = trace_step(partial(_made, case), batch, recipe, find_device("cpu"), prepare)
    took = time.perf_counter() - began
    model = case.make().train()
    if is_recomputed:
        _checkpointed(model)
    return compute_exact_peak(traced.events), peak(model, recipe, batch), took


def main() -> None:
    """Write result.json and result.md."""
    rows = []
    for name, case in CASES.items():
        for setting in SETTINGS:
            forecast, taken, took = compare(case, setting)
            rows.append(
                {"model": name, "setting": setting, "forecast": forecast, "taken": taken, "seconds": round(took, 2)}
            )
            print(
                f"{name:8} {setting:32} {forecast / MIB:9.2f} {taken / MIB:9.2f} {forecast / taken - 1:+.2%}",
                flush=True,
            )
    result = {"date": date.today().isoformat(), "machine": machine(), "torch": torch.__version__, "rows": rows}
    (FOLDER / "result.json").write_text(json.dumps(result, indent=1) + "\n")
    table = ["| model | setting | forecast MiB | taken MiB | error |", "|---|---|---|---|---|"]
    table += [
        f"| {row['model']} | {row['setting']} | {row['forecast'] / MIB:.2f} | {row['taken'] / MIB:.2f} | "
        f"{row['forecast'] / row['taken'] - 1:+.2%} |"
        for row in rows
    ]
    (FOLDER / "result.md").write_text("\n".join(table) + "\n")


if __name__ == "__main__":
    main()
