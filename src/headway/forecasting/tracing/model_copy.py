"""Copy the user's model, its optimizer and a batch without their values, so that a forecast can trace the copies.

The original model is not changed. The copy shares no tensor with it, and no tensor is read. A patched function inside
the model can still refer to the original model. `ensure_untouched` detects this if the original gets gradients,
restores the previous gradients and raises an error.
"""

import copy
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode

from headway.errors import ConfigError, HeadwayError, UnsupportedError
from headway.forecasting._torch import DisableTorchFunction, is_traceable_wrapper_subclass
from headway.forecasting.tracing.tensors import make_empty_like

_META = torch.device("meta")


class _ValuelessCopies(TorchFunctionMode):
    """Torch function mode in which `copy.deepcopy` copies tensors without their values.

    The copies are uninitialized tensors with the shape, strides and dtype of the originals.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.__deepcopy__:
            tensor, memo = args
            memo[id(tensor)] = valueless = _make_like(tensor, self._device)
            return valueless
        if func is torch.Tensor.clone:  # copies parameters that belong to no module
            return _make_like(args[0], self._device)
        return func(*args, **(kwargs or {}))


def _make_like(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return an uninitialized tensor on a device with the shape, strides and dtype of another.

    Raises:
        UnsupportedError: If the tensor belongs to a subclass whose memory is unknown.
    """
    with DisableTorchFunction():
        _refuse_unknown(tensor)
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)


def _refuse_unknown(tensor: torch.Tensor) -> None:
    """Raise UnsupportedError if the memory of a tensor cannot be tracked.

    That is the case for lazy tensors, wrapper subclasses, and tensors whose layout is not strided.
    """
    if is_lazy(tensor):
        raise UnsupportedError(
            "the model has parameters without a shape (a lazy module); call it once with a real batch, then forecast"
        )
    if is_traceable_wrapper_subclass(tensor) or tensor.layout is not torch.strided:
        raise UnsupportedError(
            f"the model has a tensor of type {type(tensor).__name__}, layout {tensor.layout}, whose memory cannot be followed "
            "yet. Forecast the model before it is sharded or quantized"
        )


def copy_model(model: nn.Module) -> nn.Module:
    """Return a copy of a model on the meta device, without the changes that `prepare()` made to the model.

    Raises:
        UnsupportedError: If the model cannot be copied.
    """
    memo: dict[int, Any] = {}  # copies by the ID of the original, as for `copy.deepcopy`
    for module in model.modules():
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            if tensor is not None and id(tensor) not in memo:
                _refuse_unknown(tensor)
                memo[id(tensor)] = make_empty_like(tensor, _META)
    try:
        with _ValuelessCopies(_META):
            return copy.deepcopy(model, memo)
    except HeadwayError:
        raise
    except Exception as error:
        raise UnsupportedError(
            f"{type(model).__name__} cannot be copied ({type(error).__name__}: {str(error)[:200]}), and a forecast traces a copy. "
            "Use headway.forecast(model_fn=...), with a function that makes the model"
        ) from error


def copy_optimizer(
    optimizer: torch.optim.Optimizer, originals: Iterable[nn.Parameter], copies: Iterable[nn.Parameter]
) -> torch.optim.Optimizer:
    """Return a copy of the optimizer for the copied parameters, without state.

    Call this function in a context in which new tensors have no values.

    Args:
        optimizer: Optimizer of the original model.
        originals: Trainable parameters of the original model.
        copies: Trainable parameters of the copied model, in the order of `originals`.

    Raises:
        ConfigError: If the optimizer updates parameters that are not in `originals`.
    """
    copies_by_id = {id(original): copied for original, copied in zip(originals, copies)}
    memo: dict[int, Any] = dict(copies_by_id)
    groups: list[dict[str, Any]] = []
    for group in optimizer.param_groups:
        trainable = [parameter for parameter in group["params"] if parameter.requires_grad]
        num_foreign = sum(id(parameter) not in copies_by_id for parameter in trainable)
        if num_foreign:
            raise ConfigError(
                f"optimizer= updates {num_foreign} parameters that are not the model's; give the optimizer of the model that is "
                "forecast, or a function that makes one from parameters"
            )
        groups.append({**group, "params": trainable})
    # The memo makes `deepcopy` use the copied parameters, copied groups and an empty state in place of the originals.
    with _ValuelessCopies(torch.device("cpu")):
        memo[id(optimizer.param_groups)] = copy.deepcopy(groups, memo)
        memo[id(optimizer.state)] = defaultdict(dict)
        return copy.deepcopy(optimizer, memo)


@contextmanager
def ensure_untouched(model: nn.Module) -> Iterator[None]:
    """Return a context at whose end an error is raised if the original model has got gradients in it.

    Only the copy of the model may get gradients.

    Args:
        model: Original model.

    Raises:
        UnsupportedError: If a parameter's gradient was replaced. The previous gradients are restored.
    """
    parameters = dict(model.named_parameters())
    before = {name: parameter.grad for name, parameter in parameters.items()}
    touched: list[str] = []
    try:
        yield
    finally:
        for name, parameter in parameters.items():
            if parameter.grad is not before[name]:
                parameter.grad = before[name]
                touched.append(name)
    if touched:
        raise UnsupportedError(
            f"the copy of the model that was traced computed with the model's own parameters ({', '.join(touched[:3])}): a "
            "function in it, such as a patched forward or a hook, keeps a reference to the model. Write it as a method, or use "
            "headway.forecast(model_fn=...)"
        )
