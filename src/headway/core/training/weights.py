"""Transfer of model weights between prepared models and files: gathering shards into full tensors, reading checkpoints.

For a state dict or plain weight files, sharded tensors are gathered on rank 0, one at a time. When a pretrained
checkpoint is loaded, each rank reads only its own shards, once, and directly into the model's tensors.
"""

import hashlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import torch

from headway.common.object_path import open_writable, to_path
from headway.common.text import format_bytes
from headway.core import extensions
from headway.core.runtime.collectives.checked import Collectives, digest_text
from headway.core.runtime.control_plane.attendance import Attendance
from headway.core.runtime.control_plane.conditional_calls import RankConditionalCallCheck
from headway.core.runtime.process import ProcessRuntime
from headway.core.strategies.base import Strategy
from headway.core.strategies.checkpoint_protocol import CheckpointStrategy
from headway.core.weights.compiled import accept_bare_names, remove_compiled_levels, rename_bare_items
from headway.core.weights.export import (
    has_adapters,
    list_write_order,
    push_folder,
    save_pickled,
    save_weights,
    split_ties,
    write_configurations,
)
from headway.core.weights.files import StoredTensor, open_checkpoint
from headway.core.weights.names import (
    Conversion,
    TensorLocation,
    TensorSources,
    load_extra_states,
    map_locations,
    map_ties,
    match_names,
)
from headway.core.weights.pieces import (
    ShardCutter,
    ShardPiece,
    get_memory_key,
    is_dtensor,
    is_spread,
    list_own_boxes,
    make_slices,
)
from headway.core.weights.shards import get_raw_bytes, view_as_bits
from headway.errors import CheckpointError, ConfigError
from headway.log import get_logger

log = get_logger(__name__)

_T = TypeVar("_T")
_BLOCK = 16 * 2**20
"""Bytes per message between ranks."""


def iterate_buckets(items: Iterable[tuple[_T, int]], most: int) -> Iterator[list[_T]]:
    """Yield items in order, in buckets of at most `most` bytes. A larger item gets a bucket for itself.

    Args:
        items: Pairs of (item, size in bytes).
        most: Largest size of a bucket in bytes.
    """
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
    """Sharded tensor that is gathered on rank 0 when it is needed. All ranks must request it, in the same order.

    Args:
        piece: This rank's shard of the tensor.
        collectives: Collectives over all ranks.
    """

    def __init__(self, piece: ShardPiece, collectives: Collectives) -> None:
        self.shape = torch.Size(piece.shape)
        self.dtype = piece.dtype
        self.is_done = False
        self._piece = piece
        self._collectives = collectives

    def assemble(self) -> torch.Tensor:
        """Gather the tensor, and return it on rank 0's CPU. Other ranks get a meta tensor without values.

        Rank 0 needs memory for the tensor and for one received part of it.
        """
        is_here = self._collectives.rank == 0
        out = torch.empty(self.shape, dtype=self.dtype, device="cpu" if is_here else "meta")
        self._send_to_rank0(out if is_here else None)
        return out

    def pass_by(self) -> None:
        """Take part in the gather without keeping the values, so that the other ranks can continue."""
        self._send_to_rank0(None)

    def _send_to_rank0(self, out: torch.Tensor | None) -> None:
        """Send this rank's boxes to rank 0. On rank 0, receive the boxes of all ranks.

        A box is a rectangular part of the full tensor. Every rank must call this method.

        Args:
            out: Full tensor that rank 0 fills. If None, rank 0 drops the values. Other ranks pass None.
        """
        self.is_done = True
        rank = self._collectives.rank
        own = {box.offsets: box.values for box in self._piece.boxes if box.is_written}
        for source, offsets, shape in self._iterate_boxes():
            if rank == source == 0 and out is not None:
                view_as_bits(out[make_slices(offsets, shape)]).copy_(view_as_bits(own[offsets]))
            elif rank == source != 0:
                self._send_blocks(get_raw_bytes(own[offsets]))
            elif rank == 0 and source != 0:
                self._receive_blocks(out, offsets, shape, source)

    def _iterate_boxes(self) -> Iterator[tuple[int, tuple[int, ...], tuple[int, ...]]]:
        """Yield the rectangular parts that make up the full tensor, as tuples (sending rank, offsets, shape)."""
        split = self._piece.split
        if split is None:
            own = [(box.offsets, tuple(box.values.shape)) for box in self._piece.boxes if box.is_written]
            for rank, boxes in enumerate(self._collectives.gather_objects(own)):
                yield from ((rank, *box) for box in boxes)
            return
        yield from split.iterate_boxes()

    def _send_blocks(self, flat: torch.Tensor) -> None:
        for start in range(0, len(flat), _BLOCK):
            self._collectives.send(flat[start : start + _BLOCK], 0)

    def _receive_blocks(
        self, out: torch.Tensor | None, offsets: tuple[int, ...], shape: tuple[int, ...], source: int
    ) -> None:
        num_bytes = torch.Size(shape).numel() * self.dtype.itemsize
        if out is None:
            scratch = torch.empty(min(_BLOCK, num_bytes), dtype=torch.uint8)
            for start in range(0, num_bytes, _BLOCK):
                self._collectives.receive(scratch[: min(_BLOCK, num_bytes - start)], source)
            return
        target = out[make_slices(offsets, shape)]
        box = target if target.is_contiguous() else torch.empty(shape, dtype=self.dtype)
        flat = get_raw_bytes(box)  # a view of `box`: it is contiguous and on the CPU
        for start in range(0, num_bytes, _BLOCK):
            self._collectives.receive(flat[start : start + _BLOCK], source)
        if box is not target:
            view_as_bits(target).copy_(view_as_bits(box))


