"""The Accelerator under Accelerate's name, on one process: values that are not per sample, settings that change."""

from importlib.metadata import PathDistribution

import pytest
import torch
from torch.utils.data import DataLoader

from headway.compat.accelerate.accelerator import AccelerateAccelerator
from headway.launch.stand_in import FOLDER, VERSION


@pytest.fixture
def accelerator():
    return AccelerateAccelerator(cpu=True)


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
