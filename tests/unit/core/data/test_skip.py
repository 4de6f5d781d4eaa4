import pytest
import torch
from torch.utils.data import DataLoader

from headway.core.data.build import skip_first_batches
from headway.errors import DataError
from tests.unit.core.data.fakes import Numbers, Stream, joined, prepare, read


def rows_of(loader):
    return [batch.tolist() for batch in loader]


def test_only_the_next_epoch_is_shortened():
    loader = prepare(DataLoader(Numbers(10), batch_size=2, shuffle=True))
    whole = rows_of(prepare(DataLoader(Numbers(10), batch_size=2, shuffle=True)))
    skipped = skip_first_batches(loader, 2)
    assert len(skipped) == 3
    assert rows_of(skipped) == whole[2:]
    assert len(skipped) == 5
    assert len(rows_of(skipped)) == 5


def test_the_loader_goes_on_after_its_view():
    """The documented pattern: the first epoch on the view, the others on the loader."""
    reference = prepare(DataLoader(Numbers(10), batch_size=2, shuffle=True))
    epochs = [rows_of(reference) for _ in range(3)]
    loader = prepare(DataLoader(Numbers(10), batch_size=2, shuffle=True))
    seen = [rows_of(skip_first_batches(loader, 3)), rows_of(loader), rows_of(loader)]
    assert seen == [epochs[0][3:], epochs[1], epochs[2]]


def test_the_start_is_absolute_after_a_state_was_loaded():
    loader = prepare(DataLoader(Numbers(10), batch_size=2))
    loader.load_state_dict({"epoch": 0, "consumed": 4})
    assert rows_of(skip_first_batches(loader, 2)) == [[4, 5], [6, 7], [8, 9]]


def test_metrics_stay_exact():
    """D2 of the inventory."""
    loaders = [skip_first_batches(prepare(DataLoader(Numbers(10), batch_size=4), rank, 2), 1) for rank in range(2)]
    assert joined([read(loader) for loader in loaders]) == [8, 9]


def test_settings_are_kept():
    """D3 of the inventory."""
    loader = prepare(DataLoader(Numbers(11), batch_size=2, drop_last=True, pin_memory=True))
    view = skip_first_batches(loader, 1)
    assert (view.drop_last, view.pin_memory) == (True, True)
    assert isinstance(view, DataLoader)


def test_skipped_samples_are_never_fetched():
    """D7 of the inventory."""
    dataset = Numbers(12)
    rows_of(skip_first_batches(prepare(DataLoader(dataset, batch_size=2)), 4))
    assert dataset.fetched == [8, 9, 10, 11]


def test_far_into_a_large_dataset():
    dataset = Numbers(8_000_000)
    loader = prepare(DataLoader(dataset, batch_size=4, shuffle=True))
    batch = next(iter(skip_first_batches(loader, 1_900_000)))
    assert len(dataset.fetched) == 4
    assert loader.num_consumed == 7_600_004
    resumed = prepare(DataLoader(dataset, batch_size=4, shuffle=True))
    resumed.load_state_dict({"epoch": 0, "consumed": 7_600_000})
    assert torch.equal(next(iter(resumed)), batch)


def test_a_plain_loader_keeps_its_own_order():
    torch.manual_seed(1)
    expected = rows_of(DataLoader(Numbers(20), batch_size=3, shuffle=True))
    torch.manual_seed(1)
    skipped = skip_first_batches(DataLoader(Numbers(20), batch_size=3, shuffle=True), 2)
    assert len(skipped) == 5
    assert rows_of(skipped) == expected[2:]


def test_a_plain_stream():
    assert rows_of(skip_first_batches(DataLoader(Stream(7), batch_size=2), 2)) == [[4, 5], [6]]


def test_everything_can_be_skipped():
    loader = prepare(DataLoader(Numbers(4), batch_size=2))
    view = skip_first_batches(loader, 9)
    assert len(view) == 0
    assert rows_of(view) == []
    assert rows_of(loader) == [[0, 1], [2, 3]]


@pytest.mark.parametrize("num_batches", [-1, 1.5, True, "2"])
def test_a_wrong_number_is_refused(num_batches):
    with pytest.raises(DataError, match=f"cannot skip {num_batches!r} batches"):
        skip_first_batches(prepare(DataLoader(Numbers(4))), num_batches)


def test_something_else_is_refused():
    with pytest.raises(DataError, match="got a list"):
        skip_first_batches([1, 2], 1)
