"""A few tokens of a batch, what differs between two outputs, and what stands for logits that are in parts."""

import copy

import pytest
import torch

from headway.errors import UnsupportedError
from headway.layouts.context import sequences as context_check
from headway.layouts.context.context_parallel import PartialOutput


def test_a_few_tokens_of_whatever_is_given() -> None:
    given = {
        "input_ids": torch.arange(60).view(3, 20),
        "attention_mask": torch.zeros(3, 20, dtype=torch.long),
        "labels": torch.full((3, 20), -100),
        "mask": torch.zeros(3, 1, 20, 20),
        "kinds": torch.arange(3),
        "nested": [torch.zeros(3, 20, 5)],
        "count": torch.tensor(7.0),
        "name": "x",
    }
    args, few = context_check.shorten_arguments((torch.zeros(3, 20),), given, 8, ("labels",))
    assert args[0].shape == (2, 8)
    assert few["input_ids"].tolist() == [list(range(8)), list(range(20, 28))]
    assert few["attention_mask"].tolist() == [[1] * 8] * 2
    assert few["labels"].tolist() == [[0] * 8] * 2
    assert few["mask"].shape == (2, 1, 8, 8)
    assert few["kinds"].tolist() == [0, 1]
    assert few["nested"][0].shape == (2, 8, 5)
    assert (few["count"], few["name"]) == (7.0, "x")
    assert given["labels"].min() == -100
    assert context_check.shorten_arguments((1,), {}, 8, ()) == ((1,), {})
    alone = {"ids": torch.arange(20)[None], "bias": torch.zeros(1, 1, 20, 20), "weights": torch.ones(1)}
    _, few = context_check.shorten_arguments((), alone, 8, ())
    assert few["ids"].tolist() == [list(range(8))] * 2
    assert (few["bias"].shape, few["weights"].shape) == ((2, 1, 8, 8), (1,))


@pytest.mark.parametrize(("ignored", "row"), [(-1, [3, 0, 4, 0]), (0, [3, 4, 4, 4]), (4, [3, 0, 0, 0])])
def test_rows_have_unlike_numbers_of_labels(ignored: int, row: list[int]) -> None:
    given = {"labels": torch.tensor([[3, 0, 4, 0]] * 2), "targets": torch.ones(2, 4), "ids": torch.zeros(2, 4)}
    found = context_check.ignore_some_labels(given, ["labels", "targets"], ignored)
    assert found["labels"].tolist() == [[ignored, *row[1:]], row]
    assert found["targets"] is given["targets"]
    assert given["labels"][0, 0] == 3


def test_what_differs_is_said() -> None:
    whole = {"loss": torch.tensor(2.0), "logits": torch.tensor([[1.0, torch.nan, 300.0]])}
    near = {"loss": torch.tensor(2.0001), "logits": whole["logits"] + 1e-3}
    assert context_check.describe_difference(whole, near, is_exact=True) == ""
    assert "its loss differs" in context_check.describe_difference(
        whole, {**near, "loss": torch.tensor(2.0002)}, True, True
    )
    far = {**whole, "loss": torch.tensor(2.01)}
    assert context_check.describe_difference(whole, far, is_exact=False) == ""
    assert "its loss differs by 0.01 (the largest value is 2)" in context_check.describe_difference(
        whole, far, is_exact=True
    )
    assert "shape (1, 3) differs" in context_check.describe_difference(
        whole, {**whole, "logits": torch.ones(1, 3)}, True
    )
    assert "shapes [(1, 2)] when it is cut, and [(1, 3)]" in context_check.describe_difference(
        torch.ones(1, 3), torch.ones(1, 2), True
    )


def test_evaluation_is_undone() -> None:
    model = torch.nn.Sequential(torch.nn.Dropout(), torch.nn.Dropout().eval())
    with context_check.enter_evaluation(model):
        assert not any(module.training for module in model.modules())
        assert not torch.is_grad_enabled()
    assert [module.training for module in model] == [True, False]


def test_withheld_logits_refuse_every_use() -> None:
    part = PartialOutput(torch.Size((2, 6, 50)), 12)
    for use in (
        lambda: part.shape,
        lambda: part[0],
        lambda: part.float(),
        lambda: len(part),
        lambda: part + 1,
        lambda: list(part),
    ):
        with pytest.raises(UnsupportedError, match=r"each rank has 6 of 12 tokens.*call the model without labels"):
            use()
    assert isinstance(copy.copy(part), PartialOutput)
