"""`Accelerator.forecast` on several ranks: DDP's buckets are included, and a sharded model is an error."""

import pytest
import torch
from torch import nn

from tests.distributed.ranks import run_ranks


def make_net():
    return nn.Sequential(*[nn.Linear(256, 256) for _ in range(6)])


def measure_and_forecast_replica():
    """Return (forecast before `prepare`, forecast after it, measured peak) in bytes, without and with gradient_as_bucket_view."""
    from benchmarks.forecast.truth import measure_peak
    from headway import Accelerator, DistributedDataParallelKwargs
    from headway.errors import UnsupportedError
    from headway.forecasting.tracing.recipe import StepRecipe

    results = []
    rows = torch.ones(32, 256)
    for is_view in (False, True):
        options = DistributedDataParallelKwargs(gradient_as_bucket_view=is_view)
        accelerator = Accelerator(cpu=True, kwargs_handlers=[options])
        model = make_net()
        workload = {"optimizer": torch.optim.AdamW, "loss": lambda outputs, _: outputs.mean()}
        before = accelerator.forecast(model, rows, **workload).allocated
        model = accelerator.prepare(model)
        after = accelerator.forecast(model, rows, **workload).allocated
        measured = measure_peak(model, StepRecipe(torch.optim.AdamW, workload["loss"]), lambda: rows.clone())
        results.append((before, after, measured))
        accelerator.free_memory()
    sharding = Accelerator(cpu=True, strategy="fsdp")
    with pytest.raises(UnsupportedError, match="what the fsdp strategy leaves on a process"):
        sharding.forecast(make_net(), rows, **workload)
    sharding.end_training()
    return results


def test_forecast_includes_ddp_buckets():
    """`test_forecast.py` compares replicas exactly. This test checks that the Accelerator's own settings are used."""
    bucket_bytes = sum(parameter.nbytes for parameter in make_net().parameters())
    for without_view, with_view in run_ranks(measure_and_forecast_replica, 2):
        for before, after, measured in (without_view, with_view):
            assert before == after
            # DDP rebuilds its buckets after the first step. The profiler sees them only if that happens in its window.
            assert any(after == pytest.approx(measured + unseen, rel=0.02) for unseen in (0, bucket_bytes))
        # Gradients that are not views of the buckets take as much memory as the buckets, a second time.
        assert without_view[0] - with_view[0] == pytest.approx(bucket_bytes, rel=0.02)
