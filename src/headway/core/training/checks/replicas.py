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
_NUM_NAMES = 3
_PART = 1 << 22
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
_PLACES = (
    "ranks are at different places of their data: samples read in this pass are %s. Either the data of a rank ended before that of "
    "its peers, or a rank left batches out by itself, by continue or break. It trains on other rounds than its peers, and is missing "
    "at the end: give all ranks as many batches, and leave batches out on all ranks alike"
)
_UNEVEN = (
    "%s, and no prepared loader counts rows: each rank's loss weighs 1, so that rows of smaller batches weigh more, and the update "
    "is not that of the whole batch. Give backward(loss, weight=n), n being what the loss is a mean over, or prepare() the loader"
)

Settings = list[dict[str, Any]]
"""Hyperparameters of each parameter group of each optimizer."""


class RowCountCheck:
    """Check that all batches have equally many rows, for loops whose batches do not come from a prepared loader.

    Each loss of such a loop has weight 1. The check only warns, and derives no weight from the row counts.

    Args:
        windows: Accumulation windows of the run. Batches whose rows a prepared loader counts are not checked.
    """

    def __init__(self, windows: AccumulationWindows) -> None:
        self._windows = windows
        self._seen: set[int] = set()
        self._first: set[int] = set()
        self._num_rows = 0
        self._is_told = False

    def record_rows(self, model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Record the number of rows in the inputs of a prepared model's training call, unless a loader counts them."""
        if self._windows.loader is None and torch.is_grad_enabled() and model.training:
            self._seen.add(find_batch_size((args, kwargs)) or 0)

    def warn_of_varying_rows(self) -> None:
        """Warn if a loss has weight 1 although the row counts on this rank vary.

        `ReplicaCheck` finds row counts that are constant on each rank but differ between ranks.
        """
        seen, self._seen = self._seen, set()
        if not seen:
            return
        self._num_rows = sum(seen)
        self._first = self._first or seen
        if seen != self._first and not self._is_told:
            now, before = (", ".join(map(str, sorted(rows))) for rows in (seen, self._first))
            log.warning(_UNEVEN, f"a batch of this rank has {now} rows, earlier ones {before}", main_process_only=False)
            self._is_told = True

    def take_row_count(self) -> int:
        """Return the number of rows of the last loss that had weight 1, and reset the number to 0.

        The result is 0 if there was no such loss since the last call.
        """
        found, self._num_rows = self._num_rows, 0
        return found

    def get_position(self) -> int:
        """Return the number of samples that the current loader has returned in this epoch, or 0 without a loader."""
        return 0 if self._windows.loader is None else self._windows.loader.num_consumed

    def warn_of_differences(self, counts: list[int]) -> None:
        """Warn once that the ranks' batches have different row counts."""
        if not self._is_told:
            told = ", ".join(f"{count} on rank {rank}" for rank, count in enumerate(counts))
            log.warning(_UNEVEN, f"batches have different numbers of rows ({told})")
            self._is_told = True


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
        self._num_reduced, self._next = 0, 1
        self._told: set[str] = set()

    def count_reduction(self) -> None:
        """Count a reduction of gradients, unless ranks train separately at the moment."""
        self._num_reduced += self._strategy.get_peers() is not None

    def check(self) -> None:
        """Compare the ranks before an update, if a comparison is due.

        Raises:
            StateError: On all ranks, if they have diverged and the check is strict.
        """
        if self._num_reduced < self._next:
            return
        group = self._strategy.get_peers()
        if group is None:
            return
        self._next = 2 * self._num_reduced
        replicas = [(name, p) for name, p in self._strategy.list_replicas() if _has_bits(p)]
        bits, settings = _try_checksums([p for _, p in replicas]), self._collect_settings()
        look = math.nan if bits is None else digest_text(repr(bits))
        changed = self._strategy.find_changed_shards()
        own = [
            look,
            digest_text(repr(settings)),
            float(self._rows.take_row_count()),
            float(self._rows.get_position()),
            digest_text(repr(changed)),
        ]
        parameters, hyperparameters, rows, places, shards = zip(*group.gather_numbers(own))
        if len(set(rows)) > 1:
            self._rows.warn_of_differences([int(count) for count in rows])
        if len(set(places)) > 1:
            told = ", ".join(f"{int(place)} on rank {rank}" for rank, place in zip(group.list_ranks(), places))
            self._warn_once("places", _PLACES % told)
        if len(set(hyperparameters)) > 1:
            self._compare_settings(group, settings)
        if len(set(shards)) > 1:
            self._compare_changes(group, *changed)
        if any(map(math.isnan, parameters)):
            self._next = self._num_reduced + 1  # a rank lacks memory: all retry at the next update
        elif bits is not None and len(set(parameters)) > 1:
            self._compare_parameters(group, replicas, bits)

    # ---------------------------------------------------------------- hyperparameters

    def _collect_settings(self) -> Settings:
        groups = [group for each in self._prepared.optimizers for group in each.optimizer.param_groups]
        return [{key: value for key in group if (value := _to_comparable(group[key])) is not None} for group in groups]

    def _compare_settings(self, group: Collectives, own: Settings) -> None:
        every: list[Settings] = group.gather_objects(own)
        for number, first in enumerate(every[0]):
            for key, value in first.items():
                values = [settings[number].get(key) if number < len(settings) else None for settings in every]
                if any(not _are_close(value, other) for other in values):
                    told = ", ".join(f"{other} on rank {rank}" for rank, other in zip(group.list_ranks(), values))
                    self._report_drift(
                        f"the optimizers of the ranks are not alike: {key!r} of parameter group {number} is {told}",
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
        every: list[tuple[list[str], list[int]]] = group.gather_objects((names, per_step))
        if any(counts != per_step for _, counts in every):
            return  # an optimizer that steps only on some ranks cannot be distinguished from user code
        told = []
        for name in dict.fromkeys(name for changed, _ in every for name in changed):
            ranks = [rank for rank, (changed, _) in zip(group.list_ranks(), every) if name in changed]
            if len(ranks) < len(every):
                told.append(f"{name} on rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}")
        if told:
            self._report_drift(
                f"parts of sharded parameters were changed in place on some ranks alone: {_join_shortened(told)}"
            )

    def _compare_parameters(
        self, group: Collectives, replicas: Sequence[tuple[str, torch.Tensor]], bits: list[int]
    ) -> None:
        """Compare the values of the parameters whose checksums differ, one parameter at a time to save memory.

        Args:
            group: Collectives over the ranks to compare.
            replicas: Pairs of (name, parameter), in the order of `bits`.
            bits: Checksum of each parameter on this rank.

        Raises:
            StateError: If trainable parameters differ by more than rounding, and the check is strict.
        """
        every = group.gather_objects(bits)
        drifted, frozen, num_rounded = list[str](), list[str](), 0
        for index, (name, parameter) in enumerate(replicas):
            column = [row[index] for row in every]
            if len(set(column)) == 1:
                continue
            usual = Counter(column).most_common(1)[0][0]
            there = group.broadcast(parameter.detach(), src=column.index(usual))
            distances = [row[0] for row in group.gather_numbers([_compute_distance(parameter.detach(), there)])]
            others = [
                rank for rank, distance in zip(group.list_ranks(), distances) if distance > _get_tolerance(parameter)
            ]
            num_rounded += not others
            if others:
                where = f"rank{'s' if len(others) > 1 else ''} {', '.join(map(str, others))}"
                source = group.list_ranks()[column.index(usual)]
                told = f"{name} on {where} differs from rank {source}'s by up to {max(distances):.3g}"
                (drifted if parameter.requires_grad else frozen).append(told)
        if drifted:
            told = f"the replicas of the model are not alike on all ranks: {_join_shortened(drifted)}"
            self._report_drift(told + (_SEVERAL_MODELS if len(self._prepared.models) > 1 else ""))
        if frozen:
            self._warn_once(
                "frozen", f"frozen parameters are not alike on all ranks: {_join_shortened(frozen)}. {_REMEDY}"
            )
        if num_rounded:
            what = (
                "ranks compute on different kinds of devices, or an optimizer draws random numbers of each rank's own"
            )
            self._warn_once("bits", f"{num_rounded} parameters differ between ranks in their last bits: {what}")

    def _report_drift(self, text: str, remedy: str = _REMEDY) -> None:
        if self._is_strict:
            raise StateError(f"{text}. {remedy}")
        self._warn_once("drift", f"{text}. {remedy}")

    def _warn_once(self, kind: str, text: str) -> None:
        if kind not in self._told:
            log.warning("%s", text)
            self._told.add(kind)


def _has_bits(parameter: torch.Tensor) -> bool:
    """Whether a parameter's own storage holds its values.

    The storage of a quantized parameter, for example, does not.
    """
    is_plain = parameter.layout is torch.strided and not parameter.is_quantized and not parameter.is_meta
    return is_plain and not is_traceable_wrapper_subclass(parameter)


def _try_checksums(parameters: Sequence[torch.Tensor]) -> list[int] | None:
    """Return a checksum of each parameter (the sum of its bits as integers), or None if this rank runs out of memory.

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
        for part in _split_values(parameter):
            whole = part.view(_INTEGERS[part.element_size()]) if part.is_floating_point() else part
            sums.setdefault(part.device, []).append((index, whole.sum(dtype=torch.int64)))
    found = [0] * len(parameters)
    for several in sums.values():
        for (index, _), value in zip(several, torch.stack([each for _, each in several]).tolist()):
            found[index] += value
    return found


def _compute_distance(own: torch.Tensor, other: torch.Tensor) -> float:
    """Return the largest absolute difference between two tensors, divided by the largest absolute value in `other`.

    Two NaNs count as equal.
    """
    most, size = 0.0, 1e-300
    for one, two in zip(_split_values(own), _split_values(other)):
        one, two = one.double(), two.double()
        away = torch.where((one == two) | (one.isnan() & two.isnan()), 0.0, (one - two).abs()).nan_to_num(math.inf)
        most, size = max(most, away.max().item()), max(size, two.abs().nan_to_num(0.0, 0.0).max().item())
    return most / size


def _split_values(parameter: torch.Tensor) -> Sequence[torch.Tensor]:
    """Return a parameter's values as a list of flat chunks, to limit the memory of computations on them."""
    plain = parameter.detach()
    real = torch.view_as_real(plain) if plain.is_complex() else plain
    return torch.split(real.reshape(-1), _PART) if real.numel() else ()


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
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(map(_are_close, one, other))
    if isinstance(one, int | float) and isinstance(other, int | float):
        return math.isclose(one, other, rel_tol=1e-6) or (math.isnan(one) and math.isnan(other))
    return bool(one == other)


def _join_shortened(told: list[str]) -> str:
    more = f", and {len(told) - _NUM_NAMES} more" if len(told) > _NUM_NAMES else ""
    return "; ".join(told[:_NUM_NAMES]) + more


def check_models(
    model: torch.nn.Module, settings: dict[str, str], everyone: Collectives, expected: Container[str] = ()
) -> bool:
    """Raise an error if ranks built different models or settings. Return whether rank 0's model has values.

    The model has no values if some of its parameters are on the meta device. One exchange of three numbers is enough
    if all ranks are equal. Details are exchanged only if they differ.

    Args:
        model: Model about to be wrapped.
        settings: Settings of the run, by the names of the Accelerator's arguments.
        everyone: Collectives over all ranks.
        expected: Names of tensors whose values are loaded from files afterward.

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
    lacking = [name for name, buffer in model.named_buffers() if buffer.is_meta and name not in expected]
    digests, values, num_lacking = zip(
        *everyone.gather_numbers([digest_text(repr(own)), float(has_values), float(len(lacking))])
    )
    if len(set(digests)) == 1:
        if values[0] and num_lacking[0]:
            names = everyone.broadcast_object(lacking)
            raise PrepareError(
                f"the parameters of {type(model).__name__} have values, but these of its buffers are on the meta device: "
                f"{join_names(names)}. load_state_dict(..., assign=True) leaves buffers there that are not in the state dict. "
                "Compute them before prepare, or build the model under init_empty_weights(), which keeps buffers on the CPU"
            )
        return bool(values[0])
    first, *others = everyone.gather_objects(own)
    rank, other = next((rank, other) for rank, other in enumerate(others, 1) if other != first)
    name = next(name for name in [*first, *other] if first.get(name) != other.get(name))
    found = f"{first.get(name, 'missing')} on rank 0 and {other.get(name, 'missing')} on rank {rank}"
    if name in settings:
        raise PrepareError(f"ranks have different settings: {name} is {found}; give all ranks the same")
    raise PrepareError(
        f"ranks have built different models: {name} of {type(model).__name__} is {found}. Compute all sizes from values that are "
        "equal on every rank, not from one rank's part of the data or from a file that only one rank has read"
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
    told = (
        f"ranks gave prepare() different data, such as a part for each: {difference}. A prepared loader gives each rank a share of "
        "its data, so the rest of each part would never be read. Give all ranks the whole data in the same order (no split by "
        "rank, and the same seed for what shuffles or splits them), or leave the loader unprepared"
    )
    if is_strict:
        raise DataError(told)
    log.warning_once("%s", told)


def _describe_tensors(model: torch.nn.Module) -> dict[str, str]:
    """Return a description of each parameter and buffer of a model (shape, dtype, whether frozen), by name."""
    found = {
        name: f"{tuple(p.shape)} in {p.dtype}{'' if p.requires_grad else ', frozen'}"
        for name, p in model.named_parameters()
    }
    return found | {name: f"{tuple(buffer.shape)} in {buffer.dtype}" for name, buffer in model.named_buffers()}
