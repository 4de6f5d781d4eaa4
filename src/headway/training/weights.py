"""Weights between prepared models and files: whole tensors on their way out, pretrained ones on their way in.

Out go the state dict that scripts ask for, and files of plain weights: sharded tensors are gathered as whole ones on rank 0, one at a
time. Of a pretrained checkpoint each rank reads its own part, once, and straight to where it stays.
"""

import hashlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import torch

from headway.common.text import format_bytes
from headway.errors import CheckpointError, ConfigError
from headway.log import get_logger
from headway.runtime.collectives.checked import Collectives, digest
from headway.runtime.control_plane.attendance import Attendance, RankConditionalCallCheck
from headway.runtime.process import ProcessRuntime
from headway.strategies.base import Strategy
from headway.weights.export import describe, has_adapters, order_of, push, save_pickled, save_weights, untied
from headway.weights.files import StoredTensor, open_checkpoint
from headway.weights.names import Conversion, TensorLocation, TensorSources, match, places_of, tied_groups
from headway.weights.pieces import ShardCutter, ShardPiece, is_dtensor, is_spread, memory_of, own_boxes, slices
from headway.weights.shards import bits, raw_bytes

log = get_logger(__name__)

_T = TypeVar("_T")
_BLOCK = 16 * 2**20
"""Bytes that travel at once."""


def bucketed(items: Iterable[tuple[_T, int]], most: int) -> Iterator[list[_T]]:
    """Things of so many bytes each, in order, in buckets of at most `most` bytes; what is larger has one of its own."""
    bucket: list[_T] = []
    room = most
    for item, size in items:
        if bucket and size > room:
            yield bucket
            bucket, room = [], most
        bucket.append(item)
        room -= size
    if bucket:
        yield bucket


class GatheredTensor:
    """A tensor whose boxes come to rank 0 when all ranks ask for it, in the same order.

    Args:
        piece: this rank's.
        collectives: all ranks.
    """

    def __init__(self, piece: ShardPiece, collectives: Collectives) -> None:
        self.shape = torch.Size(piece.shape)
        self.dtype = piece.dtype
        self.is_done = False
        self._piece = piece
        self._collectives = collectives

    def whole(self) -> torch.Tensor:
        """All of it on rank 0's host, which takes its memory and at most one box's; elsewhere nothing (on the meta device)."""
        is_here = self._collectives.rank == 0
        out = torch.empty(self.shape, dtype=self.dtype, device="cpu" if is_here else "meta")
        self._travel(out if is_here else None)
        return out

    def pass_by(self) -> None:
        """Let it travel for the other ranks' sake, where rank 0 has no use for it any more."""
        self._travel(None)

    def _travel(self, out: torch.Tensor | None) -> None:
        self.is_done = True
        rank = self._collectives.rank
        own = {box.offsets: box.values for box in self._piece.boxes if box.is_written}
        for source, offsets, shape in self._boxes():
            if rank == source == 0 and out is not None:
                bits(out[slices(offsets, shape)]).copy_(bits(own[offsets]))
            elif rank == source != 0:
                self._send(raw_bytes(own[offsets]))
            elif rank == 0 and source != 0:
                self._receive(out, offsets, shape, source)

    def _boxes(self) -> Iterator[tuple[int, tuple[int, ...], tuple[int, ...]]]:
        """(the rank that brings it, where it begins, its shape) of every box."""
        split = self._piece.split
        if split is None:
            own = [(box.offsets, tuple(box.values.shape)) for box in self._piece.boxes if box.is_written]
            for rank, boxes in enumerate(self._collectives.gather_objects(own)):
                yield from ((rank, *box) for box in boxes)
            return
        yield from split.boxes()

    def _send(self, flat: torch.Tensor) -> None:
        for start in range(0, len(flat), _BLOCK):
            self._collectives.send(flat[start : start + _BLOCK], 0)

    def _receive(self, out: torch.Tensor | None, offsets: tuple[int, ...], shape: tuple[int, ...], source: int) -> None:
        num_bytes = torch.Size(shape).numel() * self.dtype.itemsize
        if out is None:
            scratch = torch.empty(min(_BLOCK, num_bytes), dtype=torch.uint8)
            for start in range(0, num_bytes, _BLOCK):
                self._collectives.receive(scratch[: min(_BLOCK, num_bytes - start)], source)
            return
        target = out[slices(offsets, shape)]
        box = target if target.is_contiguous() else torch.empty(shape, dtype=self.dtype)
        flat = raw_bytes(box)  # the same memory: it is contiguous, and on the host
        for start in range(0, num_bytes, _BLOCK):
            self._collectives.receive(flat[start : start + _BLOCK], source)
        if box is not target:
            bits(target).copy_(bits(box))


