"""Peak memory of runs on the CPU, as torch's profiler records it."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from headway.forecasting.tracing.recipe import StepRecipe
from headway.forecasting.tracing.step import run_recipe


def measure_peak(model: nn.Module, recipe: StepRecipe, batch: Callable[[], Any]) -> int:
    """Return the peak bytes in use during two updates, including the model's parameters and buffers."""
    storages = {
        tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes()
        for tensor in (*model.parameters(), *model.buffers())
    }
    return profile_peak(lambda: run_recipe(model, recipe, batch), sum(storages.values()))


def profile_peak(work: Callable[[], object], in_use: int) -> int:
    """Return the peak bytes in use while `work` runs, starting from `in_use` bytes."""
    with torch.autograd.profiler.profile(profile_memory=True, use_cpu=True) as profile:
        work()
    peak = in_use
    events = [event for event in profile.kineto_results.events() if event.name() == "[memory]"]
    for event in sorted(events, key=lambda event: event.start_ns()):
        in_use += event.nbytes()
        peak = max(peak, in_use)
    return peak
