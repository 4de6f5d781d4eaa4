"""Check that replicas of a model do not diverge while they train.

DDP averages gradients and assumes that all ranks have equal parameters. If one rank alone changes a parameter or a
learning rate, the ranks train different models from then on. To find this, ranks compare the hyperparameters and a
checksum of each parameter's bits. Parameters whose checksums differ are compared by value, which distinguishes a change
from rounding. When a comparison is due depends only on the number of gradient reductions, which is equal on all ranks.
So a rank that skips an update still takes part in every comparison.
"""

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from headway.core.runtime.collectives.checked import Collectives, digest_text
from headway.core.strategies.base import Strategy
from headway.core.training.checks.row_counts import RowCountCheck
from headway.core.training.checksums import has_bits, split_values, try_checksums
from headway.core.training.prepared.objects import PreparedObjects
from headway.errors import StateError
from headway.log import get_logger

log = get_logger(__name__)

_NUM_NAMES = 3
"""Largest number of tensors that a message describes."""
_REMEDY = (
    "Change them alike on all ranks (the same seed for what is drawn, no condition on the rank around it), or before prepare(), "
    "which gives all ranks rank 0's values"
)
_REMEDY_FOR_OPTIONS = (
    "Give the optimizer equal options on all ranks when it is created (prepare() does not send them), and change them alike on all "
    "ranks: no condition on the rank, and for ReduceLROnPlateau a metric that is reduced over all ranks"
)
_SEVERAL_MODELS = (
    ". Or the ranks computed their losses with different models: gradients of one were then averaged with those of another. Put "
    "the models into one module, and pass kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)]"
)
_DIFFERENT_POSITIONS = (
    "ranks are at different places of their data: samples read in this pass are %s. Either the data of a rank ended before that of "
    "its peers, or a rank left batches out by itself, by continue or break. It trains on other rounds than its peers, and is missing "
    "at the end: give all ranks as many batches, and leave batches out on all ranks alike"
)
Hyperparameters = list[dict[str, Any]]
"""Hyperparameters by name, for each parameter group of all optimizers."""


class _ComparedNumbers(NamedTuple):
    """Numbers that must be equal on all ranks before an update. Digests are numbers that represent a text.

    Attributes:
        parameters: Digest of the parameters' checksums. NaN if the rank lacked the memory to compute them.
        hyperparameters: Digest of the optimizers' hyperparameters.
        num_rows: Rows in batches that do not come from a prepared loader, since the last comparison.
        position: Number of samples read in the current pass over the data.
        changed_shards: Digest of the shards that user code has changed in place, and of their version counters.
    """

    parameters: float
    hyperparameters: float
    num_rows: float
    position: float
    changed_shards: float


