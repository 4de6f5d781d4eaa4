"""Have all ranks built the same model, and do they still train the same? Asked by small exchanges.

DDP averages gradients and trusts that parameters are alike. What one rank changes by itself (a parameter, a learning rate) stays
different for ever, and each rank then computes the gradient of another model. A rank's fingerprint is a sum over the bits of
each parameter, and the hyperparameters; bits that are not alike are compared by value, which tells a change from rounding.

Updates are counted by the reductions that all ranks took part in: what a rank skips by itself does not make it miss an exchange.

Rows of batches that no prepared loader counts, on several ranks: each loss weighs 1, however many rows it was taken over.

Have all ranks built the same model, and the same settings? Asked before it is wrapped: engines would mix tensors up, or hang.
"""

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils.data import Subset, TensorDataset

from headway.errors import PrepareError, StateError
from headway.log import get_logger
from headway.memory.oom import is_out_of_memory
from headway.runtime.collectives.checked import Collectives, digest
from headway.runtime.collectives.tree import find_batch_size
from headway.strategies.base import Strategy
from headway.training.prepared.objects import PreparedObjects
from headway.training.windows import AccumulationWindows

log = get_logger(__name__)

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_NUM_NAMES = 3
_PART = 1 << 22
_REMEDY = (
    "Change them alike on all ranks (the same seed for what is drawn, no condition on the rank around it), or before prepare(), "
    "which gives all ranks rank 0's values"
)
_PLACES = (
    "ranks are at different places of their data: samples read in this pass are %s. A rank that leaves batches out by itself, by "
    "continue or break, trains on other rounds than its peers, and is missing at the end; leave them out on all ranks alike"
)
_UNEVEN = (
    "%s, and no prepared loader counts rows: each rank's loss weighs 1, so that rows of smaller batches weigh more, and the update "
    "is not that of the whole batch. Give backward(loss, weight=n), n being what the loss is a mean over, or prepare() the loader"
)

Settings = list[dict[str, Any]]
"""The hyperparameters of each group of each optimizer."""


