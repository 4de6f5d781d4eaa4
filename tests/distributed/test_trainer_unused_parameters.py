"""`ddp_find_unused_parameters` on two ranks: the error without it names it, and with it the run trains."""

import pytest
import torch
from torch import nn

from headway import Trainer
from headway.errors import UnsupportedError
from tests.distributed.ranks import run_ranks
from tests.unit.trainer.models import WithLoss, arguments


class WithUnused(WithLoss):
    """Classifier with a layer that does not take part in the loss."""

    def __init__(self):
        super().__init__()
        self.unused = nn.Linear(5, 2)


def train(folder, **given):
    """Return whether the used and the unused layer have changed, or the error message."""
    generator = torch.Generator().manual_seed(3)
    rows = [{"x": torch.randn(5, generator=generator), "labels": index % 2} for index in range(32)]
    model = WithUnused()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    try:
        Trainer(model, arguments(folder, max_steps=3, weight_decay=0.0, **given), train_dataset=rows).train()
    except UnsupportedError as error:
        return str(error)
    after = model.state_dict()
    return [not torch.equal(before[name], after[name]) for name in ("body.0.weight", "unused.weight")]


@pytest.mark.slow
def test_unused_parameters_need_the_argument_that_the_error_names(tmp_path):
    for message in run_ranks(train, 2, tmp_path):
        assert "unused.weight" in message
        assert "(Trainer: ddp_find_unused_parameters=True)" in message

    for changes in run_ranks(train_with_search, 2, tmp_path):
        assert changes == [True, False]


def train_with_search(folder):
    return train(folder, ddp_find_unused_parameters=True)
