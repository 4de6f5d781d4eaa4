"""Test the collation of rows: stacking, padding, and label counts."""

import numpy
import pytest
import torch
from torch import nn

from headway.core.runtime.collectives.tree import slice_rows
from headway.errors import DataError
from headway.trainer.collation import NUM_ITEMS, Collator, LabelCount, LoaderCollator, is_shifted
from headway.trainer.loss import split_label_count
from tests.unit.trainer.models import bert, llama


def test_rows_of_one_length_are_stacked_by_their_types():
    rows = [
        {"a": [1, 2], "b": numpy.float32(1.5), "c": torch.ones(2), "label": n, "name": "x", "none": None}
        for n in (0, 1)
    ]
    batch = Collator()(rows)
    assert set(batch) == {"a", "b", "c", "labels"}
    assert (batch["a"].dtype, batch["b"].dtype, batch["labels"].tolist()) == (torch.int64, torch.float32, [0, 1])
    assert [part.shape for part in Collator()([(torch.ones(3), 1)] * 4)] == [(4, 3), (4,)]


def test_rows_of_several_lengths_are_padded_according_to_their_names():
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


def test_padded_columns_have_a_dtype_that_holds_all_rows():
    collate = Collator(pad_token_id=0)
    floats = collate([{"labels": [0, 1]}, {"labels": [0.5, 0.25, 1]}])["labels"]
    assert floats.tolist() == [[0, 1, -100], [0.5, 0.25, 1]]
    batch = collate([{"input_ids": []}, {"input_ids": [1, 2]}])
    assert (batch["input_ids"].dtype, batch["input_ids"].tolist()) == (torch.int64, [[0, 0], [1, 2]])
    assert batch["attention_mask"].tolist() == [[0, 0], [1, 1]]
    flags = collate([{"labels": [True]}, {"labels": [False, True]}])["labels"]
    assert flags.tolist() == [[1, -100], [0, 1]]


def test_columns_with_values_in_some_rows_only_are_refused():
    assert list(Collator()([{"x": 1.0, "labels": None}, {"x": 2.0}])) == ["x"]
    rows = [{"x": [1.0], "labels": 1}, {"x": [2.0], "labels": None}]
    for given in (rows, rows[::-1], [rows[0], {"x": [2.0]}]):
        with pytest.raises(DataError, match="1 of the 2 rows of a batch have no 'labels'"):
            Collator()(given)


def test_tokenizer_pads_rows_without_labels():
    class Tokenizer:
        def pad(self, rows, return_tensors):
            assert all("labels" not in row for row in rows)
            width = max(len(row["input_ids"]) for row in rows) + 1
            made = [row["input_ids"] + [7] * (width - len(row["input_ids"])) for row in rows]
            return {"input_ids": torch.tensor(made)}

    batch = Collator(Tokenizer())([{"input_ids": [1, 2], "labels": [1, 2]}, {"input_ids": [3], "labels": [3]}])
    assert batch["input_ids"].tolist() == [[1, 2, 7], [3, 7, 7]]
    assert batch["labels"].tolist() == [[1, 2, -100], [3, -100, -100]]


def test_labels_are_counted_like_in_the_mean_of_the_loss():
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
