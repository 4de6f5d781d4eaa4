"""Sequences and their labels under context parallelism: how they are divided among the ranks, cut, counted and compared.

How sequences are divided among the ranks of context parallelism, and how their parts travel.

A sequence is padded to a multiple of twice the number of ranks and divided into that many pieces. Rank r holds piece r and the
piece that lies as far from the end: under causal attention a late piece sees much and an early one little, and so all ranks
compute the same amount. It is torch's head-tail order, which its ring attention expects.

Labels among what a model is given: they are cut as its sequences are, and those that count are counted.

A mean over a part's labels becomes a term of the whole's mean by the share of labels that count, so what the model's loss ignores
must be known: from the options, or from the cross entropy that the model is seen to compute.

Does a model compute the same when its sequences are cut? A few tokens of its first batch, whole and cut, beside each other.
What would make it differ without an error: positions made within a block, which would begin at 0 on every rank; attention or
convolutions past that function; a loss that is neither a mean nor a sum over tokens; labels that are shifted within the model.
In a plan tensors have no values, and shapes are compared alone.
"""

import math
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch._subclasses.fake_tensor import is_fake
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from headway.config.parallelism import TensorParallelOptions, TorchContextParallelConfig
from headway.errors import DataError, PrepareError, UnsupportedError
from headway.runtime.collectives import tree
from headway.runtime.collectives.checked import Collectives
from headway.strategies.tensor.crossings import SplitAxis, all_gather, cross, exchange, reduce_scatter, same


