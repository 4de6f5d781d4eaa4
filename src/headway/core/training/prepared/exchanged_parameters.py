"""Replace the parameters in an optimizer that was created before its model was sharded, and shard its state like them.

`prepare()` replaces a sharded model's parameters by shards. An optimizer that was created earlier still holds the
original ones.
"""

from typing import Any

import torch

from headway.core.strategies.base import Strategy
from headway.core.training.prepared.low_bit import dequantize_states
from headway.core.training.prepared.objects import find_parameter_reference, iterate_parameters
from headway.core.weights.pieces import is_dtensor
from headway.errors import UnsupportedError
from headway.log import get_logger

log = get_logger(__name__)


def repoint_parameters(optimizer: torch.optim.Optimizer, strategy: Strategy) -> None:
    """Replace an optimizer's parameters by the prepared ones, and shard its state like them. Log the first replacement.

    The parameter lists are changed in place, because an optimizer such as LBFGS also refers to them elsewhere.

    Args:
        optimizer: User's optimizer.
        strategy: Strategy that set up the parameters' model.

    Raises:
        UnsupportedError: If the optimizer keeps replaced parameters, or their IDs, outside of its groups and state.
    """
    num_exchanged = 0
    replaced = {id(p) for p in iterate_parameters(optimizer) if strategy.find_current(p) is not p}
    if replaced and (place := find_parameter_reference(optimizer, replaced)):
        raise UnsupportedError(
            f"{type(optimizer).__name__} cannot train a sharded model: it keeps parameters, or their IDs, in {place}. prepare() "
            "replaces parameters by shards, and the optimizer would keep the old ones. Let it read parameters from param_groups, or "
            "train with strategy='ddp'"
        )
    with dequantize_states(optimizer, bool(replaced)):
        for group in optimizer.param_groups:
            old_parameters = group["params"]
            new_parameters = [strategy.find_current(parameter) for parameter in old_parameters]
            for old, new in zip(old_parameters, new_parameters):
                if new is old:
                    continue
                num_exchanged += 1
                if old in optimizer.state:
                    state = optimizer.state.pop(old)
                    if not strategy.keeps_whole_state(optimizer):
                        state = _shard_state(state, old.shape, new, strategy)
                    optimizer.state[new] = state
            if any(new is not old for old, new in zip(old_parameters, new_parameters)):
                old_parameters[:] = new_parameters
    if num_exchanged:
        log.info_once(
            "%s was created before prepare(): %d of its parameters were replaced by the prepared ones",
            type(optimizer).__name__,
            num_exchanged,
        )


def fit_state(optimizer: torch.optim.Optimizer, strategy: Strategy) -> None:
    """Shard full tensors in the optimizer's state like their parameters, for example after `load_state_dict`.

    Do nothing if the strategy keeps the optimizer's states as full tensors.
    """
    if strategy.keeps_whole_state(optimizer):
        return
    with dequantize_states(optimizer, any(map(is_dtensor, iterate_parameters(optimizer)))):
        for parameter, state in optimizer.state.items():
            optimizer.state[parameter] = _shard_state(state, parameter.shape, parameter, strategy)


def _shard_state(state: Any, shape: torch.Size, parameter: torch.Tensor, strategy: Strategy) -> Any:
    """Return a parameter's optimizer state in which tensors of the full shape are sharded like the parameter.

    Other values, such as step counts, are kept. A state that is not a dict is returned unchanged.

    Args:
        state: The optimizer's state of the parameter, by name.
        shape: Shape of the full parameter.
        parameter: Parameter as the strategy stores it.
        strategy: Strategy that shards the tensors.
    """
    if not isinstance(state, dict):
        return state
    sharded = dict(state)
    for name, value in state.items():
        if isinstance(value, torch.Tensor) and value.ndim and value.shape == shape:
            sharded[name] = strategy.shard_like(value, parameter)
    return sharded
