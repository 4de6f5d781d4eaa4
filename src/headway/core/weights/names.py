"""Match the tensors of a model with stored tensors by name, before any value is loaded."""

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

from headway.core.weights.compiled import remove_compiled_levels, rename_bare_items
from headway.core.weights.files import EXTRA, WeightFiles
from headway.core.weights.shards import get_dtype_name
from headway.errors import CheckpointError
from headway.log import get_logger

logger = get_logger(__name__)

_SHOWN = 8


@dataclass(frozen=True)
class TensorLocation:
    """Location of a tensor in a model: `module._parameters[leaf]` or `module._buffers[leaf]`.

    Attributes:
        module: Module that holds the tensor.
        leaf: Name of the tensor in the module.
        is_parameter: Whether the tensor is a parameter. False: it is a buffer.
        is_persistent: Whether the module's state dict contains the tensor.
    """

    module: nn.Module
    leaf: str
    is_parameter: bool
    is_persistent: bool = True

    @property
    def tensor(self) -> torch.Tensor:
        """Tensor that is currently at this location."""
        tensors: Mapping[str, torch.Tensor | None] = (
            self.module._parameters if self.is_parameter else self.module._buffers
        )
        tensor = tensors[self.leaf]
        assert tensor is not None
        return tensor

    def put_tensor(self, tensor: torch.Tensor) -> None:
        """Replace the tensor at this location, without the checks of `register_parameter` and `register_buffer`."""
        if self.is_parameter:
            self.module._parameters[self.leaf] = tensor  # type: ignore[assignment]
        else:
            self.module._buffers[self.leaf] = tensor
        if isinstance(self.module, nn.RNNBase):
            # RNN kernels read the weights from this separate list.
            self.module._flat_weights = [getattr(self.module, name, None) for name in self.module._flat_weights_names]


def iterate_own_locations(module: nn.Module) -> Iterator[TensorLocation]:
    """Yield the locations of a module's own parameters and buffers, without those of its submodules."""
    for leaf, parameter in module._parameters.items():
        if parameter is not None:
            yield TensorLocation(module, leaf, True)
    for leaf, buffer in module._buffers.items():
        if buffer is not None:
            yield TensorLocation(module, leaf, False, leaf not in module._non_persistent_buffers_set)


def map_locations(model: nn.Module) -> dict[str, TensorLocation]:
    """Return the location of every parameter and buffer of a model, by name.

    A tensor that is tied, or whose module is used twice, has several names.
    """
    modules = model.named_modules(remove_duplicate=False)
    return {
        f"{prefix}.{each.leaf}".lstrip("."): each
        for prefix, module in modules
        for each in iterate_own_locations(module)
    }


def map_ties(locations: Mapping[str, TensorLocation]) -> dict[str, list[str]]:
    """Return a mapping from each tensor name to all names of the same tensor, including that name.

    Args:
        locations: Locations of the tensors, by name.
    """
    groups: defaultdict[int, list[str]] = defaultdict(list)
    for name, location in locations.items():
        groups[id(location.tensor)].append(name)
    return {name: group for group in groups.values() for name in group}


def assign_value(
    locations: Mapping[str, TensorLocation], names: list[str], value: torch.Tensor, is_mapped: bool
) -> None:
    """Set the value of a tensor under all its names.

    If the tensor is on the value's device, its data is replaced. A meta tensor, or one on another device, is replaced
    by a new tensor.

    Args:
        locations: Locations of the model's tensors, by name.
        names: All names of the tensor.
        value: New value. It is not copied.
        is_mapped: Whether the value is in a mapped file.
    """
    first = locations[names[0]]
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
        if locations[name].tensor is not new:
            locations[name].put_tensor(new)


def mark_mapped(tensor: torch.Tensor) -> None:
    """Record that a tensor's values are in a mapped file.

    The record is valid as long as the tensor keeps this memory.
    """
    tensor.headway_mapped_at = tensor.data_ptr()  # type: ignore[attr-defined]


def is_mapped(tensor: torch.Tensor) -> bool:
    """Whether a tensor's values are in a mapped file."""
    return bool(getattr(tensor, "headway_mapped_at", None) == tensor.data_ptr()) and tensor.numel() > 0


