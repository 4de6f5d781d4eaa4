"""Names: which stored tensor each tensor of a model comes from, settled before any value is moved."""

import difflib
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from headway.errors import CheckpointError
from headway.log import get_logger
from headway.weights.files import WeightFiles
from headway.weights.shards import dtype_name

logger = get_logger(__name__)

_SHOWN = 8


@dataclass(frozen=True)
class TensorLocation:
    """Where a tensor hangs in a model: `module._parameters[leaf]`, or `_buffers`."""

    module: nn.Module
    leaf: str
    is_parameter: bool
    is_persistent: bool = True

    @property
    def tensor(self) -> torch.Tensor:
        """The tensor that is there now."""
        found = (self.module._parameters if self.is_parameter else self.module._buffers)[self.leaf]
        assert found is not None
        return found

    def put(self, tensor: torch.Tensor) -> None:
        """Hang another tensor there, without the checks of registration."""
        if self.is_parameter:
            self.module._parameters[self.leaf] = tensor  # type: ignore[assignment]
        else:
            self.module._buffers[self.leaf] = tensor
        if isinstance(self.module, nn.RNNBase):
            # Its kernels take the weights from a list of its own.
            self.module._flat_weights = [getattr(self.module, name, None) for name in self.module._flat_weights_names]


def own_places(module: nn.Module) -> Iterator[TensorLocation]:
    """The parameters and buffers of a module itself."""
    for leaf, parameter in module._parameters.items():
        if parameter is not None:
            yield TensorLocation(module, leaf, True)
    for leaf, buffer in module._buffers.items():
        if buffer is not None:
            yield TensorLocation(module, leaf, False, leaf not in module._non_persistent_buffers_set)


def places_of(model: nn.Module) -> dict[str, TensorLocation]:
    """Every parameter and buffer by name; one that is tied, or hangs in a module used twice, has several names."""
    modules = model.named_modules(remove_duplicate=False)
    return {f"{prefix}.{each.leaf}".lstrip("."): each for prefix, module in modules for each in own_places(module)}


def tied_groups(places: Mapping[str, TensorLocation]) -> dict[str, list[str]]:
    """{name: all names of the same tensor}, itself included."""
    groups: defaultdict[int, list[str]] = defaultdict(list)
    for name, place in places.items():
        groups[id(place.tensor)].append(name)
    return {name: group for group in groups.values() for name in group}


def assign(places: Mapping[str, TensorLocation], names: list[str], value: torch.Tensor, is_mapped: bool) -> None:
    """Give a tensor, under all its names, its value: new data for one that has values, a new parameter for a meta one."""
    first = places[names[0]]
    old = first.tensor
    new: torch.Tensor
    if old.is_meta or old.device != value.device:
        new = nn.Parameter(value, requires_grad=old.requires_grad) if isinstance(old, nn.Parameter) else value
    else:
        old.data = value
        new = old
    if is_mapped:
        mark_mapped(new)
    for name in names:
        if places[name].tensor is not new:
            places[name].put(new)


def mark_mapped(tensor: torch.Tensor) -> None:
    """Remember that these values lie in a file; the mark holds as long as the tensor has this memory."""
    tensor.headway_mapped_at = tensor.data_ptr()  # type: ignore[attr-defined]


def is_mapped(tensor: torch.Tensor) -> bool:
    """Do the values lie in a mapped file?"""
    return bool(getattr(tensor, "headway_mapped_at", None) == tensor.data_ptr()) and tensor.numel() > 0


@dataclass
class Conversion:
    """Stored tensors that become others of the model: stacked, joined, split or permuted, by transformers' own rules."""

    target: str
    converter: Any
    model: Any
    sources: list[tuple[str, str]] = field(default_factory=list)

    def run(self, read: Callable[[str], torch.Tensor]) -> dict[str, torch.Tensor]:
        """The model's tensors by name. `read` gives a stored tensor (on the meta device: names and shapes only)."""
        converter = deepcopy(self.converter)
        for key, pattern in self.sources:
            converter.add_tensor(self.target, key, pattern, read(key))
        made = converter.convert(self.target, model=self.model, config=self.model.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}


