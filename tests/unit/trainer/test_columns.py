"""Test columns and labels read from the model's forward."""

import pytest
from torch import nn

from headway.errors import DataError
from headway.trainer.collation import Collator, LoaderCollator
from headway.trainer.columns import find_label_names, list_forward_parameters, select_columns
from tests.unit.trainer.models import bert


def test_columns_and_labels_are_read_from_forward():
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
