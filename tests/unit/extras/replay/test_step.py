"""Test automatic micro-batching on one process: sizes of pieces, replay, and undone optimizer steps."""

import dataclasses
from collections import UserDict, namedtuple
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

from headway import Accelerator, GradientAccumulationPlugin
from headway.core.runtime.collectives.tree import slice_rows
from headway.core.strategies.base import Capabilities, SingleStrategy
from headway.core.training.loss_policy import ConstantDivision
from headway.errors import ConfigError, LossError, MemoryExhausted, StateError, UnsupportedError
from headway.extras.replay.piece_size import FIRST_PATIENCE, PieceSize

TEXT = (
    "[enforce fail at alloc_cpu.cpp:127] . DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes."
)
Pair = namedtuple("Pair", "x y")


@dataclasses.dataclass
class Record:
    """Record with rows and a name."""

    x: torch.Tensor
    name: str


# ---------------------------------------------------------------- pieces


def test_values_with_one_entry_per_row_are_sliced() -> None:
    x = torch.arange(14).reshape(7, 2)
    batch = {
        "x": x, "pair": Pair(x, numpy.arange(7)), "names": list("abcdefg"), "weights": torch.ones(3), "flag": True,
        "record": Record(x, "r"), "nested": UserDict(x=[x, x]), "boxes": [{"n": n} for n in range(7)], "scalar": torch.tensor(1),
    }  # fmt: skip
    found = slice_rows(batch, 4, 7, 7)
    assert torch.equal(found["x"], x[4:])
    assert isinstance(found["pair"], Pair)
    assert found["pair"].y.tolist() == [4, 5, 6]
    assert found["names"] == ["e", "f", "g"]
    assert found["boxes"] == [{"n": 4}, {"n": 5}, {"n": 6}]
    assert found["weights"] is batch["weights"]
    assert (found["flag"], found["scalar"], found["record"].name) == (True, batch["scalar"], "r")
    assert torch.equal(found["record"].x, x[4:])
    assert isinstance(found["nested"], UserDict)
    assert [len(each) for each in found["nested"]["x"]] == [3, 3]
    assert len(batch["nested"]["x"][0]) == 7


def test_list_of_batch_tensors_is_not_a_list_of_rows() -> None:
    x = torch.arange(4).reshape(2, 2)
    assert [each.tolist() for each in slice_rows([x, x], 1, 2, 2)] == [[[2, 3]], [[2, 3]]]