def padded(length: int, axis: SplitAxis) -> int:
    """The next length that can be divided."""
    step = 2 * axis.size
    return -(-length // step) * step


def pieces_of(rank: int, axis: SplitAxis) -> tuple[int, int]:
    """The numbers of the two pieces that a rank holds."""
    return rank, 2 * axis.size - 1 - rank


def part_of(whole: torch.Tensor, axis: SplitAxis, dim: int, filler: float = 0) -> torch.Tensor:
    """This rank's part of a whole tensor; the gradients that come back through it are terms of a sum over the ranks.

    Args:
        whole: alike on all ranks.
        axis: the ranks.
        dim: the sequence.
        filler: what it is padded with.
    """
    dim = dim % whole.dim()
    length = padded(whole.shape[dim], axis)
    if length > whole.shape[dim]:
        whole = functional.pad(whole, [0, 0] * (whole.dim() - 1 - dim) + [0, length - whole.shape[dim]], value=filler)
    step = length // (2 * axis.size)
    return torch.cat([whole.narrow(dim, piece * step, step) for piece in pieces_of(axis.rank, axis)], dim)


def gather(part: torch.Tensor, axis: SplitAxis, dim: int) -> torch.Tensor:
    """The whole of the ranks' parts, padding included, for computations in which each rank does its share."""
    dim = dim % part.dim()
    return cross(part, partial(_gather, axis=axis, dim=dim), partial(scatter, axis=axis, dim=dim))


def to_heads(part: torch.Tensor, axis: SplitAxis) -> torch.Tensor:
    """From a part of the sequence of all heads [rows, heads, part, width] to whole sequences of this rank's share of the heads."""
    found = _exchange(torch.stack(part.chunk(axis.size, 1)), axis)
    return _in_order(found, axis, 2)


def to_parts(heads: torch.Tensor, axis: SplitAxis) -> torch.Tensor:
    """The way back from `to_heads`."""
    return torch.cat(_exchange(_by_rank(heads, axis, 2), axis).unbind(0), 1)


def _exchange(by_rank: torch.Tensor, axis: SplitAxis) -> torch.Tensor:
    rows, even = by_rank.reshape(axis.size, -1), [1] * axis.size
    return exchange(rows, axis, even, even, 1.0, nullcontext).view_as(by_rank)


def scatter(terms: torch.Tensor, axis: SplitAxis, dim: int) -> torch.Tensor:
    """This rank's part of the sum of the ranks' terms; autograd does not see it."""
    stacked = _by_rank(terms, axis, dim % terms.dim())
    return reduce_scatter(stacked.view(-1, *stacked.shape[2:]), axis)


def join(part: torch.Tensor, axis: SplitAxis, dim: int, length: int, times: int = 1) -> torch.Tensor:
    """The whole of the ranks' parts, of this length without padding, for computations that all ranks do alike.

    Args:
        part: this rank's.
        axis: the ranks.
        dim: the sequence.
        length: of the whole.
        times: what gradients that come back are multiplied by.
    """
    dim = dim % part.dim()

    def back(grad: torch.Tensor) -> torch.Tensor:
        mine = part_of(grad, axis, dim)
        return mine if times == 1 else mine * times

    whole = cross(part, partial(_gather, axis=axis, dim=dim), back)
    return whole if whole.shape[dim] == length else whole.narrow(dim, 0, length).clone()


def one_of(whole: torch.Tensor, axis: SplitAxis) -> torch.Tensor:
    """What all ranks compute alike, as one term of a sum over them: its gradient is divided among them."""
    return cross(whole, same, lambda grad: grad / axis.size) if whole.requires_grad else whole


def _gather(part: torch.Tensor, axis: SplitAxis, dim: int) -> torch.Tensor:
    return _in_order(all_gather(part, axis).view(axis.size, *part.shape), axis, dim)


def _in_order(by_rank: torch.Tensor, axis: SplitAxis, dim: int) -> torch.Tensor:
    """Parts, stacked by rank along a new first dimension, as one sequence."""
    step = by_rank.shape[dim + 1] // 2
    found: list[Any] = [None] * (2 * axis.size)
    for rank in range(axis.size):
        for place, piece in enumerate(pieces_of(rank, axis)):
            found[piece] = by_rank[rank].narrow(dim, place * step, step)
    return torch.cat(found, dim)


def _by_rank(whole: torch.Tensor, axis: SplitAxis, dim: int) -> torch.Tensor:
    """A sequence as its parts, stacked by rank along a new first dimension."""
    pieces = whole.chunk(2 * axis.size, dim)
    return torch.stack([torch.cat([pieces[p] for p in pieces_of(rank, axis)], dim) for rank in range(axis.size)])


_DEFAULT = -100
_LOSSES = (functional.cross_entropy, functional.nll_loss)


@dataclass
class LabelledCall:
    """One call of the model.

    Attributes:
        args, kwargs: what the model is given: labels are cut, everything else is whole.
        num_labels: labels that count: of the whole sequences, and of this rank's part; None: none are cut.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    num_labels: tuple[torch.Tensor, torch.Tensor] | None = None


class SplitLabels:
    """The labels of one model.

    Args:
        model: whose.
        parameters: names of what may be given to its forward by place.
        options: which arguments are labels, and which label its loss ignores.
        axis: the ranks.
        everyone: all ranks of the run, which raise errors together.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        parameters: list[str],
        options: TorchContextParallelConfig,
        axis: SplitAxis,
        everyone: Collectives,
    ) -> None:
        self._model, self._parameters, self._options, self._axis = model, parameters, options, axis
        self._everyone = everyone
        self._of_loss: int | None = None
        self._name = type(model).__name__

    @property
    def ignored(self) -> int:
        """The label that does not count, and with which sequences are padded."""
        known = (self._options.ignore_index, self._of_loss, _DEFAULT)
        return next(value for value in known if value is not None)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """A block in which the model computes its loss: which label does it ignore?

        Raises:
            PrepareError: another one than the options say.
        """
        with _IgnoredLabels() as watch:
            yield
        seen = set().union(*self._everyone.gather_objects(watch.seen))  # of stages the last one alone computes it
        if len(seen) != 1:
            return
        (self._of_loss,) = seen
        if self._options.ignore_index not in (None, self._of_loss):
            raise PrepareError(
                f"TorchContextParallelConfig(ignore_index={self._options.ignore_index}), but the cross entropy of "
                f"{self._name} has ignore_index={self._of_loss}; make them equal, or leave the option out"
            )

    def within(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """Those of the shape (rows, tokens), by name."""
        given = {**dict(zip(self._parameters, args)), **kwargs}
        found = {name: given.get(name) for name in self._options.labels}
        return {name: label for name, label in found.items() if isinstance(label, torch.Tensor) and label.dim() > 1}

    def for_dry_run(self, labels: Mapping[str, torch.Tensor]) -> int:
        """A label that the model's loss takes, and ignores if that can be known."""
        if self._of_loss is not None:
            return self._of_loss
        if self._options.ignore_index is not None:
            return self._options.ignore_index
        known = [label for label in labels.values() if _is_class(label) and not is_fake(label)]
        return min((int(label.min()) for label in known), default=0)

    def cut(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], is_alone: bool = False) -> LabelledCall:
        """Cut them among what the model is given.

        Args:
            args, kwargs: of the call.
            is_alone: other ranks need not make the same call now: an error is raised here alone.

        Raises:
            DataError: they would have to be padded, but not with what they say is ignored.
        """
        labels = self.within(args, kwargs)
        if not labels:
            return LabelledCall(args, dict(kwargs))
        self._check_padding(labels, is_alone)
        if "labels" in labels and "shift_labels" not in labels and _shifts(self._model):
            labels["shift_labels"] = functional.pad(labels["labels"][:, 1:], (0, 1), value=self.ignored)
        parts = {
            name: part_of(label, self._axis, 1, self.ignored if _is_class(label) else 0)
            for name, label in labels.items()
        }
        counted = "shift_labels" if "shift_labels" in labels else next(iter(labels))
        counts = self._count(labels[counted]), self._count(parts[counted])
        rest = args[len(self._parameters) :]
        args = tuple(parts.pop(name, value) for name, value in zip(self._parameters, args)) + rest
        return LabelledCall(args, {**kwargs, **parts}, counts)

    def _check_padding(self, labels: Mapping[str, torch.Tensor], is_alone: bool) -> None:
        """Before ranks that alone have such a sequence raise, while the others wait for their share of the model.

        Raises:
            DataError: on all ranks, or alone.
        """
        classes = [label for label in labels.values() if _is_class(label)]
        if self._of_loss is not None or not classes:
            return
        problem = next(filter(None, map(self._padding_problem, classes)), "")
        rows = [] if is_alone else self._everyone.gather_numbers([float(bool(problem))])
        refusing = [rank for rank, row in enumerate(rows) if row[0]]
        if problem:
            raise DataError(problem)
        if refusing:
            raise DataError(
                f"the batch of ranks {', '.join(map(str, refusing))} has labels that cannot be padded; the error there says more"
            )

    def _padding_problem(self, label: torch.Tensor) -> str:
        length = label.shape[1]
        if is_fake(label) or padded(length, self._axis) == length:
            return ""
        least = int(label.masked_fill(label == self.ignored, 0).min())
        if least >= 0:
            return ""
        return (
            f"context parallelism must pad sequences of {length} tokens to {padded(length, self._axis)}, and labels with "
            f"{self.ignored}, but they contain {least}; name the label that the loss of {self._name} ignores: "
            f"TorchContextParallelConfig(ignore_index={least}), or pad batches to a multiple of {2 * self._axis.size} tokens"
        )

    def _count(self, label: torch.Tensor) -> torch.Tensor:
        """Labels that count; no loss counts negative ones."""
        if label.is_floating_point():
            return torch.tensor(label.numel(), device=label.device)
        if label.dtype == torch.bool:
            return label.sum()
        return ((label >= 0) & (label != self.ignored)).sum()