def pass_by(tensors: Iterable[Any]) -> None:
    """Let those travel that nobody has asked for yet, for the other ranks' sake; whole tensors may be among them."""
    for each in tensors:
        if isinstance(each, GatheredTensor) and not each.is_done:
            each.pass_by()


def gathered(tensors: Mapping[str, Any], collectives: Collectives) -> dict[str, Any]:
    """The tensors, those that are spread to be asked for as whole ones; every rank calls it with the same.

    Raises:
        CheckpointError: ranks hold other tensors, or cut otherwise, or not all of one; or values that were not reduced.
    """
    cutter = ShardCutter()
    pieces = {name: cutter.piece(each) if is_dtensor(each) else each for name, each in tensors.items()}
    spread = {name: each for name, each in pieces.items() if isinstance(each, ShardPiece)}
    told = [
        (name, each.shape, str(each.dtype), each.split and (each.split.rows, each.split.steps))
        for name, each in spread.items()
    ]
    brought = {
        name: sum(box.values.numel() for box in each.boxes if box.is_written)
        for name, each in spread.items()
        if each.split is None
    }
    answers = collectives.gather_objects((hashlib.sha256(repr(told).encode()).hexdigest(), list(brought.values())))
    if len({found for found, _ in answers}) > 1:
        raise CheckpointError("the ranks hold different sharded tensors; pass the same model on every rank")
    for name, *numbers in zip(brought, *(each for _, each in answers)):
        wanted, there = prod(pieces[name].shape), sum(numbers)
        if there != wanted:  # the rest of it would be whatever lies in new memory
            raise CheckpointError(f"{name} has {wanted:,} values, but the ranks' parts of it have {there:,} in total")
    return pieces | {name: GatheredTensor(each, collectives) for name, each in spread.items()}


def whole_state(tensors: Iterable[tuple[str, Any]], collectives: Collectives) -> dict[str, torch.Tensor]:
    """A state dict of whole tensors: where any is spread, on rank 0's host, and empty elsewhere; every rank calls it.

    Raises:
        CheckpointError: on every rank: they hold other tensors, or not all of one, or rank 0 failed.
    """
    named = dict(tensors)
    if not any(map(is_spread, named.values())):
        return named
    values = {name: each for name, each in named.items() if isinstance(each, torch.Tensor) or is_spread(each)}
    kept, tied = untied(values.items())
    whole = gathered(kept, collectives)

    def put_together() -> dict[str, torch.Tensor]:
        found = named | {
            name: each.whole() if isinstance(each, GatheredTensor) else each for name, each in whole.items()
        }
        return {name: found[tied.get(name, name)] for name in named}

    return _on_rank_0(put_together, whole, list(whole), collectives) or {}


def save_gathered(
    tensors: Iterable[tuple[str, Any]], folder: str | Path, max_shard_size: int | str, collectives: Collectives
) -> None:
    """As `save_weights` on rank 0, where some tensors are spread; every rank calls it.

    Memory: one whole tensor at a time on rank 0, nothing more than its part on the others.

    Raises:
        CheckpointError: on every rank, where rank 0 could not write.
    """
    named = list(tensors)
    kept, tied = untied(named)
    whole = gathered(kept, collectives)
    every = [(name, whole[tied.get(name, name)]) for name, _ in named]
    _on_rank_0(lambda: save_weights(every, folder, max_shard_size), whole, order_of(whole, max_shard_size), collectives)