@given(st.integers(1, 500), st.integers(1, 500))
def test_batch_is_split_into_as_few_even_pieces_as_the_limit_allows(num_rows: int, limit: int) -> None:
    cuts = PieceSize(limit=limit).split_rows(num_rows)
    sizes = [stop - start for start, stop in cuts]
    assert [start for start, _ in cuts] == [0, *(stop for _, stop in cuts[:-1])]
    assert sum(sizes) == num_rows
    assert max(sizes) <= limit
    assert max(sizes) - min(sizes) <= 1
    assert len(cuts) == -(-num_rows // limit)


def test_seven_rows_are_split_into_four_and_three() -> None:
    assert PieceSize(limit=4).split_rows(7) == [(0, 4), (4, 7)]


@given(st.integers(1, 64), st.integers(1, 64), st.integers(200, 2000))
def test_piece_size_grows_back_without_thrashing(fits: int, num_rows: int, num_batches: int) -> None:
    """Memory fits `fits` rows. Few batches fail, whatever their number, and finally pieces have at least half of this size."""
    size, num_failures = PieceSize(), 0
    for _ in range(num_batches):
        while (largest := max(stop - start for start, stop in size.split_rows(num_rows))) > fits:
            limit = size.get_smaller_size(largest)
            assert 1 <= limit < largest
            size.shrink(limit, largest)
            num_failures += 1
        size.record_success(largest)
    assert num_failures <= 7 + (num_batches // FIRST_PATIENCE + 1).bit_length() + 1
    assert 2 * max(stop - start for start, stop in size.split_rows(num_rows)) >= min(fits, num_rows)


def test_piece_size_grows_back_when_memory_is_available() -> None:
    size = PieceSize()
    size.shrink(8, 16)
    for _ in range(200):
        size.record_success(max(stop - start for start, stop in size.split_rows(32)))
    assert size.split_rows(32) == [(0, 32)]


def test_piece_size_stays_without_memory() -> None:
    size = PieceSize()
    size.shrink(8, 16)
    for _ in range(200):
        size.record_success(8, predicted_rows=8, batch_rows=32)
    assert size.limit == 8


@given(st.integers(1, 64), st.integers(1, 64), st.integers(-2, 2))
def test_measured_sizes_are_found_with_few_replays(fits: int, num_rows: int, error: int) -> None:
    """Pieces of `fits` rows fit, and `fits + error` are predicted. After ten updates, the pieces are as few as possible."""
    size, num_failures, num_tries = PieceSize(), 0, 0
    for _ in range(10):
        while (largest := max(stop - start for start, stop in size.split_rows(num_rows))) > fits:
            num_tries += size.good is not None
            limit = size.get_smaller_size(largest, is_measured=True)
            assert 1 <= limit < largest
            size.shrink(limit, largest, is_measured=True)
            num_failures += 1
        size.record_success(largest, max(fits + error, 1), num_rows)
    assert num_failures <= 3 + num_tries
    assert num_tries <= max(0, error)
    if error == 0:
        assert len(size.split_rows(num_rows)) == -(-num_rows // fits)
    assert not size.is_calibrating


def test_calibration_splits_a_batch_into_two_sizes() -> None:
    size = PieceSize()
    size.shrink(5, 20, is_measured=True)
    assert [stop - start for start, stop in size.split_rows(20)] == [5, 5, 5, 3, 2]
    assert size.split_rows(9) == [(0, 2), (2, 6), (6, 9)], "the first piece is not measured, so it can be smaller"
    assert len(size.split_rows(20)) == size.count_pieces(20)
    assert size.split_rows(4) == [(0, 4)]
    assert len(size.split_rows(4, min_pieces=3)) == 3, "the number of pieces must follow another rank with more rows"
    size.shrink(1, 5, is_measured=True)
    assert [stop - start for start, stop in size.split_rows(3)] == [1, 1, 1]


def test_calibration_counts_updates() -> None:
    """The first update creates optimizer state, and a window of several batches needs a second set of gradients."""
    size = PieceSize()
    size.shrink(5, 20, is_measured=True)
    for is_update in (False, False, True, False, False):
        size.record_success(5, predicted_rows=10, batch_rows=20, is_update=is_update)
    assert (size.limit, size.num_clean) == (5, 1)
    size.record_success(5, predicted_rows=10, batch_rows=20)
    assert (size.limit, size.good) == (10, 5)
    assert [stop - start for start, stop in size.split_rows(20)] == [10, 10]


def test_prediction_that_saves_no_piece_is_not_tried() -> None:
    size = PieceSize()
    size.shrink(7, 20, is_measured=True)
    for _ in range(2):
        size.record_success(7, predicted_rows=9, batch_rows=20)
    assert (size.limit, size.patience) == (7, FIRST_PATIENCE)


def test_prediction_above_a_failed_size_is_tried_second_and_once() -> None:
    size, sizes = PieceSize(), []
    size.shrink(5, 10, is_measured=True)
    for _ in range(6):
        size.record_success(size.limit, predicted_rows=10, batch_rows=20)
        sizes.append(size.limit)
    assert sizes == [5, 7, 7, 10, 10, 10]
    size.shrink(size.get_smaller_size(10, is_measured=True), 10, is_measured=True)
    for _ in range(2 * FIRST_PATIENCE - 1):
        size.record_success(size.limit, predicted_rows=10, batch_rows=20)
    assert (size.limit, size.patience) == (7, 2 * FIRST_PATIENCE)


# ---------------------------------------------------------------- updates compared with plain PyTorch


def make_data(num_rows: int = 36) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(num_rows, 3, generator=generator), torch.randn(num_rows, 1, generator=generator))


def build_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))


