"""Tests of optimizers with shapes that cannot be divided evenly between ranks."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

from headway import Accelerator
from tests.distributed.ranks import RankFailed, run_ranks

INPUTS = torch.randn(24, 4, generator=torch.Generator().manual_seed(0))
TARGETS = INPUTS.sum(1, keepdim=True)
KINDS = {"lbfgs": lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=2), "muon": lambda p: torch.optim.Muon(p, lr=1e-3)}


def train(kind, num_rows, strategy):
    """Train with Headway and with plain PyTorch. Return the largest difference of the weights."""
    accelerator = Accelerator(cpu=True, strategy=strategy)
    torch.manual_seed(0)
    model = nn.Linear(4, num_rows, bias=False)
    plain = copy.deepcopy(model)
    optimizer, plain_optimizer = KINDS[kind](model.parameters()), KINDS[kind](plain.parameters())
    loader = DataLoader(TensorDataset(INPUTS, TARGETS), batch_size=4 // accelerator.num_processes)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    def step(a_model, an_optimizer, backward, inputs, targets):
        def closure():
            an_optimizer.zero_grad()
            loss = mse_loss(a_model(inputs).sum(1, keepdim=True), targets)
            backward(loss)
            return loss

        an_optimizer.step(closure)

    for inputs, targets in loader:
        step(model, optimizer, accelerator.backward, inputs, targets)
    for inputs, targets in zip(INPUTS.split(4), TARGETS.split(4)):
        step(plain, plain_optimizer, torch.Tensor.backward, inputs, targets)
    state = accelerator.get_state_dict(model)
    return (state["weight"] - plain.weight).abs().max().item() if state else 0.0


@pytest.mark.parametrize(
    ("kind", "num_rows", "strategy"),
    [("lbfgs", 5, "ddp"), ("lbfgs", 4, "fsdp"), ("muon", 1, "ddp"), *[("muon", n, "fsdp") for n in (1, 2, 3)]],
)
def test_optimizer_on_two_processes_matches_plain_pytorch(kind, num_rows, strategy):
    assert max(run_ranks(train, 2, kind, num_rows, strategy)) < (1e-5 if kind == "lbfgs" else 1e-3)


@pytest.mark.parametrize(("kind", "num_rows"), [("lbfgs", 5), ("lbfgs", 1)])
def test_shape_that_cannot_be_sharded_is_named_at_prepare(kind, num_rows):
    with pytest.raises(
        RankFailed, match=rf"dimension 0 of a parameter of shape \({num_rows}, 4\) is shared by 2 ranks"
    ):
        run_ranks(train, 2, kind, num_rows, "fsdp")


@pytest.mark.parametrize(("kind", "num_rows"), [("lbfgs", 5), ("muon", 1)])
def test_parameters_of_any_shape_match_plain_pytorch_on_one_process(kind, num_rows):
    assert run_ranks(train, 1, kind, num_rows, "fsdp")[0] < 1e-5
