"""On one CUDA device: what `headway estimate --calibrate` measures, and whether a forecast with this record matches a real run."""

import pytest
import torch
from torch import nn

import headway
from headway.forecasting.device import calibration
from headway.forecasting.device.devices import MIB, name_this_device
from headway.forecasting.tracing.recipe import StepRecipe
from headway.forecasting.tracing.step import run_recipe

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; this machine shows none"),
]


def build_model() -> nn.Module:
    return nn.Sequential(nn.Linear(1024, 4096), nn.Tanh(), nn.Linear(4096, 1024))


@pytest.mark.card("rates depend on the card's clock; benchmarks/cuda_build compares forecasts with the allocator")
def test_what_a_process_takes_beside_tensors(tmp_path, monkeypatch):
    monkeypatch.setenv("HEADWAY_HOME", str(tmp_path))
    record, again = calibration.measure_overhead(), calibration.measure_overhead()
    assert 150 * MIB < record.overhead < 2000 * MIB
    assert again.overhead == pytest.approx(record.overhead, abs=64 * MIB)
    assert record.memory == torch.cuda.get_device_properties(0).total_memory
    calibration.write_record(tmp_path / "devices.json", name_this_device(), record)
    found = headway.forecast(
        build_model,
        lambda size: (torch.zeros(size, 1024), torch.zeros(size, 1024)),
        loss=nn.functional.mse_loss,
        batch_size=4096,
        device="this",
        largest=False,
    )
    assert any("measured on" in each for each in found.caveats)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_reserved()
    with torch.device("cuda"):
        run_recipe(
            build_model(), StepRecipe(torch.optim.AdamW, nn.functional.mse_loss), lambda: (torch.zeros(4096, 1024),) * 2
        )
    assert torch.cuda.max_memory_reserved() - held == pytest.approx(found.reserved, rel=0.1)
