"""Sharding of sequences and labels for context parallelism, and the dry run that checks the result.

A sequence is padded, and divided into twice as many equal pieces as there are ranks. Rank r holds piece r and the piece
at the same distance from the end. Under causal attention a late piece attends to many keys and an early one to few, so
all ranks have equal work. This is torch's head-tail order, which torch's ring attention expects.

Labels among the model's arguments are sharded like its sequences. A mean over a shard's labels becomes a term of the
overall mean, weighted by the shard's fraction of labels that are not ignored. The ignored label must therefore be
known. It comes from the options, or from the cross entropy that the model is observed to compute.

The dry run computes a few tokens of the first batch, with full and with sharded sequences, and compares the results.
It detects these errors, which would otherwise stay silent:

- positions that are created within a block, and would begin at 0 on every rank
- attention or convolutions outside of torch's attention function
- a loss that is neither a mean nor a sum over tokens
- labels that are shifted within the model

In a forecast on fake tensors, values do not exist, and only shapes are compared.
"""

import math
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from headway.core.config.parallelism import TensorParallelOptions, TorchContextParallelConfig
from headway.core.runtime.collectives import tree
from headway.core.runtime.collectives.checked import Collectives
from headway.core.training.evaluation_mode import use_evaluation_mode
from headway.errors import DataError, PrepareError, UnsupportedError
from headway.layouts.context._torch import is_fake
from headway.layouts.tensor.crossings import (
    SplitAxis,
    all_gather,
    apply_with_backward,
    exchange_rows,
    reduce_scatter,
    view_unchanged,
)


