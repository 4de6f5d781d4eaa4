"""Test the record of losses of a window, with batches that are run again in pieces."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.trainer.loss_book import LossBook


class SingleProcess:
    num_processes = 1


@given(
    st.lists(st.lists(st.tuples(st.integers(-5, 5), st.integers(0, 4)), min_size=1, max_size=4), min_size=1, max_size=8)
)
@settings(max_examples=100, deadline=None)
def test_losses_of_batches_run_again_count_once(windows):
    """Each batch fails in a first attempt, and is then run in pieces."""
    book, expected = LossBook(SingleProcess()), []
    for window in windows:
        total = weight = 0
        for loss, count in window:
            book.add_loss(torch.tensor(99.0), 1, 2)  # first attempt of a batch of 4 rows, which failed
            for _ in range(2):
                book.add_loss(torch.tensor(float(loss) if count else float("nan")), count, 2)
            book.end_batch(4)
            total, weight = total + 2 * loss * count, weight + 2 * count
        book.end_window()
        expected += [total / weight] if weight else []
    found = book.pop_mean()
    assert found == (pytest.approx(sum(expected) / len(expected), abs=1e-5) if expected else None)
    assert book.pop_mean() is None
    other = LossBook(SingleProcess())
    other.load_state_dict(book.state_dict())
    assert other.compute_mean() == pytest.approx(book.compute_mean(), nan_ok=True)