MAKERS: dict[str, Any] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.4, weight_decay=0.1),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.05, amsgrad=True),
    "adamw foreach": lambda p: torch.optim.AdamW(p, lr=0.05, foreach=True),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=0.05, fused=True),
    "adam capturable-like lr": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.05), foreach=False),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.05),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
    "unknown": lambda p: Averaging(p),
}


class Averaging(torch.optim.Optimizer):
    """Optimizer outside of torch whose state is a history that grows in each step."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.05, "k": 0})
        self.num_steps = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.num_steps += 1
        for group in self.param_groups:
            group["k"] += 1
            for p in group["params"]:
                state = self.state[p]
                state.setdefault("history", []).append(p.grad.clone())
                p -= group["lr"] / self.num_steps * torch.stack(state["history"]).mean(0)


def train_plain(make: Any, num_updates: int, steps: int) -> tuple[list[torch.Tensor], Any]:
    """Train with plain PyTorch on whole batches. Return the parameters and the optimizer."""
    model = build_net()
    optimizer = make(list(model.parameters()))
    x, y = make_data().tensors
    size = 6 * steps
    for number in range(num_updates):
        rows = slice(number * size % 36, number * size % 36 + size)
        optimizer.zero_grad()
        mse_loss(model(x[rows]), y[rows]).backward()
        optimizer.step()
    return [p.detach() for p in model.parameters()], optimizer


def train_automatic(make: Any, steps: int, faults: set[int], where: str = "post") -> tuple[list[torch.Tensor], Any]:
    """Train on six batches of 6 rows, with out-of-memory errors in the given calls of the optimizer's step.

    The error is raised after the step changed the parameters, or before it if `where` is not "post". Return the parameters and
    the optimizer.
    """
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=steps, microbatching="auto")
    model = build_net()
    optimizer = make(list(model.parameters()))
    calls = [0]

    def fail_in_some_calls(*_: Any) -> None:
        calls[0] += 1
        if calls[0] in faults:
            raise RuntimeError(TEXT)

    (optimizer.register_step_post_hook if where == "post" else optimizer.register_step_pre_hook)(fail_in_some_calls)
    model, prepared, loader = accelerator.prepare(model, optimizer, DataLoader(make_data(), batch_size=6))
    for batch in loader:
        accelerator.forward_backward(batch, lambda piece: mse_loss(model(piece[0]), piece[1]))
        prepared.step()
        prepared.zero_grad()
    return [p.detach() for p in model.parameters()], optimizer


@pytest.mark.parametrize("name", list(MAKERS))
@pytest.mark.parametrize("steps", [1, 3])
def test_updates_after_an_undone_first_step_equal_plain_torch(name: str, steps: int) -> None:
    expected, reference = train_plain(MAKERS[name], 6 // steps, steps)
    for faults in (set(), {1}, {1, 2}):
        found, optimizer = train_automatic(MAKERS[name], steps, faults)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
        for one, other in zip(optimizer.state.values(), reference.state.values()):
            assert one.keys() == other.keys()
            if "step" in one:
                assert one["step"] == other["step"]


def test_unknown_optimizer_can_be_restored_at_any_step() -> None:
    expected, _ = train_plain(MAKERS["unknown"], 6, 1)
    found, optimizer = train_automatic(MAKERS["unknown"], 1, {1, 3, 6})
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
    assert (optimizer.num_steps, optimizer.param_groups[0]["k"]) == (6, 6)


def test_out_of_memory_in_a_later_step_of_torchs_optimizers_ends_the_run() -> None:
    with pytest.raises(RuntimeError, match="DefaultCPUAllocator"):
        train_automatic(MAKERS["adam"], 1, {3})


# ---------------------------------------------------------------- microbatches() and forward_backward()


def test_loop_over_microbatches_trains_like_whole_batches() -> None:
    accelerator = Accelerator(cpu=True, microbatching="auto")
    model = build_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    rows = [{"x": x, "y": y} for x, y in make_data()]
    model, optimizer, loader, scheduler = accelerator.prepare(
        model, optimizer, DataLoader(rows, batch_size=7), scheduler
    )
    accelerator._training_step.transaction.size.limit = 4
    loss_function, sizes = mse_loss, []
    for batch in loader:
        for piece in accelerator.microbatches(batch):
            sizes.append(len(piece["x"]))
            with accelerator.accumulate(model):
                accelerator.backward(loss_function(model(piece["x"]), piece["y"]))
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
    assert sizes == [4, 3] * 5 + [1]
    assert accelerator.num_updates == 6
    assert scheduler.last_epoch == 6


def test_without_auto_both_methods_run_whole_batches() -> None:
    accelerator = Accelerator(cpu=True)
    model, x = accelerator.prepare(build_net()), torch.ones(5, 3)
    assert [piece is x for piece in accelerator.microbatches(x)] == [True]
    loss = accelerator.forward_backward(x, lambda piece: model(piece).square().mean())
    torch.testing.assert_close(loss, model(x).square().mean().detach())
    assert model[0].weight.grad is not None


def test_independent_schedules_tick_once_per_batch() -> None:
    accelerator = Accelerator(cpu=True, microbatching="auto", step_scheduler_with_optimizer=False)
    model = build_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
    accelerator._training_step.transaction.size.limit = 4
    num_pieces = 0
    for _ in range(2):
        for piece in accelerator.microbatches(torch.ones(8, 3)):
            num_pieces += 1
            with accelerator.accumulate(model):
                accelerator.backward(model(piece).mean())
                schedule.step()
                if num_pieces == 2:
                    raise RuntimeError(TEXT)
                optimizer.step()
                optimizer.zero_grad()
    assert num_pieces == 2 + 4 + 4
    assert schedule.last_epoch == 2


def test_zero_grad_before_backward_discards_saved_gradients() -> None:
    accelerator = Accelerator(cpu=True, microbatching="auto")
    model = build_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    model, optimizer = accelerator.prepare(model, optimizer)
    accelerator._training_step.transaction.size.limit = 2
    for _ in range(2):
        for piece in accelerator.microbatches(torch.ones(4, 3)):
            with accelerator.accumulate(model):
                optimizer.zero_grad()
                accelerator.backward(model(piece).mean())
                optimizer.step()
    expected = build_net()
    expected(torch.ones(4, 3)).mean().backward()
    torch.testing.assert_close([p.grad for p in model.parameters()], [p.grad for p in expected.parameters()])


def test_two_losses_per_piece_are_added_to_remaining_gradients() -> None:
    """Each piece has two backwards, in addition to gradients that remain from an earlier window."""
    accelerator = Accelerator(cpu=True, microbatching="auto", gradient_accumulation_steps=2)
    model, reference = build_net(), build_net()
    model = accelerator.prepare(model)
    accelerator._training_step.transaction.size.limit = 3
    x = torch.randn(8, 3)
    for _ in range(2):
        (reference(x).mean() + reference(x).square().mean()).backward()
        for half in (x[:4], x[4:]):
            for piece in accelerator.microbatches(half):
                with accelerator.accumulate(model):
                    accelerator.backward(model(piece).mean())
                    accelerator.backward(model(piece).square().mean())
    torch.testing.assert_close([p.grad for p in model.parameters()], [p.grad for p in reference.parameters()])


def test_policy_that_counts_micro_batches_counts_pieces_as_parts() -> None:
    found = []
    for limit in (None, 3):
        accelerator = Accelerator(
            cpu=True, microbatching="auto", gradient_accumulation_steps=3, loss_policy=ConstantDivision()
        )
        model = accelerator.prepare(build_net())
        accelerator._training_step.transaction.size.limit = limit
        for number in range(3):
            accelerator.forward_backward(torch.ones(5, 3) * number, lambda piece: model(piece).mean())
        found.append([p.grad for p in model.parameters()])
    torch.testing.assert_close(*found)


def test_leaving_the_loop_undoes_the_batch() -> None:
    accelerator = Accelerator(cpu=True, microbatching="auto", gradient_accumulation_steps=2)
    model = accelerator.prepare(build_net())
    accelerator.forward_backward(torch.ones(4, 3), lambda piece: model(piece).mean())
    before = [p.grad.clone() for p in model.parameters()]
    accelerator._training_step.transaction.size.limit = 2
    for piece in accelerator.microbatches(torch.ones(4, 3)):
        with accelerator.accumulate(model):
            accelerator.backward(model(piece).mean())
        break
    assert all(torch.equal(p.grad, grad) for p, grad in zip(model.parameters(), before))
    with pytest.raises(ValueError, match="mine"):
        accelerator.forward_backward(torch.ones(4, 3), lambda piece: (_ for _ in ()).throw(ValueError("mine")))


def test_gradients_changed_by_hand_cannot_be_replayed() -> None:
    accelerator = Accelerator(cpu=True, microbatching="auto")
    model = build_net()
    optimizer = torch.optim.Adam(model.parameters())
    optimizer.register_step_post_hook(lambda *_: (_ for _ in ()).throw(RuntimeError(TEXT)))
    model, optimizer = accelerator.prepare(model, optimizer)
    accelerator.forward_backward(torch.ones(4, 3), lambda piece: model(piece).mean())
    model[0].weight.grad.mul_(2)
    with pytest.raises(StateError, match="changed by hand"):
        optimizer.step()


def test_padding_labels_without_weights_cause_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    accelerator = Accelerator(cpu=True, microbatching="auto")
    model = accelerator.prepare(build_net())
    batch = {"x": torch.ones(4, 3), "labels": torch.tensor([[1], [-100], [2], [3]])}
    for _ in range(2):
        accelerator.forward_backward(batch, lambda piece: model(piece["x"]).mean())
    assert caplog.text.count("contain -100") == 1


def test_invalid_values_are_refused() -> None:
    accelerator = Accelerator(cpu=True, microbatching="auto")
    model = build_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    with pytest.raises(StateError, match="microbatches"), accelerator.accumulate(model):
        pass
    with pytest.raises(StateError, match="forward_backward"):
        accelerator.backward(model(torch.ones(1, 3)).mean())
    accelerator.forward_backward(torch.ones(2, 3), lambda piece: model(piece).mean())
    with pytest.raises(UnsupportedError, match="closure"):
        optimizer.step(lambda: None)
    with pytest.raises(MemoryExhausted, match="one row"):
        accelerator.forward_backward(torch.ones(2, 3), lambda piece: (_ for _ in ()).throw(RuntimeError(TEXT)))
    with pytest.raises(ConfigError, match="'always'; allowed: 'auto'"):
        Accelerator(cpu=True, microbatching="always")
    plugin = GradientAccumulationPlugin(num_steps=2, sync_each_batch=True)
    with pytest.raises(ConfigError, match="sync_each_batch"):
        Accelerator(cpu=True, microbatching="auto", gradient_accumulation_plugin=plugin)


def test_misspelled_settings_are_named() -> None:
    accelerator = Accelerator(cpu=True, microbatching="auto")
    model = build_net()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    batch = torch.ones(4, 3)

    def compute_loss(piece: torch.Tensor) -> torch.Tensor:
        return model(piece).mean()

    with pytest.raises(LossError, match=r"forward_backward got weight=3; give a function from a micro-batch"):
        accelerator.forward_backward(batch, compute_loss, weight=3)  # type: ignore[arg-type]
    with pytest.raises(LossError, match=r"got fn=Tensor, which cannot be called; give the batch first"):
        accelerator.forward_backward(compute_loss, batch)  # type: ignore[arg-type]
    for piece in accelerator.microbatches(batch):
        with pytest.raises(StateError, match="microbatches inside a micro-batch"):
            next(iter(accelerator.microbatches(piece)))
        with pytest.raises(StateError, match="forward_backward inside a micro-batch"):
            accelerator.forward_backward(piece, compute_loss)
        with accelerator.accumulate(model):  # the piece still works
            accelerator.backward(compute_loss(piece))
            optimizer.step()
            optimizer.zero_grad()
    assert optimizer.num_updates == 1


def test_strategy_without_rollback_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SingleStrategy, "capabilities", Capabilities(rollback=False))
    with pytest.raises(
        UnsupportedError, match="the single strategy does not support rollback; leave microbatching off"
    ):
        Accelerator(cpu=True, microbatching="auto")
    Accelerator(cpu=True)
