"""What a checkpoint says of a run besides its objects: read in one strict pass, before anything is changed.

A manifest may be damaged, another program's, or made to do harm: every value is asked for by type and range, counts must fit each
other, and what would be repeated that often has a bound. What is not as it must be is named with its place.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from headway.checkpoint.format.manifest import LARGEST, TypedReader
from headway.checkpoint.resume.batch import BatchState
from headway.checkpoint.resume.checks import check_loaders, check_names, check_objects, check_rng_states, decoded
from headway.checkpoint.state import CollectedState
from headway.precision.mixed import Precision
from headway.runtime.process import ProcessRuntime

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
