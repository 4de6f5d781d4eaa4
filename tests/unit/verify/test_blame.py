"""Test that the first call that differs is named, with its line, for losses that do not equal the sum of their parts."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from headway.verify.blame import Blame, blame_repeat
from headway.verify.calls import CallTrace, ModelNames
from headway.verify.causes import explain_parts, explain_repeat
from headway.verify.draws import SharedDraws
from headway.verify.part_blame import blame_parts
from headway.verify.record_types import LossEntry

Loss = Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor]
"""Function of the rows, their labels and the number of the part."""

torch.manual_seed(0)
ROWS = torch.randn(8, 6)
LABELS = torch.tensor([0, 1, 2, 2, 2, 0, 2, 2])
MODEL = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))
OTHERS = [nn.Linear(6, 3), nn.Linear(6, 3)]
CLASS_WEIGHTS = torch.tensor([1.0, 5.0, 2.0])
PIXELS = torch.randn(3 << 16, generator=torch.Generator().manual_seed(4))
TABLES = torch.randn(2, 256, 3, generator=torch.Generator().manual_seed(3)).unbind(0)


class Names(ModelNames):
    """Names of the parameters of `MODEL`."""

    def map_tensors(self) -> tuple[dict[int, str], dict[int, str]]:
        return {id(p): name for name, p in MODEL.named_parameters()}, {}


def record(folder: Path, loss: Loss, parts: list[slice], weight: float | None = None) -> list[list[LossEntry]]:
    """Record the calls of a loss on parts of the rows, like one process and several ranks."""
    records = []
    for number, part in enumerate(parts):
        path = folder / f"trace{len(list(folder.iterdir()))}.jsonl"
        trace = CallTrace(path, Names())
        with SharedDraws(False, False, lambda: None, trace):
            rows, labels = ROWS[part], LABELS[part]
            trace.begin_batch(len(rows))
            value = loss(rows, labels, number)
            trace.write_loss(value, None if weight is None else float((labels != 2).sum()), "mean")
        records.append([LossEntry.from_dict(json.loads(line)) for line in path.read_text().splitlines()])
    return records


def blame(folder: Path, loss: Loss, weight: float | None = None) -> Blame | None:
    """Compare eight rows with two parts of four."""
    (whole,) = record(folder, loss, [slice(0, 8)], weight)
    return blame_parts(whole, record(folder, loss, [slice(0, 4), slice(4, 8)], weight))


def use_mean(rows: torch.Tensor, labels: torch.Tensor, number: int) -> torch.Tensor:
    return nn.functional.cross_entropy(MODEL(rows), labels)


def use_sum(rows: torch.Tensor, labels: torch.Tensor, number: int) -> torch.Tensor:
    return nn.functional.cross_entropy(MODEL(rows), labels, reduction="sum")


def use_own_sum(rows: torch.Tensor, labels: torch.Tensor, number: int) -> torch.Tensor:
    return MODEL(rows).square().sum()


def use_large_table(rows: torch.Tensor, labels: torch.Tensor, number: int) -> torch.Tensor:
    """256 rows, which are summed in as many groups as the batch has rows."""
    return use_mean(rows, labels, number) + (2 * TABLES[0]).square().mean()


def use_large_table_of_zeros(rows: torch.Tensor, labels: torch.Tensor, number: int) -> torch.Tensor:
    return use_mean(rows, labels, number) + (2 * torch.zeros(256, 3)).square().mean()


def use_large_table_by_part(rows: torch.Tensor, labels: torch.Tensor, number: int) -> torch.Tensor:
    return use_mean(rows, labels, number) + (2 * TABLES[number]).square().mean()


def use_long_rows(rows: torch.Tensor, labels: torch.Tensor, number: int) -> torch.Tensor:
    """Rows so long that only some of their values are summed, as in the logits of a language model."""
    pixels = rows.mean(1, keepdim=True) * PIXELS
    return (2 * pixels).square().mean()


def use_long_rows_in_second_dimension(rows: torch.Tensor, labels: torch.Tensor, number: int) -> torch.Tensor:
    pixels = (rows.mean(1, keepdim=True) * PIXELS).view(len(rows), 64, -1).transpose(0, 1)
    return (2 * pixels).square().mean()


def sum_long_rows(rows: torch.Tensor, labels: torch.Tensor, number: int) -> torch.Tensor:
    pixels = rows.mean(1, keepdim=True) * PIXELS
    return (pixels - pixels.mean(0)).square().mean()


def use_class_weights(rows: torch.Tensor, labels: torch.Tensor, number: int) -> torch.Tensor:
    return nn.functional.cross_entropy(MODEL(rows), labels, weight=CLASS_WEIGHTS)


def use_tokens(rows: torch.Tensor, labels: torch.Tensor, number: int) -> torch.Tensor:
    return nn.functional.cross_entropy(MODEL(rows), labels, ignore_index=2)


def use_masked_mean(rows: torch.Tensor, labels: torch.Tensor, number: int) -> torch.Tensor:
    mask = labels != 2
    losses = nn.functional.cross_entropy(MODEL(rows), labels, reduction="none")
    return (losses * mask).sum() / mask.sum()


def use_standard_scores(rows: torch.Tensor, labels: torch.Tensor, number: int) -> torch.Tensor:
    values = MODEL(rows)
    scores = (rows[:, :3] - rows[:, :3].mean(0)) / rows[:, :3].std(0)
    return (values * scores).mean()


def use_negatives(rows: torch.Tensor, labels: torch.Tensor, number: int) -> torch.Tensor:
    codes = MODEL(rows)
    scores = codes @ codes.T
    return nn.functional.cross_entropy(scores, torch.arange(len(rows)))


def use_hardest(rows: torch.Tensor, labels: torch.Tensor, number: int) -> torch.Tensor:
    losses = nn.functional.cross_entropy(MODEL(rows), labels, reduction="none")
    return losses.topk(len(losses) // 2).values.mean()


def use_batch_norm(rows: torch.Tensor, labels: torch.Tensor, number: int) -> torch.Tensor:
    return nn.functional.cross_entropy(nn.BatchNorm1d(3)(MODEL(rows)), labels)


def use_softmax_over_rows(rows: torch.Tensor, labels: torch.Tensor, number: int) -> torch.Tensor:
    return (MODEL(rows).softmax(0) * rows[:, :3]).mean()


def use_number_of_parts(rows: torch.Tensor, labels: torch.Tensor, number: int) -> torch.Tensor:
    return nn.functional.cross_entropy(MODEL(rows), labels) * (16 // len(rows))


def use_other_model(rows: torch.Tensor, labels: torch.Tensor, number: int) -> torch.Tensor:
    return (MODEL(rows) - OTHERS[number](rows)).square().mean()


def use_noise_by_part(rows: torch.Tensor, labels: torch.Tensor, number: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(number)
    noise = torch.randn(8, 6, generator=generator)[: len(rows)]
    return MODEL(rows + noise).mean()


def use_branch_by_part(rows: torch.Tensor, labels: torch.Tensor, number: int) -> torch.Tensor:
    values = MODEL(rows)
    if number == 1:
        values = values.relu()
    return values.square().mean()


def use_noise_filled_by_part(rows: torch.Tensor, labels: torch.Tensor, number: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(number)
    noise = torch.empty(8, 6).uniform_(-1, 1, generator=generator)[: len(rows)]
    return MODEL(rows + noise).mean()


def find_code(line: str, file: str = __file__) -> str:
    """Return the text of a line of a file, given as "test_blame.py:12 in function"."""
    return Path(file).read_text().splitlines()[int(line.rpartition(":")[2].split()[0]) - 1]


@pytest.mark.parametrize(
    ("loss", "kind", "code"),
    [
        (use_sum, "sum", 'reduction="sum"'),
        (use_own_sum, "sum", ".square().sum()"),
        (use_class_weights, "classes", "weight=CLASS_WEIGHTS"),
        (use_tokens, "tokens", "ignore_index=2"),
        (use_masked_mean, "count", "/ mask.sum()"),
        (use_standard_scores, "statistic", ".std(0)"),
        (use_negatives, "mixes", "codes @ codes.T"),
        (use_hardest, "selects", "losses.topk"),
        (use_batch_norm, "norm", "BatchNorm1d"),
        (use_softmax_over_rows, "mixes", ".softmax(0)"),
        (use_number_of_parts, "number", "16 // len(rows)"),
        (use_other_model, "tensor", "OTHERS[number](rows)"),
        (use_large_table_by_part, "tensor", "TABLES[number]"),
        (sum_long_rows, "statistic", "pixels.mean(0)"),
        (use_noise_by_part, "draw", "torch.randn("),
        (use_noise_filled_by_part, "draw", ".uniform_("),
        (use_branch_by_part, "path", "values.relu()"),
    ],
)
def test_call_that_makes_a_loss_depend_on_its_part_is_named(tmp_path: Path, loss: Loss, kind: str, code: str) -> None:
    found = blame(tmp_path, loss)
    assert found is not None
    assert found.kind == kind, found
    assert code in find_code(found.line), found
    cause = explain_parts(found, "rank")
    assert found.line in cause.reason
    assert (Path(__file__).parents[3] / "docs" / cause.page.partition("#")[0]).exists()


@pytest.mark.parametrize(
    "loss", [use_large_table, use_large_table_of_zeros, use_long_rows, use_long_rows_in_second_dimension]
)
def test_large_tensor_that_is_equal_on_all_parts_is_not_blamed(tmp_path: Path, loss: Loss) -> None:
    assert blame(tmp_path, loss) is None


def use_tokens_at_the_start(rows: torch.Tensor, labels: torch.Tensor, number: int) -> torch.Tensor:
    """Mean over tokens of a model whose outputs are almost equal, as in the first update."""
    return nn.functional.cross_entropy(1e-4 * MODEL(rows), labels, ignore_index=2)


def use_masked_mean_at_the_start(rows: torch.Tensor, labels: torch.Tensor, number: int) -> torch.Tensor:
    mask = labels != 2
    losses = nn.functional.cross_entropy(1e-4 * MODEL(rows), labels, reduction="none")
    return (losses * mask).sum() / mask.sum()


@pytest.mark.parametrize(
    ("loss", "kind", "code"),
    [(use_tokens_at_the_start, "tokens", "ignore_index=2"), (use_masked_mean_at_the_start, "count", "/ mask.sum()")],
)
def test_mean_over_uneven_numbers_is_named_although_the_means_are_equal(
    tmp_path: Path, loss: Loss, kind: str, code: str
) -> None:
    found = blame(tmp_path, loss)
    assert found is not None
    assert found.kind == kind, found
    assert code in find_code(found.line), found
    assert blame(tmp_path, loss, weight=1.0) is None


def use_all_rows(rows: torch.Tensor, labels: torch.Tensor, number: int) -> torch.Tensor:
    everyone = MODEL(ROWS).detach()  # like the result of accelerator.gather()
    first = 4 * number
    scores = MODEL(rows) @ everyone.T
    return nn.functional.cross_entropy(scores, torch.arange(first, first + len(rows)))


def use_mean_of_means(rows: torch.Tensor, labels: torch.Tensor, number: int) -> torch.Tensor:
    losses = nn.functional.cross_entropy(MODEL(rows), labels, reduction="none")
    return losses.sum() / len(losses)


def use_rows_after_time(rows: torch.Tensor, labels: torch.Tensor, number: int) -> torch.Tensor:
    """Rows in the second dimension, like in a network over (time, rows, features)."""
    series = MODEL(rows[:, None].expand(-1, 5, -1)).transpose(0, 1).contiguous()
    return series.square().sum(2).mean()


@pytest.mark.parametrize("loss", [use_mean, use_all_rows, use_mean_of_means, use_rows_after_time])
def test_loss_that_is_a_mean_over_rows_is_not_blamed(tmp_path: Path, loss: Loss) -> None:
    assert blame(tmp_path, loss) is None


def test_mean_over_tokens_weighted_by_their_number_is_not_blamed(tmp_path: Path) -> None:
    assert blame(tmp_path, use_tokens, weight=1.0) is None


class Keeper:
    """State that a script keeps outside its checkpoint."""

    def __init__(self) -> None:
        self.mean = 1.5
        self.rows = ROWS.clone()


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ("mean", "number keeper.mean"),
        ("rows", "tensor keeper.rows"),
        ("length", "its shape is [3, 6] instead of [8, 6]"),
    ],
)
def test_value_that_differs_between_equal_runs_is_named(tmp_path: Path, change: str, text: str) -> None:
    runs = []
    for run in range(2):
        keeper = Keeper()
        if run and change == "mean":
            keeper.mean = 2.5
        elif run and change == "rows":
            keeper.rows = keeper.rows + 1.0
        elif run:
            keeper.rows = keeper.rows[:3]

        def loss(rows: torch.Tensor, labels: torch.Tensor, number: int, keeper: Keeper = keeper) -> torch.Tensor:
            kept = keeper.rows.square()
            return MODEL(rows).mean() / keeper.mean + kept.mean()

        runs += record(tmp_path, loss, [slice(0, 8)])
    found = blame_repeat(runs[0], runs[1])
    assert found is not None
    assert text in explain_repeat(found), found
    assert blame_repeat(runs[0], runs[0]) is None


def test_call_made_by_only_one_of_two_equal_runs_is_named(tmp_path: Path) -> None:
    def flip(rows: torch.Tensor, labels: torch.Tensor, number: int) -> torch.Tensor:
        return MODEL(rows.flip(-1)).mean()

    def keep(rows: torch.Tensor, labels: torch.Tensor, number: int) -> torch.Tensor:
        return MODEL(rows).mean()

    runs = [record(tmp_path, loss, [slice(0, 8)])[0] for loss in (keep, flip)]
    for calls in (run[0].calls for run in runs):  # as if both runs used the model at the same line
        for call in calls:
            call.line = "train.py:9" if call.func != "flip" else call.line
    for one, other in (runs, reversed(runs)):
        found = blame_repeat(one, other)
        assert found is not None
        assert (found.kind, found.call) == ("path", "flip")
        assert "rows.flip(-1)" in find_code(found.line)
