"""Checks that all ranks built the same model and settings, and that replicas do not diverge while they train.

DDP averages gradients and assumes that all ranks have equal parameters. If one rank alone changes a parameter or a
learning rate, the ranks train different models from then on. To find this, ranks compare the hyperparameters and a
checksum of each parameter's bits. Parameters whose checksums differ are compared by value, which distinguishes a change
from rounding. When a comparison is due depends only on the number of gradient reductions, which is equal on all ranks.
So a rank that skips an update still takes part in every comparison.

Row counts of batches that do not come from a prepared loader are compared, too, because each of their losses has
weight 1.

Before a model is wrapped, its tensors and the run's settings are compared. Otherwise DDP and similar wrappers would
mix up tensors, or hang.
"""

import math
from collections import Counter
from collections.abc import Container, Sequence
from typing import Any

import torch

from headway.common.text import join_names
from headway.core.data.compare.samples import compare_samples
from headway.core.memory.oom import is_out_of_memory
from headway.core.runtime.collectives.checked import Collectives, digest_text
from headway.core.runtime.collectives.tree import find_batch_size
from headway.core.strategies.comparison_protocol import ComparedStrategy
from headway.core.training._torch import is_traceable_wrapper_subclass
from headway.core.training.prepared.objects import PreparedObjects
from headway.core.training.windows import AccumulationWindows
from headway.errors import DataError, PrepareError, StateError
from headway.log import get_logger

log = get_logger(__name__)

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer dtypes by size in bytes, as which the bits of floating-point values are read."""
_NUM_NAMES = 3
"""Largest number of tensors that a message describes."""
_CHUNK_SIZE = 1 << 22
"""Elements of a parameter that are processed at once, to limit the memory of temporary results."""
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
_DIFFERENT_ROW_COUNTS = (
    "%s, and no prepared loader counts rows: each rank's loss weighs 1, so that rows of smaller batches weigh more, and the update "
    "is not that of the whole batch. Give backward(loss, weight=n), n being what the loss is a mean over, or prepare() the loader"
)

Hyperparameters = list[dict[str, Any]]
"""Hyperparameters by name, for each parameter group of all optimizers."""


class RowCountCheck:
    """Check that all batches have equally many rows, for loops whose batches do not come from a prepared loader.

    Each loss of such a loop has weight 1. The check only warns, and derives no weight from the row counts.

    Args:
        windows: Accumulation windows of the run. Batches whose rows a prepared loader counts are not checked.
    """

    def __init__(self, windows: AccumulationWindows) -> None:
        self._windows = windows
        self._current: set[int] = set()  # row counts of the model calls since the last loss
        self._first: set[int] = set()  # row counts of the model calls before the first loss
        self._num_rows = 0
        self._has_warned = False

    def record_rows(self, model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Record the number of rows in the inputs of a prepared model's training call, unless a loader counts them."""
        if self._windows.loader is None and torch.is_grad_enabled() and model.training:
            self._current.add(find_batch_size((args, kwargs)) or 0)

    def warn_of_varying_rows(self) -> None:
        """Warn once if a loss has weight 1 although the row counts on this rank vary.

        Called for each loss with weight 1. `ReplicaCheck` finds row counts that are constant on each rank but differ
        between ranks.
        """
        current, self._current = self._current, set()
        if not current:
            return
        self._num_rows = sum(current)
        self._first = self._first or current
        if current != self._first and not self._has_warned:
            now, before = (", ".join(map(str, sorted(rows))) for rows in (current, self._first))
            problem = f"a batch of this rank has {now} rows, earlier ones {before}"
            log.warning(_DIFFERENT_ROW_COUNTS, problem, main_process_only=False)
            self._has_warned = True

    def pop_row_count(self) -> int:
        """Return the number of rows of the last loss that had weight 1, and reset the number to 0.

        The result is 0 if there was no such loss since the last call.
        """
        num_rows, self._num_rows = self._num_rows, 0
        return num_rows

    def get_position(self) -> int:
        """Return the number of samples that the current loader has returned in this epoch, or 0 without a loader."""
        return 0 if self._windows.loader is None else self._windows.loader.num_consumed

    def warn_of_differences(self, counts: list[int]) -> None:
        """Warn once that the ranks' batches have different row counts.

        Args:
            counts: Row count of each rank.
        """
        if not self._has_warned:
            text = ", ".join(f"{count} on rank {rank}" for rank, count in enumerate(counts))
            log.warning(_DIFFERENT_ROW_COUNTS, f"batches have different numbers of rows ({text})")
            self._has_warned = True


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

    def __init__(
        self, prepared: PreparedObjects, strategy: ComparedStrategy, rows: RowCountCheck, is_strict: bool
    ) -> None:
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
        group = self._strategy.get_peers()
        if group is None:
            return
        self._next_check = 2 * self._num_reductions
        replicas = [(name, p) for name, p in self._strategy.list_replicas() if _has_bits(p)]
        checksums, hyperparameters = _try_checksums([p for _, p in replicas]), self._collect_hyperparameters()
        changed = self._strategy.find_changed_shards()
        own = [
            math.nan if checksums is None else digest_text(repr(checksums)),
            digest_text(repr(hyperparameters)),
            float(self._rows.pop_row_count()),
            float(self._rows.get_position()),
            digest_text(repr(changed)),
        ]
        # Each of these tuples has one entry per rank.
        digests, hyperparameter_digests, row_counts, positions, shard_digests = zip(*group.gather_numbers(own))
        if len(set(row_counts)) > 1:
            self._rows.warn_of_differences([int(count) for count in row_counts])
        if len(set(positions)) > 1:
            text = ", ".join(f"{int(each)} on rank {rank}" for rank, each in zip(group.list_ranks(), positions))
            self._warn_once("positions", _DIFFERENT_POSITIONS % text)
        if len(set(hyperparameter_digests)) > 1:
            self._compare_hyperparameters(group, hyperparameters)
        if len(set(shard_digests)) > 1:
            self._compare_changes(group, *changed)
        if any(map(math.isnan, digests)):
            self._next_check = self._num_reductions + 1  # a rank lacks memory: all retry at the next update
        elif checksums is not None and len(set(digests)) > 1:
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
        all_ranks = group.gather_objects(checksums)
        drifted, frozen, num_rounded = list[str](), list[str](), 0
        for index, (name, parameter) in enumerate(replicas):
            by_rank = [row[index] for row in all_ranks]
            if len(set(by_rank)) == 1:
                continue
            most_frequent = Counter(by_rank).most_common(1)[0][0]
            source = by_rank.index(most_frequent)  # rank in `group`
            reference = group.broadcast(parameter.detach(), src=source)
            distances = [row[0] for row in group.gather_numbers([_compute_distance(parameter.detach(), reference)])]
            tolerance = _get_tolerance(parameter)
            differing = [rank for rank, distance in zip(group.list_ranks(), distances) if distance > tolerance]
            if not differing:
                num_rounded += 1
                continue
            where = f"rank{'s' if len(differing) > 1 else ''} {', '.join(map(str, differing))}"
            text = f"{name} on {where} differs from rank {group.list_ranks()[source]}'s by up to {max(distances):.3g}"
            (drifted if parameter.requires_grad else frozen).append(text)
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

    def _report_drift(self, text: str, remedy: str = _REMEDY) -> None:
        """Raise `StateError` if the check is strict, else warn once."""
        if self._is_strict:
            raise StateError(f"{text}. {remedy}")
        self._warn_once("drift", f"{text}. {remedy}")

    def _warn_once(self, kind: str, text: str) -> None:
        if kind not in self._warned_kinds:
            log.warning("%s", text)
            self._warned_kinds.add(kind)


