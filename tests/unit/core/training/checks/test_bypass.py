"""Test code that trains past the prepared objects on one process, where only windows and the fp16 scale can go wrong."""

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.optim import optimizer as torch_optimizer
from torch.utils.data import DataLoader, TensorDataset

from headway import Accelerator
from headway.core.runtime import process
from headway.errors import StateError


def build() -> tuple[nn.Module, torch.optim.Optimizer, DataLoader[Any]]:
    torch.manual_seed(0)
    model, rows = nn.Linear(3, 1), torch.randn(10, 3)
    dataset = TensorDataset(rows, rows.sum(1, keepdim=True))
    return model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(dataset, batch_size=2)


def train(accelerator: Accelerator, model: nn.Module, optimizer: Any, loader: Any, when_synced: bool = False) -> None:
    """Train on all batches. With `when_synced`, step only at the end of a window."""
    for inputs, targets in loader:
        with accelerator.accumulate(model):
            accelerator.backward(mse_loss(model(inputs), targets))
            if accelerator.sync_gradients or not when_synced:
                optimizer.step()
                optimizer.zero_grad()


def test_unprepared_optimizer_must_not_step_inside_a_window() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model, optimizer, loader = build()
    model, loader = accelerator.prepare(model, loader)
    before = model.weight.detach().clone()
    with pytest.raises(StateError, match=r"SGD stepped inside an accumulation window.*what prepare\(\) returned"):
        train(accelerator, model, optimizer, loader)
    assert torch.equal(model.weight, before)


