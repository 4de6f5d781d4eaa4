"""Optimizers created before prepare() hold the original parameters: a strategy that shards replaces them."""

from typing import Any

import torch

from headway.log import get_logger
from headway.strategies.base import Strategy

log = get_logger(__name__)


def repoint(optimizer: torch.optim.Optimizer, strategy: Strategy) -> None:
    """Let an optimizer of torch's hold the parameters as they are now, and its state, cut like them; said once.

    Groups keep their lists: an optimizer may hold one of them elsewhere too (LBFGS does).

    Args:
        optimizer: the user's.
        strategy: by which the parameters' model was set up.
    """
    num_exchanged = 0
    for group in optimizer.param_groups:
        given = group["params"]
        now = [strategy.current(parameter) for parameter in given]
        for old, new in zip(given, now):
            if new is not old:
                num_exchanged += 1
                if old in optimizer.state:
                    optimizer.state[new] = _cut(optimizer.state.pop(old), old.shape, new, strategy)
        if any(new is not old for old, new in zip(given, now)):
            given[:] = now
    if num_exchanged:
        log.info_once(
            "%s was created before prepare(): %d of its parameters were replaced by the prepared ones",
            type(optimizer).__name__,
            num_exchanged,
        )


def fit_state(optimizer: torch.optim.Optimizer, strategy: Strategy) -> None:
    """Cut whole tensors in the state, as `load_state_dict` may have put them there, like the parameters they belong to."""
    if strategy.capabilities.whole_gradients:
        return
    for parameter, state in optimizer.state.items():
        optimizer.state[parameter] = _cut(state, parameter.shape, parameter, strategy)


def _cut(state: Any, shape: torch.Size, parameter: torch.Tensor, strategy: Strategy) -> Any:
    if not isinstance(state, dict):
        return state
    return {
        name: strategy.cut(value, parameter)
        if isinstance(value, torch.Tensor) and value.ndim and value.shape == shape
        else value
        for name, value in state.items()
    }