def pad_length(length: int, axis: SplitAxis) -> int:
    """Return the length of a sequence after padding to the next multiple of twice the number of ranks.

    Args:
        length: Length of the sequence in tokens.
        axis: Mesh axis of context parallelism.
    """
    step = 2 * axis.size
    return -(-length // step) * step


def find_pieces(rank: int, axis: SplitAxis) -> tuple[int, int]:
    """Return the indices of the two pieces of a sequence that a rank computes: one from each end.

    A sequence is divided into twice as many equal pieces as there are ranks.

    Args:
        rank: Rank on the axis.
        axis: Mesh axis of context parallelism.
    """
    return rank, 2 * axis.size - 1 - rank


def split_sequence(whole: torch.Tensor, axis: SplitAxis, dim: int, filler: float = 0) -> torch.Tensor:
    """Return this rank's shard of a replicated tensor, without communication.

    Backward gives `whole` a gradient that is zero outside the shard. The sum of these gradients over the ranks is the
    full gradient.

    Args:
        whole: Tensor that is equal on all ranks.
        axis: Mesh axis of context parallelism.
        dim: Dimension of the sequence.
        filler: Value used as padding. Default: 0.
    """
    dim = dim % whole.dim()
    length = pad_length(whole.shape[dim], axis)
    if length > whole.shape[dim]:
        whole = functional.pad(whole, [0, 0] * (whole.dim() - 1 - dim) + [0, length - whole.shape[dim]], value=filler)
    step = length // (2 * axis.size)
    return torch.cat([whole.narrow(dim, piece * step, step) for piece in find_pieces(axis.rank, axis)], dim)


def gather_sequence(part: torch.Tensor, axis: SplitAxis, dim: int) -> torch.Tensor:
    """Return the full sequence with padding, all-gathered from the ranks' shards. Backward reduce-scatters gradients.

    Args:
        part: This rank's shard.
        axis: Mesh axis of context parallelism.
        dim: Dimension of the sequence.
    """
    dim = dim % part.dim()
    return apply_with_backward(
        part, partial(_gather_sequence, axis=axis, dim=dim), partial(reduce_scatter_sequence, axis=axis, dim=dim)
    )


def exchange_for_heads(part: torch.Tensor, axis: SplitAxis) -> torch.Tensor:
    """Return full sequences of this rank's heads, given this rank's sequence shard of all heads (all-to-all).

    Args:
        part: Tensor of shape [rows, heads, sequence shard, head dim].
        axis: Mesh axis of context parallelism.
    """
    found = _exchange_rows(torch.stack(part.chunk(axis.size, 1)), axis)
    return _restore_order(found, axis, 2)


def exchange_for_parts(heads: torch.Tensor, axis: SplitAxis) -> torch.Tensor:
    """Return this rank's sequence shard of all heads, given full sequences of this rank's heads (all-to-all).

    This is the inverse of `exchange_for_heads`.

    Args:
        heads: Tensor of shape [rows, heads of this rank, sequence, head dim].
        axis: Mesh axis of context parallelism.
    """
    return torch.cat(_exchange_rows(_stack_by_rank(heads, axis, 2), axis).unbind(0), 1)


def _exchange_rows(by_rank: torch.Tensor, axis: SplitAxis) -> torch.Tensor:
    rows, even = by_rank.reshape(axis.size, -1), [1] * axis.size
    return exchange_rows(rows, axis, even, even, 1.0, nullcontext).view_as(by_rank)


def reduce_scatter_sequence(terms: torch.Tensor, axis: SplitAxis, dim: int) -> torch.Tensor:
    """Return this rank's shard of the sum of all ranks' tensors (reduce-scatter). Not differentiable.

    Args:
        terms: This rank's term of the sum, for full sequences.
        axis: Mesh axis of context parallelism.
        dim: Dimension of the sequence.
    """
    stacked = _stack_by_rank(terms, axis, dim % terms.dim())
    return reduce_scatter(stacked.view(-1, *stacked.shape[2:]), axis)


def join_sequence(part: torch.Tensor, axis: SplitAxis, dim: int, length: int, times: int = 1) -> torch.Tensor:
    """Return the full sequence, all-gathered without padding, for computations that are identical on all ranks.

    Backward returns this rank's shard of the gradient, without communication.

    Args:
        part: This rank's shard.
        axis: Mesh axis of context parallelism.
        dim: Dimension of the sequence.
        length: Length of the full sequence without padding.
        times: Factor for the gradients in backward. Default: 1.
    """
    dim = dim % part.dim()

    def split_gradient(grad: torch.Tensor) -> torch.Tensor:
        mine = split_sequence(grad, axis, dim)
        return mine if times == 1 else mine * times

    whole = apply_with_backward(part, partial(_gather_sequence, axis=axis, dim=dim), split_gradient)
    return whole if whole.shape[dim] == length else whole.narrow(dim, 0, length).clone()


def divide_gradient(whole: torch.Tensor, axis: SplitAxis) -> torch.Tensor:
    """Return the tensor unchanged. Backward divides its gradient by the number of ranks.

    The division is needed because all ranks compute this gradient identically, and their gradients are summed later.
    """
    return apply_with_backward(whole, view_unchanged, lambda grad: grad / axis.size) if whole.requires_grad else whole


def _gather_sequence(part: torch.Tensor, axis: SplitAxis, dim: int) -> torch.Tensor:
    return _restore_order(all_gather(part, axis).view(axis.size, *part.shape), axis, dim)


def _restore_order(by_rank: torch.Tensor, axis: SplitAxis, dim: int) -> torch.Tensor:
    """Return a full sequence in its original order, given the ranks' shards stacked along a new first dimension.

    Args:
        by_rank: Stacked shards, one for each rank.
        axis: Mesh axis of context parallelism.
        dim: Dimension of the sequence in each shard.
    """
    step = by_rank.shape[dim + 1] // 2
    found: list[Any] = [None] * (2 * axis.size)
    for rank in range(axis.size):
        for place, piece in enumerate(find_pieces(rank, axis)):
            found[piece] = by_rank[rank].narrow(dim, place * step, step)
    return torch.cat(found, dim)


def _stack_by_rank(whole: torch.Tensor, axis: SplitAxis, dim: int) -> torch.Tensor:
    """Return the ranks' shards of a full sequence, stacked along a new first dimension."""
    pieces = whole.chunk(2 * axis.size, dim)
    return torch.stack([torch.cat([pieces[p] for p in find_pieces(rank, axis)], dim) for rank in range(axis.size)])


_DEFAULT = -100
"""Label that torch's losses ignore by default."""
_LOSSES = (functional.cross_entropy, functional.nll_loss)


@dataclass
class LabeledCall:
    """Arguments of one call of the model, with sharded labels.

    Attributes:
        args: Positional arguments. Only labels are sharded.
        kwargs: Keyword arguments. Only labels are sharded.
        num_labels: Pair of (number of labels in the full sequences, number of labels in this rank's shard), without
            ignored labels. None: no labels are sharded.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    num_labels: tuple[torch.Tensor, torch.Tensor] | None = None


class SplitLabels:
    """Labels among a model's arguments. The methods find the labels of a call, and shard them like its sequences.

    Args:
        model: Model that gets the labels.
        parameters: Argument names of the model's forward that can be positional.
        options: Options with the names of arguments that are labels, and the label that the loss ignores.
        axis: Mesh axis of context parallelism.
        everyone: Collectives over all ranks of the run, so that all of them raise errors together.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        parameters: list[str],
        options: TorchContextParallelConfig,
        axis: SplitAxis,
        everyone: Collectives,
    ) -> None:
        self._model = model
        self._parameters = parameters
        self._options = options
        self._axis = axis
        self._everyone = everyone
        self._of_loss: int | None = None
        self._name = type(model).__name__

    @property
    def ignored_label(self) -> int:
        """Label that the loss ignores: from the options, else from the model's cross entropy, else -100.

        Labels are padded with it.
        """
        known = (self._options.ignore_index, self._of_loss, _DEFAULT)
        return next(value for value in known if value is not None)

    @contextmanager
    def observe_ignored_label(self) -> Iterator[None]:
        """Return a context in which the `ignore_index` of the model's cross entropy is recorded.

        Nothing is recorded if the ranks together observe no value or several ones. Every rank must enter the context.

        Raises:
            PrepareError: If the recorded label differs from the label in the options.
        """
        with _IgnoredLabels() as watch:
            yield
        seen = set().union(*self._everyone.gather_objects(watch.seen))  # in a pipeline only the last stage computes it
        if len(seen) != 1:
            return
        (self._of_loss,) = seen
        if self._options.ignore_index not in (None, self._of_loss):
            raise PrepareError(
                f"TorchContextParallelConfig(ignore_index={self._options.ignore_index}), but the cross entropy of "
                f"{self._name} has ignore_index={self._of_loss}; make them equal, or leave the option out"
            )

    def find_labels(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """Return the labels of a call by argument name.

        Labels are tensors of at least two dimensions, (rows, tokens), among the arguments that the options name.
        """
        given = {**dict(zip(self._parameters, args)), **kwargs}
        found = {name: given.get(name) for name in self._options.labels}
        return {name: label for name, label in found.items() if isinstance(label, torch.Tensor) and label.dim() > 1}

    def choose_dry_run_label(self, labels: Mapping[str, torch.Tensor]) -> int:
        """Return a label for dry runs: the ignored label if known, else the smallest of the given labels.

        The ignored label is known if the loss or the options determine it.

        Args:
            labels: Labels of the call by argument name.
        """
        if self._of_loss is not None:
            return self._of_loss
        if self._options.ignore_index is not None:
            return self._options.ignore_index
        known = [label for label in labels.values() if _is_class(label) and not is_fake(label)]
        return min((int(label.min()) for label in known), default=0)

    def split_call(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], is_alone: bool = False) -> LabeledCall:
        """Return the call with each tensor of labels replaced by this rank's shard of the tensor.

        If the model's own loss shifts labels by one, the keyword argument `shift_labels` is added, because a shard
        lacks the label after its end. Without labels, the arguments do not change.

        Args:
            args: Positional arguments of the call.
            kwargs: Keyword arguments of the call.
            is_alone: Whether the other ranks might not make this call. Labels are then checked without a collective,
                and an error is raised on this rank only. Default: False.

        Raises:
            DataError: If labels must be padded but contain a negative label other than `ignored_label`, unless the
                model's cross entropy has shown which label it ignores. Unless `is_alone`, it is raised on all ranks.
        """
        labels = self.find_labels(args, kwargs)
        if not labels:
            return LabeledCall(args, dict(kwargs))
        self._check_padding(labels, is_alone)
        if "labels" in labels and "shift_labels" not in labels and _has_shifted_loss(self._model):
            labels["shift_labels"] = functional.pad(labels["labels"][:, 1:], (0, 1), value=self.ignored_label)
        parts = {
            name: split_sequence(label, self._axis, 1, self.ignored_label if _is_class(label) else 0)
            for name, label in labels.items()
        }
        counted = "shift_labels" if "shift_labels" in labels else next(iter(labels))
        counts = self._count_labels(labels[counted]), self._count_labels(parts[counted])
        rest = args[len(self._parameters) :]
        args = tuple(parts.pop(name, value) for name, value in zip(self._parameters, args)) + rest
        return LabeledCall(args, {**kwargs, **parts}, counts)

    def _check_padding(self, labels: Mapping[str, torch.Tensor], is_alone: bool) -> None:
        """Raise an error on all ranks if any rank's labels cannot be padded.

        If only some ranks raised it, the others would wait in a collective of the model. Do nothing if the model's
        cross entropy has shown which label it ignores, or if no labels are class indices.

        Args:
            labels: Labels by name.
            is_alone: Whether to check this rank only, without a collective.

        Raises:
            DataError: If this rank's labels cannot be padded or, unless `is_alone`, another rank's.
        """
        classes = [label for label in labels.values() if _is_class(label)]
        if self._of_loss is not None or not classes:
            return
        problem = next(filter(None, map(self._find_padding_problem, classes)), "")
        rows = [] if is_alone else self._everyone.gather_numbers([float(bool(problem))])
        refusing = [rank for rank, row in enumerate(rows) if row[0]]
        if problem:
            raise DataError(problem)
        if refusing:
            raise DataError(
                f"the batch of ranks {', '.join(map(str, refusing))} has labels that cannot be padded; the error there says more"
            )

    def _find_padding_problem(self, label: torch.Tensor) -> str:
        length = label.shape[1]
        if is_fake(label) or pad_length(length, self._axis) == length:
            return ""
        least = int(label.masked_fill(label == self.ignored_label, 0).min())
        if least >= 0:
            return ""
        return (
            f"context parallelism must pad sequences of {length} tokens to {pad_length(length, self._axis)}, and labels with "
            f"{self.ignored_label}, but they contain {least}; name the label that the loss of {self._name} ignores: "
            f"TorchContextParallelConfig(ignore_index={least}), or pad batches to a multiple of {2 * self._axis.size} tokens"
        )

    def _count_labels(self, label: torch.Tensor) -> torch.Tensor:
        """Return the number of labels that count in a loss, as a 0-d tensor.

        Class labels count unless they are negative or ignored, and bool labels if they are True. All floating-point
        labels count.
        """
        if label.is_floating_point():
            return torch.tensor(label.numel(), device=label.device)
        if label.dtype == torch.bool:
            return label.sum()
        return ((label >= 0) & (label != self.ignored_label)).sum()