def test_optimizer_under_a_prepared_one_must_not_step_inside_a_window() -> None:
    """The script uses the object that it passed to prepare()."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model, optimizer, loader = build()
    model, _, loader = accelerator.prepare(model, optimizer, loader)
    with pytest.raises(StateError, match="SGD stepped inside an accumulation window"):
        train(accelerator, model, optimizer, loader)


@pytest.mark.parametrize("steps", [1, 2])
def test_scripts_that_check_sync_gradients_may_step_any_optimizer(steps: int, caplog: pytest.LogCaptureFixture) -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=steps)
    model, optimizer, loader = build()
    model, loader = accelerator.prepare(model, loader)
    train(accelerator, model, optimizer, loader, when_synced=True)
    reference, rule, batches = build()
    x, y = batches.dataset.tensors
    for start in range(0, 10, 2 * steps):
        rule.zero_grad()
        mse_loss(reference(x[start : start + 2 * steps]), y[start : start + 2 * steps]).backward()
        rule.step()
    torch.testing.assert_close(model.weight, reference.weight)
    assert not caplog.records


def test_other_parameters_and_interrupted_windows_are_not_checked(caplog: pytest.LogCaptureFixture) -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model, optimizer, loader = build()
    model, loader = accelerator.prepare(model, loader)
    other = nn.Linear(3, 1)
    rule = torch.optim.Adam(other.parameters())
    for inputs, targets in loader:
        with accelerator.accumulate(model):
            accelerator.backward(mse_loss(model(inputs), targets))
            mse_loss(other(inputs), targets).backward()
            rule.step()  # a window is open, but for other parameters
        break
    del inputs, targets
    mse_loss(model(torch.ones(2, 3)), torch.ones(2, 1)).backward()
    optimizer.step()  # after the loop, the script trains without Headway
    assert not caplog.records


def test_unprepared_optimizer_must_not_step_on_scaled_gradients() -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="fp16")
    model, optimizer, loader = build()
    model, loader = accelerator.prepare(model, loader)
    with pytest.raises(StateError, match="fp16's loss scale"):
        train(accelerator, model, optimizer, loader)


@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("is_shared", [True, False])
def test_two_optimizers_of_the_same_parameters_in_one_window(
    steps: int, is_shared: bool, caplog: pytest.LogCaptureFixture
) -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=steps)
    model, _, loader = build()
    first = torch.optim.SGD([model.weight] if not is_shared else model.parameters(), lr=0.1)
    second = torch.optim.AdamW([model.bias], lr=0.1)
    model, first, second, loader = accelerator.prepare(model, first, second, loader)
    for inputs, targets in loader:
        with accelerator.accumulate(model):
            accelerator.backward(mse_loss(model(inputs), targets))
            for optimizer in (first, second):
                optimizer.step()
            for optimizer in (first, second):
                optimizer.zero_grad()
    assert caplog.text.count("SGD and AdamW both update 1 parameters in one window") == is_shared


def test_two_optimizers_whose_closures_compute_new_gradients(caplog: pytest.LogCaptureFixture) -> None:
    accelerator = Accelerator(cpu=True)
    model, _, loader = build()
    first, second = (torch.optim.LBFGS(model.parameters(), max_iter=2) for _ in range(2))
    model, first, second, loader = accelerator.prepare(model, first, second, loader)
    for optimizer in (first, second):
        for inputs, targets in loader:

            def compute_loss(inputs: torch.Tensor = inputs, targets: torch.Tensor = targets) -> torch.Tensor:
                first.zero_grad()
                with accelerator.accumulate(model):
                    loss = mse_loss(model(inputs), targets)
                    accelerator.backward(loss)
                return loss

            optimizer.step(compute_loss)
    assert "both update" not in caplog.text


def test_two_optimizers_of_the_same_parameters_in_different_windows(caplog: pytest.LogCaptureFixture) -> None:
    accelerator = Accelerator(cpu=True)
    model, first, loader = build()
    second = torch.optim.AdamW(model.parameters(), lr=0.1)
    model, first, second, loader = accelerator.prepare(model, first, second, loader)
    for number, (inputs, targets) in enumerate(loader):
        optimizer = (first, second)[number % 2]
        with accelerator.accumulate(model):
            accelerator.backward(mse_loss(model(inputs), targets))
            optimizer.step()
            optimizer.zero_grad()
    assert "both update" not in caplog.text


def test_loader_of_another_accelerator_is_recognized() -> None:
    """Its end closes the window, and its batches are weighted and gathered correctly."""
    first, second = Accelerator(cpu=True, gradient_accumulation_steps=4), Accelerator(cpu=True)
    model, optimizer, loader = build()
    model, optimizer = first.prepare(model, optimizer)
    loader = second.prepare(loader)
    closed = []
    for number, (inputs, targets) in enumerate(loader, start=1):
        with first.accumulate(model):
            first.backward(mse_loss(model(inputs), targets))
            closed += [number] * first.sync_gradients
            optimizer.step()
            optimizer.zero_grad()
        assert first.gather_for_metrics(inputs).shape == inputs.shape
    assert closed == [4, 5]
    assert first._training_step.windows.reads.loader is None
    own = first.prepare(DataLoader(torch.arange(3), batch_size=3))
    for _ in loader:
        for _ in own:
            assert first._training_step.windows.reads.loader is own
        assert first._training_step.windows.reads.loader is None  # outside a loop of the first accelerator
        break


def test_hook_in_torch_is_removed_by_the_reset() -> None:
    hooks = torch_optimizer._global_optimizer_pre_hooks
    before = len(hooks)
    kept = [Accelerator(cpu=True) for _ in range(3)]
    assert len(hooks) == before + 1
    process.reset()
    assert len(hooks) == before
    del kept


def test_accelerator_can_be_garbage_collected_while_hooks_run() -> None:
    """torch iterates over its hooks, so none of them may be removed during this loop."""
    lost = weakref.ref(Accelerator(cpu=True))

    def collect(*_: Any) -> None:
        gc.collect()

    handle = torch_optimizer.register_optimizer_step_pre_hook(collect)
    _, optimizer, _ = build()
    gc.disable()
    try:
        kept = [Accelerator(cpu=True) for _ in range(2)]
        kept[0].itself = kept[0]  # only the garbage collector can free it
        del kept[0]
        optimizer.step()
    finally:
        gc.enable()
        handle.remove()
    assert lost() is None
