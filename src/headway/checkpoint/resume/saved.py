"""What a checkpoint says of a run and its objects: read in one strict pass, before anything is changed.

A manifest may be damaged, another program's, or made to do harm: every value is asked for by type and range, counts must fit each
other, and what would be repeated that often has a bound. What is not as it must be is named with its place.

What objects take up (optimizers, loaders, RNG states) is looked at before any of them is changed; RNG states are tried on generators
that nobody uses.
"""

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy
import torch

from headway.checkpoint.format.manifest import LARGEST, TypedReader
from headway.checkpoint.format.values import TAG, decode
from headway.checkpoint.resume.batch import BatchState
from headway.checkpoint.state import CollectedState, StatefulObjects, parameter_names
from headway.data.sampling.rng import among_rng_states, is_generator_text, is_rng_states_text
from headway.errors import CheckpointError
from headway.precision.mixed import Precision
from headway.runtime.device import Hardware
from headway.runtime.process import ProcessRuntime
from headway.weights.pieces import is_spread

_MOST_RANKS, _MOST_STEPS = 2**24, 2**24
_MOST_TICKS, _MOST_PASSES = 2**20, 2**20
"""So many ticks an update, and empty passes, are made one after the other."""
_WORD = 2**64
_LIMITS, _COUNTS = ("limit", "failed", "good"), {"patience": 1, "num_clean": 0}
"""The fields of `training.replay.piece_size.PieceSize`, which only some runs load; and the least of those that are never None."""


@dataclass(frozen=True)
class SavedRun:
    """The counters and positions of a saved run, for this rank.

    Attributes:
        run_id: of the run.
        world_size: ranks of the run.
        ranks: those whose own state the checkpoint holds.
        num_shards: parts that the data was in: several ranks may have read one.
        accumulation: micro-batches per update.
        versions: of packages, by their names.
        num_updates, optimizer_updates, epoch, counts_epochs, seed, precision, ticks: as they were.
        batch: of the global batch.
        nominal: for each set of models, by number, the weight that its next window divides by.
        scaler: of the loss.
        seeds: of the loaders.
        trained_on: numbers of the loaders that updates were made from.
        passes_over: for each loader, its passes of the epoch that are over; None where nothing was trained on it.
        lengths: for each loader, the samples of its data; None: unknown.
        local_steps: for each model, the steps of the local SGD that it was in; None: in none.
        exchange_orders: for each model, the order in which its gradients travel; empty: there is none, or one rank saved alone.
        pieces: how automatic micro-batching cuts; empty: it was off.
        units: for each schedule, what it counts.
        loaders: their positions.
        is_own: were the generators, and what loaders keep of their shards, saved by this rank?
        rng_states: the RNG states.
        loader_rng: of the loaders' orders; None: the global one.
    """

    run_id: str
    world_size: int
    ranks: list[int]
    num_shards: int
    accumulation: int
    versions: dict[str, str]
    num_updates: int
    optimizer_updates: list[int]
    epoch: int
    counts_epochs: bool
    seed: int
    precision: str
    ticks: tuple[int, int]
    batch: BatchState
    nominal: list[tuple[list[int], float]]
    scaler: dict[str, Any]
    seeds: list[int]
    trained_on: list[int]
    passes_over: list[int | None]
    lengths: list[int | None]
    local_steps: list[int | None]
    exchange_orders: list[list[int]]
    pieces: dict[str, int | None]
    units: list[str]
    loaders: list[dict[str, Any]]
    is_own: bool
    rng_states: dict[str, Any]
    loader_rng: torch.Tensor | None