def _on_rank_0(
    act: Callable[[], _T], whole: Mapping[str, Any], order: Iterable[str], collectives: Collectives
) -> _T | None:
    """Act on rank 0, which asks for the tensors in that order; the others send them. Where it fails there, they go on together."""
    result: _T | None = None
    failure: Exception | None = None
    try:
        if collectives.rank == 0:
            result = act()
    except Exception as error:
        failure = error
    pass_by(whole[name] for name in order)  # what rank 0 asks for, and where that failed, the rest of it
    told = collectives.broadcast_object(None if failure is None else f"{type(failure).__name__}: {failure}")
    if failure is not None:
        raise failure
    if told is not None:
        raise CheckpointError(f"rank 0 could not put the weights together, or write them: {told}")
    return result


class WholeWeights:
    """Whole tensors of prepared models; where each rank holds a part, all ranks put them together.

    Args:
        strategy: gives the tensors.
        runtime: this process.
    """

    def __init__(self, strategy: Strategy, runtime: ProcessRuntime) -> None:
        self._strategy = strategy
        self._runtime = runtime
        self._lone_calls = RankConditionalCallCheck(runtime, strategy.name)

    def state_dict(self, model: torch.nn.Module) -> dict[str, torch.Tensor]:
        """The model's tensors by name; of a sharded model on rank 0 alone, on the host, and nothing elsewhere.

        Raises:
            UnsupportedError: the model is sharded, and only some ranks make the call.
        """
        self._begin(model, "get_state_dict")
        return whole_state(self._strategy.export_state(model), self._strategy.everyone)

    def save(self, model: torch.nn.Module, folder: str | Path, max_shard_size: int | str, is_safe: bool) -> None:
        """Write the weights from rank 0: as safetensors, or pickled in one file; where all ranks call it, they go on together.

        Under `if accelerator.is_main_process:` the rank that comes writes whole copies, when the others have gone on.

        Raises:
            UnsupportedError: as for `state_dict`.
            ConfigError: the state dict holds something besides tensors, and safetensors is wanted.
        """
        everyone = self._strategy.everyone
        tensors = self.export(model, "save_model", is_safe)
        attended = self._runtime.scope.own(Attendance).who_comes("save_model")
        if is_safe and any(map(is_spread, tensors.values())):
            save_gathered(tensors.items(), folder, max_shard_size, everyone)
        else:
            tensors = whole_state(tensors.items(), everyone)
            if self._runtime.rank == attended.ranks[0]:
                save_weights(tensors.items(), folder, max_shard_size) if is_safe else save_pickled(tensors, folder)
        if not attended.elsewhere:
            everyone.barrier()

    def publish(
        self, model: torch.nn.Module, folder: Path, max_shard_size: int | str, parts: Sequence[object] = ()
    ) -> None:
        """Write what `from_pretrained` opens, from rank 0; called like `save`. Of a model with adapters, these alone."""
        if has_adapters(model):
            state = self.state_dict(model)
            if self._runtime.rank == 0:
                model.save_pretrained(folder, state_dict=dict(state))  # type: ignore[operator]
        else:
            self.save(model, folder, max_shard_size, True)
        if self._runtime.rank == 0:
            describe(model, folder, parts)

    def publish_all(self, models: Sequence[torch.nn.Module], weights: object, folder: str) -> None:
        """A hook of a save: the first model goes into the folder itself, the others into folders of their own."""
        for number, model in enumerate(models):
            place = Path(folder, f"model_{number}") if number else Path(folder)
            place.mkdir(parents=True, exist_ok=True)
            self.publish(getattr(model, "_orig_mod", model), place, "10GB")

    def push(
        self,
        model: torch.nn.Module,
        repo_id: str,
        parts: Sequence[object],
        max_shard_size: int | str,
        about: Mapping[str, Any],
    ) -> str | None:
        """Upload the same to the Hub; returns the commit's URL on rank 0. Where that fails, no rank waits for it."""
        with TemporaryDirectory(prefix="headway-push-") as folder:
            self.publish(model, Path(folder), max_shard_size, parts)
            return push(Path(folder), repo_id, **about) if self._runtime.rank == 0 else None

    def export(self, model: torch.nn.Module, call: str, is_safe: bool = True) -> dict[str, Any]:
        """The model's tensors, of sharded ones this rank's parts; with `is_safe` nothing else."""
        self._begin(model, call)
        tensors = dict(self._strategy.export_state(model))
        for name, module in model.named_modules():
            scales: Any = getattr(
                module, "quant_state", None
            )  # bitsandbytes looks for them at the weight, which is in parts
            if scales is not None and is_spread(tensors.get(f"{name}.weight")):
                tensors |= {f"{name}.weight.{key}": value for key, value in scales.as_dict(packed=True).items()}
        if is_safe:
            _refuse_objects(tensors)
        return tensors

    def _begin(self, model: torch.nn.Module, call: str) -> None:
        if not self._strategy.capabilities.lone_forward:
            self._lone_calls.check(f"{call}() is called", "putting whole weights together")
        self._strategy.at_rest(model)


