"""Match the tensors of a model with stored tensors by name, before any value is loaded."""

import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from headway.core.weights.compiled import remove_compiled_levels, rename_bare_items
from headway.core.weights.files import EXTRA_STATE, WeightFiles
from headway.core.weights.layer_data import find_data_misfits, map_layer_data
from headway.core.weights.locations import TensorLocation, map_ties
from headway.core.weights.tensor_bytes import TensorSpec, get_dtype_name
from headway.core.weights.transformers_names import Conversion, is_transformers_model, match_by_transformers
from headway.errors import CheckpointError
from headway.log import get_logger

logger = get_logger(__name__)

_MAX_LISTED = 8
"""Maximum number of names in one list of an error message."""


@dataclass
class TensorSources:
    """For each tensor of a model, the stored tensors from which its values come.

    Attributes:
        direct: Mapping from names in the model to names in the checkpoint, for tensors that are loaded unchanged.
        conversions: Conversions that compute tensors from stored ones.
        specs: Stored or computed shape and dtype by name in the model, for tensors that are in the checkpoint or
            computed by a conversion.
        unexpected: Stored names that match neither a tensor nor an extra state of the model.
        extra_states: Mapping from names of extra states in the model to names in the checkpoint.
        layer_data: Mapping from names of quantized layers' data in the model to names in the checkpoint. This data is neither a
            parameter nor a buffer.
    """

    direct: dict[str, str] = field(default_factory=dict)
    conversions: list[Conversion] = field(default_factory=list)
    specs: dict[str, TensorSpec] = field(default_factory=dict)
    unexpected: list[str] = field(default_factory=list)
    extra_states: dict[str, str] = field(default_factory=dict)
    layer_data: dict[str, str] = field(default_factory=dict)


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
    data = map_layer_data(locations)
    sources = _find_sources(model, locations, checkpoint, data)
    tied_names = map_ties(locations)
    missing = []
    for name, location in locations.items():
        is_computed_later = computes_buffers and not location.is_persistent
        if not is_computed_later and _is_missing(location, tied_names[name], sources.specs, strict):
            missing.append(name)
    if strict:
        missing += [name for name in _map_extra_modules(model) if name not in sources.extra_states]
    mismatched = _list_mismatched(locations, sources.specs)
    keys = {**sources.direct, **sources.layer_data}
    mismatched += find_data_misfits(data, locations, checkpoint.tensors, keys, sources.unexpected)
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


def load_extra_states(model: nn.Module, sources: TensorSources, checkpoint: WeightFiles) -> None:
    """Call `set_extra_state` of each module whose extra state is stored. Tensors are passed as CPU copies.

    Args:
        model: Model to load into.
        sources: Names that the extra states have in the checkpoint.
        checkpoint: Checkpoint with the stored tensors and objects.
    """
    modules = _map_extra_modules(model)
    for name, key in sources.extra_states.items():
        stored = checkpoint.tensors.get(key)
        modules[name].set_extra_state(checkpoint.objects[key] if stored is None else stored.tensor().clone())


def _find_sources(
    model: nn.Module, locations: Mapping[str, TensorLocation], checkpoint: WeightFiles, data_names: Iterable[str]
) -> TensorSources:
    """Find the stored tensors and extra states from which a model is loaded, without checking shapes.

    Names are first compared without the prefixes of `torch.compile`. If some stored names match no tensor of a
    transformers model, transformers' own mapping replaces the result. A tied tensor without a match gets the stored
    tensor that the checkpoint records for it.

    Args:
        model: Model that loads the tensors.
        locations: Locations of the model's parameters and buffers, by name.
        checkpoint: Stored tensors and objects.
        data_names: Names of the data of quantized layers.

    Raises:
        CheckpointError: If a conversion of transformers fails.
    """
    stored = checkpoint.tensors
    model_names = {name for name, location in locations.items() if location.is_persistent}
    # The model can have compiled submodules, and so can the model that wrote the checkpoint. A bare name lacks the
    # prefixes of `torch.compile`. Both dicts map bare names to full names.
    own_names = dict(rename_bare_items((name, name) for name in (*model_names, *data_names)))
    stored_names = dict(rename_bare_items((name, name) for name in stored))
    direct = {bare_name: bare_name for bare_name in stored_names if bare_name in own_names}
    unmatched = [bare_name for bare_name in stored_names if bare_name not in direct]
    conversions: list[Conversion] = []
    if unmatched and is_transformers_model(model):
        direct, conversions, unmatched = match_by_transformers(model, stored_names, set(own_names))
    for conversion in conversions:
        conversion.target = own_names[conversion.target]
        conversion.own_names = own_names
        conversion.sources = [(stored_names[bare_key], pattern) for bare_key, pattern in conversion.sources]
    sources = TensorSources({own_names[name]: stored_names[key] for name, key in direct.items()}, conversions)
    sources.layer_data = {name: sources.direct.pop(name) for name in data_names if name in sources.direct}
    for alias, key in checkpoint.ties.items():
        own_name = own_names.get(remove_compiled_levels(alias))
        if own_name is not None and own_name not in sources.direct:
            sources.direct[own_name] = key
    sources.specs = {name: TensorSpec(stored[key].shape, stored[key].dtype) for name, key in sources.direct.items()}
    for conversion in conversions:
        for name, spec in _try_conversion(conversion, checkpoint).items():
            if name in model_names:
                sources.specs[name] = spec
    for name in _map_extra_modules(model):
        key = checkpoint.ties.get(name, name)
        if key in checkpoint.tensors or key in checkpoint.objects:
            sources.extra_states[name] = key
    extra_keys = set(sources.extra_states.values())
    unmatched_keys = [*(stored_names[bare_name] for bare_name in unmatched), *checkpoint.objects]
    sources.unexpected = [key for key in unmatched_keys if key not in extra_keys]
    return sources