def _has_bits(parameter: torch.Tensor) -> bool:
    """Whether a parameter's own storage holds its values, so that they have a checksum.

    False for meta tensors, quantized and sparse tensors, and tensors that consist of other tensors.
    """
    is_plain = parameter.layout is torch.strided and not parameter.is_quantized and not parameter.is_meta
    return is_plain and not is_traceable_wrapper_subclass(parameter)


def _try_checksums(parameters: Sequence[torch.Tensor]) -> list[int] | None:
    """Return a checksum of each parameter (the sum of its values' bits, read as integers).

    Return None if this rank runs out of memory.

    The error is caught, because the other ranks would wait in the collective for a rank that raises.
    """
    try:
        return _compute_checksums(parameters)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return None


def _compute_checksums(parameters: Sequence[torch.Tensor]) -> list[int]:
    """Return the sum of each parameter's bits, read as integers. One value is read from each device."""
    sums: dict[torch.device, list[tuple[int, torch.Tensor]]] = {}
    for index, parameter in enumerate(parameters):
        for chunk in _split_values(parameter):
            integers = chunk.view(_INTEGERS[chunk.element_size()]) if chunk.is_floating_point() else chunk
            sums.setdefault(chunk.device, []).append((index, integers.sum(dtype=torch.int64)))
    checksums = [0] * len(parameters)
    for device_sums in sums.values():
        values = torch.stack([each for _, each in device_sums]).tolist()
        for (index, _), value in zip(device_sums, values):
            checksums[index] += value
    return checksums


def _compute_distance(own: torch.Tensor, other: torch.Tensor) -> float:
    """Return the largest absolute difference between two tensors, divided by the largest absolute value in `other`.

    Two NaNs count as equal.
    """
    largest_difference, largest_value = 0.0, 1e-300  # not 0, which would be a division by zero
    for own_chunk, other_chunk in zip(_split_values(own), _split_values(other)):
        a, b = own_chunk.double(), other_chunk.double()
        are_equal = (a == b) | (a.isnan() & b.isnan())
        differences = torch.where(are_equal, 0.0, (a - b).abs()).nan_to_num(math.inf)
        largest_difference = max(largest_difference, differences.max().item())
        largest_value = max(largest_value, b.abs().nan_to_num(0.0, 0.0).max().item())
    return largest_difference / largest_value


