"""Test `skip_first_batches`: the next epoch is shortened, later ones are complete, and skipped samples are not fetched."""

import pytest
import torch
from torch.utils.data import DataLoader

from headway.core.data.build import skip_first_batches
from headway.errors import DataError
from tests.unit.core.data.fakes import Numbers, Stream, join_real_rows, prepare, read_batches


def read_rows(loader):
    return [batch.tolist() for batch in loader]


def test_only_the_next_epoch_is_shortened():
    loader = prepare(DataLoader(Numbers(10), batch_size=2, shuffle=True))
    whole = read_rows(prepare(DataLoader(Numbers(10), batch_size=2, shuffle=True)))
    skipped = skip_first_batches(loader, 2)
    assert len(skipped) == 3
    assert read_rows(skipped) == whole[2:]
    assert len(skipped) == 5
    assert len(read_rows(skipped)) == 5


def test_loader_continues_after_its_view():
    """The first epoch reads the view, and the others read the loader, as documented."""
    reference = prepare(DataLoader(Numbers(10), batch_size=2, shuffle=True))
    epochs = [read_rows(reference) for _ in range(3)]
    loader = prepare(DataLoader(Numbers(10), batch_size=2, shuffle=True))
    seen = [read_rows(skip_first_batches(loader, 3)), read_rows(loader), read_rows(loader)]
    assert seen == [epochs[0][3:], epochs[1], epochs[2]]


def test_start_is_absolute_after_a_loaded_state():
    loader = prepare(DataLoader(Numbers(10), batch_size=2))
    loader.load_state_dict({"epoch": 0, "consumed": 4})
    assert read_rows(skip_first_batches(loader, 2)) == [[4, 5], [6, 7], [8, 9]]


def test_real_row_counts_stay_exact():
    loaders = [skip_first_batches(prepare(DataLoader(Numbers(10), batch_size=4), rank, 2), 1) for rank in range(2)]
    assert join_real_rows([read_batches(loader) for loader in loaders]) == [8, 9]


def test_settings_are_kept():
    loader = prepare(DataLoader(Numbers(11), batch_size=2, drop_last=True, pin_memory=True))
    view = skip_first_batches(loader, 1)
    assert (view.drop_last, view.pin_memory) == (True, True)
    assert isinstance(view, DataLoader)


def test_skipped_samples_are_never_fetched():
    dataset = Numbers(12)
    read_rows(skip_first_batches(prepare(DataLoader(dataset, batch_size=2)), 4))
    assert dataset.fetched == [8, 9, 10, 11]


def test_skipping_far_into_a_large_dataset_is_fast():
    dataset = Numbers(8_000_000)
    loader = prepare(DataLoader(dataset, batch_size=4, shuffle=True))
    batch = next(iter(skip_first_batches(loader, 1_900_000)))
    assert len(dataset.fetched) == 4
    assert loader.num_consumed == 7_600_004
    resumed = prepare(DataLoader(dataset, batch_size=4, shuffle=True))
    resumed.load_state_dict({"epoch": 0, "consumed": 7_600_000})
    assert torch.equal(next(iter(resumed)), batch)


def test_plain_loader_keeps_its_own_order():
    torch.manual_seed(1)
    expected = read_rows(DataLoader(Numbers(20), batch_size=3, shuffle=True))
    torch.manual_seed(1)
    skipped = skip_first_batches(DataLoader(Numbers(20), batch_size=3, shuffle=True), 2)
    assert len(skipped) == 5
    assert read_rows(skipped) == expected[2:]


def test_plain_stream_is_skipped():
    assert read_rows(skip_first_batches(DataLoader(Stream(7), batch_size=2), 2)) == [[4, 5], [6]]


def test_all_batches_can_be_skipped():
    loader = prepare(DataLoader(Numbers(4), batch_size=2))
    view = skip_first_batches(loader, 9)
    assert len(view) == 0
    assert read_rows(view) == []
    assert read_rows(loader) == [[0, 1], [2, 3]]


@pytest.mark.parametrize("num_batches", [-1, 1.5, True, "2"])
def test_invalid_number_is_refused(num_batches):
    with pytest.raises(DataError, match=f"cannot skip {num_batches!r} batches"):
        skip_first_batches(prepare(DataLoader(Numbers(4))), num_batches)


def test_object_that_is_not_a_loader_is_refused():
    with pytest.raises(DataError, match="got a list"):
        skip_first_batches([1, 2], 1)
