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
    num_pieces = 2 * axis.size
    return -(-length // num_pieces) * num_pieces


def find_pieces(rank: int, axis: SplitAxis) -> tuple[int, int]:
    """Return the indices of the two pieces of a sequence that a rank computes: one from each end.

    A sequence is divided into twice as many equal pieces as there are ranks.

    Args:
        rank: Rank on the axis.
        axis: Mesh axis of context parallelism.
    """
    return rank, 2 * axis.size - 1 - rank


def split_sequence(full: torch.Tensor, axis: SplitAxis, dim: int, filler: float = 0) -> torch.Tensor:
    """Return this rank's shard of a replicated tensor, without communication. The sequence is padded if necessary.

    Backward gives `full` a gradient that is zero outside the shard. The sum of these gradients over the ranks is the
    full gradient.

    Args:
        full: Tensor that is equal on all ranks.
        axis: Mesh axis of context parallelism.
        dim: Dimension of the sequence.
        filler: Value used as padding. Default: 0.
    """
    dim = dim % full.dim()
    length = pad_length(full.shape[dim], axis)
    num_missing = length - full.shape[dim]
    if num_missing:
        # `pad` gets (before, after) for each dimension, beginning with the last one.
        full = functional.pad(full, [0, 0] * (full.dim() - 1 - dim) + [0, num_missing], value=filler)
    piece_length = length // (2 * axis.size)
    pieces = [full.narrow(dim, piece * piece_length, piece_length) for piece in find_pieces(axis.rank, axis)]
    return torch.cat(pieces, dim)


def gather_sequence(shard: torch.Tensor, axis: SplitAxis, dim: int) -> torch.Tensor:
    """Return the full sequence with padding, all-gathered from the ranks' shards. Backward reduce-scatters gradients.

    Args:
        shard: This rank's shard.
        axis: Mesh axis of context parallelism.
        dim: Dimension of the sequence.
    """
    dim = dim % shard.dim()
    return apply_with_backward(
        shard, partial(_gather_sequence, axis=axis, dim=dim), partial(reduce_scatter_sequence, axis=axis, dim=dim)
    )


def exchange_for_heads(shard: torch.Tensor, axis: SplitAxis) -> torch.Tensor:
    """Return full sequences of this rank's heads, given this rank's sequence shard of all heads (all-to-all).

    Args:
        shard: Tensor of shape [rows, heads, sequence shard, head dim].
        axis: Mesh axis of context parallelism.
    """
    heads_by_rank = torch.stack(shard.chunk(axis.size, 1))
    return _restore_order(_exchange_rows(heads_by_rank, axis), axis, 2)


def exchange_for_shards(heads: torch.Tensor, axis: SplitAxis) -> torch.Tensor:
    """Return this rank's sequence shard of all heads, given full sequences of this rank's heads (all-to-all).

    This is the inverse of `exchange_for_heads`.

    Args:
        heads: Tensor of shape [rows, heads of this rank, sequence, head dim].
        axis: Mesh axis of context parallelism.
    """
    shards_by_rank = _stack_by_rank(heads, axis, 2)
    return torch.cat(_exchange_rows(shards_by_rank, axis).unbind(0), 1)


def _exchange_rows(by_rank: torch.Tensor, axis: SplitAxis) -> torch.Tensor:
    """Send one tensor to each rank, and return the tensors received from them (all-to-all). Differentiable.

    Args:
        by_rank: Tensors of equal shape, stacked by destination rank.
        axis: Mesh axis of context parallelism.
    """
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


def join_sequence(shard: torch.Tensor, axis: SplitAxis, dim: int, length: int, grad_factor: int = 1) -> torch.Tensor:
    """Return the full sequence, all-gathered without padding, for computations that are identical on all ranks.

    Backward returns this rank's shard of the gradient, without communication.

    Args:
        shard: This rank's shard.
        axis: Mesh axis of context parallelism.
        dim: Dimension of the sequence.
        length: Length of the full sequence without padding.
        grad_factor: Factor by which backward multiplies the gradients. Default: 1.
    """
    dim = dim % shard.dim()

    def split_gradient(grad: torch.Tensor) -> torch.Tensor:
        grad_shard = split_sequence(grad, axis, dim)
        return grad_shard if grad_factor == 1 else grad_shard * grad_factor

    full = apply_with_backward(shard, partial(_gather_sequence, axis=axis, dim=dim), split_gradient)
    return full if full.shape[dim] == length else full.narrow(dim, 0, length).clone()


def divide_gradient(tensor: torch.Tensor, axis: SplitAxis) -> torch.Tensor:
    """Return the tensor unchanged. Backward divides its gradient by the number of ranks.

    The division is needed because all ranks compute this gradient identically, and their gradients are summed later.
    """
    if not tensor.requires_grad:
        return tensor
    return apply_with_backward(tensor, view_unchanged, lambda grad: grad / axis.size)


def _gather_sequence(shard: torch.Tensor, axis: SplitAxis, dim: int) -> torch.Tensor:
    """All-gather a sequence without autograd, in its original order and with padding."""
    return _restore_order(all_gather(shard, axis).view(axis.size, *shard.shape), axis, dim)


def _restore_order(by_rank: torch.Tensor, axis: SplitAxis, dim: int) -> torch.Tensor:
    """Return a full sequence in its original order, given the ranks' shards stacked along a new first dimension.

    Args:
        by_rank: Stacked shards, one for each rank.
        axis: Mesh axis of context parallelism.
        dim: Dimension of the sequence in each shard.
    """
    piece_length = by_rank.shape[dim + 1] // 2
    pieces: list[Any] = [None] * (2 * axis.size)
    for rank in range(axis.size):
        for position, piece in enumerate(find_pieces(rank, axis)):
            pieces[piece] = by_rank[rank].narrow(dim, position * piece_length, piece_length)
    return torch.cat(pieces, dim)


def _stack_by_rank(full: torch.Tensor, axis: SplitAxis, dim: int) -> torch.Tensor:
    """Return the ranks' shards of a full sequence, stacked along a new first dimension."""
    pieces = full.chunk(2 * axis.size, dim)
    shards = [torch.cat([pieces[piece] for piece in find_pieces(rank, axis)], dim) for rank in range(axis.size)]
    return torch.stack(shards)


_DEFAULT_IGNORED_LABEL = -100
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
        self._observed_label: int | None = None  # `ignore_index` of the model's cross entropy, once it was observed
        self._name = type(model).__name__

    @property
    def ignored_label(self) -> int:
        """Label that the loss ignores: from the options, else from the model's cross entropy, else -100.

        Labels are padded with it.
        """
        labels = (self._options.ignore_index, self._observed_label, _DEFAULT_IGNORED_LABEL)
        return next(label for label in labels if label is not None)

    @contextmanager
    def observe_ignored_label(self) -> Iterator[None]:
        """Return a context in which the `ignore_index` of the model's cross entropy is recorded.

        Nothing is recorded if the ranks together observe no value or several ones. Every rank must enter the context.

        Raises:
            PrepareError: If the recorded label differs from the label in the options.
        """
        with _IgnoredLabels() as recorder:
            yield
        # From all ranks, because in a pipeline only the last stage computes the loss.
        observed_labels = set().union(*self._everyone.gather_objects(recorder.observed_labels))
        if len(observed_labels) != 1:
            return
        (self._observed_label,) = observed_labels
        if self._options.ignore_index not in (None, self._observed_label):
            raise PrepareError(
                f"TorchContextParallelConfig(ignore_index={self._options.ignore_index}), but the cross entropy of "
                f"{self._name} has ignore_index={self._observed_label}; make them equal, or leave the option out"
            )

    def find_labels(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """Return the labels of a call by argument name.

        Labels are tensors of at least two dimensions, (rows, tokens), among the arguments that the options name.
        """
        arguments = {**dict(zip(self._parameters, args)), **kwargs}
        candidates = {name: arguments.get(name) for name in self._options.labels}
        return {
            name: label for name, label in candidates.items() if isinstance(label, torch.Tensor) and label.dim() > 1
        }

    def choose_dry_run_label(self, labels: Mapping[str, torch.Tensor]) -> int:
        """Return a label for dry runs: the ignored label if known, else the smallest of the given labels.

        The ignored label is known if the loss or the options determine it.

        Args:
            labels: Labels of the call by argument name.
        """
        if self._observed_label is not None:
            return self._observed_label
        if self._options.ignore_index is not None:
            return self._options.ignore_index
        class_labels = [label for label in labels.values() if _is_class(label) and not is_fake(label)]
        return min((int(label.min()) for label in class_labels), default=0)

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
        shards = {
            name: split_sequence(label, self._axis, 1, self.ignored_label if _is_class(label) else 0)
            for name, label in labels.items()
        }
        counted_name = "shift_labels" if "shift_labels" in labels else next(iter(labels))
        counts = self._count_labels(labels[counted_name]), self._count_labels(shards[counted_name])
        # Shards of positional labels are removed from `shards`, and the others replace keyword arguments.
        positional = tuple(shards.pop(name, value) for name, value in zip(self._parameters, args))
        variadic = args[len(self._parameters) :]
        return LabeledCall(positional + variadic, {**kwargs, **shards}, counts)

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
        if self._observed_label is not None or not classes:
            return
        problem = next(filter(None, map(self._find_padding_problem, classes)), "")
        has_problem_by_rank = [] if is_alone else self._everyone.gather_numbers([float(bool(problem))])
        ranks = [rank for rank, (has_problem,) in enumerate(has_problem_by_rank) if has_problem]
        if problem:
            raise DataError(problem)
        if ranks:
            raise DataError(
                f"the batch of ranks {', '.join(map(str, ranks))} has labels that cannot be padded; the error there says more"
            )

    def _find_padding_problem(self, label: torch.Tensor) -> str:
        """Return the message of the error if labels cannot be padded, or "" if they can or need not be.

        Labels can be padded with `ignored_label` unless they contain another negative label, which the loss might
        ignore instead.
        """
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
        self.observed_labels: set[int] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Record the `ignore_index` of a loss whose targets are class indices. Run all functions unchanged."""
        kwargs = kwargs or {}
        if func in _LOSSES:
            target = kwargs["target"] if "target" in kwargs else args[1]
            if _is_class(target):
                # `ignore_index` is the fifth argument of both losses.
                default = args[4] if len(args) > 4 else _DEFAULT_IGNORED_LABEL
                self.observed_labels.add(int(kwargs.get("ignore_index", default)))
        return func(*args, **kwargs)


def _is_class(label: torch.Tensor) -> bool:
    """Whether labels are class indices, which are integers."""
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
_LOSS_TOLERANCE, _FLOAT32_TOLERANCE, _TF32_TOLERANCE, _HALF_TOLERANCE = 5e-5, 2e-4, 1e-2, 5e-2
"""Largest accepted difference between results, as a fraction of the largest value.

The four values are for float32 losses, float32 outputs, TF32, and half precision.
"""


def check_options(tensor: TensorParallelOptions, num_ranks: int) -> None:
    """Raise an error if options of tensor parallelism cannot be combined with context parallelism.

    Args:
        tensor: Options of tensor parallelism.
        num_ranks: Number of ranks that split each sequence.

    Raises:
        UnsupportedError: If `sequence_parallel` or `loss_parallel` is set and there are several ranks.
    """
    enabled = [name for name in ("sequence_parallel", "loss_parallel") if num_ranks > 1 and getattr(tensor, name)]
    if enabled:
        raise UnsupportedError(
            f"context parallelism (cp={num_ranks}) cuts sequences itself, which does not work with TensorParallelOptions("
            f"{', '.join(f'{name}=True' for name in enabled)}); drop {' and '.join(enabled)}, or cp"
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
    first = next((tensor for tensor in tree.list_tensors((args, kwargs)) if tensor.dim() > 1), None)
    if first is None:
        return args, kwargs
    num_rows, length = first.shape[:2]

    def shorten_leaf(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or leaf.dim() == 0:
            return leaf
        tensor, has_rows = leaf, leaf.shape[0] == num_rows
        if num_rows > 1:
            tensor = leaf[:2] if has_rows else leaf
        elif has_rows and leaf.dim() > 1:
            tensor = torch.cat([leaf, leaf])
        first_token_dim = 1 if leaf.dim() > 1 or has_rows else 0
        for dim in range(first_token_dim, tensor.dim()):
            if tensor.shape[dim] == length:
                tensor = tensor.narrow(dim, 0, min(num_tokens, length))
        return tensor

    args, kwargs = tree.map_leaves(shorten_leaf, args), tree.map_leaves(shorten_leaf, kwargs)
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
    changed = dict(kwargs)
    for name in labels:
        label = changed[name]
        if not _is_class(label):
            continue
        # Labels that are ignored already get another class, so that only the labels set below are ignored.
        largest = int(label.max()) if not is_fake(label) else 0
        other_class = largest if largest != ignored else int(ignored == 0)
        changed[name] = label.masked_fill(label == ignored, other_class)
        changed[name][0, : max(1, label.shape[1] // 4)] = ignored
    return changed


@contextmanager
def enter_evaluation(model: torch.nn.Module) -> Iterator[None]:
    """Return a context in which the model is in evaluation mode, without gradients."""
    with use_evaluation_mode(model), torch.no_grad():
        yield


def describe_difference(full_output: Any, split_output: Any, is_exact: bool, is_loss_joined: bool = False) -> str:
    """Return a description of the first difference between two outputs, or "" if they agree.

    The tolerance for losses is narrower if `is_loss_joined`. An untrained model has similar losses for all tokens, so a
    mean over the wrong tokens is close to the correct one.

    Args:
        full_output: Output of the model for full sequences.
        split_output: Output of the model for sharded sequences.
        is_exact: Whether outputs were computed in float32.
        is_loss_joined: Whether the losses of the shards were combined. Default: False.
    """
    full_tensors, split_tensors = list(tree.list_tensors(full_output)), list(tree.list_tensors(split_output))
    full_shapes = [tuple(tensor.shape) for tensor in full_tensors]
    split_shapes = [tuple(tensor.shape) for tensor in split_tensors]
    if full_shapes != split_shapes:
        return f"its outputs have the shapes {split_shapes} when it is cut, and {full_shapes} when it is not"
    for full_tensor, split_tensor in zip(full_tensors, split_tensors):
        if not full_tensor.is_floating_point() or not full_tensor.numel() or is_fake(full_tensor):
            continue
        full, split = full_tensor.float(), split_tensor.float()
        difference = float((full - split).abs().nan_to_num(0.0).max())
        largest = float(full.abs().nan_to_num(0.0).max())
        has_other_nans = bool((full.isnan() != split.isnan()).any())
        tolerance = _choose_tolerance(full.device, is_exact)
        if is_loss_joined and not full.dim() and tolerance == _FLOAT32_TOLERANCE:
            tolerance = _LOSS_TOLERANCE
        if has_other_nans or difference > tolerance * max(largest, math.ulp(1.0)):
            name = "its loss" if not full.dim() else f"an output of the shape {tuple(full.shape)}"
            return f"{name} differs by {difference:.2g} (the largest value is {largest:.2g}) from that of the whole sequence"
    return ""


def _choose_tolerance(device: torch.device, is_exact: bool) -> float:
    """Return the accepted relative difference between outputs that are not losses.

    Args:
        device: Device on which the outputs were computed.
        is_exact: Whether they were computed in float32.
    """
    if not is_exact:
        return _HALF_TOLERANCE
    is_tf32 = device.type == "cuda" and torch.get_float32_matmul_precision() != "highest"
    return _TF32_TOLERANCE if is_tf32 else _FLOAT32_TOLERANCE