@dataclass
class Conversion:
    """transformers rule for computing a model's tensors from stored tensors.

    The stored tensors are stacked, concatenated, split or permuted.

    Attributes:
        target: Name of the model's tensor.
        converter: transformers' `WeightConverter`.
        model: Model that loads the tensors.
        sources: Pairs of (stored name, converter's name pattern that matches it), one for each stored tensor.
        own_names: Mapping from names without `torch.compile` prefixes to the model's names.
    """

    target: str
    converter: Any
    model: Any
    sources: list[tuple[str, str]] = field(default_factory=list)
    own_names: Mapping[str, str] = field(default_factory=dict)

    def run(self, read: Callable[[str], torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the computed tensors, keyed by the model's names.

        Args:
            read: Function that returns a stored tensor by name. It may return meta tensors if only the names and shapes
                of the result are needed.
        """
        converter = deepcopy(self.converter)
        for key, pattern in self.sources:
            converter.add_tensor(self.target, key, pattern, read(key))
        computed_tensors = converter.convert(self.target, model=self.model, config=self.model.config)
        return {
            self.own_names.get(name, name): value[0] if isinstance(value, list) else value
            for name, value in computed_tensors.items()
        }


@dataclass
class TensorSources:
    """For each tensor of a model, the stored tensors from which its values come.

    Attributes:
        direct: Mapping from names in the model to names in the checkpoint, for tensors that are loaded unchanged.
        conversions: Conversions that compute tensors from stored ones.
        shapes: Pairs of (shape, dtype) by name in the model, for tensors that are in the checkpoint or computed by a
            conversion.
        unexpected: Stored names that match neither a tensor nor an extra state of the model.
        extras: Mapping from names of extra states in the model to names in the checkpoint.
    """

    direct: dict[str, str] = field(default_factory=dict)
    conversions: list[Conversion] = field(default_factory=list)
    shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = field(default_factory=dict)
    unexpected: list[str] = field(default_factory=list)
    extras: dict[str, str] = field(default_factory=dict)


def match_names(
    model: nn.Module,
    locations: Mapping[str, TensorLocation],
    checkpoint: WeightFiles,
    strict: bool,
    computes_buffers: bool = False,
) -> TensorSources:
    """Match the model's tensor names to the checkpoint's, or raise one error that lists every mismatch.

    Each parameter must be in the checkpoint. If it is tied, one of its names is enough. A buffer that the model has
    computed itself may be missing. If `strict` is set, this applies only to non-persistent buffers. With
    `computes_buffers`, non-persistent buffers that have no values yet may be missing, too. Unexpected names are an
    error if `strict` is set, and logged otherwise. Names that the model's class declares as ignored are skipped. Shapes
    must be equal. A floating-point tensor matches only a floating-point tensor, and a complex one only a complex one.

    Args:
        model: Model that loads the tensors.
        locations: Locations of the model's parameters and buffers, by name.
        checkpoint: Stored tensors.
        strict: Whether missing persistent buffers, missing extra states and unexpected names are errors.
        computes_buffers: Whether the model will compute its non-persistent buffers later. Default: False.

    Raises:
        CheckpointError: If names or shapes do not match, or a conversion fails. The message lists missing, unexpected
            and mismatched names. Missing and unexpected names are shown with the most similar name on the other side.
    """
    sources = _find_sources(model, locations, checkpoint)
    groups = map_ties(locations)
    computed = {name for name, location in locations.items() if computes_buffers and not location.is_persistent}
    missing = [
        name
        for name, location in locations.items()
        if name not in computed and _is_missing(location, groups[name], sources.shapes, strict)
    ]
    mismatched = []
    for name, location in locations.items():
        tensor = location.tensor
        shape, dtype = sources.shapes.get(name, (tuple(tensor.shape), tensor.dtype))
        if shape != tuple(tensor.shape) or _get_kind(dtype) != _get_kind(tensor.dtype):
            mismatched.append(
                f"{name}: {_describe_tensor(shape, dtype)} in the checkpoint, "
                f"{_describe_tensor(tensor.shape, tensor.dtype)} in the model"
            )
    modules = _map_extra_modules(model)
    keys = {name: checkpoint.ties.get(name, name) for name in modules}
    sources.extras = {n: key for n, key in keys.items() if key in checkpoint.tensors or key in checkpoint.objects}
    if strict:
        missing += [name for name in modules if name not in sources.extras]
    used = set(sources.extras.values())
    sources.unexpected = [name for name in (*sources.unexpected, *checkpoint.objects) if name not in used]
    unexpected = [name for name in sources.unexpected if not _is_ignored(model, name)]
    if missing or mismatched or (strict and unexpected):
        raise CheckpointError(_describe_mismatches(checkpoint, missing, mismatched, unexpected, locations))
    if unexpected:
        logger.warning(
            "%s: %d stored tensors have no place in the model and were left out: %s (strict=True makes this an error)",
            checkpoint.source,
            len(unexpected),
            _list_with_nearest(unexpected),
        )
    return sources


def _get_kind(dtype: torch.dtype) -> str:
    return "complex" if dtype.is_complex else "floating" if dtype.is_floating_point else "integer"


def _map_extra_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules that define extra state, by the key of that state in the model's state dict."""
    return {
        f"{path}.{EXTRA}" if path else EXTRA: module
        for path, module in model.named_modules(remove_duplicate=False)
        if type(module).set_extra_state is not nn.Module.set_extra_state
    }


def load_extra_states(model: nn.Module, sources: TensorSources, checkpoint: WeightFiles) -> None:
    """Call `set_extra_state` of each module whose extra state is stored. Tensors are passed as CPU copies.

    Args:
        model: Model to load into.
        sources: Names that the extra states have in the checkpoint.
        checkpoint: Checkpoint with the stored tensors and objects.
    """
    modules = _map_extra_modules(model)
    for name, key in sources.extras.items():
        stored = checkpoint.tensors.get(key)
        modules[name].set_extra_state(checkpoint.objects[key] if stored is None else stored.tensor().clone())


def _is_missing(location: TensorLocation, names: list[str], available: Mapping[str, Any], strict: bool) -> bool:
    """Whether a tensor that the model needs is missing. A computed buffer that has values is not needed.

    Args:
        location: Location of the tensor in the model.
        names: All names of the tensor.
        available: Tensors that are in the checkpoint or computed by a conversion, by name in the model.
        strict: Whether persistent buffers are needed even if the model has computed them.
    """
    if any(name in available for name in names):
        return False
    if location.is_parameter:
        return True
    return location.tensor.is_meta or (strict and location.is_persistent)


def _find_sources(model: nn.Module, locations: Mapping[str, TensorLocation], checkpoint: WeightFiles) -> TensorSources:
    """Find the stored tensors from which each tensor of a model is loaded, without checking shapes.

    Names are compared first without the prefixes of `torch.compile`. If some stored names remain, and the model is one of
    transformers, transformers' own mapping is used instead. Recorded ties fill the names that are left.
    """
    stored = checkpoint.tensors
    model_names = {name for name, location in locations.items() if location.is_persistent}
    # The model can have compiled submodules, and so can the model that wrote the checkpoint.
    own_names = dict(rename_bare_items((name, name) for name in model_names))
    stored_names = dict(rename_bare_items((name, name) for name in stored))
    direct = {name: name for name in stored_names if name in own_names}
    unmatched = [name for name in stored_names if name not in direct]
    if unmatched and _is_transformers(model):
        direct, conversions, unmatched = _match_by_transformers(model, stored_names, set(own_names))
        for each in conversions:
            each.target, each.own_names = own_names[each.target], own_names
            each.sources = [(stored_names[key], pattern) for key, pattern in each.sources]
    else:
        conversions = []
    sources = TensorSources({own_names[name]: stored_names[key] for name, key in direct.items()}, conversions)
    sources.unexpected = [stored_names[name] for name in unmatched]
    for alias, name in checkpoint.ties.items():
        own = own_names.get(remove_compiled_levels(alias))
        if own is not None and own not in sources.direct:
            sources.direct[own] = name
    sources.shapes = {name: (stored[key].shape, stored[key].dtype) for name, key in sources.direct.items()}
    for conversion in sources.conversions:
        computed_tensors = _try_conversion(conversion, checkpoint)
        sources.shapes.update({name: value for name, value in computed_tensors.items() if name in model_names})
    return sources


def _try_conversion(conversion: Conversion, checkpoint: WeightFiles) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Run a conversion on meta tensors, so that errors are found before anything is loaded.

    Returns:
        Pair of (shape, dtype) for each computed tensor, by the model's name.

    Raises:
        CheckpointError: If the conversion fails.
    """

    def make_meta_tensor(key: str) -> torch.Tensor:
        return torch.empty(checkpoint.tensors[key].shape, dtype=checkpoint.tensors[key].dtype, device="meta")

    try:
        computed_tensors = conversion.run(make_meta_tensor)
    except Exception as error:
        keys = _list_with_nearest([key for key, _ in conversion.sources])
        raise CheckpointError(
            f"{checkpoint.source}: transformers' conversion to {conversion.target} fails on {keys}: {error}"
        ) from error
    return {name: (tuple(value.shape), value.dtype) for name, value in computed_tensors.items()}


def _is_transformers(model: nn.Module) -> bool:
    modeling = sys.modules.get("transformers.modeling_utils")
    return modeling is not None and isinstance(model, modeling.PreTrainedModel)


def _match_by_transformers(
    model: Any, stored: Iterable[str], model_names: set[str]
) -> tuple[dict[str, str], list[Conversion], list[str]]:
    """Match names with the mapping of transformers' own loader (core_model_loading.py, transformers 5).

    Renaming rules are applied one after the other, then at most one conversion. The base model's prefix is added or
    removed where necessary. If the resulting name is not in the model, only the prefix of the stored name is adjusted.

    Args:
        model: Model of transformers.
        stored: Names of the stored tensors.
        model_names: Names of the model's tensors.

    Returns:
        Triple of (mapping from names in the model to names in the checkpoint, conversions, stored names that match no
            tensor).
    """
    from transformers import core_model_loading as rules
    from transformers.conversion_mapping import get_model_conversion_mapping

    entries = get_model_conversion_mapping(model)
    renamings = [entry for entry in entries if isinstance(entry, rules.WeightRenaming)]
    converters = [entry for entry in entries if isinstance(entry, rules.WeightConverter)]
    converter_by_pattern = {pattern: entry for entry in converters for pattern in entry.source_patterns}
    known_names, prefix = dict.fromkeys(model_names, True), model.base_model_prefix
    direct: dict[str, str] = {}
    conversions: dict[str, Conversion] = {}
    unmatched: list[str] = []
    for key in sorted(stored, key=rules.dot_natural_key):
        # The pattern is that of the conversion which computes the tensor, or None.
        name, pattern = rules.rename_source_key(key, renamings, converters, prefix, known_names)
        if name not in model_names:
            unconverted_name, _ = rules.rename_source_key(key, [], [], prefix, known_names)
            name, pattern = (unconverted_name, None) if unconverted_name in model_names else (name, pattern)
        if name not in model_names:
            unmatched.append(key)
        elif pattern is None:
            direct[name] = key
        else:
            conversion = conversions.setdefault(name, Conversion(name, converter_by_pattern[pattern], model))
            conversion.sources.append((key, pattern))
    return direct, list(conversions.values()), unmatched


def _is_ignored(model: nn.Module, name: str) -> bool:
    """Whether the model's class declares that a checkpoint can contain this name although the model lacks it."""
    return any(re.search(pattern, name) for pattern in getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())


def _describe_mismatches(
    checkpoint: WeightFiles,
    missing: list[str],
    mismatched: list[str],
    unexpected: list[str],
    locations: Mapping[str, TensorLocation],
) -> str:
    lines = [f"{checkpoint.source} does not fit the model; nothing was loaded."]
    if missing:
        lines.append(f"Missing from the checkpoint ({len(missing)}): {_list_with_nearest(missing, unexpected)}.")
    if mismatched:
        lines.append(f"Mismatched ({len(mismatched)}): {'; '.join(mismatched[:_SHOWN])}.")
    if unexpected:
        lines.append(
            f"Without a place in the model ({len(unexpected)}): {_list_with_nearest(unexpected, missing or list(locations))}."
        )
    if any(name in locations and not locations[name].is_persistent for name in missing):
        lines.append(
            "A buffer that no checkpoint holds is computed by its module: build with init_empty_weights(), which does that."
        )
    if missing:
        lines.append("To keep what a part of the model has (e.g. a new head), load the checkpoint into the other part.")
    return " ".join(lines)


def _list_with_nearest(names: list[str], others: list[str] | None = None) -> str:
    words = []
    for name in names[:_SHOWN]:
        near = difflib.get_close_matches(name, (others or [])[:2000], n=1, cutoff=0.6)
        words.append(f"{name} (nearest: {near[0]})" if near else name)
    return ", ".join(words) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")


def _describe_tensor(shape: Iterable[int], dtype: torch.dtype) -> str:
    return f"{list(shape)} {get_dtype_name(dtype)}"
