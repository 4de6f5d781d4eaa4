"""A copy of a model that is in use, and of its optimizer, without values: what a forecast in a script traces.

The model itself stays as it is: the copy shares no tensor with it, and is made without reading one. A function that was patched into
the model may hold on to the model all the same; that is found out, taken back, and refused.

A batch that is there gives those of any size: its rows are repeated or cut, without values.
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
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from headway.errors import ConfigError, DataError, HeadwayError, UnsupportedError
from headway.forecasting.tracing.tensors import MASK, POSITIONS, without_values
from headway.runtime.collectives.tree import Tree, find_batch_size, map_tensors, tensors

_META = torch.device("meta")


class _WithoutValues(TorchFunctionMode):
    """In its block deepcopy() gives tensors of the same shape, strides and dtype, whose values nobody reads."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.__deepcopy__:
            tensor, memo = args
            memo[id(tensor)] = made = _like(tensor, self._device)
            return made
        if func is torch.Tensor.clone:  # a parameter that is no module's is copied by it
            return _like(args[0], self._device)
        return func(*args, **(kwargs or {}))


def _like(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    with torch._C.DisableTorchFunction():
        _refuse_unknown(tensor)
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)


def _refuse_unknown(tensor: torch.Tensor) -> None:
    if is_lazy(tensor):
        raise UnsupportedError(
            "the model has parameters without a shape (a lazy module); call it once with a real batch, then forecast"
        )
    if is_traceable_wrapper_subclass(tensor) or tensor.layout is not torch.strided:
        raise UnsupportedError(
            f"the model has a tensor of type {type(tensor).__name__}, layout {tensor.layout}, whose memory cannot be followed "
            "yet. Forecast the model before it is sharded or quantised"
        )


def twin_of(model: nn.Module) -> nn.Module:
    """A copy of the model on torch's meta device, prepared or not; what prepare() added is left out of it.

    Raises:
        UnsupportedError: it cannot be copied.
    """
    memo: dict[int, Any] = {}
    for module in model.modules():
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            if tensor is not None and id(tensor) not in memo:
                _refuse_unknown(tensor)
                memo[id(tensor)] = without_values(tensor, _META)
    try:
        with _WithoutValues(_META):
            return copy.deepcopy(model, memo)
    except HeadwayError:
        raise
    except Exception as error:
        raise UnsupportedError(
            f"{type(model).__name__} cannot be copied ({type(error).__name__}: {str(error)[:200]}), and a forecast traces a copy. "
            "Use headway.forecast(model_fn=...), with a function that makes the model"
        ) from error


def twin_of_optimizer(
    optimizer: torch.optim.Optimizer, originals: Iterable[nn.Parameter], copies: Iterable[nn.Parameter]
) -> torch.optim.Optimizer:
    """The same optimizer for the copies, with no state yet; call it where tensors are made without values.

    Args:
        optimizer: of the model.
        originals: the model's parameters that learn.
        copies: theirs, in the same order.

    Raises:
        ConfigError: it updates parameters that are not the model's.
    """
    by_id = {id(original): made for original, made in zip(originals, copies)}
    memo: dict[int, Any] = dict(by_id)
    groups: list[dict[str, Any]] = []
    for group in optimizer.param_groups:
        learning = [parameter for parameter in group["params"] if parameter.requires_grad]
        foreign = sum(id(parameter) not in by_id for parameter in learning)
        if foreign:
            raise ConfigError(
                f"optimizer= updates {foreign} parameters that are not the model's; give the optimizer of the model that is "
                "forecast, or a function that makes one from parameters"
            )
        groups.append({**group, "params": learning})
    with _WithoutValues(torch.device("cpu")):
        memo[id(optimizer.param_groups)] = copy.deepcopy(groups, memo)
        memo[id(optimizer.state)] = defaultdict(dict)
        return copy.deepcopy(optimizer, memo)


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """A block in which only copies of the model are to be used.

    Raises:
        UnsupportedError: it was the model itself that computed; the gradients it got are taken back.
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
            f"the copy of the model that was traced computed with the model's own parameters ({', '.join(touched[:3])}): a function "
            "in it, such as a patched forward or a hook, holds on to the model. Write it as a method, or use "
            "headway.forecast(model_fn=...)"
        )


class BatchResizer:
    """Gives the batch with another number of rows.

    Args:
        batch: a real one: tensors, and whatever holds them. Tensors with as many rows as the first one grow and shrink.

    Attributes:
        num_rows: of the batch.
        is_padded: its attention_mask masks something; None: there is none.
        is_packed: its position_ids start anew within a row, as those of packed sequences do.
        caveats: what is assumed.

    Raises:
        DataError: there is no tensor with rows in it.
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
        others = [list(each.shape) for each in tensors(self._batch) if each.ndim and each.shape[0] != num_rows]
        self.caveats: tuple[str, ...] = ()
        if others:
            self.caveats = (
                f"the batch has {num_rows} samples, but also tensors of shape {others[0]}, which are assumed to be the same for "
                "any batch; give batch_fn= if they are not",
            )

    def __call__(self, size: int) -> Tree:
        """With so many rows, on torch's meta device."""
        return map_tensors(lambda tensor: self._sized(tensor, size), self._batch)

    def _sized(self, tensor: torch.Tensor, size: int) -> torch.Tensor:
        shape = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
        if tensor.ndim == 0 or tensor.shape[0] != self.num_rows or size == self.num_rows:
            return shape
        return torch.cat([shape] * -(-size // self.num_rows))[:size]


def _is_padded(batch: Tree) -> bool | None:
    mask = _values(batch, MASK)
    return None if mask is None else not bool(mask.all())


def _is_packed(batch: Tree) -> bool:
    places = _values(batch, POSITIONS)
    return places is not None and bool((places.diff() != 1).any())


def _values(batch: Tree, name: str) -> torch.Tensor | None:
    found = batch.get(name) if isinstance(batch, dict) else None
    return found if isinstance(found, torch.Tensor) and not found.is_meta else None
