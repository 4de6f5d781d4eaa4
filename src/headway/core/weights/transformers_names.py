"""Match stored names with a model's names by the rules of transformers, which renames and converts stored tensors."""

import sys
from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn


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


def is_transformers_model(model: nn.Module) -> bool:
    """Whether a model is one of transformers, which is not imported here: without it, there is no such model."""
    modeling = sys.modules.get("transformers.modeling_utils")
    return modeling is not None and isinstance(model, modeling.PreTrainedModel)


def match_by_transformers(
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
        if name not in model_names:  # try the stored name without renamings and conversions
            name, pattern = rules.rename_source_key(key, [], [], prefix, known_names)
        if name not in model_names:
            unmatched.append(key)
        elif pattern is None:
            direct[name] = key
        else:
            conversion = conversions.setdefault(name, Conversion(name, converter_by_pattern[pattern], model))
            conversion.sources.append((key, pattern))
    return direct, list(conversions.values()), unmatched
