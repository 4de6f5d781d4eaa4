"""What a run on the CPU took: the peak of torch's allocator, as its profiler records it."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from headway.forecasting.tracing.step import StepRecipe, run


def peak(model: nn.Module, recipe: StepRecipe, batch: Callable[[], Any]) -> int:
    """The most bytes in use during two updates, the model's own included."""
    held = {
        each.untyped_storage()._cdata: each.untyped_storage().nbytes()
        for each in (*model.parameters(), *model.buffers())
    }
    with torch.autograd.profiler.profile(profile_memory=True, use_cpu=True) as profile:
        run(model, recipe, batch)
    in_use = most = sum(held.values())
    events = [event for event in profile.kineto_results.events() if event.name() == "[memory]"]
    for event in sorted(events, key=lambda event: event.start_ns()):
        in_use += event.nbytes()
        most = max(most, in_use)
    return most
