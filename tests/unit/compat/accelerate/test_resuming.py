"""Test where in an epoch a script continues after `load_state` under Accelerate's name."""

from itertools import islice

import pytest
import torch
from torch.utils.data import DataLoader

from headway.compat.accelerate.accelerator import AccelerateAccelerator
from headway.compat.accelerate.data.loaders import DataLoaderShard
from headway.compat.accelerate.state import AcceleratorState
from headway.core.config.run import DataLoaderConfiguration
from tests.unit.core.data.fakes import Numbers

BATCHES = 5


@pytest.fixture(autouse=True)
def fresh_states():
    """Reset the states of Accelerate before and after each test."""
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


def build_run(is_stateful=False, by_seed=False, **options):
    torch.manual_seed(3)
    config = DataLoaderConfiguration(use_stateful_dataloader=is_stateful, use_seedable_sampler=by_seed)
    accelerator = AccelerateAccelerator(cpu=True, dataloader_config=config)
    return accelerator, *accelerator.prepare(
        torch.nn.Linear(1, 1), DataLoader(Numbers(19), batch_size=4, **{"shuffle": True, **options})
    )


def read_epoch(batches):
    return [batch.tolist() for batch in batches]


def read_two_epochs_with_a_save(folder, number, **options):
    """Read two epochs, save after `number` batches, and return all batches."""
    accelerator, _model, loader = build_run(**options)
    read = []
    for _ in range(2):
        for batch in loader:
            read.append(batch.tolist())
            if len(read) == number:
                accelerator.save_state(folder)
    return read


@pytest.mark.parametrize(
    "skip",
    [
        lambda accelerator, loader: read_epoch(accelerator.skip_first_batches(loader, 2)),
        lambda accelerator, loader: [batch.tolist() for step, batch in enumerate(loader) if step >= 2],
        lambda accelerator, loader: read_epoch(islice(loader, 2, None)),
    ],
    ids=["skip_first_batches", "continue", "islice"],
)
@pytest.mark.parametrize("options", [{}, {"shuffle": False}, {"drop_last": True}, {"num_workers": 2}], ids=str)
def test_batches_that_the_script_skips_are_skipped_once(skip, options, tmp_path):
    read = read_two_epochs_with_a_save(tmp_path, 2, **options)
    accelerator, _model, loader = build_run(**options)
    accelerator.load_state(tmp_path)
    assert skip(accelerator, loader) + read_epoch(loader) == read[2:]


def test_loop_without_skipping_reads_the_whole_epoch_again(tmp_path):
    read = read_two_epochs_with_a_save(tmp_path, 2)
    accelerator, _model, loader = build_run()
    accelerator.load_state(tmp_path)
    assert read_epoch(loader) + read_epoch(loader) == read


@pytest.mark.parametrize("options", [{}, {"shuffle": False}, {"drop_last": True}], ids=str)
def test_state_saved_at_the_last_batch_resumes_in_the_next_epoch(options, tmp_path):
    num_batches = BATCHES - bool(options.get("drop_last"))
    read = read_two_epochs_with_a_save(tmp_path, num_batches, **options)
    assert len(read) == 2 * num_batches
    accelerator, _model, loader = build_run(**options)
    accelerator.load_state(tmp_path)
    assert read_epoch(loader) == read[num_batches:]


def test_loader_is_complete_after_the_best_state_is_loaded(tmp_path):
    accelerator, _model, loader = build_run()
    for step, _batch in enumerate(loader):
        if step == 1:
            accelerator.save_state(tmp_path)
    accelerator.load_state(tmp_path)
    assert [len(read_epoch(loader)), len(read_epoch(loader))] == [BATCHES, BATCHES]


def test_stateful_loader_resumes_by_itself(tmp_path):
    pytest.importorskip("torchdata", reason="StatefulDataLoader is torchdata's")
    read = read_two_epochs_with_a_save(tmp_path, 2, is_stateful=True)
    accelerator, _model, loader = build_run(is_stateful=True)
    accelerator.load_state(tmp_path)
    assert read_epoch(loader) + read_epoch(loader) == read[2:]


def test_stateful_loader_is_a_torchdata_loader():
    module = pytest.importorskip("torchdata.stateful_dataloader", reason="StatefulDataLoader is torchdata's")
    accelerator, _model, loader = build_run(is_stateful=True)
    assert isinstance(loader, module.StatefulDataLoader)
    assert isinstance(loader, DataLoaderShard)
    assert loader.use_stateful_dataloader
    assert accelerator._dataloaders[0] is loader
    _accelerator, _model, plain = build_run()
    assert not isinstance(plain, module.StatefulDataLoader)
    assert not plain.use_stateful_dataloader


def test_interrupted_epoch_repeats_with_its_seed_even_after_a_resume(tmp_path):
    accelerator, _model, loader = build_run(by_seed=True)
    first = read_epoch(loader)
    second = read_epoch(islice(loader, 2))  # stop in the middle of the epoch, like `break`
    accelerator.save_state(tmp_path)
    read = read_epoch(loader) + read_epoch(loader)
    assert read[:2] == second != first[:2]
    assert read[BATCHES : BATCHES + 2] != second
    accelerator, _model, loader = build_run(by_seed=True)
    accelerator.load_state(tmp_path)
    assert read_epoch(loader) + read_epoch(loader) == read