class _IgnoredLabels(TorchFunctionMode):
    """Torch function mode that records the `ignore_index` of cross entropies and NLL losses of class indices."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[int] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Record the `ignore_index` of a loss whose targets are class indices. Run all functions unchanged."""
        kwargs = kwargs or {}
        if func in _LOSSES:
            target = kwargs["target"] if "target" in kwargs else args[1]
            if _is_class(target):
                # `ignore_index` is the fifth argument of both losses.
                self.seen.add(int(kwargs.get("ignore_index", args[4] if len(args) > 4 else _DEFAULT)))
        return func(*args, **kwargs)


def _is_class(label: torch.Tensor) -> bool:
    return not label.is_floating_point() and label.dtype != torch.bool


def _has_shifted_loss(model: torch.nn.Module) -> bool:
    """Whether the model's own loss shifts labels by one, as in transformers' causal language models."""
    return hasattr(model, "loss_function") and getattr(model, "loss_type", None) in (None, "ForCausalLM")


ADVICE = (
    "Needed are: positions that are added before the first block or given to each block (as rotary embeddings or position_ids), "
    "attention by torch.nn.functional.scaled_dot_product_attention, no other exchange between tokens, and a loss that is a mean or "
    "a sum over labels of the shape (rows, tokens), in an argument that TorchContextParallelConfig(labels=...) names; else use fsdp "
    "or tp"
)
_EXACT_LOSS, _EXACT, _TF32, _HALF = 5e-5, 2e-4, 1e-2, 5e-2
"""Largest accepted difference between results, as a fraction of the largest value.

The four values are for float32 losses, float32 outputs, TF32, and half precision.
"""


