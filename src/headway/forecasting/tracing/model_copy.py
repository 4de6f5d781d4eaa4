"""Copy the user's model, its optimizer and a batch without their values, so that a forecast can trace the copies.

The original model is not changed. The copy shares no tensor with it, and no tensor is read. A patched function inside
the model can still refer to the original model. `ensure_untouched` detects this if the original gets gradients,
restores the previous gradients and raises an error.

`BatchResizer` makes batches of any size from a real batch by repeating or cutting off rows.
"""

import copy
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode

from headway.core.runtime.collectives.tree import Tree, find_batch_size, list_tensors, map_tensors
from headway.errors import ConfigError, DataError, HeadwayError, UnsupportedError
from headway.forecasting._torch import DisableTorchFunction, is_traceable_wrapper_subclass
from headway.forecasting.tracing.attention_masks import MASK, POSITIONS
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
    memo: dict[int, Any] = {}
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
    by_id = {id(original): made for original, made in zip(originals, copies)}
    memo: dict[int, Any] = dict(by_id)
    groups: list[dict[str, Any]] = []
    for group in optimizer.param_groups:
        trainable = [parameter for parameter in group["params"] if parameter.requires_grad]
        num_foreign = sum(id(parameter) not in by_id for parameter in trainable)
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


class BatchResizer:
    """Callable that returns a copy of a real batch with a given number of rows, on the meta device.

    Rows are repeated or cut off.

    Args:
        batch: Real batch: tensors, possibly in nested containers. Tensors are resized if their first dimension equals
            that of the first tensor.

    Attributes:
        num_rows: Number of rows of the real batch.
        is_padded: Whether the batch's `attention_mask` masks any token, or None if the batch has no mask.
        is_packed: Whether `position_ids` are not consecutive in some row of the batch, as in packed sequences.
        caveats: Assumptions about the batch, as sentences.

    Raises:
        DataError: If the batch has no tensor with a first dimension.
    """

    def __init__(self, batch: Tree) -> None:
        num_rows = find_batch_size(batch)
        if not num_rows:
            raise DataError(
                "the batch has no tensor with a first dimension, so its number of samples is unknown; give one real micro-batch"
            )
        self.num_rows = num_rows
        self._batch = dict(batch) if isinstance(batch, Mapping) else batch
        self.is_padded = _is_padded(self._batch)
        self.is_packed = _is_packed(self._batch)
        others = [list(each.shape) for each in list_tensors(self._batch) if each.ndim and each.shape[0] != num_rows]
        self.caveats: tuple[str, ...] = ()
        if others:
            self.caveats = (
                f"the batch has {num_rows} samples, but also tensors of shape {others[0]}, which are assumed to be the same for "
                "any batch; give batch_fn= if they are not",
            )

    def __call__(self, size: int) -> Tree:
        """Return the batch with `size` rows, on the meta device."""
        return map_tensors(lambda tensor: self._resize_tensor(tensor, size), self._batch)

    def _resize_tensor(self, tensor: torch.Tensor, size: int) -> torch.Tensor:
        meta = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
        if tensor.ndim == 0 or tensor.shape[0] != self.num_rows or size == self.num_rows:
            return meta
        num_repeats = -(-size // self.num_rows)
        return torch.cat([meta] * num_repeats)[:size]


def _is_padded(batch: Tree) -> bool | None:
    """Whether the batch's attention mask masks any token, or None if the batch has no mask with values."""
    mask = _get_values(batch, MASK)
    return None if mask is None else not bool(mask.all())


def _is_packed(batch: Tree) -> bool:
    """Whether the batch has position IDs that are not consecutive in some row."""
    position_ids = _get_values(batch, POSITIONS)
    return position_ids is not None and bool((position_ids.diff() != 1).any())


def _get_values(batch: Tree, name: str) -> torch.Tensor | None:
    tensor = batch.get(name) if isinstance(batch, dict) else None
    return tensor if isinstance(tensor, torch.Tensor) and not tensor.is_meta else None