def pass_by_all(tensors: Iterable[Any]) -> None:
    """Take part in the gathers of all tensors that have not been gathered yet. Other objects are ignored."""
    for each in tensors:
        if isinstance(each, GatheredTensor) and not each.is_done:
            each.pass_by()


def wrap_sharded(tensors: Mapping[str, Any], collectives: Collectives) -> dict[str, Any]:
    """Return the tensors by name, with a `GatheredTensor` in place of each sharded tensor.

    Every rank must call this function with the same names.

    Args:
        tensors: Tensors by name.
        collectives: Collectives over all ranks.

    Raises:
        CheckpointError: If ranks hold different tensors, shard them differently, or together miss part of one, or if
            partial sums were not reduced over ranks.
    """
    cutter = ShardCutter()
    pieces = {name: cutter.cut_tensor(each) if is_dtensor(each) else each for name, each in tensors.items()}
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
        raise CheckpointError("the ranks have different sharded tensors; pass the same model on every rank")
    for name, *numbers in zip(brought, *(each for _, each in answers)):
        wanted, there = prod(pieces[name].shape), sum(numbers)
        if there != wanted:  # a missing part would be uninitialized memory
            raise CheckpointError(f"{name} has {wanted:,} values, but the ranks' parts of it have {there:,} in total")
    return pieces | {name: GatheredTensor(each, collectives) for name, each in spread.items()}


def gather_state(tensors: Iterable[tuple[str, Any]], collectives: Collectives) -> dict[str, torch.Tensor]:
    """Return a state dict of full tensors. Every rank calls it.

    If any tensor is sharded, only rank 0 gets the tensors, with the gathered ones on the CPU. The other ranks get an
    empty dict. If no tensor is sharded, every rank gets its own tensors unchanged.

    Args:
        tensors: Pairs of (name, tensor).
        collectives: Collectives over all ranks.

    Raises:
        CheckpointError: On every rank, if ranks hold different tensors, or part of one is missing. If rank 0 fails to
            gather, it raises its own error, and the other ranks raise CheckpointError.
    """
    named = dict(tensors)
    if not any(map(is_spread, named.values())):
        return named
    values = {name: each for name, each in named.items() if isinstance(each, torch.Tensor) or is_spread(each)}
    kept, tied = split_ties(values.items())
    whole = wrap_sharded(kept, collectives)

    def put_together() -> dict[str, torch.Tensor]:
        found = named | {
            name: each.assemble() if isinstance(each, GatheredTensor) else each for name, each in whole.items()
        }
        return {name: found[tied.get(name, name)] for name in named}

    return run_on_rank_0(put_together, collectives, whole, list(whole)) or {}


