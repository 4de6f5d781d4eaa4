"""What the Accelerator of `import accelerate` does in Accelerate's way."""

import pytest
import torch
from torch.utils.data import DataLoader

from headway.compat.accelerate.accelerator import AccelerateAccelerator
from headway.compat.accelerate.loading import AccelerateRules
from headway.compat.accelerate.state import AcceleratorState


@pytest.fixture
def accelerator():
    AcceleratorState._reset_state(reset_partial_state=True)
    yield AccelerateAccelerator(cpu=True)
    AcceleratorState._reset_state(reset_partial_state=True)


def test_its_loaders_go_by_accelerates_rules(accelerator):
    assert isinstance(accelerator._preparation.rules, AccelerateRules)
    assert accelerator._preparation.loader_stream.is_global


def test_what_is_not_one_value_for_each_sample_is_gathered_and_cut_at_the_end(accelerator):
    """transformers repeats a loss to its batch size, which is not the process's where batches are split."""
    loader = accelerator.prepare(DataLoader(torch.arange(6.0), batch_size=4))
    lengths = []
    for rows in loader:
        pair = accelerator.gather_for_metrics({"rows": rows, "loss": rows.mean().repeat(8)})
        lengths.append((len(accelerator.gather_for_metrics(rows)), len(pair["rows"]), len(pair["loss"])))
    assert lengths == [(4, 4, 8), (2, 2, 2)]


@pytest.mark.parametrize("value", ["text", {"name": "text"}, 3])
def test_other_objects_come_back_on_one_process(accelerator, value):
    for _rows in accelerator.prepare(DataLoader(torch.arange(4.0), batch_size=4)):
        assert accelerator.gather_for_metrics(value) == value


def test_one_value_for_each_rank_is_kept_at_the_end(accelerator):
    for rows in accelerator.prepare(DataLoader(torch.arange(6.0), batch_size=4)):
        assert accelerator.gather_for_metrics(rows.mean()).numel() == 1