def read_run(
    manifest_about: Mapping[str, Any],
    found: CollectedState,
    runtime: ProcessRuntime,
    precision: Precision,
    num_shards: int | None = None,
) -> SavedRun:
    """Read all that a load takes from a manifest, for this process; what objects take up is checked and left where it is.

    Args:
        manifest_about: the manifest's.
        found: its state, and the tensors that it names.
        runtime: this process.
        precision: of this run.
        num_shards: parts that this run's data is in; None: one for each rank.

    Raises:
        CheckpointError: naming the first value that is not as it must be.
    """
    about, state = TypedReader(manifest_about, "about"), TypedReader(found.state, "state")
    check_names(found)
    world_size, ranks = _read_ranks(about)
    _check_about(about)
    run = state["run"]
    seeds = [seed.whole(-_WORD, _WORD) for seed in run["seeds"].items()]
    num_models, num_optimizers = len(state["extra"].items()), len(state["optimizer"].items())
    check_objects(state, found)
    former_shards = run["data_shards"].whole(1, world_size)
    is_same = world_size == runtime.world_size and former_shards == (num_shards or runtime.world_size)
    is_own = is_same and runtime.rank in ranks
    place = ranks.index(runtime.rank) if is_own else 0
    loaders, rng_states = _read_own(state, found, runtime, len(ranks), len(seeds))[place]
    loader_rng = rng_states.pop("loaders", None)
    if loader_rng is None and world_size != runtime.world_size:
        loader_rng = rng_states["torch"]
    num_processes, num_steps = run["ticks"].items(2)
    return SavedRun(
        run_id=about["run"].text(),
        world_size=world_size,
        ranks=ranks,
        num_shards=former_shards,
        accumulation=about["accumulation"].whole(1, _MOST_STEPS),
        versions={name: each.text() for name, each in about["versions"].table().items()},
        num_updates=run["num_updates"].whole(),
        optimizer_updates=[each.whole() for each in run["optimizer_updates"].items(num_optimizers)],
        epoch=run["epoch"].whole(),
        counts_epochs=run["counts_epochs"].flag(),
        seed=run["seed"].whole(0, _WORD),
        precision=run["precision"].text(),
        ticks=(num_processes.whole(1, _MOST_TICKS), num_steps.whole(1, _MOST_TICKS)),
        batch=_read_batch(run["batch"], len(seeds)),
        nominal=_read_nominal(run["nominal"], num_models),
        scaler=_read_scaler(run, precision),
        seeds=seeds,
        trained_on=[number.whole() for number in run["trained_on"].items()],
        passes_over=_read_counts(run, "passes_over", len(seeds), _MOST_PASSES),
        local_steps=_read_counts(run, "local_steps", num_models, LARGEST),
        lengths=_read_counts(run, "lengths", len(seeds), LARGEST),
        exchange_orders=[
            [number.whole() for number in order.items()]
            for each in run.given("exchange_orders")
            for order in each.items(num_models)
        ],
        pieces=_read_pieces(run),
        units=[unit.text() for unit in run["units"].items(len(state["scheduler"].items()))],
        loaders=loaders,
        is_own=is_own,
        rng_states=rng_states,
        loader_rng=loader_rng,
    )


def _read_ranks(about: TypedReader) -> tuple[int, list[int]]:
    """How many ranks the run had, and those whose own state the checkpoint holds, in its order."""
    world_size = about["world_size"].whole(1, _MOST_RANKS)
    for each in about.given("saved_by"):
        ranks = [rank.whole(0, world_size - 1) for rank in each.items()]
        if len(set(ranks)) != len(ranks):
            each.refuse("a list of ranks, each of them once,")
        if ranks:
            return world_size, ranks
    return world_size, list(range(world_size))


def _check_about(about: TypedReader) -> None:
    """What is shown, told to others, or read by who resumes."""
    for name in ("num_updates", "epoch"):
        about[name].whole()
    for name, least in (("global_batch", 1), ("iteration", 0)):
        for each in about.given(name):
            each.whole(least)
    for each in about.given("metric"):
        each.number()
    for each in about.given("device", "saved_at"):
        each.text()
    for each in about.given("notes"):
        for note in each.table().values():
            if type(note.value) is int:  # the step of a tracker
                note.whole(-LARGEST)


