"""Test the strategy for one process, and the interface that all strategies share."""

import pytest
import torch
from torch import nn

from headway import Accelerator
from headway.core.config.torch_kwargs import DDPCommunicationHookType, DistributedDataParallelKwargs
from headway.core.data.sampling.shard import ShardIndex
from headway.core.precision.mixed import Precision
from headway.core.strategies.base import Capabilities, SingleStrategy
from headway.core.strategies.ddp_errors import make_parameter_error
from headway.errors import ConfigError, StateError, UnsupportedError


@pytest.fixture
def strategy() -> SingleStrategy:
    """Strategy of one process."""
    return SingleStrategy(Accelerator(cpu=True).collectives)


def test_one_process_uses_the_single_strategy(strategy: SingleStrategy) -> None:
    assert type(Accelerator(cpu=True).strategy) is SingleStrategy
    assert (strategy.data_shard, strategy.gradient_divisor) == (ShardIndex(0, 1), 1)
    model = nn.Linear(1, 1)
    assert strategy.setup_model(model) is None
    assert strategy.unwrap_model(model) is model


def test_transforms_are_applied_in_order(strategy: SingleStrategy) -> None:
    seen: list[str] = []

    def make_transform(name: str):
        return lambda model: seen.append(name) or model

    strategy.setup_model(nn.Linear(1, 1), [make_transform("checkpoint"), make_transform("compile")])
    assert seen == ["checkpoint", "compile"]


def test_backward_multiplies_the_gradient_by_the_factor(strategy: SingleStrategy) -> None:
    x = torch.tensor(3.0, requires_grad=True)
    for factor in (0.5, 2.0, 0.5):
        strategy.backward(x * x, factor, Precision())
    assert x.grad.item() == 6 * (0.5 + 2.0 + 0.5)
    strategy.backward((x * x).reshape(1), 1.0, Precision())
    assert x.grad.item() == 24


def test_gradient_of_a_view_as_the_loss_is_no_memory_of_the_next_backward(strategy: SingleStrategy) -> None:
    x = torch.zeros(1, requires_grad=True)
    for expected in (2.0, 4.0, 6.0):  # autograd makes the factor the storage of x.grad
        strategy.backward(x.squeeze(), 2.0, Precision())
        assert x.grad.item() == expected


def test_gradients_are_scaled_and_discarded(strategy: SingleStrategy) -> None:
    one, none = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    one.grad = torch.ones(2)
    strategy.scale_gradients([one, none], 0.5)
    assert one.grad.tolist() == [0.5, 0.5]
    assert none.grad is None
    strategy.discard_update([torch.optim.SGD([one, none], lr=1.0)])
    assert one.grad is None


def test_state_is_exported_by_bare_names(strategy: SingleStrategy) -> None:
    model = nn.Linear(2, 1)
    state = dict(strategy.export_state(model))
    assert list(state) == ["weight", "bias"]
    assert state["weight"].data_ptr() == model.weight.data_ptr()


def test_missing_capability_is_an_error() -> None:
    with pytest.raises(
        UnsupportedError, match="the sharded strategy does not support clip by value; use clip_grad_norm_"
    ):
        Capabilities(clip_by_value=False).require("clip_by_value", "sharded", "use clip_grad_norm_")
    Capabilities().require("clip_by_value", "sharded", "")


def test_hooks_are_chosen_by_name() -> None:
    assert DistributedDataParallelKwargs(comm_hook="fp16").comm_hook is DDPCommunicationHookType.FP16
    with pytest.raises(ConfigError, match="comm_hook='zip'; allowed: no, fp16, bf16, power_sgd, batched_power_sgd"):
        DistributedDataParallelKwargs(comm_hook="zip")
    with pytest.raises(ConfigError, match="comm_wrapper='power_sgd'"):
        DistributedDataParallelKwargs(comm_wrapper="power_sgd")


def test_unused_parameters_are_named() -> None:
    """torch counts only parameters that require gradients."""
    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1), nn.Linear(1, 1))
    model[0].requires_grad_(False)
    text = ("Expected to have finished reduction in the prior iteration before starting a new one. "
            "Parameter indices which did not receive grad for rank 1: 2 3\n")  # fmt: skip
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    error = make_parameter_error(RuntimeError(text), model, trained, False)
    assert isinstance(error, UnsupportedError)
    assert "of Sequential took no part in the last loss: 2.weight, 2.bias. " in str(error)
    assert "find_unused_parameters=True)] (Trainer: ddp_find_unused_parameters=True). If another loss" in str(error)
    error = make_parameter_error(RuntimeError(text), model, trained, True)
    assert "find_unused_parameters=True does not help here" in str(error)
    assert make_parameter_error(RuntimeError("something else"), model, trained, False) is None
    model[1].requires_grad_(False)  # frozen after DDP was created, so indices count it still
    error = make_parameter_error(RuntimeError(text.replace("2 3", "0 1")), model, trained, False)
    assert isinstance(error, StateError)
    assert "2 parameters of Sequential (1.weight, 1.bias) were frozen after prepare()" in str(error)
