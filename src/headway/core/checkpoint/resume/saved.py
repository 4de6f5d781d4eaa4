"""Read a manifest's values for a run and its objects, in one strict pass before anything is changed.

A manifest may be damaged, written by another program, or malicious. The type and range of every value are checked.
Lists must have matching lengths, and numbers of repetitions are bounded. Errors contain the path of the wrong value.

Values for objects (optimizers, loaders, RNG states) are checked before any object is changed.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from headway.common.garbage import pause_garbage_collection
from headway.core.checkpoint.format.typed_reader import LARGEST, TypedReader
from headway.core.checkpoint.resume.batch import BatchState
from headway.core.checkpoint.resume.saved_objects import check_objects, check_references, decode_reader
from headway.core.checkpoint.resume.saved_positions import check_loaders, check_rng_states
from headway.core.checkpoint.state import CollectedState
from headway.core.precision.mixed import Precision
from headway.core.runtime.process import ProcessRuntime
from headway.core.training.seen_data import SeenTotals

_MOST_RANKS, _MOST_STEPS = 2**24, 2**24
_MOST_TICKS, _MOST_PASSES = 2**20, 2**20
"""Maximum number of scheduler steps per update, and of empty passes over a loader.

A resume repeats these one by one.
"""
_WORD = 2**64
"""Number of possible seeds: seeds are unsigned 64-bit integers."""
_LIMITS, _COUNTS = ("limit", "failed", "good"), {"patience": 1, "num_clean": 0}
"""Fields of `extras.replay.piece_size.PieceSize` in a checkpoint.

