"""Test values that the run log records by itself: the norm of the last clipping, and memory."""

import pytest
import torch

from headway import Accelerator, ProjectConfiguration
from headway.core.tracking.report import load
from headway.core.tracking.runlog_reader import read_run


def _train(folder, more, clip=True):
    accelerator = Accelerator(cpu=True, project_config=ProjectConfiguration(logging_dir=str(folder)))
    accelerator.init_trackers("run")
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    norms = []
    for _ in range(12):
        loss = model(torch.randn(8, 4)).square().mean()
        accelerator.backward(loss)
        if clip:
            norms.append(accelerator.clip_grad_norm_(model.parameters(), 0.5).item())
        optimizer.step()
        optimizer.zero_grad()
        accelerator.log({"loss": loss} | more(norms))
    accelerator.end_training()
    return norms


def test_report_of_a_logged_loss_has_norm_memory_and_speed(tmp_path):
    norms = _train(tmp_path, lambda norms: {})
    (run,) = load([tmp_path / "run"])
    assert [(step, value) for step, _, value in run.series["grad_norm"]] == [
        (step, pytest.approx(norm)) for step, norm in enumerate(norms, 1)
    ]
    assert len(run.series["memory"]) == 12
    assert all(value > 1 << 20 for _, _, value in run.series["memory"])
    assert "steps_per_second" in run.series
    assert set(read_run(tmp_path / "run").values) == {"loss"}, "measured values must not be among the script's values"


def test_values_of_the_script_have_priority(tmp_path):
    _train(tmp_path, lambda norms: {"train/gradient_norm": norms[-1], "memory/forward": 1e6})
    assert read_run(tmp_path / "run").measured == {}


def test_loop_without_clipping_has_no_norm(tmp_path):
    _train(tmp_path, lambda norms: {}, clip=False)
    assert set(read_run(tmp_path / "run").measured) == {"memory"}