@dataclass
class TensorSources:
    """What comes from where.

    Attributes:
        direct: {name in the model: name in the checkpoint}.
        conversions: what is computed from stored tensors.
        shapes: {name in the model: (shape, dtype) that the checkpoint has for it}.
        unexpected: stored names that the model has no place for.
    """

    direct: dict[str, str] = field(default_factory=dict)
    conversions: list[Conversion] = field(default_factory=list)
    shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = field(default_factory=dict)
    unexpected: list[str] = field(default_factory=list)


def match(
    model: nn.Module,
    places: Mapping[str, TensorLocation],
    checkpoint: WeightFiles,
    strict: bool,
    computes_buffers: bool = False,
) -> TensorSources:
    """Settle every name, or say everything that does not fit at once.

    A tensor must come from the checkpoint, under one of its names where it is tied. Only a buffer that the model has
    computed itself may be absent, unless `strict`; with `computes_buffers`, one that it will
    compute. Names that the model has no place for are an error where `strict`, and are logged otherwise. Shapes must be equal.

    Raises:
        CheckpointError: lists what is missing, unexpected and mismatched, each with the nearest name on the other side.
    """
    sources = _sources(model, places, checkpoint)
    groups = tied_groups(places)
    computed = {name for name, place in places.items() if computes_buffers and not place.is_persistent}
    missing = [
        name
        for name, place in places.items()
        if name not in computed and _is_missing(place, groups[name], sources.shapes, strict)
    ]
    mismatched = [
        f"{name}: {_words(shape, dtype)} in the checkpoint, {_words(place.tensor.shape, place.tensor.dtype)} in the model"
        for name, place in places.items()
        for shape, dtype in [sources.shapes.get(name, (tuple(place.tensor.shape), place.tensor.dtype))]
        if (shape != tuple(place.tensor.shape) or dtype.is_floating_point != place.tensor.dtype.is_floating_point)
    ]
    unexpected = [name for name in sources.unexpected if not _is_ignored(model, name)]
    if missing or mismatched or (strict and unexpected):
        raise CheckpointError(_complaint(checkpoint, missing, mismatched, unexpected, places))
    if unexpected:
        logger.warning(
            "%s: %d stored tensors have no place in the model and were left out: %s (strict=True makes this an error)",
            checkpoint.source,
            len(unexpected),
            _listed(unexpected),
        )
    return sources


def _is_missing(place: TensorLocation, group: list[str], found: Mapping[str, Any], strict: bool) -> bool:
    if any(name in found for name in group):
        return False
    if place.is_parameter:
        return True
    return place.tensor.is_meta or (strict and place.is_persistent)


def _sources(model: nn.Module, places: Mapping[str, TensorLocation], checkpoint: WeightFiles) -> TensorSources:
    stored = checkpoint.tensors
    wanted = {name for name, place in places.items() if place.is_persistent}
    sources = TensorSources(direct={name: name for name in stored if name in wanted})
    left = [name for name in stored if name not in sources.direct]
    if left and _is_transformers(model):
        sources.direct, sources.conversions, left = _by_transformers(model, stored, wanted)
    sources.unexpected = left
    for alias, name in checkpoint.ties.items():
        if alias in wanted and alias not in sources.direct:
            sources.direct[alias] = name
    sources.shapes = {name: (stored[key].shape, stored[key].dtype) for name, key in sources.direct.items()}
    for conversion in sources.conversions:
        made = _trial(conversion, checkpoint)
        sources.shapes.update({name: value for name, value in made.items() if name in wanted})
    return sources