def save_gathered(
    tensors: Iterable[tuple[str, Any]], folder: str | Path, max_shard_size: int | str, collectives: Collectives
) -> None:
    """Gather sharded tensors and write all tensors from rank 0, as `save_weights` does. Every rank calls it.

    Rank 0 needs memory for one full tensor at a time. The other ranks need none beyond their own shards.

    Args:
        tensors: Pairs of (name, tensor).
        folder: Directory to write to.
        max_shard_size: Largest size of a file, in bytes or as text such as "10GB".
        collectives: Collectives over all ranks.

    Raises:
        CheckpointError: On every rank, if ranks hold different tensors, or part of one is missing. If rank 0 fails to
            write, it raises its own error, and the other ranks raise CheckpointError.
    """
    named = list(tensors)
    kept, tied = split_ties(named)
    whole = wrap_sharded(kept, collectives)
    every = [(name, whole[tied.get(name, name)]) for name, _ in named]
    run_on_rank_0(
        lambda: save_weights(every, folder, max_shard_size), collectives, whole, list_write_order(whole, max_shard_size)
    )


def run_on_rank_0(
    act: Callable[[], _T],
    collectives: Collectives,
    whole: Mapping[str, Any] | None = None,
    order: Iterable[str] = (),
) -> _T | None:
    """Run `act` on rank 0 while the other ranks send it the tensors in the given order, and then wait for its end.

    If `act` fails, rank 0 still receives the remaining tensors, so that all ranks continue together.

    Args:
        act: Function that rank 0 calls, such as one that writes a file.
        collectives: Collectives over all ranks.
        whole: Tensors by name, sharded ones as `GatheredTensor`. None: `act` needs none.
        order: Names in the order in which `act` requests them.

    Returns:
        The result of `act` on rank 0, and None on the other ranks.

    Raises:
        CheckpointError: On the other ranks, if `act` fails. Rank 0 raises the error of `act`.
    """
    result: _T | None = None
    failure: Exception | None = None
    try:
        if collectives.rank == 0:
            result = act()
    except Exception as error:
        failure = error
    # Other ranks send what rank 0 requests. After a failure rank 0 receives the rest, so that no sender waits.
    pass_by_all(whole[name] for name in order if whole is not None)
    told = collectives.broadcast_object(None if failure is None else f"{type(failure).__name__}: {failure}")
    if failure is not None:
        raise failure
    if told is not None:
        raise CheckpointError(f"rank 0 could not put the weights together, or write them: {told}")
    return result


