"""What a run on the CPU took: the peak of torch's allocator, as its profiler records it."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from headway.forecasting.tracing.step import StepRecipe, run_recipe


def peak(model: nn.Module, recipe: StepRecipe, batch: Callable[[], Any]) -> int:
    """The most bytes in use during two updates, the model's own included."""
    held = {
        each.untyped_storage()._cdata: each.untyped_storage().nbytes()
        for each in (*model.parameters(), *model.buffers())
    }
    return profiled(lambda: run_recipe(model, recipe, batch), sum(held.values()))


def profiled(work: Callable[[], object], in_use: int) -> int:
    """The most bytes in use while something runs, as torch's profiler records requests; `in_use` of them before it."""
    with torch.autograd.profiler.profile(profile_memory=True, use_cpu=True) as profile:
        work()
    most = in_use
    events = [event for event in profile.kineto_results.events() if event.name() == "[memory]"]
    for event in sorted(events, key=lambda event: event.start_ns()):
        in_use += event.nbytes()
        most = max(most, in_use)
    return most