class ReplicaCheck:
    """Check that compares ranks to detect replicas that diverge.

    Ranks compare their parameters, hyperparameters, row counts and data positions. They do so before the updates that
    follow the gradient reductions number 1, 2, 4, 8, ...

    Args:
        prepared: Registry whose optimizers are compared.
        strategy: Strategy that defines which parameters must be equal, and on which ranks.
        rows: Row counts of batches that do not come from a prepared loader. They must be equal on all ranks, because
            each loss then has weight 1.
        is_strict: Whether differences are an error. If False, they cause one warning.
    """

    def __init__(self, prepared: PreparedObjects, strategy: Strategy, rows: RowCountCheck, is_strict: bool) -> None:
        self._prepared = prepared
        self._strategy = strategy
        self._rows = rows
        self._is_strict = is_strict
        self._num_reductions = 0
        self._next_check = 1  # number of reductions after which the next comparison is due
        self._warned_kinds: set[str] = set()

    def count_reduction(self) -> None:
        """Count a reduction of gradients, unless ranks train separately at the moment."""
        self._num_reductions += self._strategy.get_peers() is not None

    def check(self) -> None:
        """Compare the ranks before an update, if a comparison is due. One exchange of five numbers shows differences.

        Raises:
            StateError: On all ranks, if they have diverged and the check is strict.
        """
        if self._num_reductions < self._next_check:
            return
        group, everyone = self._strategy.get_peers(), self._strategy.everyone
        if group is None:
            return
        is_first = self._next_check == 1
        self._next_check = 2 * self._num_reductions
        if is_first and group is not everyone:
            # Finds ranks outside of the group that are at another call, such as a clipping that this rank does not make.
            everyone.gather_numbers((), "comparison before an update")
        replicas = [(name, p) for name, p in self._strategy.list_replicas() if has_bits(p)]
        checksums, hyperparameters = try_checksums([p for _, p in replicas]), self._collect_hyperparameters()
        changed_names, increments = self._strategy.find_changed_shards()
        own = _ComparedNumbers(
            parameters=math.nan if checksums is None else digest_text(repr(checksums)),
            hyperparameters=digest_text(repr(hyperparameters)),
            num_rows=float(self._rows.pop_row_count()),
            position=float(self._rows.get_position()),
            changed_shards=digest_text(repr((changed_names, increments))),
        )
        rows = group.gather_numbers(list(own), "comparison before an update")
        states = [_ComparedNumbers(*row) for row in rows]
        if len({state.num_rows for state in states}) > 1:
            self._rows.warn_of_differences([int(state.num_rows) for state in states])
        if len({state.position for state in states}) > 1:
            text = ", ".join(f"{int(state.position)} on rank {rank}" for rank, state in zip(group.list_ranks(), states))
            self._warn_once("positions", _DIFFERENT_POSITIONS % text)
        if len({state.hyperparameters for state in states}) > 1:
            self._compare_hyperparameters(group, hyperparameters)
        if len({state.changed_shards for state in states}) > 1:
            self._compare_changes(group, changed_names, increments)
        if any(math.isnan(state.parameters) for state in states):
            self._next_check = self._num_reductions + 1  # a rank lacks memory: all retry at the next update
        elif checksums is not None and len({state.parameters for state in states}) > 1:
            self._compare_parameters(group, replicas, checksums)

    # ---------------------------------------------------------------- hyperparameters

    def _collect_hyperparameters(self) -> Hyperparameters:
        """Return this rank's hyperparameters that can be compared."""
        result: Hyperparameters = []
        for each in self._prepared.optimizers:
            for group in each.optimizer.param_groups:
                values = {key: _to_comparable(value) for key, value in group.items()}
                result.append({key: value for key, value in values.items() if value is not None})
        return result

    def _compare_hyperparameters(self, group: Collectives, own: Hyperparameters) -> None:
        """Report optimizer hyperparameters whose values differ between the ranks of `group`. All ranks of the group must call this.

        Numbers count as equal up to a relative difference of 1e-6. If the check is not strict, differences cause one warning
        instead of an error.

        Args:
            group: Collectives over the ranks to compare.
            own: Hyperparameters of this rank, one dict per parameter group.

        Raises:
            StateError: If any of them differ, and the check is strict.
        """
        all_ranks: list[Hyperparameters] = group.gather_objects(own)
        for group_index in range(max(map(len, all_ranks))):
            options = [rank[group_index] if group_index < len(rank) else {} for rank in all_ranks]
            for key in dict.fromkeys(key for each in options for key in each):
                values = [each.get(key) for each in options]
                if any(not _are_close(values[0], other) for other in values):
                    text = ", ".join(f"{other} on rank {rank}" for rank, other in zip(group.list_ranks(), values))
                    self._report_drift(
                        f"the optimizers of the ranks are not alike: {key!r} of parameter group {group_index} is {text}",
                        _REMEDY_FOR_OPTIONS,
                    )

    # ---------------------------------------------------------------- parameters

    def _compare_changes(self, group: Collectives, names: list[str], per_step: list[int]) -> None:
        """Report shards that some ranks changed in place since the last comparison, but others did not.

        Args:
            group: Collectives over the ranks to compare.
            names: Parameters whose shards user code has changed in place on this rank.
            per_step: For every parameter, the number by which an optimizer step increases its version counter.

        Raises:
            StateError: If there are such shards, and the check is strict.
        """
        all_ranks: list[tuple[list[str], list[int]]] = group.gather_objects((names, per_step))
        if any(counts != per_step for _, counts in all_ranks):
            return  # an optimizer that steps only on some ranks cannot be distinguished from user code
        differences = []
        for name in dict.fromkeys(name for changed, _ in all_ranks for name in changed):
            ranks = [rank for rank, (changed, _) in zip(group.list_ranks(), all_ranks) if name in changed]
            if len(ranks) < len(all_ranks):
                differences.append(f"{name} on rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}")
        if differences:
            self._report_drift(
                f"parts of sharded parameters were changed in place on some ranks alone: {_join_shortened(differences)}"
            )

    def _compare_parameters(
        self, group: Collectives, replicas: Sequence[tuple[str, torch.Tensor]], checksums: list[int]
    ) -> None:
        """Compare the values of the parameters whose checksums differ, one parameter at a time to save memory.

        Each parameter is compared with that of a rank that has the most frequent checksum. Differences of frozen
        parameters, and those of the size of rounding, only cause a warning.

        Args:
            group: Collectives over the ranks to compare.
            replicas: Pairs of (name, parameter), in the order of `checksums`.
            checksums: Checksum of each parameter on this rank.

        Raises:
            StateError: If trainable parameters differ by more than rounding, and the check is strict.
        """
        checksums_by_rank = group.gather_objects(checksums)
        drifted: list[str] = []
        frozen: list[str] = []
        num_rounded = 0
        for index, (name, parameter) in enumerate(replicas):
            parameter_checksums = [rank_checksums[index] for rank_checksums in checksums_by_rank]
            if len(set(parameter_checksums)) == 1:
                continue
            difference = self._describe_difference(group, name, parameter, parameter_checksums)
            if difference is None:
                num_rounded += 1
            elif parameter.requires_grad:
                drifted.append(difference)
            else:
                frozen.append(difference)
        if drifted:
            text = f"the replicas of the model are not alike on all ranks: {_join_shortened(drifted)}"
            self._report_drift(text + (_SEVERAL_MODELS if len(self._prepared.models) > 1 else ""))
        if frozen:
            self._warn_once(
                "frozen", f"frozen parameters are not alike on all ranks: {_join_shortened(frozen)}. {_REMEDY}"
            )
        if num_rounded:
            cause = (
                "ranks compute on different kinds of devices, or an optimizer draws random numbers of each rank's own"
            )
            self._warn_once("bits", f"{num_rounded} parameters differ between ranks in their last bits: {cause}")

    def _describe_difference(
        self, group: Collectives, name: str, parameter: torch.Tensor, checksums: Sequence[int]
    ) -> str | None:
        """Return how a parameter differs between ranks, or None if only by rounding. All ranks of `group` must call it.

        Args:
            group: Collectives over the ranks to compare.
            name: Name of the parameter.
            parameter: Parameter of this rank.
            checksums: Checksum of the parameter on each rank of `group`. The most frequent one is taken as correct.
        """
        most_frequent = Counter(checksums).most_common(1)[0][0]
        source = checksums.index(most_frequent)  # rank in `group`
        reference = group.broadcast(parameter.detach(), src=source)
        distances = [row[0] for row in group.gather_numbers([_compute_distance(parameter.detach(), reference)])]
        tolerance = _get_tolerance(parameter)
        differing = [rank for rank, distance in zip(group.list_ranks(), distances) if distance > tolerance]
        if not differing:
            return None
        where = f"rank{'s' if len(differing) > 1 else ''} {', '.join(map(str, differing))}"
        return f"{name} on {where} differs from rank {group.list_ranks()[source]}'s by up to {max(distances):.3g}"

    def _report_drift(self, text: str, remedy: str = _REMEDY) -> None:
        """Raise `StateError` if the check is strict, else warn once."""
        if self._is_strict:
            raise StateError(f"{text}. {remedy}")
        self._warn_once("drift", f"{text}. {remedy}")

    def _warn_once(self, kind: str, text: str) -> None:
        """Log a warning unless this check has logged one of this kind.

        Args:
            kind: Kind of the difference, such as "positions".
            text: Warning.
        """
        if kind not in self._warned_kinds:
            log.warning("%s", text)
            self._warned_kinds.add(kind)