class WholeWeights:
    """Access to the full tensors of models, prepared or not.

    If a model is sharded, all ranks gather the tensors together.

    Args:
        strategy: Strategy that exports the tensors.
        runtime: Runtime of this process.
    """

    def __init__(self, strategy: Strategy, runtime: ProcessRuntime) -> None:
        self._strategy = strategy
        self._runtime = runtime
        self._lone_calls = RankConditionalCallCheck(runtime, strategy.name)

    def state_dict(self, model: torch.nn.Module, is_bare: bool = True) -> dict[str, torch.Tensor]:
        """Return the full tensors of a model by name.

        For a sharded model, only rank 0 gets the tensors, with the gathered ones on the CPU. The other ranks get an
        empty dict.

        Args:
            model: Model, prepared or not.
            is_bare: Whether to remove the prefixes that `torch.compile(module)` adds to names. Default: True.

        Raises:
            UnsupportedError: If the model is sharded, and only some ranks make the call.
            StateError: If the model is sharded, and the process group has ended.
        """
        self._begin_gather(model, "get_state_dict")
        tensors = self._strategy.export_state(model)
        accept_bare_names(model)  # submodules may have been compiled since prepare()
        return gather_state(rename_bare_items(tensors) if is_bare else tensors, self._strategy.everyone)

    def save(self, model: torch.nn.Module, folder: str | Path, max_shard_size: int | str, is_safe: bool) -> None:
        """Write the model's weights from rank 0, as safetensors or as one pickled file.

        If all ranks call this method, the other ranks wait until rank 0 has written the files. Under `if
        accelerator.is_main_process:` the main process writes alone, and the other ranks do not wait. After the process
        group has been destroyed, rank 0 writes, and no rank waits.

        Args:
            model: Model to save.
            folder: Directory to write to.
            max_shard_size: Largest size of a file, in bytes or as text such as "10GB".
            is_safe: Whether to write safetensors instead of one pickled file.

        Raises:
            UnsupportedError: If the model is sharded, and only some ranks make the call.
            StateError: If the model is sharded, and the process group has ended.
            ConfigError: If safetensors are requested, and the state dict contains objects other than tensors.
        """
        everyone = self._strategy.everyone
        tensors = self.export(model, "save_model", is_safe)
        attended = self._runtime.scope.get_or_create(Attendance).find_participants("save_model")
        if is_safe and any(map(is_spread, tensors.values())):
            save_gathered(tensors.items(), folder, max_shard_size, everyone)
        else:
            tensors = gather_state(tensors.items(), everyone)
            if self._runtime.rank == attended.ranks[0]:
                save_weights(tensors.items(), folder, max_shard_size) if is_safe else save_pickled(tensors, folder)
        if not (attended.elsewhere or everyone.has_ended):
            everyone.barrier()

    def save_adapters(self, model: torch.nn.Module, folder: str | Path) -> None:
        """Write a model's adapters from rank 0 with its `save_pretrained`, such as PEFT's. The base is not written.

        Ranks call it and wait as in `save`.

        Args:
            model: Model with adapters.
            folder: Directory or URL to write to.

        Raises:
            UnsupportedError: If the model is sharded, and only some ranks make the call.
            StateError: If the model is sharded, and the process group has ended.
        """
        everyone = self._strategy.everyone
        tensors = self.export(model, "save_model", is_safe=False)
        attended = self._runtime.scope.get_or_create(Attendance).find_participants("save_model")
        self._write_adapters(model, tensors, folder, attended.ranks[0])
        if not (attended.elsewhere or everyone.has_ended):
            everyone.barrier()

    def _write_adapters(
        self, model: torch.nn.Module, tensors: Mapping[str, torch.Tensor], folder: str | Path, writer: int
    ) -> None:
        """Write a model's adapters from one rank. All ranks must call it if tensors are sharded.

        Args:
            model: Model with adapters.
            tensors: Tensors of the model, from `export`.
            folder: Directory or URL to write to.
            writer: Rank that writes. It is 0 if tensors are sharded.
        """
        state = dict(tensors)
        if any(map(is_spread, tensors.values())):
            state = extensions.load("feature", "gather_written_tensors")(model, tensors, self._strategy.everyone)
        if self._runtime.rank == writer:
            with open_writable(to_path(folder)) as local:
                model.save_pretrained(local, state_dict=state)  # type: ignore[operator]

    def publish(
        self, model: torch.nn.Module, folder: Path, max_shard_size: int | str, parts: Sequence[object] = ()
    ) -> None:
        """Write a directory that `from_pretrained` can open. Rank 0 writes it.

        If the model has adapters, only the adapters are written. All ranks must call this method if the model is
        sharded. Otherwise rank 0 can call it alone.

        Args:
            model: Model to save.
            folder: Directory to write to.
            max_shard_size: Largest size of a file, in bytes or as text such as "10GB".
            parts: Objects to save in addition to the model, such as a tokenizer. Default: ().
        """
        if has_adapters(model):
            self._write_adapters(model, self.export(model, "save_pretrained", is_safe=False), folder, 0)
        else:
            self.save(model, folder, max_shard_size, True)
        if self._runtime.rank == 0:
            write_configurations(model, folder, parts)

    def publish_all(self, models: Sequence[torch.nn.Module], weights: object, folder: str) -> None:
        """Write all models so that `from_pretrained` can open them. `save_state` calls this as a save hook.

        The first model is written to `folder` itself, the others to subdirectories `model_1`, `model_2` and so on.

        Args:
            models: Prepared models, in order of preparation.
            weights: State dicts that save hooks receive. They are ignored here.
            folder: Directory to write to. It is created if missing.
        """
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
        """Write a model to a temporary directory, as `publish` does, and upload it to the Hugging Face Hub from rank 0.

        All ranks must call this method if the model is sharded. Otherwise rank 0 can call it alone. If the upload
        fails, only rank 0 raises the error.

        Args:
            model: Model to upload.
            repo_id: Repository on the Hub: "name" or "owner/name".
            parts: Objects to upload in addition to the model, such as a tokenizer.
            max_shard_size: Largest size of a file, in bytes or as text such as "10GB".
            about: Keyword arguments of `push_folder`, such as `commit_message`.

        Returns:
            URL of the commit on rank 0, and None on the other ranks.
        """
        with TemporaryDirectory(prefix="headway-push-") as folder:
            self.publish(model, Path(folder), max_shard_size, parts)
            return push_folder(Path(folder), repo_id, **about) if self._runtime.rank == 0 else None

    def export(self, model: torch.nn.Module, call: str, is_safe: bool = True) -> dict[str, Any]:
        """Return the model's tensors by name. Sharded tensors are not gathered: they contain this rank's shards.

        Args:
            model: Model to export.
            call: Name of the calling public method, for error messages.
            is_safe: Whether to raise an error for objects other than tensors. Default: True.

        Raises:
            ConfigError: If `is_safe` is set, and the state dict contains objects other than tensors.
            UnsupportedError: If the model is sharded, and only some ranks make the call.
            StateError: If the model is sharded, and the process group has ended.
        """
        self._begin_gather(model, call)
        tensors = dict(rename_bare_items(self._strategy.export_state(model)))
        for path, module in model.named_modules():
            name = remove_compiled_levels(f"{path}.").removesuffix(".")
            scales: Any = getattr(
                module, "quant_state", None
            )  # bitsandbytes expects quantization data on the weight, which is sharded
            if scales is not None and is_spread(tensors.get(f"{name}.weight")):
                tensors |= {f"{name}.weight.{key}": value for key, value in scales.as_dict(packed=True).items()}
        if is_safe:
            _refuse_objects(tensors)
        return tensors

    def _begin_gather(self, model: torch.nn.Module, call: str) -> None:
        """Check that all ranks can gather a sharded model together, and free its gathered parameters.

        Args:
            model: Model to export.
            call: Name of the calling public method, for error messages.

        Raises:
            UnsupportedError: If the model is sharded, and only some ranks make the call.
            StateError: If the model is sharded, and the process group has ended.
        """
        if not self._strategy.capabilities.lone_forward:
            self._strategy.everyone.ensure_connected(call)
            self._lone_calls.check(f"{call}() is called", "putting whole weights together")
        self._strategy.free_gathered(model)


