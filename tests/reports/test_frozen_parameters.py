"""Tests of `requires_grad` after resuming: the script decides, with a warning if it differs from the saved run."""

import logging

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from headway import Accelerator, ProjectConfiguration
from headway.core.checkpoint.resume.frozen_parameters import FrozenParameters
from headway.core.training.hooks import StepHooks
from tests.distributed.ranks import run_ranks

WARNING = "requires_grad"


def train(folder, strategy, until, resumes, freeze, by_epoch=None):
    """Train, and return the warnings about requires_grad as (number of updates, text).

    Args:
        freeze: Names of the parameters to freeze at the start.
        by_epoch: Function called with the model and the epoch before each epoch, or None.
    """
    warnings = []

    class Listener(logging.Handler):
        def emit(self, record):
            if WARNING in record.getMessage():
                warnings.append((accelerator.num_updates, record.getMessage()))

    logging.getLogger("headway").addHandler(Listener(logging.WARNING))
    project = ProjectConfiguration(folder, automatic_checkpoint_naming=True)
    accelerator = Accelerator(cpu=True, strategy=strategy, project_config=project)
    model = torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(4)))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in freeze)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    data = TensorDataset(torch.randn(8, 2, generator=torch.Generator().manual_seed(1)))
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=2))
    if resumes:
        assert accelerator.resume() is not None
    for epoch in accelerator.epochs(until):
        if by_epoch is not None:
            by_epoch(model, epoch)
        for (rows,) in loader:
            accelerator.backward(model(rows).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        accelerator.save_state()
    return warnings


def unfreeze_reached(model, epoch):
    """Unfreeze all layers up to the epoch's number, and freeze the rest."""
    for number, layer in enumerate(get_layers(model)):
        layer.requires_grad_(number <= epoch)


def unfreeze_next(model, epoch):
    """Unfreeze only the epoch's layer. After resuming, earlier layers stay frozen."""
    get_layers(model)[epoch].requires_grad_(True)


def get_layers(model):
    return getattr(model, "module", model)


LATER = ["1.weight", "1.bias", "2.weight", "2.bias", "3.weight", "3.bias"]
CASES = {
    "other ones frozen": (["0.weight"], None, ["1.weight"], None, ("0.weight", "1.weight")),
    "none frozen": (["0.weight", "0.bias"], None, [], None, ("0.weight", "0.bias")),
    "frozen after the resume": ([], None, ["2.bias"], None, ("2.bias",)),
    "the next stage alone": (LATER, unfreeze_next, LATER, unfreeze_next, ("1.weight", "1.bias")),
    "the same": (["0.weight"], None, ["0.weight"], None, None),
    "staged by epoch": (LATER, unfreeze_reached, LATER, unfreeze_reached, None),
    "staged, everything free at the start": (LATER, unfreeze_reached, [], unfreeze_reached, None),
}


@pytest.mark.parametrize(
    ("name", "strategy", "world_size"),
    [
        ("other ones frozen", "ddp", 2),
        ("staged by epoch", "ddp", 1),
        *[pytest.param(name, "ddp", 1, marks=pytest.mark.matrix) for name in CASES],
        *[pytest.param(name, "fsdp", 2, marks=pytest.mark.matrix) for name in CASES],
    ],
)
def test_parameters_frozen_differently_are_named_after_resuming(name, strategy, world_size, tmp_path):
    first, stages, later, later_stages, named = CASES[name]
    saved = run_ranks(train, world_size, str(tmp_path), strategy, 2, False, first, stages)
    assert saved == [[]] * world_size
    warnings = run_ranks(train, world_size, str(tmp_path), strategy, 4, True, later, later_stages)
    assert warnings[1:] == [[]] * (world_size - 1)
    if named is None:
        assert warnings[0] == []
        return
    ((number, text),) = warnings[0]
    assert number == 2 * 8 // 2 // world_size
    for each in named:
        assert each in text
    assert "3.bias" not in text


@pytest.mark.parametrize("is_alike", [True, False])
def test_saved_names_with_the_components_of_compile_are_compared_without_them(is_alike, caplog):
    """Headway has saved such names for frozen parameters of compiled submodules."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    model[0].requires_grad_(not is_alike)
    hooks = StepHooks()
    frozen = FrozenParameters(lambda: [model], hooks)
    frozen.compare_at_update([["0._orig_mod.weight", "0._orig_mod.bias"]], "checkpoint_0")
    for check in hooks.before_update:
        check()
    assert (WARNING in caplog.text) == (not is_alike)
