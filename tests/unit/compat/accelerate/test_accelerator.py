"""What the Accelerator of `import accelerate` does in Accelerate's way."""

import pickle
from importlib.metadata import PathDistribution

import pytest
import torch
from torch.utils.data import DataLoader

from headway.compat.accelerate.accelerator import AccelerateAccelerator
from headway.compat.accelerate.data.loaders import AccelerateRules
from headway.compat.accelerate.state import AcceleratorState
from headway.launch.stand_in import FOLDER, VERSION


@pytest.fixture
def accelerator():
    AcceleratorState._reset_state(reset_partial_state=True)
    yield AccelerateAccelerator(cpu=True)
    AcceleratorState._reset_state(reset_partial_state=True)


def test_its_loaders_go_by_accelerates_rules(accelerator):
    assert isinstance(accelerator._preparation.behavior.loading_rules, AccelerateRules)
    assert accelerator._preparation.loader_rng.is_global


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


def batches(accelerator, rows=10):
    return accelerator.prepare(DataLoader(torch.arange(rows), batch_size=4))


def test_a_value_for_the_batch_stays_as_it_is(accelerator):
    seen = [accelerator.gather_for_metrics(batch.sum()) for batch in batches(accelerator)]
    assert [each.item() for each in seen] == [6, 22, 17]
    assert all(each.ndim == 0 for each in seen)


def test_values_of_another_length_are_cut_at_the_end_only(accelerator):
    lengths = [len(accelerator.gather_for_metrics(torch.zeros(7))) for _ in batches(accelerator)]
    assert lengths == [7, 7, 2]


def test_rows_per_sample_come_as_headway_gathers_them(accelerator):
    seen = [
        accelerator.gather_for_metrics({"rows": batch, "names": [str(row) for row in batch.tolist()]})
        for batch in batches(accelerator)
    ]
    assert torch.cat([each["rows"] for each in seen]).tolist() == list(range(10))
    assert seen[-1]["names"] == ["8", "9"]


def test_data_settings_can_be_assigned(accelerator):
    accelerator.even_batches = False
    accelerator.dataloader_config.non_blocking = False
    assert accelerator.dataloader_config.even_batches is False
    assert accelerator.non_blocking is False


def test_the_metadata_says_whose_names_these_are():
    (about,) = FOLDER.glob("accelerate-*.dist-info")
    found = PathDistribution(about)
    assert found.version == VERSION
    assert "huggingface" in found.metadata["Home-page"]


def test_a_model_prepared_twice_gives_float32_once_and_can_be_pickled():
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
