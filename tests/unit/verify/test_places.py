"""Test that watches of a run name the line of a leak, of a learning rate, and of tensors that stay alive."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from headway.verify.alive_tensors import measure_alive_tensors
from headway.verify.calls import CallTrace
from headway.verify.draws import SharedDraws
from headway.verify.probes import LeakProbe
from headway.verify.rate_watch import RateWatch
from headway.verify.readings import list_generators, list_versions
from headway.verify.unprepared_models import UnpreparedModels


def find_code(line: str) -> str:
    """Return the text of a line of this file, given as "softmax() at test_places.py:12 in forward"."""
    number = line.rpartition(".py:")[2].split()[0]
    return Path(__file__).read_text().splitlines()[int(number) - 1]


class Pooling(nn.Module):
    """Attention whose softmax is over the rows."""

    def __init__(self) -> None:
        super().__init__()
        self.score, self.head = nn.Linear(4, 1), nn.Linear(4, 2)

    def forward(self, parts: torch.Tensor) -> torch.Tensor:
        weights = self.score(parts).softmax(dim=0)
        return self.head((weights * parts).sum(1))


class Attention(nn.Module):
    """Attention over tokens, with or without a causal mask."""

    def __init__(self, is_causal: bool) -> None:
        super().__init__()
        self.embed, self.head, self.is_causal = nn.Embedding(16, 8), nn.Linear(8, 16), is_causal

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        y = nn.functional.scaled_dot_product_attention(x, x, x, is_causal=self.is_causal)
        return self.head(x + y)


def probe(model: nn.Module, given: torch.Tensor, batch: Any) -> LeakProbe:
    found = LeakProbe(model, (given,), {}, batch)
    found.test_model()
    return found


def test_call_that_mixes_rows_is_named() -> None:
    parts = torch.randn(6, 5, 4)
    (finding,) = probe(Pooling(), parts, (parts,)).entries
    assert finding["is_leak"]
    assert "softmax() at " in finding["description"]
    assert "softmax(dim=0)" in find_code(finding["description"])


@pytest.mark.parametrize("is_causal", [True, False])
def test_call_that_uses_later_tokens_is_named(is_causal: bool) -> None:
    tokens = torch.randint(0, 16, (4, 13))
    findings = probe(Attention(is_causal), tokens[:, :-1], (tokens,)).entries
    future = next(each for each in findings if each["kind"] == "future")
    assert future["is_leak"] == (not is_causal)
    if not is_causal:
        assert "scaled_dot_product_attention" in find_code(future["description"])


class AttentionByHand(nn.Module):
    """Attention whose mask hides tokens from `first_hidden` positions ahead. 1 is correct."""

    def __init__(self, first_hidden: int) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(16, 8), nn.Linear(8, 16)
        self.first_hidden = first_hidden

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        scores = x @ x.transpose(1, 2)
        hidden = torch.ones(tokens.shape[1], tokens.shape[1], dtype=torch.bool).triu(self.first_hidden)
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        return self.head(x + weights @ x)


@pytest.mark.parametrize("first_hidden", [1, 2])
def test_wrong_mask_is_named_rather_than_the_scores_before_it(first_hidden: int) -> None:
    torch.manual_seed(0)  # in 2 of 100 random models, the probe still names the scores, and in 5 no place
    tokens = torch.randint(0, 16, (4, 13))
    findings = probe(AttentionByHand(first_hidden), tokens[:, :-1], (tokens,)).entries
    future = next(each for each in findings if each["kind"] == "future")
    assert future["is_leak"] == (first_hidden == 2)
    if first_hidden == 2:
        assert "softmax() at " in future["description"]
        assert "masked_fill(hidden" in find_code(future["description"])


class Scale(nn.Module):
    """Model with a buffer that each call changes, that training changes, or that is a cache."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.register_buffer("scale", torch.ones(4), persistent=kind != "cache")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kind in ("always", "cache") or self.training:
            self.scale += 0.01
        return x * self.scale


