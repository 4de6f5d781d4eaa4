"""Pretrained weights into prepared models: each rank reads its own part of a checkpoint, once, and straight to where it stays."""

import weakref
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from headway.common.text import format_bytes
from headway.errors import CheckpointError
from headway.log import get_logger
from headway.runtime.collectives.checked import Collectives, digest
from headway.strategies.base import Strategy
from headway.weights.files import StoredTensor, open_checkpoint
from headway.weights.names import Conversion, TensorLocation, TensorSources, match, places_of, tied_groups
from headway.weights.pieces import memory_of, own_boxes, slices

logger = get_logger(__name__)


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
        self._stored: dict[str, StoredTensor]
        opened, places = open_checkpoint(source), _bare_places(model)
        self._stored = opened.tensors
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
            logger.info("%s: this rank has read its part, %s", weights.source, format_bytes(num_bytes))
        self._strategy.settle()
        for part in list(model.modules()):
            self._waiting.pop(part, None)
