"""`accelerator.log` of numbers that come from sharded parameters: every rank calls it, and rank 0 stores whole values."""

import json
from pathlib import Path

import pytest
import torch

from headway import Accelerator
from headway.errors import TrackingError
from tests.distributed.ranks import run_ranks


def make_model() -> torch.nn.Linear:
    torch.manual_seed(0)
    return torch.nn.Linear(4, 6)


def log_norms(folder: str) -> None:
    accelerator = Accelerator(cpu=True, strategy="fsdp", project_dir=folder)
    accelerator.init_trackers("run")
    model = accelerator.prepare(make_model())
    accelerator.log(
        {"norm": model.weight.norm(), "parts": {"bias": model.bias.sum(), "rank": accelerator.process_index}}
    )
    if accelerator.is_main_process:
        with pytest.raises(TrackingError, match=r"sharded tensor for 'weight'.*full_tensor\(\)"):
            accelerator.log_images({"weight": model.weight})
    accelerator.log_images({"weight": model.weight.full_tensor().detach().sigmoid()})
    accelerator.end_training()


def test_every_rank_takes_part_in_the_sum(tmp_path: Path) -> None:
    run_ranks(log_norms, 2, str(tmp_path))
    lines = map(json.loads, (tmp_path / "run" / "log.jsonl").read_text().splitlines())
    (values,) = [line["values"] for line in lines if "norm" in line.get("values", {})]
    plain = make_model()
    assert values["norm"] == pytest.approx(plain.weight.norm().item(), rel=1e-5)
    assert values["parts/bias"] == pytest.approx(plain.bias.sum().item(), rel=1e-5)
    assert values["parts/rank"] == 0
