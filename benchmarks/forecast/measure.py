"""Memory forecasts for the CPU compared with real runs: eight models, each trained in three ways.

Run it with `python -m benchmarks.forecast.measure`.
"""

import json
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import date
from functools import partial
from pathlib import Path

import torch
from torch import nn

from benchmarks.forecast.models import CASES
from benchmarks.forecast.truth import measure_peak
from benchmarks.forecast.workload import Workload
from benchmarks.timing import describe_machine
from headway.core.config.activation_checkpointing import ActivationCheckpointing
from headway.extras.activation_checkpointing import checkpoint_activations
from headway.forecasting.device.devices import MIB, find_device
from headway.forecasting.device.memory_events import compute_exact_peak
from headway.forecasting.tracing.attention_masks import skip_causal_mask
from headway.forecasting.tracing.recipe import StepRecipe
from headway.forecasting.tracing.trace_step import trace_step

FOLDER = Path(__file__).parent
BATCH = 8


def _make_adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters)


def _make_sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-3, momentum=0.9)


def _recompute_activations(model: nn.Module) -> None:
    checkpoint_activations(model, ActivationCheckpointing(), torch.device("cpu"))


@dataclass(frozen=True)
class Setting:
    """A way to train a model.

    Attributes:
        make_optimizer: Function of the parameters that returns the optimizer.
        precision: "no" or "bf16".
        accumulation: Micro-batches of one update.
        is_recomputed: Whether activations are recomputed in the backward.
        max_grad_norm: Norm to which gradients are clipped, or None.
    """

    make_optimizer: Callable[..., torch.optim.Optimizer]
    precision: str = "no"
    accumulation: int = 1
    is_recomputed: bool = False
    max_grad_norm: float | None = None


SETTINGS = {
    "AdamW": Setting(_make_adamw),
    "SGD, bf16, clipped": Setting(_make_sgd, precision="bf16", max_grad_norm=1.0),
    "AdamW, recomputed, accumulated": Setting(_make_adamw, accumulation=2, is_recomputed=True),
}


def _build(case: Workload) -> nn.Module:
    model = case.make()
    return skip_causal_mask(model) if hasattr(model, "set_attn_implementation") else model


def compare(case: Workload, setting: Setting) -> tuple[int, int, float]:
    """Return (forecast bytes, measured bytes, seconds of the forecast)."""
    recipe = StepRecipe(
        setting.make_optimizer, case.loss, setting.precision, setting.accumulation, setting.max_grad_norm
    )
    batch = partial(case.batch, BATCH)
    start = time.perf_counter()
    prepare = _recompute_activations if setting.is_recomputed else None
    traced = trace_step(partial(_build, case), batch, recipe, find_device("cpu"), prepare)
    seconds = time.perf_counter() - start
    model = case.make().train()
    if setting.is_recomputed:
        _recompute_activations(model)
    return compute_exact_peak(traced.events), measure_peak(model, recipe, batch), seconds


def main() -> None:
    """Compare all models in all settings, and write result.json and result.md."""
    rows = []
    for name, case in CASES.items():
        for label, setting in SETTINGS.items():
            forecast, measured, seconds = compare(case, setting)
            rows.append(
                {
                    "model": name,
                    "setting": label,
                    "forecast": forecast,
                    "measured": measured,
                    "seconds": round(seconds, 2),
                }
            )
            print(
                f"{name:8} {label:32} {forecast / MIB:9.2f} {measured / MIB:9.2f} {forecast / measured - 1:+.2%}",
                flush=True,
            )
    result = {"date": date.today().isoformat(), "machine": describe_machine(), "torch": torch.__version__, "rows": rows}
    (FOLDER / "result.json").write_text(json.dumps(result, indent=1) + "\n")
    table = ["| model | setting | forecast MiB | measured MiB | error |", "|---|---|---|---|---|"]
    table += [
        f"| {row['model']} | {row['setting']} | {row['forecast'] / MIB:.2f} | {row['measured'] / MIB:.2f} | "
        f"{row['forecast'] / row['measured'] - 1:+.2%} |"
        for row in rows
    ]
    (FOLDER / "result.md").write_text("\n".join(table) + "\n")


if __name__ == "__main__":
    main()