class _IgnoredLabels(TorchFunctionMode):
    """Notes which labels cross entropies ignore."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[int] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Look at calls; all pass."""
        kwargs = kwargs or {}
        if func in _LOSSES:
            target = kwargs["target"] if "target" in kwargs else args[1]
            if _is_class(target):
                # Both have it as their fifth argument.
                self.seen.add(int(kwargs.get("ignore_index", args[4] if len(args) > 4 else _DEFAULT)))
        return func(*args, **kwargs)


def _is_class(label: torch.Tensor) -> bool:
    return not label.is_floating_point() and label.dtype != torch.bool


def _shifts(model: torch.nn.Module) -> bool:
    """Does the model's own loss shift labels by one (transformers' causal language models)?"""
    return hasattr(model, "loss_function") and getattr(model, "loss_type", None) in (None, "ForCausalLM")


ADVICE = (
    "Needed are: positions that are added before the first block or given to each block (as rotary embeddings or position_ids), "
    "attention by torch.nn.functional.scaled_dot_product_attention, no other exchange between tokens, and a loss that is a mean or "
    "a sum over labels of the shape (rows, tokens), in an argument that TorchContextParallelConfig(labels=...) names; else use fsdp "
    "or tp"
)
_EXACT_LOSS, _EXACT, _TF32, _HALF = 5e-5, 2e-4, 1e-2, 5e-2
"""How far results may lie apart, as a share of the largest."""


def check_options(tensor: TensorParallelOptions, num_parts: int) -> None:
    """Can sequences be cut beside these options of tensor parallelism?

    Args:
        tensor: the options.
        num_parts: into how many parts sequences are cut.

    Raises:
        UnsupportedError: they cannot.
    """
    given = [name for name in ("sequence_parallel", "loss_parallel") if num_parts > 1 and getattr(tensor, name)]
    if given:
        raise UnsupportedError(
            f"context parallelism (cp={num_parts}) cuts sequences itself, which does not work with TensorParallelOptions("
            f"{', '.join(f'{name}=True' for name in given)}); drop {' and '.join(given)}, or cp"
        )


