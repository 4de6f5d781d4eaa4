"""Test sampling by length."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway import TrainingArguments
from headway.errors import DataError
from headway.trainer.data import LengthGroupedSampler, find_lengths
from tests.unit.trainer.models import texts


@given(st.lists(st.integers(1, 99), min_size=1, max_size=300), st.integers(1, 8))
@settings(max_examples=50, deadline=None)
def test_grouping_by_length_is_an_order_of_all_rows(lengths, size):
    order = list(LengthGroupedSampler(lengths, size))
    assert sorted(order) == list(range(len(lengths)))
    assert lengths[order[0]] == max(lengths)


def test_lengths_are_read_from_a_column_or_the_tokens():
    from datasets import Dataset

    rows = texts(5)
    expected = [len(row["input_ids"]) for row in rows]
    assert find_lengths(rows, "length") == expected
    assert find_lengths(Dataset.from_list(rows), "length") == expected
    assert find_lengths(Dataset.from_dict({"length": [3, 1]}), "length") == [3, 1]
    with pytest.raises(DataError, match="row 0 has no length: neither"):
        find_lengths([(1, 2)], "length")
    assert TrainingArguments(group_by_length=True).train_sampling_strategy == "group_by_length"
