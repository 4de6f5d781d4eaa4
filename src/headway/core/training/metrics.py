"""Gathering of per-sample results from all ranks, in the order of the data and without padding samples."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy
import torch

from headway.core.data.loader import PreparedLoader
from headway.core.runtime.collectives.checked import Collectives
from headway.core.runtime.collectives.tree import Tree, list_tensors
from headway.errors import MetricError
from headway.log import get_logger

log = get_logger(__name__)


def gather_for_metrics(
    tree: Tree, loader: PreparedLoader | None, collectives: Collectives, use_gather_object: bool
) -> Tree:
    """Concatenate per-sample results of all ranks, without the samples that only padded the batch.

    All ranks must call this function.

    Args:
        tree: Tuples and dicts of tensors or arrays with one row per sample, or lists with one item per sample. A list
            of tensors or containers counts as a structure if its length differs from the batch size, or if all of its
            items are tensors with one row per sample. If the batch size is unknown, a list of tensors does.
        loader: Loader that returned the batch. None: padding is unknown, and everything is concatenated.
        collectives: Collectives over the ranks.
        use_gather_object: Whether every list has one item per sample. False: lists are distinguished as for `tree`.

    Raises:
        MetricError: If a leaf does not have one entry per sample. On several ranks, also if a list could be read both
            as a structure and as one item per sample.
    """
    num_rows = None if loader is None else loader.num_rows
    num_valid = None if loader is None else loader.num_valid
    gather = _MetricGather(num_rows, num_valid, _get_full_batch_size(loader), use_gather_object, collectives)
    build_result = gather.record_leaves(tree)
    gather.run()
    return build_result()


def warn_of_repeats(tree: Tree, loader: PreparedLoader | None, num_ranks: int) -> None:
    """Warn once if `gather()` returns samples that were repeated to complete a batch.

    The script would count them as additional samples.

    Args:
        tree: Tensors to gather.
        loader: Loader that returned the current batch. None: there is nothing to warn of.
        num_ranks: Number of ranks that contribute rows.
    """
    num_rows = None if loader is None else loader.num_rows
    counts = None if loader is None else loader.valid_counts
    if not num_rows or not counts or not any(each.ndim and each.shape[0] == num_rows for each in list_tensors(tree)):
        return
    num_repeats = num_rows * num_ranks - sum(counts)
    # If ranks share data shards, as in tensor parallelism, there are fewer counts than ranks, and rows are repeated, too.
    if num_repeats > 0 and (len(counts) < num_ranks or min(counts) < num_rows):
        log.warning_once(
            "of the %d rows that gather() joins from here, %d are repeats; gather_for_metrics() returns each sample once",
            num_rows * num_ranks,
            num_repeats,
        )


def _get_full_batch_size(loader: PreparedLoader | None) -> int | None:
    """Return the number of rows of a full batch on this rank, or None if it varies or is unknown."""
    total = None if loader is None else loader.total_batch_size
    counts = None if loader is None else loader.valid_counts
    return total // len(counts) if total and counts else None


@dataclass
class _MetricGather:
    """One gather of a nested structure: the leaves to send, and later the values received from all ranks.

    First, `record_leaves` collects the leaves to send. Then `run` gathers them all, in at most two collectives: one for
    tensors, and one for arrays and lists with one item per sample, which are sent as pickled objects. Finally, the
    function that `record_leaves` returned builds the result.

    Attributes:
        num_rows: Number of rows in this rank's batch, or None if unknown.
        num_valid: Number of these rows, from the first, that do not only pad the batch, or None if unknown.
        full_batch_size: Number of rows of a full batch on this rank, or None if it varies or is unknown.
        is_list_per_sample: Whether every list has one item per sample.
        collectives: Collectives over the ranks.
        tensors: Tensors to send, without padding.
        sequences: Arrays and lists to send, without padding.
        gathered_tensors: For each of `tensors`, the tensors of all ranks, concatenated. Empty before `run`.
        gathered_sequences: For each of `sequences`, those of all ranks, concatenated. Empty before `run`.
    """

    num_rows: int | None
    num_valid: int | None
    full_batch_size: int | None
    is_list_per_sample: bool
    collectives: Collectives
    tensors: list[torch.Tensor] = field(default_factory=list)
    sequences: list[Any] = field(default_factory=list)
    gathered_tensors: list[torch.Tensor] = field(default_factory=list)
    gathered_sequences: list[Any] = field(default_factory=list)

    def run(self) -> None:
        """Gather the recorded leaves from all ranks. Every rank must call it."""
        self.gathered_tensors = list(self.collectives.gather(self.tensors))
        if self.sequences:
            sequences_by_rank = self.collectives.gather_objects(self.sequences)
            self.gathered_sequences = [_concatenate(of_all_ranks) for of_all_ranks in zip(*sequences_by_rank)]

    def record_leaves(self, tree: Tree) -> Callable[[], Any]:
        """Record the leaves of a tree for the gather.

        This is a collective if the tree contains lists of tensors or containers, because ranks agree on their meaning.

        Args:
            tree: Nested structure, as for `gather_for_metrics`.

        Returns:
            A function without arguments that builds a tree with the structure of `tree` from the gathered values. Call
                it after `run`. A mapping becomes a plain dict.

        Raises:
            MetricError: If a leaf does not have one entry per sample, or if a list is ambiguous.
        """
        if isinstance(tree, torch.Tensor):
            return self._record_tensor(tree)
        if isinstance(tree, Mapping):
            builders = {key: self.record_leaves(value) for key, value in tree.items()}
            return lambda: {key: build() for key, build in builders.items()}
        if isinstance(tree, tuple):
            return self._record_items(tree, type(tree))
        if isinstance(tree, list) and self._is_structure(tree):
            return self._record_items(tree, list)
        if isinstance(tree, numpy.ndarray):
            return self._record_sequence(tree, tree.shape[0] if tree.ndim else None, f"an array of shape {tree.shape}")
        if isinstance(tree, list):
            return self._record_sequence(tree, len(tree), f"a list of {len(tree)} items")
        raise MetricError(
            f"gather_for_metrics got a {type(tree).__name__} ({tree!r:.40}), which does not hold one entry per sample; give "
            "tensors, arrays or lists with one row per sample. For a number per rank use reduce_mean(total, weight)"
        )

    def _record_tensor(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Record a tensor with one row per sample, and return a function that returns the gathered tensor."""
        self._check_length(tensor.shape[0] if tensor.ndim else None, f"a tensor of shape {tuple(tensor.shape)}")
        index = len(self.tensors)
        self.tensors.append(tensor[: self.num_valid])
        return lambda: self.gathered_tensors[index]

    def _record_sequence(self, values: Any, length: int | None, description: str) -> Callable[[], Any]:
        """Record an array or a list with one entry per sample, and return a function that returns the gathered one.

        Args:
            values: Array or list.
            length: Number of its entries, or None for an array without dimensions.
            description: Description of the values, for messages.
        """
        self._check_length(length, description)
        index = len(self.sequences)
        self.sequences.append(values[: self.num_valid])
        return lambda: self.gathered_sequences[index]

    def _record_items(self, items: Sequence[Any], sequence_type: Any) -> Callable[[], Any]:
        """Record the leaves of all items, and return a function that builds a sequence of the gathered items.

        Args:
            items: Items of a tuple or list, each of which is a tree.
            sequence_type: Type of the built sequence: `list`, `tuple`, or a subclass of `tuple`.
        """
        builders = [self.record_leaves(item) for item in items]
        is_named_tuple = hasattr(sequence_type, "_fields")
        if is_named_tuple:
            return lambda: sequence_type(*[build() for build in builders])
        return lambda: sequence_type([build() for build in builders])

    def _is_structure(self, values: list[Any]) -> bool:
        """Whether a list is a structure of per-sample values, and does not itself have one item per sample.

        If the batch size is known, all ranks decide together about a list of tensors or containers, in a collective.

        Raises:
            MetricError: If the list could be either of them on every one of several ranks.
        """
        is_nested = bool(values) and all(isinstance(v, torch.Tensor | list | Mapping | tuple) for v in values)
        if self.is_list_per_sample or not is_nested:
            return False
        if self.num_rows is None:
            return all(isinstance(value, torch.Tensor) for value in values)
        own_may_be_items = len(values) == self.num_rows
        have_batch_rows = all(
            isinstance(value, torch.Tensor) and value.ndim > 0 and value.shape[0] == self.num_rows for value in values
        )
        own_may_be_structure = have_batch_rows or not own_may_be_items
        # On one rank the lengths can be equal by chance, so a rank on which they differ decides for all.
        answers = self.collectives.gather_numbers([float(own_may_be_items), float(own_may_be_structure)])
        may_be_items = all(rank_may_be_items for rank_may_be_items, _ in answers)
        may_be_structure = all(rank_may_be_structure for _, rank_may_be_structure in answers)
        if may_be_items and may_be_structure and len(answers) > 1:
            raise MetricError(
                f"gather_for_metrics got a list of {len(values)} tensors of {self.num_rows} rows each for a batch of {self.num_rows} "
                "samples: is it one tensor per sample, or several tensors of the whole batch? For the first pass "
                "use_gather_object=True, for the second a tuple"
            )
        return may_be_structure

    def _check_length(self, length: int | None, description: str) -> None:
        """Check that a leaf has one entry per sample.

        In the short last batch of a loader, also accept the length of a full batch, with a warning. Scripts often
        repeat a loss by the configured batch size, as in `loss.repeat(batch_size)`.

        Args:
            length: Number of entries, or None for a single value.
            description: Description of the leaf, for messages.

        Raises:
            MetricError: If the leaf has another length.
        """
        if length is None:
            raise MetricError(
                f"gather_for_metrics got {description}, which is one value for the whole batch; it would be joined as if it were a "
                "sample. Use reduce_mean(total, weight) for a mean, or gather() for one value per rank"
            )
        if self.num_rows is None or length == self.num_rows:
            return
        is_full_length = length == self.full_batch_size and length > self.num_rows
        if self.num_valid is None or not is_full_length:
            raise MetricError(
                f"gather_for_metrics got {description} for a batch of {self.num_rows} samples; give one entry per sample, or use "
                "gather() for values that are not per sample"
            )
        log.warning_once(
            "gather_for_metrics got %s for a batch of %d samples, the short last one of its loader: only the first %d count. "
            "Write loss.repeat(len(batch)) instead of repeating to the batch size",
            description,
            self.num_rows,
            self.num_valid,
        )


def _concatenate(sequences: Sequence[Any]) -> Any:
    """Concatenate the arrays, or the lists, of all ranks."""
    if isinstance(sequences[0], numpy.ndarray):
        return numpy.concatenate(sequences)
    return [each for sequence in sequences for each in sequence]