def _compute_distance(own: torch.Tensor, other: torch.Tensor) -> float:
    """Return the largest absolute difference between two tensors, divided by the largest absolute value in `other`.

    Two NaNs count as equal.
    """
    largest_difference, largest_value = 0.0, 1e-300  # not 0, which would be a division by zero
    for own_chunk, other_chunk in zip(split_values(own), split_values(other)):
        a, b = own_chunk.double(), other_chunk.double()
        are_equal = (a == b) | (a.isnan() & b.isnan())
        differences = torch.where(are_equal, 0.0, (a - b).abs()).nan_to_num(math.inf)
        largest_difference = max(largest_difference, differences.max().item())
        largest_value = max(largest_value, b.abs().nan_to_num(0.0, 0.0).max().item())
    return largest_difference / largest_value


def _get_tolerance(parameter: torch.Tensor) -> float:
    """Return the relative difference that rounding can cause during a run: the square root of the dtype's epsilon.

    The result is 0 for integers.
    """
    is_inexact = parameter.is_floating_point() or parameter.is_complex()
    return float(torch.finfo(parameter.dtype).eps ** 0.5) if is_inexact else 0.0


def _to_comparable(value: Any) -> Any:
    """Return a hyperparameter if its type can be compared between ranks, else None.

    A tensor with one element is returned as a number.
    """
    if isinstance(value, torch.Tensor):
        return value.item() if value.numel() == 1 else None
    if isinstance(value, tuple) and all(isinstance(each, int | float) for each in value):
        return value
    return value if isinstance(value, bool | int | float | str) else None


def _are_close(one: Any, other: Any) -> bool:
    """Whether two hyperparameters are equal, up to a relative difference of 1e-6 of numbers. Two NaNs are equal."""
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(map(_are_close, one, other))
    if isinstance(one, int | float) and isinstance(other, int | float):
        return math.isclose(one, other, rel_tol=1e-6) or (math.isnan(one) and math.isnan(other))
    return bool(one == other)


def _join_shortened(texts: list[str]) -> str:
    """Return the first texts, separated by semicolons, and the number of the others."""
    more = f", and {len(texts) - _NUM_NAMES} more" if len(texts) > _NUM_NAMES else ""
    return "; ".join(texts[:_NUM_NAMES]) + more
