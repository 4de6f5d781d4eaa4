"""Test local SGD on one process. tests/distributed/test_compat_accelerate.py tests the averages."""

import pytest
import torch

from headway import Accelerator, LocalSGD
from headway.core.training.local_blocks import iterate_averages
from headway.errors import ConfigError, PrepareError


def test_one_process_needs_no_averages():
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(torch.nn.Linear(1, 1))
    with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=2) as block:
        for _ in range(3):
            block.step()
    assert block.num_steps == 3
    assert not block.enabled


def test_invalid_settings_are_refused():
    accelerator = Accelerator(cpu=True)
    with pytest.raises(ConfigError, match="local_sgd_steps=0"):
        LocalSGD(accelerator, torch.nn.Linear(1, 1), 0)
    with pytest.raises(PrepareError, match="got a int"):
        LocalSGD(accelerator, 3, 2)


class RecordingCollectives:
    """Stand-in for the collectives that records which tensors are reduced together."""

    def __init__(self) -> None:
        self.sizes: list[list[int]] = []

    def reduce(self, group: list[torch.Tensor], how: str) -> list[torch.Tensor]:
        self.sizes.append([each.numel() for each in group])
        return group


def test_large_model_is_averaged_in_groups(monkeypatch):
    monkeypatch.setattr("headway.core.training.local_blocks._BUCKET_BYTES", 8)
    parameters, groups = [torch.nn.Parameter(torch.ones(n)) for n in (1, 1, 3, 1)], RecordingCollectives()
    assert [each.numel() for each in iterate_averages(parameters, groups)] == [1, 1, 3, 1]
    assert groups.sizes == [[1, 1], [3], [1]]