def check_options(tensor: TensorParallelOptions, num_parts: int) -> None:
    """Raise an error if options of tensor parallelism cannot be combined with context parallelism.

    Args:
        tensor: Options of tensor parallelism.
        num_parts: Number of parts into which sequences are split.

    Raises:
        UnsupportedError: If `sequence_parallel` or `loss_parallel` is set and there are several parts.
    """
    given = [name for name in ("sequence_parallel", "loss_parallel") if num_parts > 1 and getattr(tensor, name)]
    if given:
        raise UnsupportedError(
            f"context parallelism (cp={num_parts}) cuts sequences itself, which does not work with TensorParallelOptions("
            f"{', '.join(f'{name}=True' for name in given)}); drop {' and '.join(given)}, or cp"
        )


def shorten_arguments(
    args: tuple[Any, ...], kwargs: dict[str, Any], num_tokens: int, labels: Collection[str]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the model's arguments reduced to two rows and to the first tokens, for a dry run.

    A single row is repeated. The attention mask is set to ones, so padding counts as text. Negative labels, such as
    ignored ones, become class 0. Without a tensor of at least two dimensions, the arguments are returned unchanged.

    Args:
        args: Positional arguments of the call.
        kwargs: Keyword arguments of the call.
        num_tokens: Largest number of tokens per row.
        labels: Names of arguments that are labels.
    """
    first = next((each for each in tree.list_tensors((args, kwargs)) if each.dim() > 1), None)
    if first is None:
        return args, kwargs
    num_rows, length = first.shape[:2]

    def cut_leaf(leaf: Any) -> Any:
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

    args, kwargs = tree.map_leaves(cut_leaf, args), tree.map_leaves(cut_leaf, kwargs)
    mask = kwargs.get("attention_mask")
    if isinstance(mask, torch.Tensor) and mask.dim() == 2:
        kwargs["attention_mask"] = torch.ones_like(mask)
    for name in labels:
        label = kwargs.get(name)
        if isinstance(label, torch.Tensor) and label.dtype != torch.bool:
            kwargs[name] = label.clamp(min=0)
    return args, kwargs


def ignore_some_labels(kwargs: dict[str, Any], labels: Collection[str], ignored: int) -> dict[str, Any]:
    """Return the arguments of a dry run with the first labels of the first row set to the ignored label.

    Rows and sequence shards then have different numbers of labels that are not ignored. The dry run thus detects a loss
    that is a mean per row, or that ignores other labels. Such a loss differs between full and sharded sequences.

    Args:
        kwargs: Arguments from `shorten_arguments`.
        labels: Names of arguments that are labels.
        ignored: Label that the loss ignores.
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
def enter_evaluation(model: torch.nn.Module) -> Iterator[None]:
    """Return a context in which the model is in evaluation mode, without gradients."""
    with use_evaluation_mode(model), torch.no_grad():
        yield


def describe_difference(whole: Any, cut: Any, is_exact: bool, is_loss_joined: bool = False) -> str:
    """Return a description of the first difference between two outputs, or "" if they agree.

    The tolerance for losses is narrower if `is_loss_joined`. An untrained model has similar losses for all tokens, so a
    mean over the wrong tokens is close to the correct one.

    Args:
        whole: Output of the model for full sequences.
        cut: Output of the model for sharded sequences.
        is_exact: Whether outputs were computed in float32.
        is_loss_joined: Whether the losses of the shards were combined. Default: False.
    """
    pairs = [list(tree.list_tensors(each)) for each in (whole, cut)]
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
        allowed = _choose_tolerance(one.device, is_exact)
        if is_loss_joined and not one.dim() and allowed == _EXACT:
            allowed = _EXACT_LOSS
        if odd or apart > allowed * max(largest, math.ulp(1.0)):
            what = "its loss" if not one.dim() else f"an output of the shape {tuple(one.shape)}"
            return f"{what} differs by {apart:.2g} (the largest value is {largest:.2g}) from that of the whole sequence"
    return ""


def _choose_tolerance(device: torch.device, is_exact: bool) -> float:
    if not is_exact:
        return _HALF
    is_tf32 = device.type == "cuda" and torch.get_float32_matmul_precision() != "highest"
    return _TF32 if is_tf32 else _EXACT
