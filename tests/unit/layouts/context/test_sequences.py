"""Test the division of sequences, equal attention and gradients of parts, and the check of a split model."""

from itertools import chain

import pytest
import torch

from headway.layouts.context import dry_run, sequences
from headway.layouts.tensor.crossings import SplitAxis


def make_axis(rank: int, size: int) -> SplitAxis:
    return SplitAxis(None, None, rank, size)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_each_token_is_on_one_rank_and_attention_is_equal(size: int) -> None:
    whole = torch.arange(4 * size)
    parts = [sequences.split_sequence(whole, make_axis(rank, size), 0).tolist() for rank in range(size)]
    assert sorted(chain(*parts)) == whole.tolist()
    assert len({sum(place + 1 for place in part) for part in parts}) == 1


def test_order_equals_that_of_torchs_balancer() -> None:
    balancer = pytest.importorskip("torch.distributed.tensor.experimental._context_parallel._load_balancer")
    order = balancer._HeadTailLoadBalancer(24, 3, "cpu")._generate_indices()[0]
    mine = [sequences.split_sequence(torch.arange(24), make_axis(rank, 3), 0) for rank in range(3)]
    assert torch.equal(torch.cat(mine), order.long())


def test_length_that_does_not_divide_is_padded_at_the_end() -> None:
    ids = torch.arange(1, 11).view(2, 5)
    first, second = (sequences.split_sequence(ids, make_axis(rank, 2), -1, filler=-100) for rank in range(2))
    assert first.tolist() == [[1, 2, -100, -100], [6, 7, -100, -100]]
    assert second.tolist() == [[3, 4, 5, -100], [8, 9, 10, -100]]
    assert [sequences.pad_length(length, make_axis(0, 2)) for length in (1, 4, 5)] == [4, 4, 8]


def test_parts_are_stacked_by_rank_and_restored_in_order() -> None:
    whole = torch.randn(2, 12, 3)
    stacked = torch.stack([sequences.split_sequence(whole, make_axis(rank, 3), 1) for rank in range(3)])
    assert torch.equal(sequences._restore_order(stacked, make_axis(0, 3), 1), whole)
    assert torch.equal(sequences._stack_by_rank(whole, make_axis(0, 3), 1), stacked)


def test_gradients_of_parts_are_terms_of_the_sum() -> None:
    whole, grad = torch.randn(1, 6, requires_grad=True), torch.zeros(1, 6)
    for rank in range(2):
        grad += torch.autograd.grad(sequences.split_sequence(whole.exp(), make_axis(rank, 2), 1).sum(), whole)[0]
    assert torch.equal(grad, whole.exp())
    alike = sequences.divide_gradient(whole, make_axis(0, 4))
    assert torch.equal(torch.autograd.grad(alike.sum(), whole)[0], torch.full((1, 6), 0.25))


def test_shortened_arguments_contain_a_few_tokens() -> None:
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
    args, few = dry_run.shorten_arguments((torch.zeros(3, 20),), given, 8, ("labels",))
    assert args[0].shape == (2, 8)
    assert few["input_ids"].tolist() == [list(range(8)), list(range(20, 28))]
    assert few["attention_mask"].tolist() == [[1] * 8] * 2
    assert few["labels"].tolist() == [[0] * 8] * 2
    assert few["mask"].shape == (2, 1, 8, 8)
    assert few["kinds"].tolist() == [0, 1]
    assert few["nested"][0].shape == (2, 8, 5)
    assert (few["count"], few["name"]) == (7.0, "x")
    assert given["labels"].min() == -100
    assert dry_run.shorten_arguments((1,), {}, 8, ()) == ((1,), {})
    alone = {"ids": torch.arange(20)[None], "bias": torch.zeros(1, 1, 20, 20), "weights": torch.ones(1)}
    _, few = dry_run.shorten_arguments((), alone, 8, ())
    assert few["ids"].tolist() == [list(range(8))] * 2
    assert (few["bias"].shape, few["weights"].shape) == ((2, 1, 8, 8), (1,))


@pytest.mark.parametrize(("ignored", "row"), [(-1, [3, 0, 4, 0]), (0, [3, 4, 4, 4]), (4, [3, 0, 0, 0])])
def test_rows_get_different_numbers_of_labels(ignored: int, row: list[int]) -> None:
    given = {"labels": torch.tensor([[3, 0, 4, 0]] * 2), "targets": torch.ones(2, 4), "ids": torch.zeros(2, 4)}
    found = dry_run.ignore_some_labels(given, ["labels", "targets"], ignored)
    assert found["labels"].tolist() == [[ignored, *row[1:]], row]
    assert found["targets"] is given["targets"]
    assert given["labels"][0, 0] == 3


def test_differences_are_described() -> None:
    whole = {"loss": torch.tensor(2.0), "logits": torch.tensor([[1.0, torch.nan, 300.0]])}
    near = {"loss": torch.tensor(2.0001), "logits": whole["logits"] + 1e-3}
    assert dry_run.describe_difference(whole, near, is_exact=True) == ""
    assert "its loss differs" in dry_run.describe_difference(whole, {**near, "loss": torch.tensor(2.0002)}, True, True)
    far = {**whole, "loss": torch.tensor(2.01)}
    assert dry_run.describe_difference(whole, far, is_exact=False) == ""
    assert "its loss differs by 0.01 (the largest value is 2)" in dry_run.describe_difference(whole, far, is_exact=True)
    assert "shape (1, 3) differs" in dry_run.describe_difference(whole, {**whole, "logits": torch.ones(1, 3)}, True)
    assert "shapes [(1, 2)] with sharded sequences, and [(1, 3)]" in dry_run.describe_difference(
        torch.ones(1, 3), torch.ones(1, 2), True
    )


def test_evaluation_mode_is_undone() -> None:
    model = torch.nn.Sequential(torch.nn.Dropout(), torch.nn.Dropout().eval())
    with dry_run.enter_evaluation(model):
        assert not any(module.training for module in model.modules())
        assert not torch.is_grad_enabled()
    assert [module.training for module in model] == [True, False]


class MergingLinear(torch.nn.Linear):
    """Linear layer that merges its weights in evaluation mode, like a LoRA layer."""

    is_merged = False

    def train(self, mode: bool = True) -> "MergingLinear":
        self.is_merged = not mode
        return super().train(mode)


def test_layers_that_merge_weights_in_evaluation_mode_separate_them_again() -> None:
    model = torch.nn.Sequential(MergingLinear(2, 2), torch.nn.Dropout(), torch.nn.BatchNorm1d(2).eval())
    with dry_run.enter_evaluation(model):
        assert model[0].is_merged
    assert not model[0].is_merged
    assert [module.training for module in model] == [True, True, False]