def _read_own(
    state: TypedReader, found: CollectedState, runtime: ProcessRuntime, num_ranks: int, num_loaders: int
) -> list[tuple[list[dict[str, Any]], dict[str, Any]]]:
    """For each rank that saved, its loaders' positions and RNG states."""
    read = []
    for told, own in zip(state["loaders"].items(num_ranks), state["streams"].items(num_ranks)):
        loaders, rng_states = decoded(told, found), decoded(own, found)
        check_loaders(loaders, num_loaders, runtime.hardware)
        check_rng_states(rng_states, runtime.hardware)
        read.append(([each.mapping() for each in loaders.items()], dict(rng_states.mapping())))
    return read


def _read_batch(batch: TypedReader, num_loaders: int) -> BatchState:
    rows = [batch[name].items(num_loaders) for name in ("asked", "sizes", "units")]
    for row in zip(*rows):
        if any(each.is_none for each in row) and not all(each.is_none for each in row):
            batch.refuse("sizes that are known together")
    asked, sizes, units = [[None if each.is_none else each.whole(1) for each in row] for row in rows]
    return BatchState(asked, sizes, units, [number.whole() for number in batch["trained"].items()])


def _read_nominal(nominal: TypedReader, num_models: int) -> list[tuple[list[int], float]]:
    read = []
    for pair in nominal.items():
        numbers, weight = pair.items(2)
        read.append(([number.whole(0, num_models - 1) for number in numbers.items()], weight.number(0)))
    return read


def _read_scaler(run: TypedReader, precision: Precision) -> dict[str, Any]:
    state, own = run["scaler"], precision.scaler
    read = state.mapping()
    if run["precision"].value == precision.name and own is not None and own.is_enabled():
        for name in ("scale", "growth_factor", "backoff_factor"):
            state[name].number(1e-300)
        state["growth_interval"].whole(1)
        state["_growth_tracker"].whole()
    return read


def _read_counts(run: TypedReader, name: str, num: int, most: int) -> list[int | None]:
    return [None if count.is_none else count.whole(0, most) for count in run[name].items(num)]


def _read_pieces(run: TypedReader) -> dict[str, int | None]:
    told = run["pieces"].table()
    if not told:
        return {}
    if told.keys() != {*_LIMITS, *_COUNTS}:
        run["pieces"].refuse("the size of pieces")
    limits = {name: None if told[name].is_none else told[name].whole(1) for name in _LIMITS}
    return limits | {name: told[name].whole(least) for name, least in _COUNTS.items()}


_SHAPED = "Adam AdamW NAdam RAdam Adamax Adagrad Adadelta RMSprop Rprop ASGD SGD"
_OF_ONE_SHAPE = {getattr(torch.optim, name) for name in _SHAPED.split()}
"""What these keep of a parameter has its shape, or is one number."""
_KINDS: tuple[tuple[Any, Any], ...] = (
    (int | float, int | float | torch.Tensor | numpy.generic | None),
    (str, str | None),
    (list | tuple, list | tuple | None),
    (dict, dict | None),
)
"""What a schedule may have in the place of what another of its kind has."""


def check_objects(state: TypedReader, found: CollectedState) -> None:
    """Can what the models, optimizers, schedules and registered objects will be given be read?

    Raises:
        CheckpointError: naming the first value that is not as it must be.
    """
    for extra in state["extra"].items():
        for value in extra.table().values():
            decoded(value, found)
    for optimizer in state["optimizer"].items():
        _check_optimizer(optimizer, found)
    for name, kind in state.table().items():
        if name not in ("extra", "optimizer", "run", "loaders", "streams"):
            for value in kind.items():
                of_object = decoded(value, found)
                if name == "scheduler":
                    of_object.mapping()


