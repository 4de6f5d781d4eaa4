"""Load pretrained checkpoints into models, before or after `prepare`.

Each rank reads only its own shards, once, and directly into the model's tensors.
"""

import weakref
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from headway.common.text import format_bytes
from headway.core.runtime.collectives.checked import Collectives, digest_text
from headway.core.strategies.checkpoint_protocol import CheckpointStrategy
from headway.core.weights.compiled import remove_compiled_levels, rename_bare_items
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
    get_memory_key,
    list_own_boxes,
    make_slices,
)
from headway.errors import CheckpointError
from headway.log import get_logger

log = get_logger(__name__)

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