def _trial(conversion: Conversion, checkpoint: WeightFiles) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Run a conversion on tensors without values, so that what does not fit is known before anything is loaded."""

    def shape_only(key: str) -> torch.Tensor:
        return torch.empty(checkpoint.tensors[key].shape, dtype=checkpoint.tensors[key].dtype, device="meta")

    try:
        made = conversion.run(shape_only)
    except Exception as error:
        keys = _listed([key for key, _ in conversion.sources])
        raise CheckpointError(
            f"{checkpoint.source}: transformers' conversion to {conversion.target} fails on {keys}: {error}"
        ) from error
    return {name: (tuple(value.shape), value.dtype) for name, value in made.items()}


def _is_transformers(model: nn.Module) -> bool:
    modeling = sys.modules.get("transformers.modeling_utils")
    return modeling is not None and isinstance(model, modeling.PreTrainedModel)


def _by_transformers(
    model: Any, stored: Iterable[str], wanted: set[str]
) -> tuple[dict[str, str], list[Conversion], list[str]]:
    """Names by the mapping that transformers' own loader uses (core_model_loading.py, transformers 5).

    Renamings apply in turn, then at most one conversion; the prefix of the base model is added or taken away; a name
    that the model has as it is stays as it is where the rules lead nowhere.
    """
    from transformers import core_model_loading as rules
    from transformers.conversion_mapping import get_model_conversion_mapping

    entries = get_model_conversion_mapping(model)
    renamings = [entry for entry in entries if isinstance(entry, rules.WeightRenaming)]
    converters = [entry for entry in entries if isinstance(entry, rules.WeightConverter)]
    by_pattern = {pattern: entry for entry in converters for pattern in entry.source_patterns}
    known, prefix = dict.fromkeys(wanted, True), model.base_model_prefix
    direct: dict[str, str] = {}
    conversions: dict[str, Conversion] = {}
    left: list[str] = []
    for key in sorted(stored, key=rules.dot_natural_key):
        name, pattern = rules.rename_source_key(key, renamings, converters, prefix, known)
        if name not in wanted:
            plain, _ = rules.rename_source_key(key, [], [], prefix, known)
            name, pattern = (plain, None) if plain in wanted else (name, pattern)
        if name not in wanted:
            left.append(key)
        elif pattern is None:
            direct[name] = key
        else:
            conversion = conversions.setdefault(name, Conversion(name, by_pattern[pattern], model))
            conversion.sources.append((key, pattern))
    return direct, list(conversions.values()), left


def _is_ignored(model: nn.Module, name: str) -> bool:
    """Does the model's class say that this stored name means nothing to it?"""
    return any(re.search(pattern, name) for pattern in getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())


def _complaint(
    checkpoint: WeightFiles,
    missing: list[str],
    mismatched: list[str],
    unexpected: list[str],
    places: Mapping[str, TensorLocation],
) -> str:
    lines = [f"{checkpoint.source} does not fit the model; nothing was loaded."]
    if missing:
        lines.append(f"Missing from the checkpoint ({len(missing)}): {_listed(missing, unexpected)}.")
    if mismatched:
        lines.append(f"Mismatched ({len(mismatched)}): {'; '.join(mismatched[:_SHOWN])}.")
    if unexpected:
        lines.append(
            f"Without a place in the model ({len(unexpected)}): {_listed(unexpected, missing or list(places))}."
        )
    if any(not places[name].is_persistent for name in missing):
        lines.append(
            "A buffer that no checkpoint holds is computed by its module: build with init_empty_weights(), which does that."
        )
    if missing:
        lines.append("To keep what a part of the model has (e.g. a new head), load the checkpoint into the other part.")
    return " ".join(lines)


def _listed(names: list[str], others: list[str] | None = None) -> str:
    words = []
    for name in names[:_SHOWN]:
        near = difflib.get_close_matches(name, (others or [])[:2000], n=1, cutoff=0.6)
        words.append(f"{name} (nearest: {near[0]})" if near else name)
    return ", ".join(words) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")


def _words(shape: Iterable[int], dtype: torch.dtype) -> str:
    return f"{list(shape)} {dtype_name(dtype)}"
