"""Test that the newest checkpoint is the one saved last, even if the clock jumps back a year between two saves."""

import time

import torch

from headway import Accelerator, ProjectConfiguration


def test_newest_checkpoint_does_not_depend_on_the_clock(tmp_path, monkeypatch):
    def build_run():
        project = ProjectConfiguration(tmp_path, automatic_checkpoint_naming=True)
        accelerator = Accelerator(cpu=True, project_config=project)
        model = torch.nn.Linear(2, 1)
        return accelerator, *accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))

    def update(accelerator, model, optimizer):
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.ones(3, 2)).square().mean())
            optimizer.step()

    parts = build_run()
    update(*parts)
    first = parts[0].save_state()
    now, there = time.time, time.gmtime
    monkeypatch.setattr(time, "time", lambda: now() - 366 * 86400)
    monkeypatch.setattr(time, "gmtime", lambda *given: there(now() - 366 * 86400))
    update(*parts)
    second = parts[0].save_state()
    parts[0].end_training()
    restored = build_run()[0].resume("latest")
    assert restored.folder == second != first
    assert restored.about["num_updates"] == 2
    assert restored.about["saved_at"] < time.strftime("%Y-%m-%dT%H:%M:%SZ", there(now() - 300 * 86400))
