"""Test the behavior in which the Accelerator of `import accelerate` follows Accelerate instead of Headway."""

import pickle

import pytest
import torch
from torch.utils.data import DataLoader

from headway.compat.accelerate.accelerator import AccelerateAccelerator
from headway.compat.accelerate.data.loaders import AccelerateRules
from headway.compat.accelerate.state import AcceleratorState


@pytest.fixture
def accelerator():
    """Return an Accelerator, with fresh states before and after the test."""
    AcceleratorState._reset_state(reset_partial_state=True)
    yield AccelerateAccelerator(cpu=True)
    AcceleratorState._reset_state(reset_partial_state=True)


def test_loaders_follow_accelerates_rules(accelerator):
    assert isinstance(accelerator._preparation.behavior.loading_rules, AccelerateRules)
    assert accelerator._preparation.loader_rng.is_global


def test_tensors_without_one_value_per_sample_are_cut_in_the_last_batch(accelerator):
    """Scripts of transformers repeat a loss to the batch size, which can differ from the length of this rank's batch."""
    loader = accelerator.prepare(DataLoader(torch.arange(6.0), batch_size=4))
    lengths = []
    for rows in loader:
        pair = accelerator.gather_for_metrics({"rows": rows, "loss": rows.mean().repeat(8)})
        lengths.append((len(accelerator.gather_for_metrics(rows)), len(pair["rows"]), len(pair["loss"])))
    assert lengths == [(4, 4, 8), (2, 2, 2)]


@pytest.mark.parametrize("value", ["text", {"name": "text"}, 3])
def test_other_objects_are_returned_unchanged_on_one_process(accelerator, value):
    for _rows in accelerator.prepare(DataLoader(torch.arange(4.0), batch_size=4)):
        assert accelerator.gather_for_metrics(value) == value


def test_scalar_of_each_rank_is_kept_in_the_last_batch(accelerator):
    for rows in accelerator.prepare(DataLoader(torch.arange(6.0), batch_size=4)):
        assert accelerator.gather_for_metrics(rows.mean()).numel() == 1


def prepare_batches(accelerator, rows=10):
    return accelerator.prepare(DataLoader(torch.arange(rows), batch_size=4))


def test_scalar_of_a_batch_is_returned_unchanged(accelerator):
    seen = [accelerator.gather_for_metrics(batch.sum()) for batch in prepare_batches(accelerator)]
    assert [each.item() for each in seen] == [6, 22, 17]
    assert all(each.ndim == 0 for each in seen)


def test_tensors_of_another_length_are_cut_in_the_last_batch_only(accelerator):
    lengths = [len(accelerator.gather_for_metrics(torch.zeros(7))) for _ in prepare_batches(accelerator)]
    assert lengths == [7, 7, 2]


def test_rows_of_samples_are_gathered_like_in_headway(accelerator):
    seen = [
        accelerator.gather_for_metrics({"rows": batch, "names": [str(row) for row in batch.tolist()]})
        for batch in prepare_batches(accelerator)
    ]
    assert torch.cat([each["rows"] for each in seen]).tolist() == list(range(10))
    assert seen[-1]["names"] == ["8", "9"]


def test_data_settings_can_be_assigned(accelerator):
    accelerator.even_batches = False
    accelerator.dataloader_config.non_blocking = False
    assert accelerator.dataloader_config.even_batches is False
    assert accelerator.non_blocking is False


def test_model_prepared_twice_returns_float32_and_can_be_pickled():
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = AccelerateAccelerator(cpu=True, mixed_precision="bf16")
    model = accelerator.prepare(torch.nn.Linear(2, 2))
    hooks = len(model._forward_hooks)
    assert accelerator.prepare(model) is model
    assert len(model._forward_hooks) == hooks
    assert model(torch.ones(1, 2)).dtype == torch.float32
    read = pickle.loads(pickle.dumps(accelerator.unwrap_model(model)))
    assert torch.equal(read.weight, model.weight)
    AcceleratorState._reset_state(reset_partial_state=True)