def _refuse_objects(state: Mapping[str, Any]) -> None:
    """Raise `ConfigError` if the state dict contains objects other than tensors.

    Every rank raises it, because the state dict has the same names and types on all ranks.
    """
    for name, value in state.items():
        if not (isinstance(value, torch.Tensor) or is_spread(value)):
            raise ConfigError(
                f"{name} of the model's state dict is a {type(value).__name__}, but safetensors files contain only tensors: pass "
                "safe_serialization=False to save_model(), or use save_state(), which saves the state that get_extra_state() "
                "returns"
            )


# ---------------------------------------------------------------- pretrained weights

_WRAPPED = "base_layer."
"""Name prefix of tensors in the original layer that a PEFT layer adapts and keeps as its attribute `base_layer`."""


def _remove_levels(name: str) -> str:
    """Return a tensor's name without the components that adapters and `torch.compile` insert."""
    return remove_compiled_levels(name).replace(_WRAPPED, "")


def _map_bare_locations(model: torch.nn.Module) -> dict[str, TensorLocation]:
    """Return the locations of a model's tensors, by their names without the components that adapters insert.

    Adapter tensors are left out.
    """
    adapted = [f"{path}." for path, module in model.named_modules() if hasattr(module, "base_layer")]
    return {
        _remove_levels(name): place
        for name, place in map_locations(model).items()
        if _WRAPPED in name or not name.startswith(tuple(adapted))
    }