class RowCountCheck:
    """Looks at the first dimension of what models are called with; it guesses no weight from that, it tells.

    Args:
        windows: of the run; what a prepared loader counts is not looked at.
    """

    def __init__(self, windows: AccumulationWindows) -> None:
        self._windows = windows
        self._seen: set[int] = set()
        self._first: set[int] = set()
        self._num_rows = 0
        self._is_told = False

    def see(self, model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A prepared model is called."""
        if self._windows.loader is None and torch.is_grad_enabled() and model.training:
            self._seen.add(find_batch_size((args, kwargs)) or 0)

    def unweighed(self) -> None:
        """A loss weighs 1. Where this rank's batches change, others' may not; where all ranks' always differ, `take` shows it."""
        seen, self._seen = self._seen, set()
        if not seen:
            return
        self._num_rows = sum(seen)
        self._first = self._first or seen
        if seen != self._first and not self._is_told:
            now, before = (", ".join(map(str, sorted(rows))) for rows in (seen, self._first))
            log.warning(_UNEVEN, f"a batch of this rank has {now} rows, earlier ones {before}", main_process_only=False)
            self._is_told = True

    def take(self) -> int:
        """The rows that the last loss was computed from, if it weighs 1."""
        found, self._num_rows = self._num_rows, 0
        return found

    def place(self) -> int:
        """How many samples of its pass the loader in iteration has given."""
        return 0 if self._windows.loader is None else self._windows.loader.num_consumed

    def tell(self, counts: list[int]) -> None:
        """The ranks' batches differ."""
        if not self._is_told:
            told = ", ".join(f"{count} on rank {rank}" for rank, count in enumerate(counts))
            log.warning(_UNEVEN, f"batches have different numbers of rows ({told})")
            self._is_told = True


class ReplicaCheck:
    """Compares ranks now and then.

    Args:
        prepared: whose optimizers are compared.
        strategy: knows what must be alike, and among whom.
        rows: of the batches that nobody weighs, which are compared too.
        is_strict: ranks that differ are an error; False: one warning.
    """

    def __init__(self, prepared: PreparedObjects, strategy: Strategy, rows: RowCountCheck, is_strict: bool) -> None:
        self._prepared = prepared
        self._strategy = strategy
        self._rows = rows
        self._is_strict = is_strict
        self._num_reduced, self._next = 0, 1
        self._told: set[str] = set()

    def note(self) -> None:
        """Gradients were made final, by all ranks together or by this one alone."""
        self._num_reduced += self._strategy.peers() is not None

    def check(self) -> None:
        """An update is about to be made.

        Raises:
            StateError: ranks have drifted apart; on all of them.
        """
        if self._num_reduced < self._next:
            return
        group = self._strategy.peers()
        if group is None:
            return
        self._next = 2 * self._num_reduced
        replicas = [(name, p) for name, p in self._strategy.replicas() if _has_bits(p)]
        bits, settings = _bits_if_there_is_room([p for _, p in replicas]), self._settings()
        look = math.nan if bits is None else digest(repr(bits))
        own = [look, digest(repr(settings)), float(self._rows.take()), float(self._rows.place())]
        parameters, hyperparameters, rows, places = zip(*group.gather_numbers(own))
        if len(set(rows)) > 1:
            self._rows.tell([int(count) for count in rows])
        if len(set(places)) > 1:
            told = ", ".join(f"{int(place)} on rank {rank}" for rank, place in zip(group.members(), places))
            self._warn("places", _PLACES % told)
        if len(set(hyperparameters)) > 1:
            self._compare_settings(group, settings)
        if any(map(math.isnan, parameters)):
            self._next = self._num_reduced + 1  # a rank has no room to look: all look again at the next update
        elif bits is not None and len(set(parameters)) > 1:
            self._compare_parameters(group, replicas, bits)

    # ---------------------------------------------------------------- hyperparameters

    def _settings(self) -> Settings:
        groups = [group for each in self._prepared.optimizers for group in each.optimizer.param_groups]
        return [{key: value for key in group if (value := _plain(group[key])) is not None} for group in groups]

    def _compare_settings(self, group: Collectives, own: Settings) -> None:
        every: list[Settings] = group.gather_objects(own)
        for number, first in enumerate(every[0]):
            for key, value in first.items():
                values = [settings[number].get(key) if number < len(settings) else None for settings in every]
                if any(not _are_close(value, other) for other in values):
                    told = ", ".join(f"{other} on rank {rank}" for rank, other in zip(group.members(), values))
                    self._report(
                        f"the optimizers of the ranks are not alike: {key!r} of parameter group {number} is {told}"
                    )

    # ---------------------------------------------------------------- parameters

    def _compare_parameters(
        self, group: Collectives, replicas: Sequence[tuple[str, torch.Tensor]], bits: list[int]
    ) -> None:
        """Those whose bits differ, by value; one after the other, so that memory for the largest is enough."""
        every = group.gather_objects(bits)
        drifted, frozen, num_rounded = list[str](), list[str](), 0
        for index, (name, parameter) in enumerate(replicas):
            column = [row[index] for row in every]
            if len(set(column)) == 1:
                continue
            usual = Counter(column).most_common(1)[0][0]
            there = group.broadcast(parameter.detach(), src=column.index(usual))
            distances = [row[0] for row in group.gather_numbers([_distance(parameter.detach(), there)])]
            others = [rank for rank, distance in zip(group.members(), distances) if distance > _most(parameter)]
            num_rounded += not others
            if others:
                where = f"rank{'s' if len(others) > 1 else ''} {', '.join(map(str, others))}"
                source = group.members()[column.index(usual)]
                told = f"{name} on {where} differs from rank {source}'s by up to {max(distances):.3g}"
                (drifted if parameter.requires_grad else frozen).append(told)
        if drifted:
            self._report(f"the replicas of the model are not alike on all ranks: {_several(drifted)}")
        if frozen:
            self._warn("frozen", f"frozen parameters are not alike on all ranks: {_several(frozen)}. {_REMEDY}")
        if num_rounded:
            what = (
                "ranks compute on different kinds of devices, or an optimizer draws random numbers of each rank's own"
            )
            self._warn("bits", f"{num_rounded} parameters differ between ranks in their last bits: {what}")

    def _report(self, text: str) -> None:
        if self._is_strict:
            raise StateError(f"{text}. {_REMEDY}")
        self._warn("drift", f"{text}. {_REMEDY}")

    def _warn(self, kind: str, text: str) -> None:
        if kind not in self._told:
            log.warning("%s", text)
            self._told.add(kind)


def _has_bits(parameter: torch.Tensor) -> bool:
    """Does it hold its numbers itself, and no quantised tensor, say, within?"""
    is_plain = parameter.layout is torch.strided and not parameter.is_quantized and not parameter.is_meta
    return is_plain and not is_traceable_wrapper_subclass(parameter)


def _bits_if_there_is_room(parameters: Sequence[torch.Tensor]) -> list[int] | None:
    """The same, or None: the look takes memory that the update itself may do without, and the others wait in the exchange."""
    try:
        return _bits(parameters)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return None


def _bits(parameters: Sequence[torch.Tensor]) -> list[int]:
    """The sum of each one's bits, read as whole numbers; one value is read from each device."""
    sums: dict[torch.device, list[tuple[int, torch.Tensor]]] = {}
    for index, parameter in enumerate(parameters):
        for part in _parts(parameter):
            whole = part.view(_INTEGERS[part.element_size()]) if part.is_floating_point() else part
            sums.setdefault(part.device, []).append((index, whole.sum(dtype=torch.int64)))
    found = [0] * len(parameters)
    for several in sums.values():
        for (index, _), value in zip(several, torch.stack([each for _, each in several]).tolist()):
            found[index] += value
    return found


def _distance(own: torch.Tensor, other: torch.Tensor) -> float:
    """The largest difference, relative to the largest value; two nans are alike."""
    most, size = 0.0, 1e-300
    for one, two in zip(_parts(own), _parts(other)):
        one, two = one.double(), two.double()
        away = torch.where((one == two) | (one.isnan() & two.isnan()), 0.0, (one - two).abs()).nan_to_num(math.inf)
        most, size = max(most, away.max().item()), max(size, two.abs().nan_to_num(0.0, 0.0).max().item())
    return most / size


def _parts(parameter: torch.Tensor) -> Sequence[torch.Tensor]:
    """Its values in pieces, as what is computed from one takes memory."""
    plain = parameter.detach()
    real = torch.view_as_real(plain) if plain.is_complex() else plain
    return torch.split(real.reshape(-1), _PART) if real.numel() else ()


def _most(parameter: torch.Tensor) -> float:
    """How far replicas come apart by rounding, which adds up over a run: the root of the type's precision."""
    is_inexact = parameter.is_floating_point() or parameter.is_complex()
    return float(torch.finfo(parameter.dtype).eps ** 0.5) if is_inexact else 0.0


def _plain(value: Any) -> Any:
    """A hyperparameter that can be compared; None for any other."""
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


def _several(told: list[str]) -> str:
    more = f", and {len(told) - _NUM_NAMES} more" if len(told) > _NUM_NAMES else ""
    return "; ".join(told[:_NUM_NAMES]) + more


_MOST = 64


def check_alike(model: torch.nn.Module, settings: dict[str, str], everyone: Collectives) -> bool:
    """Has rank 0 values for the model? One exchange of two numbers; what differs is looked for only where something does.

    Args:
        model: that is to be wrapped.
        settings: of the run, by the names that the Accelerator takes them by.
        everyone: all ranks.

    Raises:
        PrepareError: it is an engine; or, on every rank, names, shapes, dtypes, or what is frozen, differ.
    """
    if isinstance(model, torch.nn.parallel.DistributedDataParallel):
        raise PrepareError("prepare() got a DistributedDataParallel; give the bare model, Headway wraps it")
    has_values = not any(parameter.is_meta for parameter in model.parameters())
    if everyone.world_size == 1:
        return has_values
    own = settings | _described(model)
    numbers, values = zip(*everyone.gather_numbers([digest(repr(own)), float(has_values)]))
    if len(set(numbers)) == 1:
        return bool(values[0])
    first, *others = everyone.gather_objects(own)
    rank, other = next((rank, other) for rank, other in enumerate(others, 1) if other != first)
    name = next(name for name in [*first, *other] if first.get(name) != other.get(name))
    found = f"{first.get(name, 'missing')} on rank 0 and {other.get(name, 'missing')} on rank {rank}"
    if name in settings:
        raise PrepareError(f"ranks have different settings: {name} is {found}; give all ranks the same")
    raise PrepareError(
        f"ranks have built different models: {name} of {type(model).__name__} is {found}. Take all sizes from what is the same on "
        "every rank: not from a rank's own part of the data, nor from a file that only one of them has read"
    )


def compare_data(dataset: Any, readers: Collectives) -> None:
    """Warn where ranks give prepare() parts of their own: a prepared loader reads only this rank's share of what it is given."""
    if (
        readers.world_size > 1
        and len({row[0] for row in readers.gather_numbers([digest(repr(_contents(dataset)))])}) > 1
    ):
        log.warning_once(
            "ranks gave prepare() different data, such as a part for each. A prepared loader gives each rank its share of what it is "
            "given, so that the rest of a part is never read: give all ranks the whole data, or leave the loader unprepared"
        )


def _contents(dataset: Any) -> list[Any]:
    """What can be told of a dataset without reading a sample, which may draw random numbers."""
    found: list[Any] = []
    while isinstance(dataset, Subset):
        found += [len(dataset), list(dataset.indices[:_MOST]), list(dataset.indices[-_MOST:])]
        dataset = dataset.dataset
    if isinstance(dataset, TensorDataset):
        found += [tensor[:1].flatten()[:_MOST].tolist() for tensor in dataset.tensors]
    return found


def _described(model: torch.nn.Module) -> dict[str, str]:
    """Each tensor in words, by name."""
    found = {
        name: f"{tuple(p.shape)} in {p.dtype}{'' if p.requires_grad else ', frozen'}"
        for name, p in model.named_parameters()
    }
    return found | {name: f"{tuple(buffer.shape)} in {buffer.dtype}" for name, buffer in model.named_buffers()}
