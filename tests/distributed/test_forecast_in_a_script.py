"""`Accelerator.forecast` on several ranks: DDP's buckets are included, and a sharded model is an error."""

import pytest
import torch
from torch import nn

from tests.distributed.ranks import run_ranks


def make_net():
    return nn.Sequential(*[nn.Linear(256, 256) for _ in range(6)])


def forecast_replica():
    from benchmarks.forecast.truth import measure_peak
    from headway import Accelerator, DistributedDataParallelKwargs
    from headway.errors import UnsupportedError
    from headway.forecasting.tracing.step import StepRecipe

    found = []
    rows = torch.ones(32, 256)
    for is_view in (False, True):
        options = DistributedDataParallelKwargs(gradient_as_bucket_view=is_view)
        accelerator = Accelerator(cpu=True, kwargs_handlers=[options])
        model = make_net()
        ask = {"optimizer": torch.optim.AdamW, "loss": lambda outputs, _: outputs.mean()}
        before = accelerator.forecast(model, rows, **ask).allocated
        model = accelerator.prepare(model)
        after = accelerator.forecast(model, rows, **ask).allocated
        # DDP rebuilds its buckets after the first step. The profiler sees them only if that happens in its window.
        taken = measure_peak(model, StepRecipe(torch.optim.AdamW, ask["loss"]), lambda: rows.clone())
        found.append((before, after, taken))
        accelerator.free_memory()
    sharding = Accelerator(cpu=True, strategy="fsdp")
    with pytest.raises(UnsupportedError, match="what the fsdp strategy leaves on a process"):
        sharding.forecast(make_net(), rows, **ask)
    sharding.end_training()
    return found


def test_forecast_includes_ddp_buckets():
    """`test_forecast.py` compares replicas exactly. This test checks that the Accelerator's own settings are used."""
    buckets = sum(parameter.nbytes for parameter in make_net().parameters())
    for found in run_ranks(forecast_replica, 2):
        for before, after, taken in found:
            assert before == after
            assert any(after == pytest.approx(taken + unseen, rel=0.02) for unseen in (0, buckets))
        (copied, *_), (viewed, *_) = found
        assert copied - viewed == pytest.approx(buckets, rel=0.02), (
            "separate gradients must take as much memory as the buckets"
        )
