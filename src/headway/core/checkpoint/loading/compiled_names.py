"""Read checkpoints of earlier Headway versions, whose tensor names contain the prefixes of `torch.compile(module)`."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from headway.core.checkpoint.format.manifest import Manifest
from headway.core.checkpoint.format.values import TAG
from headway.core.weights.compiled import remove_compiled_levels, rename_bare_items

_OWN = ("model/", "optimizer/")
"""Prefixes of the tensor names that include a name from a model. Only these can contain prefixes of torch.compile."""


def rename_compiled(manifest: Manifest) -> Manifest:
    """Return a manifest whose tensor names lack the prefixes of `torch.compile`.

    The keys of the tensors in the files do not change. A manifest without such prefixes is returned unchanged, and so
    is one in which two tensors would get the same name.
    """
    compiled = [name for name in manifest.tensors if "_orig_mod" in name]
    if not compiled:
        return manifest
    tensors = dict(rename_bare_items((_remove_prefixes(name), entry) for name, entry in manifest.tensors.items()))
    if tensors.keys() == manifest.tensors.keys() or len(tensors) != len(manifest.tensors):
        return manifest
    state = dict(manifest.state)
    for kind in ("optimizer", "extra", "frozen"):
        if kind in state:
            state[kind] = _rename_parameters(state[kind])
    aliases = {_remove_prefixes(name): _remove_prefixes(target) for name, target in manifest.aliases.items()}
    return replace(manifest, tensors=tensors, aliases=aliases, state=state)


def _remove_prefixes(name: str) -> str:
    """Return a tensor name without the prefixes of `torch.compile`. Names in the user's own state do not change."""
    start, slash, rest = name.partition("/")
    number, second, path = rest.partition("/")
    return f"{start}/{number}/{_remove_compiled_prefixes(path)}" if slash and second and name.startswith(_OWN) else name


def _remove_compiled_prefixes(path: str) -> str:
    """Return a logical name without the prefixes that `torch.compile` adds to module names."""
    return "/".join(map(remove_compiled_levels, path.split("/")))


def _rename_parameters(value: Any) -> Any:
    """Return saved state in which parameter names lack the component `_orig_mod` of torch.compile."""
    if isinstance(value, list):
        return [_rename_parameters(item) for item in value]
    if isinstance(value, Mapping):
        if value.get(TAG) == "text":
            return value
        return {_remove_compiled_prefixes(key): _rename_parameters(item) for key, item in value.items()}
    return _remove_compiled_prefixes(value) if isinstance(value, str) else value
