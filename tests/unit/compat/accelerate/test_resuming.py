"""After `load_state` under Accelerate's name the script says where in the epoch it goes on."""

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
def fresh_state():
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


def made(is_stateful=False, by_seed=False, **options):
    torch.manual_seed(3)
    config = DataLoaderConfiguration(use_stateful_dataloader=is_stateful, use_seedable_sampler=by_seed)
    accelerator = AccelerateAccelerator(cpu=True, dataloader_config=config)
    return accelerator, *accelerator.prepare(
        torch.nn.Linear(1, 1), DataLoader(Numbers(19), batch_size=4, **{"shuffle": True, **options})
    )


def epoch(batches):
    return [batch.tolist() for batch in batches]


def saved(folder, number, **options):
    """What a run of two epochs read that saves after `number` batches."""
    accelerator, _model, loader = made(**options)
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
        lambda accelerator, loader: epoch(accelerator.skip_first_batches(loader, 2)),
        lambda accelerator, loader: [batch.tolist() for step, batch in enumerate(loader) if step >= 2],
        lambda accelerator, loader: epoch(islice(loader, 2, None)),
    ],
    ids=["skip_first_batches", "continue", "islice"],
)
@pytest.mark.parametrize("options", [{}, {"shuffle": False}, {"drop_last": True}, {"num_workers": 2}], ids=str)
def test_batches_that_the_script_skips_are_skipped_once(skip, options, tmp_path):
    read = saved(tmp_path, 2, **options)
    accelerator, _model, loader = made(**options)
    accelerator.load_state(tmp_path)
    assert skip(accelerator, loader) + epoch(loader) == read[2:]


def test_a_loop_that_skips_nothing_reads_the_whole_epoch_again(tmp_path):
    read = saved(tmp_path, 2)
    accelerator, _model, loader = made()
    accelerator.load_state(tmp_path)
    assert epoch(loader) + epoch(loader) == read


@pytest.mark.parametrize("options", [{}, {"shuffle": False}, {"drop_last": True}], ids=str)
def test_a_state_saved_with_the_last_batch_in_hand_is_at_the_next_epoch(options, tmp_path):
    num_batches = BATCHES - bool(options.get("drop_last"))
    read = saved(tmp_path, num_batches, **options)
    assert len(read) == 2 * num_batches
    accelerator, _model, loader = made(**options)
    accelerator.load_state(tmp_path)
    assert epoch(loader) == read[num_batches:]


def test_a_loader_is_whole_after_the_best_state_was_loaded_back(tmp_path):
    accelerator, _model, loader = made()
    for step, _batch in enumerate(loader):
        if step == 1:
            accelerator.save_state(tmp_path)
    accelerator.load_state(tmp_path)
    assert [len(epoch(loader)), len(epoch(loader))] == [BATCHES, BATCHES]


def test_a_stateful_loader_goes_on_by_itself(tmp_path):
    pytest.importorskip("torchdata", reason="StatefulDataLoader is torchdata's")
    read = saved(tmp_path, 2, is_stateful=True)
    accelerator, _model, loader = made(is_stateful=True)
    accelerator.load_state(tmp_path)
    assert epoch(loader) + epoch(loader) == read[2:]


def test_a_stateful_loader_is_one_of_torchdatas():
    module = pytest.importorskip("torchdata.stateful_dataloader", reason="StatefulDataLoader is torchdata's")
    accelerator, _model, loader = made(is_stateful=True)
    assert isinstance(loader, module.StatefulDataLoader)
    assert isinstance(loader, DataLoaderShard)
    assert loader.use_stateful_dataloader
    assert accelerator._dataloaders[0] is loader
    _accelerator, _model, plain = made()
    assert not isinstance(plain, module.StatefulDataLoader)
    assert not plain.use_stateful_dataloader


def test_an_epoch_that_was_left_comes_again_by_seed_and_after_a_resume(tmp_path):
    accelerator, _model, loader = made(by_seed=True)
    first = epoch(loader)
    second = epoch(islice(loader, 2))  # as `break` leaves it
    accelerator.save_state(tmp_path)
    read = epoch(loader) + epoch(loader)
    assert read[:2] == second != first[:2]
    assert read[BATCHES : BATCHES + 2] != second
    accelerator, _model, loader = made(by_seed=True)
    accelerator.load_state(tmp_path)
    assert epoch(loader) + epoch(loader) == read
