"""What a checkpoint says of a run besides its objects: read as a whole, and checked, before anything is changed."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from headway.checkpoint.state import Collected
from headway.checkpoint.values import decode
from headway.errors import CheckpointError

_MAX = 1 << 63


@dataclass(frozen=True)
class SavedRun:
    """The counters and positions of a saved run, for this rank.

    Attributes:
        run_id: of the run; "" where it was saved before runs had one.
        num_updates, optimizer_updates, epoch, counts_epochs, seed, precision, ticks: as they were.
        batch: of the global batch.
        nominal: for each set of models, by number, the weight that its next window divides by.
        scaler: of the loss.
        seeds: of the loaders.
        trained_on: numbers of the loaders that updates were made from.
        passes_over: for each loader, its passes of the epoch that are over; None where nothing was trained on it.
        loaders: their positions.
        is_own: were the streams, and what loaders keep of their shards, saved by this rank?
        streams: the random streams.
        loader_stream: of the loaders' orders; None: the global one.
    """

    run_id: str
    num_updates: int
    optimizer_updates: list[int]
    epoch: int
    counts_epochs: bool
    seed: int
    precision: str
    ticks: tuple[int, int]
    batch: dict[str, Any]
    nominal: list[tuple[list[int], float]]
    scaler: dict[str, Any]
    seeds: list[int]
    trained_on: list[int]
    passes_over: list[int | None]
    loaders: list[dict[str, Any]]
    is_own: bool
    streams: dict[str, Any]
    loader_stream: torch.Tensor | None


def saved_by(about: Mapping[str, Any]) -> list[int]:
    """The ranks whose own state a checkpoint holds, in its order."""
    return list(about.get("saved_by") or range(about["world_size"]))


def read_run(about: Mapping[str, Any], found: Collected, rank: int, world_size: int) -> SavedRun:
    """Read it for a rank of a world of that size.

    Raises:
        CheckpointError: it is nothing that was saved.
    """
    try:
        return _read(about, found, rank, world_size)
    except CheckpointError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise CheckpointError(
            f"the manifest's account of the run cannot be read ({type(error).__name__}: {error}); nothing was changed"
        ) from error


def _read(about: Mapping[str, Any], found: Collected, rank: int, world_size: int) -> SavedRun:
    run = _be("run", found.state["run"], _is_dict)
    for name in ("world_size", "accumulation"):
        _be(name, about[name], lambda value: _is_count(value) and 0 < value < 1 << 31)
    for name in ("num_updates", "epoch"):
        _be(name, about[name], _is_count)
    _be("versions", about["versions"], _is_dict)
    ranks = _be("saved_by", saved_by(about), _list_of(_is_count))
    own = {name: _be(name, found.state[name], _list_of(lambda _: True)) for name in ("loaders", "streams")}
    if not ranks or any(len(each) != len(ranks) for each in own.values()):
        raise CheckpointError(
            f"the manifest has positions and streams of other ranks than {ranks}; nothing was changed"
        )
    is_same_world = about["world_size"] == world_size
    is_own = is_same_world and rank in ranks
    place = ranks.index(rank) if is_own else 0
    loaders = _be("loaders", decode(own["loaders"][place], found.tensors), _list_of(_is_dict))
    streams = dict(_be("streams", decode(own["streams"][place], found.tensors), _is_dict))
    loader_stream = streams.pop("loaders", None)
    if loader_stream is None and not is_same_world:
        loader_stream = streams["torch"]
    return SavedRun(
        run_id=str(about.get("run", "")),
        num_updates=_be("num_updates", run["num_updates"], _is_count),
        optimizer_updates=_be("optimizer_updates", run["optimizer_updates"], _list_of(_is_count)),
        epoch=_be("epoch", run["epoch"], _is_count),
        counts_epochs=bool(run.get("counts_epochs")),
        seed=_be("seed", run["seed"], _is_count),
        precision=_be("precision", run["precision"], lambda value: isinstance(value, str)),
        ticks=_pair(run["ticks"]),
        batch=_read_batch(run["batch"]),
        nominal=_read_nominal(run["nominal"], len(found.state["extra"])),
        scaler=_be("scaler", run["scaler"], _is_dict),
        seeds=_be("seeds", run["seeds"], _list_of(_is_whole)),
        trained_on=_be("trained_on", run.get("trained_on", []), _list_of(_is_count)),
        passes_over=_be("passes_over", run.get("passes_over", []), _list_of(lambda value: value is None or _is_count(value))),
        loaders=loaders, is_own=is_own, streams=streams,
        loader_stream=_be("loader_stream", loader_stream, lambda value: value is None or isinstance(value, torch.Tensor)),
    )  # fmt: skip


def _be(name: str, value: Any, is_so: Callable[[Any], bool]) -> Any:
    if not is_so(value):
        told = repr(value)
        told = told if len(told) <= 60 else f"{told[:60]} ..."
        raise CheckpointError(f"the manifest has {told} for {name}, which no save writes; nothing was changed")
    return value


def _is_dict(value: Any) -> bool:
    return isinstance(value, dict)


def _is_whole(value: Any) -> bool:
    return type(value) is int and -_MAX <= value < 2 * _MAX


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < _MAX


def _list_of(is_so: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(map(is_so, value))


def _pair(value: Any) -> tuple[int, int]:
    first, second = _be("ticks", value, lambda each: _list_of(_is_count)(each) and len(each) == 2 and all(each))
    return first, second


def _read_batch(batch: Any) -> dict[str, Any]:
    _be("batch", batch, _is_dict)
    sizes = _list_of(lambda value: value is None or _is_count(value))
    columns = [_be(name, batch[name], sizes) for name in ("asked", "sizes", "units")]
    if len({len(each) for each in columns}) != 1:
        raise CheckpointError(
            "the manifest tells the global batch of different numbers of loaders; nothing was changed"
        )
    _be("trained", batch["trained"], _list_of(_is_count))
    return dict(batch)


def _read_nominal(nominal: Any, num_models: int) -> list[tuple[list[int], float]]:
    read = []
    for numbers, weight in _be("nominal", nominal, _list_of(lambda each: isinstance(each, list) and len(each) == 2)):
        _be("nominal", numbers, _list_of(lambda value: _is_count(value) and value < num_models))
        read.append((numbers, float(_be("nominal", weight, lambda value: type(value) in (int, float)))))
    return read
