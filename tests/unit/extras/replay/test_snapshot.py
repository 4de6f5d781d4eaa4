"""Test optimizer steps that can be undone: restored state, and measured and reserved memory."""

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from headway.extras.replay.step_undo import AllocationMeter, OptimizerRecord, StepUndo
from tests.unit.extras.replay.test_step import build_net, train_automatic, train_plain


def test_undo_restores_parameters_state_and_groups() -> None:
    model = build_net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for number in range(2):
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        before = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        undo = StepUndo(optimizer)
        optimizer.step()
        optimizer.param_groups[0]["lr"] = 7.0
        undo.restore()
        torch.testing.assert_close(model.state_dict(), before[0], rtol=0, atol=0)
        torch.testing.assert_close(optimizer.state_dict(), before[1], rtol=0, atol=0)
        optimizer.step()
        assert len(optimizer.state) == 4, number


def test_meter_counts_bytes_alive_at_once() -> None:
    x = torch.ones(1000)
    with AllocationMeter() as meter:
        kept = x * 2
        (x * 3) + (x * 4)
        x.add_(1)
    assert meter.peak == 4 * 4000
    assert meter.count_live_bytes() == kept.nbytes


def test_temporaries_of_a_foreach_step_are_measured() -> None:
    parameter = nn.Parameter(torch.ones(1000))
    parameter.grad = torch.ones(1000)
    known = OptimizerRecord(torch.optim.AdamW([parameter], foreach=True))
    assert not known.is_complete
    known.measure_step(lambda: known._optimizer.step() is None)
    known.confirm_step()
    assert known.is_complete
    assert 4000 <= known.num_bytes <= 4 * 4000
    known.reserve_memory()


class Sizes(TorchDispatchMode):
    """Mode that records the bytes of every new tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.found.append(result.untyped_storage().nbytes())
        return result


def test_temporaries_are_reserved_block_by_block() -> None:
    """A device with fragmented memory has room for the blocks, but not for their sum in one block.

    Use torch's meta device, which allocates nothing and reports all sizes, because no other device is available.
    """
    parameters = [nn.Parameter(torch.ones(size, device="meta")) for size in (1 << 20, 1 << 19, *[1000] * 600)]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    known = OptimizerRecord(torch.optim.AdamW(parameters, foreach=True))
    known.measure_step(lambda: known._optimizer.step() is None)
    with Sizes() as sizes, AllocationMeter() as meter:
        known.reserve_memory()
    assert max(sizes.found) == 4 << 20  # for the largest parameter
    assert {size for size in sizes.found if size > 1 << 20} == {4 << 20, 2 << 20}
    assert len(sizes.found) < 40, "small blocks must be reserved together"
    assert meter.peak == sum(sizes.found) == known.num_bytes >= 6 << 20
    assert meter.count_live_bytes() == 0


def test_host_memory_is_reserved_in_one_block() -> None:
    parameters = [nn.Parameter(torch.ones(1 << 20)) for _ in range(4)]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    known = OptimizerRecord(torch.optim.AdamW(parameters, foreach=True))
    known.measure_step(lambda: known._optimizer.step() is None)
    with Sizes() as sizes:
        known.reserve_memory()
    assert sizes.found == [known.num_bytes]
    assert known.num_bytes >= 4 * (4 << 20)


class Steady(torch.optim.Optimizer):
    """Optimizer outside of torch that adds a second state tensor per parameter after some steps."""

    def __init__(self, params: Any, grows_at: int = 0) -> None:
        super().__init__(params, {"lr": 0.05})
        self.num_steps, self.grows_at = 0, grows_at

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.num_steps += 1
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                momentum = state.setdefault("momentum", torch.zeros_like(p))
                if self.num_steps == self.grows_at:
                    state["second"] = torch.zeros_like(p)
                p -= group["lr"] * momentum.mul_(0.9).add_(p.grad)


@pytest.mark.parametrize(("grows_at", "copied"), [(0, [1, 2]), (3, [1, 2, 4])])
def test_foreign_optimizer_is_copied_to_the_host_only_until_its_state_exists(
    grows_at: int, copied: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    copies: list[int] = []
    real = StepUndo.__init__

    def record_and_copy(undo: StepUndo, optimizer: Any) -> None:
        copies.append(optimizer.num_steps + 1)
        real(undo, optimizer)

    monkeypatch.setattr(StepUndo, "__init__", record_and_copy)
    expected, _ = train_plain(lambda p: Steady(p, grows_at), 6, 1)
    found, _ = train_automatic(lambda p: Steady(p, grows_at), 1, set())
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
    assert copies == copied
    copies.clear()
    found, _ = train_automatic(lambda p: Steady(p, grows_at), 1, {1, 2})
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("faults", "num_copies"), [(set(), 2), ({1}, 3), ({2}, 3)])
def test_published_optimizer_is_copied_twice_with_unchanged_results(
    faults: set[int], num_copies: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    schedulefree = pytest.importorskip("schedulefree", reason="schedulefree is not installed")
    copies: list[Any] = []
    real = StepUndo.__init__
    monkeypatch.setattr(StepUndo, "__init__", lambda undo, optimizer: copies.append(1) or real(undo, optimizer))

    def make(parameters: Any) -> Any:
        optimizer = schedulefree.AdamWScheduleFree(parameters, lr=0.05)
        optimizer.train()
        return optimizer

    expected, _ = train_plain(make, 6, 1)
    found, _ = train_automatic(make, 1, faults)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
    assert len(copies) == num_copies