class PretrainedWeights:
    """Pretrained checkpoint whose tensor names have been matched to a model, before any value is read.

    Args:
        model: Model or part of one, on any device, meta included.
        source: Checkpoint, as for `open_checkpoint`.
        strict: Whether names unknown to the model and missing persistent buffers are an error.

    Raises:
        CheckpointError: If the checkpoint is missing, damaged, or does not fit the model.
    """

    def __init__(self, model: torch.nn.Module, source: str | Path, strict: bool) -> None:
        self.source = str(source)
        opened, places = open_checkpoint(source), _map_bare_locations(model)
        self._model, self._opened = model, opened
        self._stored: dict[str, StoredTensor] = opened.tensors
        self._sources: TensorSources = match_names(model, places, opened, strict, computes_buffers=True)
        groups = map_ties(places)
        self.names = {name for found in self._sources.shapes for name in groups.get(found, [found])}

    def read(self, tensors: Mapping[str, Any], everyone: Collectives) -> int:
        """Fill the given tensors of the model from the checkpoint. Every rank must call this method.

        If transformers has to convert a weight after reading, one rank reads and converts it, and broadcasts the
        result.

        Args:
            tensors: Tensors to fill, by their names in the model.
            everyone: Collectives over all ranks.

        Returns:
            Number of bytes that this rank has read.

        Raises:
            CheckpointError: On every rank, if a file could not be read on one of them, or ranks see different files.
        """
        seen = [(name, each.shape, str(each.dtype)) for name, each in sorted(self._stored.items())]
        if len({row[0] for row in everyone.gather_numbers([digest_text(repr(seen))])}) > 1:
            raise CheckpointError(f"{self.source} contains other tensors on some ranks; give all ranks the same files")
        done = set[Any]()
        num_read = 0

        def read_own() -> None:
            nonlocal num_read
            for name, key in self._sources.direct.items():
                if name not in tensors:
                    raise CheckpointError(f"the model had {name} when load_weights() was called, and has none now")
                if (memory := get_memory_key(tensors[name])) in done:
                    continue
                done.add(memory)
                for offsets, box in list_own_boxes(tensors[name]):
                    self._stored[key].fill(box, offsets)
                    num_read += box.numel() * self._stored[key].dtype.itemsize

        with torch.no_grad():
            self._on_all(read_own, everyone)
            for number, conversion in enumerate(self._sources.conversions):
                num_read += self._run_conversion(conversion, number % everyone.world_size, tensors, everyone)
        self._on_all(lambda: load_extra_states(self._model, self._sources, self._opened), everyone)
        return num_read

    def _run_conversion(
        self, conversion: Conversion, rank: int, tensors: Mapping[str, Any], everyone: Collectives
    ) -> int:
        """Fill the tensors of one conversion on all ranks. One rank reads and converts the stored values.

        Args:
            conversion: Conversion of stored tensors to tensors of the model.
            rank: Rank that reads and converts the values, and broadcasts the result.
            tensors: Tensors to fill, by their names in the model.
            everyone: Collectives over all ranks.

        Returns:
            Number of bytes that this rank has read.
        """
        made: dict[str, torch.Tensor] = {}
        is_here = everyone.rank == rank

        def convert_values() -> None:
            if is_here:
                made.update(conversion.run(self._read_whole))

        self._on_all(convert_values, everyone)
        names: list[str] = everyone.broadcast_object(list(made), rank)
        for name in names:
            shape, dtype = self._sources.shapes[name]
            value = made.pop(name).contiguous() if is_here else torch.empty(shape, dtype=dtype)
            everyone.broadcast_into([value], rank)
            for offsets, box in list_own_boxes(tensors[name]):
                box.copy_(value[make_slices(offsets, box.shape)])
        return sum(self._stored[key].num_bytes for key, _ in conversion.sources) if is_here else 0

    def _read_whole(self, key: str) -> torch.Tensor:
        stored = self._stored[key]
        made = torch.empty(stored.shape, dtype=stored.dtype)
        stored.fill(made, (0,) * made.ndim)
        return made

    def _on_all(self, act: Callable[[], None], everyone: Collectives) -> None:
        """Call `act` on every rank.

        Raises:
            CheckpointError: On every rank, if `act` failed on one of them.
        """
        failure: Exception | None = None
        try:
            act()
        except Exception as error:
            failure = error
        told = [text for text in everyone.gather_objects(failure and f"{type(failure).__name__}: {failure}") if text]
        if told:
            raise CheckpointError(
                f"{self.source} could not be read completely, so the model contains a mixture of old and new weights: {told[0]}"
            ) from failure