def _refuse_objects(state: Mapping[str, Any]) -> None:
    """Every rank holds the same names, so all of them refuse."""
    for name, value in state.items():
        if not (isinstance(value, torch.Tensor) or is_spread(value)):
            raise ConfigError(
                f"{name} of the model's state dict is a {type(value).__name__}, and safetensors files hold tensors only: pass "
                "safe_serialization=False to save_model(), or use save_state(), which saves the state that get_extra_state() returns"
            )


# ---------------------------------------------------------------- pretrained weights

_WRAPPED = "base_layer."
"""Under this name PEFT's layers hold the one that they adapt."""


def _bare(name: str) -> str:
    """A tensor's name as it was before adapters came."""
    return name.replace(_WRAPPED, "")


def _bare_places(model: torch.nn.Module) -> dict[str, TensorLocation]:
    """A model's tensors by name, without those of its adapters."""
    adapted = [f"{path}." for path, module in model.named_modules() if hasattr(module, "base_layer")]
    return {
        _bare(name): place
        for name, place in places_of(model).items()
        if _WRAPPED in name or not name.startswith(tuple(adapted))
    }


class PretrainedWeights:
    """A checkpoint whose names are settled against a model; no value is read yet.

    Args:
        model: a model, or a part of one; on any device, meta included.
        source: as for `open_checkpoint`.
        strict: names that the model has no place for, and absent buffers, are an error.

    Raises:
        CheckpointError: it is missing or damaged, or does not fit.
    """

    def __init__(self, model: torch.nn.Module, source: str | Path, strict: bool) -> None:
        self.source = str(source)
        opened, places = open_checkpoint(source), _bare_places(model)
        self._stored: dict[str, StoredTensor] = opened.tensors
        self._sources: TensorSources = match(model, places, opened, strict, computes_buffers=True)
        groups = tied_groups(places)
        self.names = {name for found in self._sources.shapes for name in groups.get(found, [found])}

    def read(self, tensors: Mapping[str, Any], everyone: Collectives) -> int:
        """Fill tensors, by their names here; every rank calls it. What transformers converts is read by one rank each, and sent.

        Returns:
            The bytes that this rank has read.

        Raises:
            CheckpointError: on every rank: a file could not be read on one of them, or ranks see different files.
        """
        seen = [(name, each.shape, str(each.dtype)) for name, each in sorted(self._stored.items())]
        if len({row[0] for row in everyone.gather_numbers([digest(repr(seen))])}) > 1:
            raise CheckpointError(f"{self.source} holds other tensors on some ranks; give all of them the same files")
        done = set[Any]()
        num_read = 0

        def read_own() -> None:
            nonlocal num_read
            for name, key in self._sources.direct.items():
                if name not in tensors:
                    raise CheckpointError(f"the model had {name} when load_weights() was called, and has none now")
                if (memory := memory_of(tensors[name])) in done:
                    continue
                done.add(memory)
                for offsets, box in own_boxes(tensors[name]):
                    self._stored[key].fill(box, offsets)
                    num_read += box.numel() * self._stored[key].dtype.itemsize

        with torch.no_grad():
            self._on_all(read_own, everyone)
            for number, conversion in enumerate(self._sources.conversions):
                num_read += self._convert(conversion, number % everyone.world_size, tensors, everyone)
        return num_read

    def _convert(self, conversion: Conversion, rank: int, tensors: Mapping[str, Any], everyone: Collectives) -> int:
        made: dict[str, torch.Tensor] = {}
        is_here = everyone.rank == rank

        def convert() -> None:
            if is_here:
                made.update(conversion.run(self._whole))

        self._on_all(convert, everyone)
        names: list[str] = everyone.broadcast_object(list(made), rank)
        for name in names:
            shape, dtype = self._sources.shapes[name]
            value = made.pop(name).contiguous() if is_here else torch.empty(shape, dtype=dtype)
            everyone.broadcast_into([value], rank)
            for offsets, box in own_boxes(tensors[name]):
                box.copy_(value[slices(offsets, box.shape)])
        return sum(self._stored[key].num_bytes for key, _ in conversion.sources) if is_here else 0

    def _whole(self, key: str) -> torch.Tensor:
        stored = self._stored[key]
        made = torch.empty(stored.shape, dtype=stored.dtype)
        stored.fill(made, (0,) * made.ndim)
        return made

    def _on_all(self, act: Callable[[], None], everyone: Collectives) -> None:
        failure: Exception | None = None
        try:
            act()
        except Exception as error:
            failure = error
        told = [text for text in everyone.gather_objects(failure and f"{type(failure).__name__}: {failure}") if text]
        if told:
            raise CheckpointError(
                f"{self.source} could not be read to the end, so the model is in between: {told[0]}"
            ) from failure