def _try_conversion(conversion: Conversion, checkpoint: WeightFiles) -> dict[str, TensorSpec]:
    """Run a conversion on meta tensors, so that errors are found before anything is loaded.

    Args:
        conversion: Conversion that computes tensors of the model from tensors of the checkpoint.
        checkpoint: Weight files that contain the sources of the conversion.

    Returns:
        Shape and dtype of each computed tensor, by the tensor's name in the model.

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
    return {name: TensorSpec(tuple(value.shape), value.dtype) for name, value in computed_tensors.items()}


def _map_extra_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules that define extra state, by the key of that state in the model's state dict."""
    return {
        f"{path}.{EXTRA_STATE}" if path else EXTRA_STATE: module
        for path, module in model.named_modules(remove_duplicate=False)
        if type(module).set_extra_state is not nn.Module.set_extra_state
    }


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


def _is_ignored(model: nn.Module, name: str) -> bool:
    """Whether the model's class declares that a checkpoint can contain this name although the model lacks it."""
    return any(re.search(pattern, name) for pattern in getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())


def _list_mismatched(locations: Mapping[str, TensorLocation], specs: Mapping[str, TensorSpec]) -> list[str]:
    """Return a description of each tensor of the model whose stored values have another shape or kind of dtype.

    Args:
        locations: Locations of the model's parameters and buffers, by name.
        specs: Stored shape and dtype by name in the model. Tensors without an entry are not compared.
    """
    mismatched = []
    for name, location in locations.items():
        if name not in specs:
            continue
        tensor = location.tensor
        spec = specs[name]
        if spec.shape != tuple(tensor.shape) or _get_kind(spec.dtype) != _get_kind(tensor.dtype):
            mismatched.append(
                f"{name}: {_describe_tensor(spec.shape, spec.dtype)} in the checkpoint, "
                f"{_describe_tensor(tensor.shape, tensor.dtype)} in the model"
            )
    return mismatched


def _get_kind(dtype: torch.dtype) -> str:
    """Return "complex", "floating" or "integer". Values are converted only between dtypes of one kind."""
    if dtype.is_complex:
        return "complex"
    return "floating" if dtype.is_floating_point else "integer"


def _describe_mismatches(
    checkpoint: WeightFiles,
    missing: list[str],
    mismatched: list[str],
    unexpected: list[str],
    locations: Mapping[str, TensorLocation],
) -> str:
    """Return the error message for a checkpoint that does not fit the model.

    Args:
        checkpoint: Checkpoint.
        missing: Names of the model's tensors and extra states that are not in the checkpoint.
        mismatched: Descriptions of tensors with another shape or kind of dtype.
        unexpected: Stored names that are not in the model.
        locations: Locations of the model's tensors, by name.
    """
    lines = [f"{checkpoint.source} does not fit the model; nothing was loaded."]
    if missing:
        lines.append(f"Missing from the checkpoint ({len(missing)}): {_list_with_nearest(missing, unexpected)}.")
    if mismatched:
        lines.append(f"Mismatched ({len(mismatched)}): {'; '.join(mismatched[:_MAX_LISTED])}.")
    if unexpected:
        lines.append(
            f"Without a place in the model ({len(unexpected)}): {_list_with_nearest(unexpected, missing or list(locations))}."
        )
    if any(name in locations and not locations[name].is_persistent for name in missing):
        lines.append(
            "A buffer that no checkpoint contains is computed by its module: build with init_empty_weights(), which does that."
        )
    if missing:
        lines.append("To keep what a part of the model has (e.g. a new head), load the checkpoint into the other part.")
    return " ".join(lines)


def _list_with_nearest(names: list[str], candidates: list[str] | None = None) -> str:
    """Return the first names as text, each with the most similar candidate if there is one.

    Args:
        names: Names to list.
        candidates: Names on the other side: of the model for stored names, of the checkpoint for the model's names.
            Only the first 2,000 are compared, because this is slow. Default: None, nothing is compared.
    """
    candidates = (candidates or [])[:2000]
    words = []
    for name in names[:_MAX_LISTED]:
        nearest = difflib.get_close_matches(name, candidates, n=1, cutoff=0.6)
        words.append(f"{name} (nearest: {nearest[0]})" if nearest else name)
    num_hidden = len(names) - _MAX_LISTED
    return ", ".join(words) + (f" and {num_hidden} more" if num_hidden > 0 else "")


def _describe_tensor(shape: Iterable[int], dtype: torch.dtype) -> str:
    """Return a shape and a dtype as text, such as "[2, 3] float32"."""
    return f"{list(shape)} {get_dtype_name(dtype)}"