def few(
    args: tuple[Any, ...], kwargs: dict[str, Any], num_tokens: int, labels: Collection[str]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The first tokens of two rows of what a model is given; padding is taken for text, and ignored labels for class 0."""
    first = next((each for each in tree.tensors((args, kwargs)) if each.dim() > 1), None)
    if first is None:
        return args, kwargs
    num_rows, length = first.shape[:2]

    def cut(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or leaf.dim() == 0:
            return leaf
        is_rows = leaf.shape[0] == num_rows
        if num_rows > 1:
            leaf = leaf[:2] if is_rows else leaf
        elif is_rows and leaf.dim() > 1:
            leaf = torch.cat([leaf, leaf])
        for dim in range(1 if leaf.dim() > 1 or is_rows else 0, leaf.dim()):
            if leaf.shape[dim] == length:
                leaf = leaf.narrow(dim, 0, min(num_tokens, length))
        return leaf

    args, kwargs = tree.map_leaves(cut, args), tree.map_leaves(cut, kwargs)
    mask = kwargs.get("attention_mask")
    if isinstance(mask, torch.Tensor) and mask.dim() == 2:
        kwargs["attention_mask"] = torch.ones_like(mask)
    for name in labels:
        label = kwargs.get(name)
        if isinstance(label, torch.Tensor) and label.dtype != torch.bool:
            kwargs[name] = label.clamp(min=0)
    return args, kwargs


def ignore_some(kwargs: dict[str, Any], labels: Collection[str], ignored: int) -> dict[str, Any]:
    """Let the first row have fewer labels than the others, and the ranks' parts of it unlike numbers.

    A loss that is a mean over each row, or that ignores what is counted here, is another one in parts then.

    Args:
        kwargs: from `few`.
        labels: which of them are labels.
        ignored: what takes the labels' place.
    """
    found = dict(kwargs)
    for name in labels:
        label = found[name]
        if label.is_floating_point() or label.dtype == torch.bool:
            continue
        largest = int(label.max()) if not is_fake(label) else 0
        label = label.masked_fill(label == ignored, largest if largest != ignored else int(ignored == 0))
        label[0, : max(1, label.shape[1] // 4)] = ignored
        found[name] = label
    return found


@contextmanager
def at_rest(model: torch.nn.Module) -> Iterator[None]:
    """A block in which the model is evaluated."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module in training:
            module.training = True


def difference(whole: Any, cut: Any, is_exact: bool, is_loss_joined: bool = False) -> str:
    """What differs, in words; "": nothing does.

    Args:
        whole, cut: the model's outputs.
        is_exact: they were computed in float32.
        is_loss_joined: losses of parts were put together. A wrong mean over tokens is near the right one: the losses of a model
            that knows nothing are all alike.
    """
    pairs = [list(tree.tensors(each)) for each in (whole, cut)]
    shapes = [[tuple(tensor.shape) for tensor in tensors] for tensors in pairs]
    if shapes[0] != shapes[1]:
        return f"its outputs have the shapes {shapes[1]} when it is cut, and {shapes[0]} when it is not"
    for one, other in zip(*pairs):
        if not one.is_floating_point() or not one.numel() or is_fake(one):
            continue
        one, other = one.float(), other.float()
        apart = float((one - other).abs().nan_to_num(0.0).max())
        largest = float(one.abs().nan_to_num(0.0).max())
        odd = bool((one.isnan() != other.isnan()).any())
        allowed = _allowed(one.device, is_exact)
        if is_loss_joined and not one.dim() and allowed == _EXACT:
            allowed = _EXACT_LOSS
        if odd or apart > allowed * max(largest, math.ulp(1.0)):
            what = "its loss" if not one.dim() else f"an output of the shape {tuple(one.shape)}"
            return f"{what} differs by {apart:.2g} (the largest value is {largest:.2g}) from that of the whole sequence"
    return ""


def _allowed(device: torch.device, is_exact: bool) -> float:
    if not is_exact:
        return _HALF
    is_tf32 = device.type == "cuda" and torch.get_float32_matmul_precision() != "highest"
    return _TF32 if is_tf32 else _EXACT
