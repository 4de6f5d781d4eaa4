"""Collation of rows (stacking, padding, columns, label counts), and sampling by length."""

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from headway import TrainingArguments
from headway.core.runtime.collectives.tree import slice_rows
from headway.errors import DataError
from headway.trainer.collation import NUM_ITEMS, Collator, LabelCount, LoaderCollator, is_shifted
from headway.trainer.columns import find_label_names, list_forward_parameters, select_columns
from headway.trainer.data import LengthGroupedSampler, find_lengths
from headway.trainer.loss import split_label_count
from headway.trainer.loss_book import LossBook
from tests.unit.trainer.models import bert, llama, texts


def test_rows_of_one_length_are_stacked_by_their_types():
    rows = [
        {"a": [1, 2], "b": numpy.float32(1.5), "c": torch.ones(2), "label": n, "name": "x", "none": None}
        for n in (0, 1)
    ]
    batch = Collator()(rows)
    assert set(batch) == {"a", "b", "c", "labels"}
    assert (batch["a"].dtype, batch["b"].dtype, batch["labels"].tolist()) == (torch.int64, torch.float32, [0, 1])
    assert [part.shape for part in Collator()([(torch.ones(3), 1)] * 4)] == [(4, 3), (4,)]


def test_rows_of_several_lengths_are_padded_by_what_their_names_mean():
    rows = [{"input_ids": [5, 6, 7], "labels": [1, 2, 3]}, {"input_ids": [8], "labels": [4]}]
    batch = Collator(pad_token_id=9)(rows)
    assert batch["input_ids"].tolist() == [[5, 6, 7], [8, 9, 9]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]
    assert batch["labels"].tolist() == [[1, 2, 3], [4, -100, -100]]
    for missing in (rows, [{"pixels": [1]}, {"pixels": [1, 2]}]):
        with pytest.raises(DataError, match="no padding is defined"):
            Collator()(missing)
    with pytest.raises(DataError, match="do not make one tensor"):
        Collator()([{"a": torch.ones(2, 2)}, {"a": torch.ones(2, 3)}])


def test_a_tokenizer_pads_and_labels_are_kept_from_it():
    class Tokenizer:
        def pad(self, rows, return_tensors):
            assert all("labels" not in row for row in rows)
            width = max(len(row["input_ids"]) for row in rows) + 1
            made = [row["input_ids"] + [7] * (width - len(row["input_ids"])) for row in rows]
            return {"input_ids": torch.tensor(made)}

    batch = Collator(Tokenizer())([{"input_ids": [1, 2], "labels": [1, 2]}, {"input_ids": [3], "labels": [3]}])
    assert batch["input_ids"].tolist() == [[1, 2, 7], [3, 7, 7]]
    assert batch["labels"].tolist() == [[1, 2, -100], [3, -100, -100]]


def test_columns_and_labels_are_read_off_forward():
    class Any(nn.Module):
        def forward(self, **batch):
            return batch

    assert list_forward_parameters(Any()) is None
    assert select_columns(Any(), ["labels"]) is None
    assert find_label_names(bert()) == ["labels"]
    assert find_label_names(nn.Linear(1, 1)) == ["labels"]
    assert {"input_ids", "attention_mask", "label"} <= select_columns(bert(), ["labels"])
    collate = LoaderCollator(Collator(), {"x"}, None)
    assert set(collate([{"x": 1, "text": "a"}] * 2)) == {"x"}
    with pytest.raises(DataError, match="rename the columns"):
        collate([{"text": "a"}])


def test_labels_are_counted_as_the_loss_takes_its_mean():
    assert (is_shifted(llama()), is_shifted(bert()), is_shifted(nn.Linear(1, 1))) == (True, False, False)
    labels = torch.tensor([[1, 2, -100], [3, -100, -100]])
    assert LabelCount(False)({"labels": labels}).tolist() == [2, 1]
    assert LabelCount(True)({"labels": labels}).tolist() == [1, 0]
    assert LabelCount(True)({"labels": torch.tensor([1, 2])}).tolist() == [1, 1]
    assert LabelCount(False)({"labels": labels.float()}) is None
    assert LabelCount(False)((labels, labels)) is None
    batch = LoaderCollator(Collator(), None, LabelCount(False))([{"labels": [1, -100]}, {"labels": [1, 2]}])
    assert batch[NUM_ITEMS].tolist() == [1, 2]
    assert split_label_count(batch)[1] == 3
    assert NUM_ITEMS not in split_label_count(batch)[0]
    assert split_label_count(slice_rows(batch, 0, 1, 2))[1] == 1


@given(st.lists(st.integers(1, 99), min_size=1, max_size=300), st.integers(1, 8))
@settings(max_examples=50, deadline=None)
def test_grouping_by_length_is_an_order_of_all_rows(lengths, size):
    order = list(LengthGroupedSampler(lengths, size))
    assert sorted(order) == list(range(len(lengths)))
    assert lengths[order[0]] == max(lengths)


def test_lengths_come_from_a_column_or_the_tokens():
    from datasets import Dataset

    rows = texts(5)
    wanted = [len(row["input_ids"]) for row in rows]
    assert find_lengths(rows, "length") == wanted
    assert find_lengths(Dataset.from_list(rows), "length") == wanted
    assert find_lengths(Dataset.from_dict({"length": [3, 1]}), "length") == [3, 1]
    with pytest.raises(DataError, match="row 0 has no length: neither"):
        find_lengths([(1, 2)], "length")
    assert TrainingArguments(group_by_length=True).train_sampling_strategy == "group_by_length"


class Alone:
    num_processes = 1


@given(
    st.lists(st.lists(st.tuples(st.integers(-5, 5), st.integers(0, 4)), min_size=1, max_size=4), min_size=1, max_size=8)
)
@settings(max_examples=100, deadline=None)
def test_losses_of_batches_run_again_count_once(windows):
    """Each batch fails after a first attempt, and is then run in pieces."""
    book, wanted = LossBook(Alone()), []
    for window in windows:
        total = weight = 0
        for loss, count in window:
            book.add_loss(torch.tensor(99.0), 1, 2)  # a first attempt of a batch of 4 rows that did not get far
            for _ in range(2):
                book.add_loss(torch.tensor(float(loss) if count else float("nan")), count, 2)
            book.end_batch(4)
            total, weight = total + 2 * loss * count, weight + 2 * count
        book.end_window()
        wanted += [total / weight] if weight else []
    found = book.pop_mean()
    assert found == (pytest.approx(sum(wanted) / len(wanted), abs=1e-5) if wanted else None)
    assert book.pop_mean() is None
    other = LossBook(Alone())
    other.load_state_dict(book.state_dict())
    assert other.compute_mean() == pytest.approx(book.compute_mean(), nan_ok=True)