def unfit(parts: StatefulObjects, found: CollectedState) -> list[str]:
    """What the objects would take and fail with later, of a state that `misfits` has nothing against; nothing is changed."""
    problems = []
    names = parameter_names(parts.models)
    for optimizer, entry in zip(parts.optimizers, found.state["optimizer"]):
        if type(optimizer) in _OF_ONE_SHAPE:
            for parameter in (each for group in optimizer.param_groups for each in group["params"]):
                name = names.get(id(parameter), "")
                shape = tuple(parts.part_of(parameter).shape)
                problems += _misshapen(name, shape, decode(entry["values"].get(name, {}), found.tensors))
    for index, (obj, value) in enumerate(zip(parts.others.get("scheduler", ()), found.state.get("scheduler", ()))):
        if type(obj).__module__ == torch.optim.lr_scheduler.__name__:
            problems += _unlike(obj.state_dict(), decode(value, found.tensors), f"schedule {index}'s state")
    return problems


def _misshapen(name: str, shape: tuple[int, ...], values: Mapping[Any, Any]) -> list[str]:
    problems = []
    for key, value in values.items():
        if not isinstance(value, torch.Tensor | float | int | None) and not is_spread(value):
            problems.append(f"the optimizer's {key} of {name} is a {type(value).__name__}, where a tensor belongs")
        elif is_spread(value) or isinstance(value, torch.Tensor):
            found = tuple(value.shape)
            if prod(found) != 1 and found != shape:
                problems.append(f"the optimizer's {key} of {name} has the shape {found}, the parameter {shape}")
    return problems


def _unlike(own: Any, saved: Any, where: str) -> list[str]:
    """Where a schedule of torch's has numbers, text, lists and dicts, and the saved one something else."""
    if isinstance(own, dict) and isinstance(saved, dict):
        return [
            problem for key in own.keys() & saved.keys() for problem in _unlike(own[key], saved[key], f"{where} {key}")
        ]
    if isinstance(own, list | tuple) and isinstance(saved, list | tuple):
        is_short = where.endswith("_lrs") and len(own) != len(saved)
        problems = [f"{where} has {len(saved)} entries, {len(own)} belong there"] if is_short else []
        return problems + [problem for one, other in zip(own, saved) for problem in _unlike(one, other, where)]
    for kinds, allowed in _KINDS:
        if isinstance(own, kinds) and not isinstance(saved, allowed):
            return [f"{where} is a {type(saved).__name__}, where a {type(own).__name__} belongs"]
    return []


def decoded(told: TypedReader, found: CollectedState) -> TypedReader:
    """The value that was encoded, in its place."""
    return told.replaced(decode(told.value, found.tensors))


# -------------------------------------------------------------------- objects


def _check_optimizer(told: TypedReader, found: CollectedState) -> None:
    told["type"].text()
    names = [[name.text() for name in group.items()] for group in told["params"].items()]
    groups = told["groups"].items(len(names))
    for group in groups:
        _check_options(decoded(group, found))
    every = {name for group in names for name in group}
    if len(every) != sum(map(len, names)):
        told["params"].refuse("the parameters' names, each of them once,")
    for name, entry in told["values"].table().items():
        if name not in every:
            entry.refuse("no state: it belongs to none of the parameters")
        decoded(entry, found).mapping()
    for name in ("rest", "loose"):
        for each in told.given(name):
            decoded(each, found).mapping()
    told["rest"].mapping()


def _check_options(group: TypedReader) -> None:
    """What torch's optimizers compute with."""
    group.mapping()
    for each in group.given("params"):
        each.refuse("no list of parameters")
    for each in group.given("lr", "weight_decay", "momentum", "eps", "initial_lr", "dampening", "alpha", "rho"):
        if isinstance(each.value, str | bytes | dict | bool):
            each.refuse("a number")
    for each in group.given("betas"):
        for beta in each.items(2):
            if not isinstance(beta.value, torch.Tensor):
                beta.number()


# -------------------------------------------------------------------- data and RNG states


_NUMBERS = (("drawn", -(2**63), 2**63 - 1), ("num_rounds", 0, LARGEST), ("round_size", 1, LARGEST))


def check_loaders(loaders: TypedReader, count: int, hardware: Hardware) -> None:
    """Are these the positions of so many loaders, and would the loaders take them?"""
    for loader in loaders.items(count):
        _check_loader(loader, hardware)


