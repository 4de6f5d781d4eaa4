"""torch.func on prepared models: replicas match plain PyTorch, and sharded models raise an error before torch reads freed memory."""

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.nn.functional import mse_loss

from headway import Accelerator, DistributedDataParallelKwargs, ShardingOptions
from headway.core.strategies import ddp_errors
from headway.core.strategies.fully_sharded.dtensor_errors import explain_error
from headway.errors import UnsupportedError
from tests.distributed.ranks import run_ranks

ROWS, UPDATES, RANKS = 8, 3, 2
Loss = Callable[[nn.Module, torch.Tensor, torch.Tensor], torch.Tensor]


def make_parts() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).double()
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def make_rows(number: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return one rank's inputs and targets of one update."""
    inputs = torch.randn(ROWS, 4, generator=torch.Generator().manual_seed(number), dtype=torch.double)[rank::RANKS]
    return inputs, inputs[:, :2].square()


def compute_adapted_loss(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the loss after one inner step of gradient descent, as in model-agnostic meta-learning."""
    weights = dict(model.named_parameters())
    inner = mse_loss(functional_call(model, weights, (inputs,)), targets)
    slopes = torch.autograd.grad(inner, list(weights.values()), create_graph=True)
    fast = {name: w - 0.05 * slope for (name, w), slope in zip(weights.items(), slopes, strict=True)}
    return mse_loss(functional_call(model, fast, (inputs.flip(0),)), targets.flip(0))


def compute_weighted_loss(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return a loss whose rows are weighted by the norm of each row's gradient."""
    weights = {name: w.detach() for name, w in model.named_parameters()}

    def loss(weights: dict[str, torch.Tensor], row: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return mse_loss(functional_call(model, weights, (row[None],)), target[None])

    each = vmap(grad(loss), in_dims=(None, 0, 0))(weights, inputs, targets)
    norms = torch.stack([slopes.flatten(1).square().sum(1) for slopes in each.values()]).sum(0).sqrt()
    return ((1 / (1 + norms))[:, None] * (model(inputs) - targets).square()).mean()


LOSSES: dict[str, Loss] = {"adapted": compute_adapted_loss, "by_sample": compute_weighted_loss}


def train_by_hand(loss: Loss) -> list[torch.Tensor]:
    model, optimizer = make_parts()
    for number in range(UPDATES):
        for rank in range(RANKS):
            (loss(model, *make_rows(number, rank)) / RANKS).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [w.detach() for w in model.parameters()]


def train_prepared(layout: str, name: str) -> list[torch.Tensor]:
    accelerator = Accelerator(cpu=True, strategy=layout)
    model, optimizer = accelerator.prepare(*make_parts())
    for number in range(UPDATES):
        accelerator.backward(LOSSES[name](model, *make_rows(number, accelerator.process_index)))
        optimizer.step()
        optimizer.zero_grad()
    return [w.detach() for w in model.parameters()]


@pytest.mark.parametrize("name", LOSSES)
def test_replicas_match_plain_pytorch(name):
    for weights in run_ranks(train_prepared, RANKS, "ddp", name):
        torch.testing.assert_close(weights, train_by_hand(LOSSES[name]), rtol=1e-12, atol=1e-12)


def get_error(layout: str, name: str) -> str:
    with pytest.raises(UnsupportedError) as error:
        train_prepared(layout, name)
    return str(error.value)


@pytest.mark.parametrize("layout", ["fsdp", "tp"])
def test_sharded_models_raise_errors(layout):
    for name in LOSSES:
        for message in run_ranks(get_error, RANKS, layout, name):
            assert "torch.func cannot be used" in message


def compute_loss(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return mse_loss(model(inputs), targets)


def train_compiled(layout: str) -> tuple[list[torch.Tensor], list[str]]:
    accelerator = Accelerator(cpu=True, strategy=layout)
    model, optimizer = accelerator.prepare(*make_parts())
    called = torch.compile(model, backend="eager")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for number in range(UPDATES):
            # Under tensor parallelism, all ranks see the same rows.
            both = [make_rows(number, rank) for rank in range(RANKS)]
            is_whole = layout == "tp"
            batch = tuple(map(torch.cat, zip(*both, strict=True))) if is_whole else both[accelerator.process_index]
            accelerator.backward(compute_loss(called, *batch))
            optimizer.step()
            optimizer.zero_grad()
    return list(accelerator.get_state_dict(model).values()), [str(each.message) for each in caught]


@pytest.mark.parametrize("layout", ["fsdp", "tp"])
def test_compiled_sharded_models_match_plain_pytorch(layout):
    found = run_ranks(train_compiled, RANKS, layout)
    torch.testing.assert_close(found[0][0], train_by_hand(compute_loss), rtol=1e-12, atol=1e-12)
    for _, messages in found:
        assert not [text for text in messages if "_getframe" in text], "the check for torch.func breaks the graph"


class SquaredNorm(torch.optim.Optimizer):
    """Optimizer that changes a norm in place, as LAMB does. DTensors do not support the operation."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.parameters(), {})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for w in self.param_groups[0]["params"]:
            w.sub_(w.grad / w.grad.norm().clamp_(max=10))


def collect_explanations() -> list[str]:
    handlers = [ShardingOptions(whole_updates=False)]  # otherwise, the optimizer would get whole tensors
    accelerator = Accelerator(cpu=True, strategy="fsdp", kwargs_handlers=handlers)
    model = make_parts()[0]
    model, optimizer = accelerator.prepare(model, SquaredNorm(model))
    weight = next(model.parameters())
    loss = mse_loss(model(make_rows(0, 0)[0]), make_rows(0, 0)[1])
    message = []
    for call in (lambda: torch.autograd.grad(loss, weight), lambda: weight.detach().numpy()):
        with pytest.raises(RuntimeError) as error:
            call()
        message.append(explain_error(error.value))
    accelerator.backward(loss)
    with pytest.raises(RuntimeError) as error:
        optimizer.step()
    return [*message, explain_error(error.value)]


def test_unsupported_operations_on_shards_are_explained():
    for of_autograd, of_numpy, of_an_optimizer in run_ranks(collect_explanations, RANKS):
        assert "p.grad" in of_autograd
        assert "p.full_tensor()" in of_numpy
        assert "foreach=False" in of_an_optimizer
    assert explain_error(RuntimeError("another")) == ""
    assert "weight_decay" in explain_error(RuntimeError("Tensor on device meta is not on the expected device cuda:0!"))


def train_by_two_losses() -> str:
    """Call backward for two losses from one forward pass that reach different parameters, and return the explained error."""
    accelerator = Accelerator(cpu=True, strategy="ddp")
    trunk, heads = nn.Linear(3, 3), nn.ModuleList([nn.Linear(3, 1), nn.Linear(3, 1)])

    class TwoHeads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.trunk, self.heads = trunk, heads

        def forward(self, values: torch.Tensor) -> list[torch.Tensor]:
            return [head(self.trunk(values)) for head in self.heads]

    model = accelerator.prepare(TwoHeads())
    first, second = model(torch.ones(2, 3))
    accelerator.backward(first.sum(), retain_graph=True)
    with pytest.raises(RuntimeError) as error:
        accelerator.backward(second.sum())
    return ddp_errors.explain_error(error.value)


def train_with_cache() -> str:
    """Train on a tensor of a cache, with a search for unused parameters, and return the explained error."""
    unused = DistributedDataParallelKwargs(find_unused_parameters=True)
    accelerator = Accelerator(cpu=True, strategy="ddp", kwargs_handlers=[unused])

    class KeyCache:
        def __init__(self, keys: torch.Tensor) -> None:
            self.keys = keys

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 2)

        def forward(self, values: torch.Tensor) -> KeyCache:
            return KeyCache(self.layer(values))

    model = accelerator.prepare(Attention())
    with pytest.raises(RuntimeError) as error:
        accelerator.backward(model(torch.ones(2, 3)).keys.sum())
    return ddp_errors.explain_error(error.value)


def test_ddp_error_for_outputs_in_caches_is_explained() -> None:
    for messages in run_ranks(train_with_cache, RANKS):
        assert "but not in caches of keys and values" in messages


def test_ddp_error_for_losses_of_different_parameters_is_explained() -> None:
    for messages in run_ranks(train_by_two_losses, RANKS):
        assert "Add the losses, and call accelerator.backward once" in messages
    assert ddp_errors.explain_error(RuntimeError("another")) == ""