@pytest.mark.parametrize(("kind", "changing"), [("always", ["scale"]), ("training", []), ("cache", [])])
def test_only_a_saved_buffer_that_evaluation_changes_is_reported(kind: str, changing: list[str]) -> None:
    model, rows = Scale(kind), torch.randn(3, 4)
    assert probe(model, rows, (rows,)).changed_buffers == changing
    assert torch.equal(model.scale, torch.ones(4))


def test_lines_that_set_a_learning_rate_are_recorded() -> None:
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    watch = RateWatch()
    entry = type("Entry", (), {"optimizer": optimizer})
    watch.watch_optimizers([entry])
    optimizer.step()
    schedule.step()
    (line,) = watch.take_lines()
    assert line.endswith(" by LambdaLR")
    assert "schedule.step()" in find_code(line)
    optimizer.param_groups[0]["lr"] = 7.0  # by hand
    assert "# by hand" in find_code(watch.take_lines()[0])
    assert watch.take_lines() == []
    state = optimizer.state_dict()
    assert type(state["param_groups"][0]) is dict
    optimizer.load_state_dict(state)
    watch.watch_optimizers([entry])
    assert optimizer.param_groups[0]["lr"] == 7.0


def test_tensors_that_stay_alive_are_measured_with_their_graphs(tmp_path: Path) -> None:
    model, rows, kept = nn.Linear(4, 100), torch.randn(50, 4), []
    trace = CallTrace(tmp_path / "trace.jsonl")
    with SharedDraws(False, False, lambda: None, trace):
        for update in range(1, 5):
            trace.update = update
            trace.begin_batch(50)
            kept.append(model(rows).square().mean())  # kept
            model(rows).mean()
            outputs = model(rows)  # its graph is freed
            outputs.square().mean().backward()
            kept.append(outputs)
    known = [p.untyped_storage().data_ptr() for p in model.parameters()]
    lines = measure_alive_tensors(trace.list_alive_results(4), known)
    graphs = {find_code(each["line"]).partition("# ")[2]: each for each in lines if each["graph_bytes"]}
    assert set(graphs) == {"kept", "its graph is freed"}
    for about in graphs.values():
        assert about["updates"] == [1, 2, 3]
        assert 3 * 50 * 100 * 4 <= about["graph_bytes"] < 3 * 50 * 100 * 4 * 1.5


def test_model_that_was_not_prepared_is_found() -> None:
    prepared = nn.Sequential(nn.Linear(2, 2))
    average = torch.optim.swa_utils.AveragedModel(prepared)
    others = UnpreparedModels()
    others.find_models([prepared])
    before = others.hash_parameters()
    assert any("AveragedModel" in name for name in before)
    with torch.no_grad():
        next(average.parameters()).add_(1.0)
    changed = [name for name, value in others.hash_parameters().items() if before[name] != value]
    assert len(changed) == 1
    assert "AveragedModel" in changed[0]


class Images(torch.utils.data.Dataset[torch.Tensor]):
    """Images whose contents a faulty `__getitem__` changes."""

    def __init__(self) -> None:
        self.images, self.generator = torch.zeros(4, 3), torch.Generator()

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> torch.Tensor:
        image = self.images[index]
        image += 1
        return image


@pytest.mark.parametrize("is_wrapped", [False, True])
def test_tensors_changed_by_a_dataset_and_its_generators_are_found(is_wrapped: bool) -> None:
    images = Images()
    dataset: Any = torch.utils.data.Subset(images, [0, 1]) if is_wrapped else images
    dataset = torch.utils.data.ConcatDataset([dataset]) if is_wrapped else dataset
    before = list_versions(dataset)
    dataset[0]
    after = list_versions(dataset)
    assert [name for name in after if after[name] != before[name]] == ["Images.images"]
    assert list_generators(dataset) == ["Images.generator"]