def _check_loader(loader: TypedReader, hardware: Hardware) -> None:
    for name in ("epoch", "consumed"):
        loader[name].whole()
    source = loader.get("source")
    if source is None:
        return
    for name, least, most in _NUMBERS:
        for each in source.given(name):
            each.whole(least, most)
    if source.get("round_size") is not None:
        source["num_rounds"].whole()
    for each in source.given("is_idle"):
        each.flag()
    workers = source.get("workers")
    if workers is not None:
        workers["num_batches"].whole()
        workers["streams"].items()
    _check_states(source, hardware)


def _check_states(source: TypedReader, hardware: Hardware) -> None:
    """The RNG states that a loader's pass goes on from."""
    generators = [each for each in source.given("base_seed") if each.text()]
    generators += [text for each in source.given("generators") for text in each.items()]
    for text in generators:
        if not is_generator_text(text.text(), is_on_cpu=hardware.kind == "cpu"):
            text.refuse("the state of a generator")
    rng_states = [*source.given("global")]
    rng_states += [text for each in source.given("workers") for text in each["streams"].items() if not text.is_none]
    for text in rng_states:
        if not is_rng_states_text(text.text()):
            text.refuse("the states of generators")
    for line in (line for each in source.given("lines") for line in each.items()):
        place, number, text = line.items(3)
        number.whole(-1, LARGEST)
        if not is_rng_states_text(among_rng_states(text.text(), place.whole(0, 2))):
            text.refuse("the state of a generator")


def check_rng_states(rng_states: TypedReader, hardware: Hardware) -> None:
    """Would the process's own generators take them?"""
    _check_state(rng_states["torch"])
    for each in rng_states.given("loaders"):
        _check_state(each)
    for each in rng_states.given("device"):
        is_state = isinstance(each.value, torch.Tensor) and each.value.dtype == torch.uint8
        read = None if hardware.kind == "cpu" else hardware.ability("get_rng_state")
        if read is not None and (not is_state or each.value.shape != read().shape):
            each.refuse("the state of the device's generator")
    python = rng_states["python"]
    gauss = python.items(3)[2]
    try:
        random.Random().setstate(python.value)
    except (TypeError, ValueError, OverflowError):
        python.refuse("the state of Python's generator")
    if not gauss.is_none:
        gauss.number()
    for each in rng_states.given("numpy"):
        _check_numpy(each)


def _check_state(told: TypedReader) -> None:
    try:
        torch.Generator().set_state(told.value)
    except (TypeError, RuntimeError):
        told.refuse("the state of torch's generator")


def _check_numpy(told: TypedReader) -> None:
    if isinstance(told.value, dict):  # another bit generator than the usual one
        own = numpy.random.get_state(legacy=False)
        if own["bit_generator"] == "MT19937" or told.value.keys() != own.keys():
            told.refuse("the state of NumPy's generator")
        return
    name, keys, position, has_gauss, cached = told.items(5)
    is_sound = isinstance(keys.value, numpy.ndarray) and keys.value.shape == (624,) and keys.value.dtype == numpy.uint32
    if name.value != "MT19937" or not is_sound:
        told.refuse("the state of NumPy's generator")
    position.whole(0, 624)
    has_gauss.whole(0, 1)
    cached.number()


# -------------------------------------------------------------------- tensors


def check_names(found: CollectedState) -> None:
    """Each tensor that is not a weight stands for one value: what is read takes no more memory than the files have bytes."""
    seen: set[str] = set()
    for name in _named(found.state, found):
        if name in seen or name.startswith("model/"):
            raise CheckpointError(f"the manifest's state has the tensor {name!r} in a second place")
        seen.add(name)


def _named(value: Any, found: CollectedState) -> Iterator[str]:
    """The tensors that a value names, as often as it does."""
    left = [value]
    while left:
        item = left.pop()
        if isinstance(item, list):
            left += item
        elif isinstance(item, dict):
            if TAG in item and isinstance(item.get("name"), str) and item["name"] in found.tensors:
                yield item["name"]
            left += item.values()
