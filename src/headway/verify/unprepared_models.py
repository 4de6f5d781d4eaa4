"""`UnpreparedModels`: models that were not passed to `prepare`, such as a model with averaged weights."""

import gc
import weakref
from collections.abc import Sequence

import torch

from headway.verify.fingerprints import hash_bytes, to_bytes
from headway.verify.sharded_tensors import get_address
from headway.verify.sources import get_source_watch

_MOST_HASHED = 1 << 24
"""Largest number of parameter values of an unprepared model that is hashed after each update."""


class UnpreparedModels:
    """Models of this process that have parameters but were not passed to `prepare`.

    A model is described by its class and by the script line that created it: "Teacher, created at train.py:9".
    """

    def __init__(self) -> None:
        # Pairs of (description, weak reference to the model).
        self._models: list[tuple[str, weakref.ref[torch.nn.Module]]] = []

    def find_models(self, prepared: Sequence[torch.nn.Module]) -> None:
        """Search this process for models that were not prepared, and remember them without keeping them alive.

        Submodules, very large models, and models that share parameters with prepared ones are left out.

        Args:
            prepared: Prepared models.
        """
        prepared_modules = {id(module) for model in prepared for module in model.modules()}
        prepared_parameters = {id(p) for model in prepared for p in model.parameters()}
        # `isinstance` would read `__class__`, which any object may override, so the type is compared.
        all_modules = [each for each in gc.get_objects() if issubclass(type(each), torch.nn.Module)]
        unprepared = [each for each in all_modules if id(each) not in prepared_modules]
        submodules = {id(part) for each in unprepared for part in each.modules() if part is not each}
        models = [each for each in unprepared if id(each) not in submodules]
        for model in models:
            parameters = list(model.parameters())
            num_values = sum(p.numel() for p in parameters)
            shares_parameters = any(id(p) in prepared_parameters for p in parameters)
            if not parameters or num_values > _MOST_HASHED or shares_parameters:
                continue
            line = get_source_watch().get_creation_line(model)
            description = f"{type(model).__name__}, created at {line}" if line else type(model).__name__
            self._models.append((description, weakref.ref(model)))

    def map_addresses(self) -> dict[int, str]:
        """Return the description of each model that still exists, by the memory address of each of its parameters."""
        models = [(description, reference()) for description, reference in self._models]
        return {get_address(p): name for name, model in models if model is not None for p in model.parameters()}

    def hash_parameters(self) -> dict[str, str]:
        """Return a hash of all parameters of each model that still exists, by the description of the model."""
        hashes = {}
        for description, reference in self._models:
            model = reference()
            if model is not None:
                hashes[description] = hash_bytes(*(to_bytes(p) for p in model.parameters() if not p.is_meta))
        return hashes
