"""The clock jumps back a year between two saves: the newest checkpoint is still the one that was saved last."""

import time

import torch

from headway import Accelerator, ProjectConfiguration


def test_the_newest_is_not_found_by_the_time_of_day(tmp_path, monkeypatch):
    def prepared():
        project = ProjectConfiguration(tmp_path, automatic_checkpoint_naming=True)
        accelerator = Accelerator(cpu=True, project_config=project)
        model = torch.nn.Linear(2, 1)
        return accelerator, *accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))

    def update(accelerator, model, optimizer):
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.ones(3, 2)).square().mean())
            optimizer.step()

    parts = prepared()
    update(*parts)
    first = parts[0].save_state()
    now, there = time.time, time.gmtime
    monkeypatch.setattr(time, "time", lambda: now() - 366 * 86400)
    monkeypatch.setattr(time, "gmtime", lambda *given: there(now() - 366 * 86400))
    update(*parts)
    second = parts[0].save_state()
    parts[0].end_training()
    restored = prepared()[0].resume("latest")
    assert restored.folder == second != first
    assert restored.about["num_updates"] == 2
    assert restored.about["saved_at"] < time.strftime("%Y-%m-%dT%H:%M:%SZ", there(now() - 300 * 86400))