class PretrainedLoads:
    """Registry of the pretrained checkpoints that `load_weights` requested for models that are not prepared yet.

    Args:
        strategy: Strategy that shards or replicates the models.
    """

    def __init__(self, strategy: CheckpointStrategy) -> None:
        self._strategy = strategy
        self._waiting: weakref.WeakKeyDictionary[torch.nn.Module, PretrainedWeights] = weakref.WeakKeyDictionary()

    def add(self, part: torch.nn.Module, source: str | Path, strict: bool, prepared: Iterable[torch.nn.Module]) -> None:
        """Register a checkpoint for a model, or for part of one.

        If the model is prepared, the checkpoint is read at once, and every rank must call this method. Otherwise
        `prepare()` reads it.

        Args:
            part: Model or part of one.
            source: Checkpoint, as for `open_checkpoint`.
            strict: Whether names unknown to the model and missing persistent buffers are an error.
            prepared: All prepared models.

        Raises:
            CheckpointError: If the checkpoint is missing, damaged, or does not fit the model.
        """
        whole = next((model for model in prepared if any(part is inner for inner in model.modules())), None)
        if whole is not None:
            self._strategy.free_gathered(whole)
        self._waiting[part] = PretrainedWeights(part, source, strict)
        if whole is not None:
            self.read(whole)

    def list_names(self, model: torch.nn.Module) -> set[str]:
        """Return the names of a model's tensors that will be filled from registered checkpoints."""
        return {
            f"{path}.{name}".lstrip(".")
            for path, weights in self._find_waiting(model)
            for name in map_locations(model.get_submodule(path))
            if _remove_levels(name) in weights.names
        }

    def _find_waiting(self, model: torch.nn.Module) -> list[tuple[str, PretrainedWeights]]:
        parts = [(path, part) for path, part in model.named_modules() if part in self._waiting]
        return [(path, self._waiting[part]) for path, part in parts]

    def read(self, model: torch.nn.Module) -> None:
        """Read the registered checkpoints into a model after the strategy has set it up. All ranks call it.

        Do nothing if no checkpoint is registered for the model or part of it.
        """
        found = self._find_waiting(model)
        if not found:
            return
        everyone = self._strategy.everyone
        for path, weights in found:
            prefix = remove_compiled_levels(f"{path}.") if path else ""
            exported = rename_bare_items(self._strategy.export_state(model))
            tensors = {name: each for name, each in exported if name.startswith(prefix)}
            own = {_remove_levels(name.removeprefix(prefix)): each for name, each in tensors.items()}
            num_bytes = weights.read(own, everyone)
            log.info("%s: this rank has read its part, %s", weights.source, format_bytes(num_bytes))
        self._strategy.apply_loaded_values()
        for part in list(model.modules()):
            self._waiting.pop(part, None)