def _split_values(parameter: torch.Tensor) -> Sequence[torch.Tensor]:
    """Return a parameter's values as a list of flat chunks, to limit the memory of computations on them."""
    detached = parameter.detach()
    real = torch.view_as_real(detached) if detached.is_complex() else detached
    return torch.split(real.reshape(-1), _CHUNK_SIZE) if real.numel() else ()


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
    more = f", and {len(texts) - _NUM_NAMES} more" if len(texts) > _NUM_NAMES else ""
    return "; ".join(texts[:_NUM_NAMES]) + more


def check_models(
    model: torch.nn.Module, settings: dict[str, str], everyone: Collectives, loaded_names: Container[str] = ()
) -> bool:
    """Raise an error if ranks built different models or settings. Return whether rank 0's model has values.

    The model has no values if some of its parameters are on the meta device. One exchange of three numbers is enough
    if all ranks are equal. Details are exchanged only if they differ. On a single process, only the class of the model
    is checked.

    Args:
        model: Model about to be wrapped.
        settings: Settings of the run, by the names of the Accelerator's arguments.
        everyone: Collectives over all ranks.
        loaded_names: Names of tensors whose values are loaded from files afterward.

    Raises:
        PrepareError: If the model is already wrapped in DDP. Also, on every rank, if the ranks differ in the settings
            or in the model's tensor names, shapes, dtypes or frozen parameters, or if rank 0's parameters have values but
            its buffers do not.
    """
    if isinstance(model, torch.nn.parallel.DistributedDataParallel):
        raise PrepareError("prepare() got a DistributedDataParallel; give the bare model, Headway wraps it")
    has_values = not any(parameter.is_meta for parameter in model.parameters())
    if everyone.world_size == 1:
        return has_values
    own = settings | _describe_tensors(model)
    missing_buffers = [name for name, buffer in model.named_buffers() if buffer.is_meta and name not in loaded_names]
    # Each of these tuples has one entry per rank.
    digests, have_values, num_missing = zip(
        *everyone.gather_numbers([digest_text(repr(own)), float(has_values), float(len(missing_buffers))])
    )
    if len(set(digests)) == 1:
        if have_values[0] and num_missing[0]:
            names = everyone.broadcast_object(missing_buffers)
            raise PrepareError(
                f"the parameters of {type(model).__name__} have values, but these of its buffers are on the meta device: "
                f"{join_names(names)}. load_state_dict(..., assign=True) leaves buffers there that are not in the state dict. "
                "Compute them before prepare, or build the model under init_empty_weights(), which keeps buffers on the CPU"
            )
        return bool(have_values[0])
    first, *others = everyone.gather_objects(own)
    rank, other = next((rank, other) for rank, other in enumerate(others, 1) if other != first)
    name = next(name for name in [*first, *other] if first.get(name) != other.get(name))
    difference = f"{first.get(name, 'missing')} on rank 0 and {other.get(name, 'missing')} on rank {rank}"
    if name in settings:
        raise PrepareError(f"ranks have different settings: {name} is {difference}; give all ranks the same")
    raise PrepareError(
        f"ranks have built different models: {name} of {type(model).__name__} is {difference}. Compute all sizes from values that "
        "are equal on every rank, not from one rank's part of the data or from a file that only one rank has read"
    )


def compare_data(dataset: Any, everyone: Collectives, is_strict: bool) -> None:
    """Compare the datasets of all ranks, and raise an error if ranks have split or shuffled their data themselves.

    A prepared loader reads only this rank's shard of its dataset. If the dataset is already a shard, most of it would
    never be read.

    Args:
        dataset: Map-style dataset of this rank.
        everyone: Collectives over all ranks. Every rank must call this function.
        is_strict: Whether different data are an error. If False, they cause one warning.

    Raises:
        DataError: On all ranks, if their data differ and `is_strict` is set.
    """
    difference = compare_samples(dataset, everyone)
    if not difference:
        return
    text = (
        f"ranks gave prepare() different data, such as a part for each: {difference}. A prepared loader gives each rank a share of "
        "its data, so the rest of each part would never be read. Give all ranks the whole data in the same order (no split by "
        "rank, and the same seed for what shuffles or splits them), or leave the loader unprepared"
    )
    if is_strict:
        raise DataError(text)
    log.warning_once("%s", text)


def _describe_tensors(model: torch.nn.Module) -> dict[str, str]:
    """Return a description of each parameter and buffer of a model (shape, dtype, whether frozen), by name."""
    parameters = {
        name: f"{tuple(p.shape)} in {p.dtype}{'' if p.requires_grad else ', frozen'}"
        for name, p in model.named_parameters()
    }
    buffers = {name: f"{tuple(buffer.shape)} in {buffer.dtype}" for name, buffer in model.named_buffers()}
    return parameters | buffers