`_LIMITS`: fields that can be None. `_COUNTS`: other fields, each with its minimum. That class is not imported, because
only some runs load it.
"""


@dataclass(frozen=True)
class SavedRun:
    """Counters and positions of a saved run, for this rank.

    Attributes:
        run_id: ID of the run.
        world_size: Number of ranks of the run.
        ranks: Ranks whose own state the checkpoint holds.
        num_shards: Number of data shards. Several ranks can read one shard.
        accumulation: Micro-batches per update.
        versions: Package versions by name.
        num_updates: Number of updates.
        seen: Amount of data that the run has trained on.
        optimizer_updates: Number of updates of each optimizer.
        epoch: Epoch at which the resumed run continues.
        counts_epochs: Whether the loop used `epochs()`.
        seed: Seed of the run.
        precision: Name of the mixed precision.
        ticks: Pair of numbers that determines the scheduler steps per update (see `Preparation.tick_base`).
        batch: Settings of the global batch.
        nominal: Pairs of (indices of models, loss weight). In the next accumulation window, each backward of these
            models divides its loss by the weight.
        scaler: State of the gradient scaler.
        seeds: Seeds of the loaders.
        prepared_in: For each loader, the epoch of `epochs()` in which it was prepared. None if it was prepared outside of
            such a loop. Empty if unknown.
        prepared_by: For each loader, the lines of the loop over `epochs()` that prepared it (`LoaderOrigin.lines`). "" if
            `prepared_in` is None. Empty if unknown.
        prepared_before: For each loader, the last earlier epoch in which these lines prepared a loader, or None.
            Empty if unknown.
        dropped: Indices of the loaders to which the script no longer referred, so that it cannot have used them again.
        num_absent_loaders: Number of loaders that the saved run itself had not prepared again after a resume.
        trained_on: Indices of the loaders whose batches were used for training.
        read_in_training: Indices of the loaders that were being iterated when an accumulation window began.
        repeated_calls: For each learning rate scheduler, the number of `step` calls that the resumed loop repeats.
        passes_over: For each loader, the number of its finished passes in the epoch. None if it was not used for
            training.
        lengths: For each loader, the number of samples of its data. None if unknown.
        local_steps: For each model, the number of steps made in its local SGD block. None if it is in no such block.
        exchange_orders: For each model, the order in which its gradients are reduced. Empty if there is none, or if one
            rank saved alone.
        pieces: State of automatic micro-batching: the limit on rows per micro-batch, and the search for it. Empty if it
            was off.
        units: For each learning rate scheduler, the unit that its steps count, such as updates.
        frozen: For each model, the names of its frozen parameters. None if unknown.
        loaders: Positions of the loaders.
        is_own: Whether the RNG states and the loaders' shard-specific state were saved by this rank.
        rng_states: RNG states by name.
        loader_rng: State of the generator from which loaders draw the order of samples. None: the global generator is
            used.
    """

    run_id: str
    world_size: int
    ranks: list[int]
    num_shards: int
    accumulation: int
    versions: dict[str, str]
    num_updates: int
    seen: SeenTotals
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
    prepared_in: list[int | None]
    prepared_by: list[str]
    prepared_before: list[int | None]
    dropped: list[int]
    num_absent_loaders: int
    trained_on: list[int]
    read_in_training: list[int]
    repeated_calls: list[int]
    passes_over: list[int | None]
    lengths: list[int | None]
    local_steps: list[int | None]
    exchange_orders: list[list[int]]
    pieces: dict[str, int | None]
    units: list[str]
    frozen: list[list[str]] | None
    loaders: list[dict[str, Any]]
    is_own: bool
    rng_states: dict[str, Any]
    loader_rng: torch.Tensor | None


@pause_garbage_collection()
def read_run(
    manifest_about: Mapping[str, Any],
    saved_state: CollectedState,
    runtime: ProcessRuntime,
    precision: Precision,
    num_shards: int | None = None,
) -> SavedRun:
    """Read all values of a manifest that a load uses on this rank. Values for objects are only checked.

    If this rank saved its own state, and the layout is unchanged, its RNG states and loader positions are returned. If
    not, those of the first saved rank are.

    Args:
        manifest_about: The manifest's `about` section.
        saved_state: The manifest's state, and the tensors to which it refers.
        runtime: Runtime of this process.
        precision: Precision of this run.
        num_shards: Number of this run's data shards. Default: None, one per rank.

    Raises:
        CheckpointError: If a value is wrong. The message contains the path of the first wrong value.
    """
    about, state = TypedReader(manifest_about, "about"), TypedReader(saved_state.state, "state")
    check_references(saved_state)
    world_size, ranks = _read_ranks(about)
    _check_about(about)
    run = state["run"]
    seeds = run["seeds"].read_integers(-_WORD, _WORD)
    num_loaders = len(seeds)
    num_models = state["extra"].count_items()
    num_optimizers = state["optimizer"].count_items()
    num_schedules = state["scheduler"].count_items()
    check_objects(state, saved_state)
    saved_shards = run["data_shards"].read_integer(1, world_size)
    has_equal_layout = world_size == runtime.world_size and saved_shards == (num_shards or runtime.world_size)
    is_own = has_equal_layout and runtime.rank in ranks
    source_index = ranks.index(runtime.rank) if is_own else 0  # index in `ranks` of the rank whose state is used
    loaders, rng_states = _read_rank_states(state, saved_state, runtime, len(ranks), num_loaders)[source_index]
    loader_rng = rng_states.pop("loaders", None)
    if loader_rng is None and world_size != runtime.world_size:
        # Ranks can have different global RNG states, but must draw the order of samples from equal ones.
        loader_rng = rng_states["torch"]
    num_processes, num_steps = run["ticks"].read_integers(1, _MOST_TICKS, count=2)
    return SavedRun(
        run_id=about["run"].read_text(),
        world_size=world_size,
        ranks=ranks,
        num_shards=saved_shards,
        accumulation=about["accumulation"].read_integer(1, _MOST_STEPS),
        versions={name: each.read_text() for name, each in about["versions"].read_table().items()},
        num_updates=run["num_updates"].read_integer(),
        seen=_read_seen(about),
        optimizer_updates=run["optimizer_updates"].read_integers(count=num_optimizers),
        epoch=run["epoch"].read_integer(),
        counts_epochs=run["counts_epochs"].read_flag(),
        seed=run["seed"].read_integer(0, _WORD),
        precision=run["precision"].read_text(),
        ticks=(num_processes, num_steps),
        batch=_read_batch(run["batch"], num_loaders),
        nominal=_read_nominal(run["nominal"], num_models),
        scaler=_read_scaler(run, precision),
        seeds=seeds,
        prepared_in=run.read_if_present(
            "prepared_in", lambda epochs: epochs.read_optional_integers(count=num_loaders), default=[]
        ),
        prepared_by=run.read_if_present("prepared_by", lambda lines: lines.read_texts(count=num_loaders), default=[]),
        prepared_before=run.read_if_present(
            "prepared_before", lambda epochs: epochs.read_optional_integers(count=num_loaders), default=[]
        ),
        dropped=run.read_if_present("dropped", TypedReader.read_integers, default=[]),
        num_absent_loaders=run.read_if_present("absent_loaders", lambda count: count.read_integer(0, _WORD), default=0),
        trained_on=run["trained_on"].read_integers(),
        read_in_training=run.read_if_present("read_in_training", TypedReader.read_integers, default=[]),
        repeated_calls=run.read_if_present(
            "repeated_calls", lambda counts: counts.read_integers(0, _MOST_TICKS, count=num_schedules), default=[]
        ),
        passes_over=run["passes_over"].read_optional_integers(0, _MOST_PASSES, count=num_loaders),
        local_steps=run["local_steps"].read_optional_integers(count=num_models),
        lengths=run["lengths"].read_optional_integers(count=num_loaders),
        exchange_orders=run.read_if_present(
            "exchange_orders",
            lambda orders: [order.read_integers() for order in orders.read_items(num_models)],
            default=[],
        ),
        pieces=_read_pieces(run),
        units=run["units"].read_texts(count=num_schedules),
        frozen=run.read_if_present(
            "frozen", lambda models: [names.read_texts() for names in models.read_items(num_models)], default=None
        ),
        loaders=loaders,
        is_own=is_own,
        rng_states=rng_states,
        loader_rng=loader_rng,
    )


def _read_ranks(about: TypedReader) -> tuple[int, list[int]]:
    """Return the world size of the saved run, and the ranks whose own state the checkpoint holds.

    The ranks are in the order in which the checkpoint lists their states.
    """
    world_size = about["world_size"].read_integer(1, _MOST_RANKS)
    saved_by = about.get("saved_by")
    ranks = [] if saved_by is None else saved_by.read_integers(0, world_size - 1)
    if saved_by is not None and len(set(ranks)) != len(ranks):
        saved_by.raise_error("a list of ranks, each of them once,")
    return world_size, ranks or list(range(world_size))


def _check_about(about: TypedReader) -> None:
    """Raise `CheckpointError` if a value in the manifest's `about` section is wrong.

    Only values that are displayed, passed to listeners, or used by a resume are checked.
    """
    for name in ("num_updates", "epoch"):
        about[name].read_integer()
    if global_batch := about.get("global_batch"):
        global_batch.read_integer(1)
    if iteration := about.get("iteration"):
        iteration.read_integer()
    if metric := about.get("metric"):
        metric.read_number()
    if device := about.get("device"):
        device.read_text()
    if saved_at := about.get("saved_at"):
        saved_at.read_text()
    if notes := about.get("notes"):
        for note in notes.read_table().values():
            if type(note.value) is int:  # a tracker's step
                note.read_integer(-LARGEST)


def _read_seen(about: TypedReader) -> SeenTotals:
    """Return the totals of samples and tokens. A missing total is 0."""
    names = ("samples_seen", "tokens_seen", "padding_tokens_seen")
    return SeenTotals(*(about.read_if_present(name, TypedReader.read_integer, default=0) for name in names))


def _read_rank_states(
    state: TypedReader, saved_state: CollectedState, runtime: ProcessRuntime, num_ranks: int, num_loaders: int
) -> list[tuple[list[dict[str, Any]], dict[str, Any]]]:
    """Return, for each rank that saved its own state, a pair of (positions of its loaders, RNG states by name).

    Args:
        state: The manifest's state.
        saved_state: The state and the tensors to which it refers.
        runtime: Runtime of this process, whose device determines which generators exist.
        num_ranks: Number of ranks that saved their own state.
        num_loaders: Number of loaders of the saved run.

    Raises:
        CheckpointError: If a position or an RNG state is wrong.
    """
    states_by_rank = []
    for saved_loaders, saved_states in zip(
        state["loaders"].read_items(num_ranks), state["streams"].read_items(num_ranks)
    ):
        loaders, rng_states = decode_reader(saved_loaders, saved_state), decode_reader(saved_states, saved_state)
        check_loaders(loaders, num_loaders, runtime.hardware)
        check_rng_states(rng_states, runtime.hardware)
        positions = [each.read_mapping() for each in loaders.read_items()]
        states_by_rank.append((positions, dict(rng_states.read_mapping())))
    return states_by_rank


def _read_batch(batch: TypedReader, num_loaders: int) -> BatchState:
    """Return the settings of the global batch. The three numbers of a loader must be all known or all unknown (None)."""
    asked = batch["asked"].read_optional_integers(1, count=num_loaders)
    sizes = batch["sizes"].read_optional_integers(1, count=num_loaders)
    units = batch["units"].read_optional_integers(1, count=num_loaders)
    for loader_numbers in zip(asked, sizes, units):
        if None in loader_numbers and loader_numbers != (None, None, None):
            batch.raise_error("sizes that are known together")
    return BatchState(asked, sizes, units, batch["trained"].read_integers())


def _read_nominal(nominal: TypedReader, num_models: int) -> list[tuple[list[int], float]]:
    """Return pairs of (indices of models that train together, nominal loss weight of their next window)."""
    pairs = []
    for pair in nominal.read_items():
        indices, weight = pair.read_items(2)
        pairs.append((indices.read_integers(0, num_models - 1), weight.read_number(0)))
    return pairs


def _read_scaler(run: TypedReader, precision: Precision) -> dict[str, Any]:
    """Return the state of the gradient scaler. Its values are checked only if this run's scaler will load them."""
    state, own_scaler = run["scaler"], precision.scaler
    values = state.read_mapping()
    if run["precision"].value == precision.name and own_scaler is not None and own_scaler.is_enabled():
        for name in ("scale", "growth_factor", "backoff_factor"):
            state[name].read_number(1e-300)
        state["growth_interval"].read_integer(1)
        state["_growth_tracker"].read_integer()
    return values


def _read_pieces(run: TypedReader) -> dict[str, int | None]:
    """Return the state of automatic micro-batching by field name, or an empty dict if it was off."""
    fields = run["pieces"].read_table()
    if not fields:
        return {}
    if fields.keys() != {*_LIMITS, *_COUNTS}:
        run["pieces"].raise_error("the size of pieces")
    limits = {name: None if fields[name].is_none else fields[name].read_integer(1) for name in _LIMITS}
    return limits | {name: fields[name].read_integer(least) for name, least in _COUNTS.items()}