class PretrainedLoads:
    """The checkpoints that models are to be filled from.

    Args:
        strategy: shards or copies the models.
    """

    def __init__(self, strategy: Strategy) -> None:
        self._strategy = strategy
        self._waiting: weakref.WeakKeyDictionary[torch.nn.Module, PretrainedWeights] = weakref.WeakKeyDictionary()

    def add(self, part: torch.nn.Module, source: str | Path, strict: bool, prepared: Iterable[torch.nn.Module]) -> None:
        """Fill a model, or a part of one: now where it is prepared, else when it will be."""
        whole = next((model for model in prepared if any(part is inner for inner in model.modules())), None)
        if whole is not None:
            self._strategy.at_rest(whole)
        self._waiting[part] = PretrainedWeights(part, source, strict)
        if whole is not None:
            self.read(whole)

    def names(self, model: torch.nn.Module) -> set[str]:
        """The tensors of a model that are waiting to be filled."""
        return {
            f"{path}.{name}".lstrip(".")
            for path, weights in self._of(model)
            for name in places_of(model.get_submodule(path))
            if _bare(name) in weights.names
        }

    def _of(self, model: torch.nn.Module) -> list[tuple[str, PretrainedWeights]]:
        parts = [(path, part) for path, part in model.named_modules() if part in self._waiting]
        return [(path, self._waiting[part]) for path, part in parts]

    def read(self, model: torch.nn.Module) -> None:
        """Fill what is waiting of a model that has been set up."""
        found = self._of(model)
        if not found:
            return
        everyone = self._strategy.everyone
        for path, weights in found:
            prefix = f"{path}." if path else ""
            tensors = {name: each for name, each in self._strategy.export_state(model) if name.startswith(prefix)}
            own = {_bare(name.removeprefix(prefix)): each for name, each in tensors.items()}
            num_bytes = weights.read(own, everyone)
            log.info("%s: this rank has read its part, %s", weights.source, format_bytes(num_bytes))
        self._strategy.settle()
        for part in list(model.modules()):
            self._waiting.pop(part, None)
