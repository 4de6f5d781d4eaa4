"""`requires_grad` after a resume: the script's own choice, and a warning where it forgets what the saved run had."""

import logging

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from headway import Accelerator, ProjectConfiguration
from tests.distributed.ranks import run_ranks

WARNING = "requires_grad"


def train(folder, strategy, until, resumes, freeze, by_epoch=None):
    """Train; return what was warned of requires_grad, by the number of updates made.

    Args:
        freeze: names that the script freezes at the start.
        by_epoch: called with the model and the epoch.
    """
    told = []

    class Listener(logging.Handler):
        def emit(self, record):
            if WARNING in record.getMessage():
                told.append((accelerator.num_updates, record.getMessage()))

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
    return told


def unfreeze_reached(model, epoch):
    for number, layer in enumerate(layers_of(model)):
        layer.requires_grad_(number <= epoch)


def unfreeze_next(model, epoch):
    """Forgets the earlier layers of a run that is resumed."""
    layers_of(model)[epoch].requires_grad_(True)


def layers_of(model):
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
def test_other_frozen_parameters_are_named_before_the_second_update(name, strategy, world_size, tmp_path):
    first, stages, later, later_stages, named = CASES[name]
    saved = run_ranks(train, world_size, str(tmp_path), strategy, 2, False, first, stages)
    assert saved == [[]] * world_size
    told = run_ranks(train, world_size, str(tmp_path), strategy, 4, True, later, later_stages)
    assert told[1:] == [[]] * (world_size - 1)
    if named is None:
        assert told[0] == []
        return
    ((number, text),) = told[0]
    assert number == 2 * 8 // 2 // world_size
    for each in named:
        assert each in text
    assert "3.bias" not in text
