"""Watches of learning rates, unprepared models and tensors kept alive, so that a failed proof can name a cause."""

import gc
import sys
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from headway.common.callsite import walk_stack
from headway.verify.calls import find_line, get_address
from headway.verify.fingerprints import hash_bytes, to_bytes
from headway.verify.sources import watch_sources

_MOST_HASHED = 1 << 24
"""Largest number of parameter values of an unprepared model that is hashed after each update."""
_REFERENCES = 3
"""Reference count of a parameter group to which only its optimizer refers: the list, a variable and an argument."""
_MOST_NODES = 5000
"""Largest number of nodes that are visited in the autograd graph of a tensor."""


class _WatchedGroup(dict[str, Any]):
    """Optimizer parameter group that records which lines of the script set its learning rate."""

    lines: list[str]

    def __setitem__(self, key: str, value: Any) -> None:
        if key == "lr" and self.get("lr") != value:
            line = find_line()
            scheduler = _find_scheduler()
            line = f"{line} by {scheduler}" if line and scheduler else line
            if line and line not in self.lines:
                self.lines.append(line)
        super().__setitem__(key, value)

    def __reduce__(self) -> Any:
        return dict, (dict(self),)


def _find_scheduler() -> str:
    """Return the class name of the torch scheduler that is running, or "" if there is none."""
    for frame in walk_stack():
        owner = frame.f_locals.get("self") if frame.f_code.co_filename.endswith("torch/optim/lr_scheduler.py") else None
        if isinstance(owner, torch.optim.lr_scheduler.LRScheduler):
            return type(owner).__name__
    return ""


class RateWatch:
    """Record of the script's lines that set a learning rate, directly or through a scheduler."""

    def __init__(self) -> None:
        self._lines: list[str] = []

    def watch_optimizers(self, optimizers: Sequence[Any]) -> None:
        """Watch the parameter groups of prepared optimizers.

        Call it before each update, because loading a checkpoint creates new groups.

        Args:
            optimizers: Prepared optimizers of the run.
        """
        for each in optimizers:
            groups = each.optimizer.param_groups
            for index in range(len(groups)):
                group = groups[index]
                # A script with its own reference to the group would continue to write to the group, not to its copy.
                if type(group) is dict and sys.getrefcount(group) <= _REFERENCES:
                    groups[index] = _WatchedGroup(group)
                    groups[index].lines = self._lines

    def take_lines(self) -> list[str]:
        """Return the script lines that have set a learning rate since the last call of this method."""
        lines, self._lines[:] = list(self._lines), []
        return lines


class OtherModules:
    """Models that have parameters but were not passed to `prepare`, such as a model with averaged weights."""

    def __init__(self) -> None:
        self._models: list[tuple[str, Any]] = []

    def find_models(self, prepared: Sequence[torch.nn.Module]) -> None:
        """Search this process for models that were not prepared, and remember them without keeping them alive.

        Submodules, very large models, and models that share parameters with prepared ones are left out.

        Args:
            prepared: Prepared models.
        """
        known = {id(each) for model in prepared for each in model.modules()}
        own = {id(p) for model in prepared for p in model.parameters()}
        # `isinstance` would read `__class__`, which any object may override, so the type is compared.
        found = [each for each in gc.get_objects() if issubclass(type(each), torch.nn.Module) and id(each) not in known]
        parts = {id(part) for each in found for part in each.modules() if part is not each}
        for each in found:
            parameters = list(each.parameters())
            is_large = sum(p.numel() for p in parameters) > _MOST_HASHED
            if id(each) in parts or not parameters or is_large or any(id(p) in own for p in parameters):
                continue
            line = watch_sources().get_birth(each)
            name = f"{type(each).__name__}" + (f", created at {line}" if line else "")
            self._models.append((name, weakref.ref(each)))

    def list_addresses(self) -> dict[int, str]:
        """Return the name of each model that still exists, by the address of each of its parameters."""
        models = [(name, reference()) for name, reference in self._models]
        return {get_address(p): name for name, model in models if model is not None for p in model.parameters()}

    def hash_all(self) -> dict[str, str]:
        """Return a hash of the parameters of each model that still exists, by a description of the model."""
        hashes = {}
        for name, reference in self._models:
            model = reference()
            if model is not None:
                hashes[name] = hash_bytes(*(to_bytes(p) for p in model.parameters() if not p.is_meta))
        return hashes


class GraphSizes:
    """Tensors of earlier updates that are still alive, and the memory that their autograd graphs keep.

    Args:
        alive: Tuples of (number of the update, line that made the tensor, tensor).
        known: Addresses of parameters and buffers, which are not counted.
    """

    def __init__(self, alive: Sequence[tuple[int, str, torch.Tensor]], known: Iterable[int]) -> None:
        self._alive = alive
        self._known = set(known)

    def list_lines(self) -> list[dict[str, Any]]:
        """Return one dict per line of the script: the line, and the updates and bytes of the tensors that it made.

        "bytes" is the memory of tensors without an autograd graph. "graph" is the memory of tensors with one, including
        all memory that the graph keeps. Memory that several graphs keep is counted once, for the last tensor.
        """
        lines: dict[str, dict[str, Any]] = {}
        seen = set(self._known)
        visited: set[Any] = set()
        for update, line, tensor in reversed(self._alive):
            about = lines.setdefault(line, {"line": line, "updates": [], "bytes": 0, "graph": 0})
            if update not in about["updates"]:
                about["updates"].append(update)
            kind = "bytes" if tensor.grad_fn is None else "graph"
            if tensor.grad_fn is not None and tensor.grad_fn not in visited:
                about["graph"] += _measure_graph(tensor, seen, visited)
            address = get_address(tensor)
            if address not in seen and address > 0:
                seen.add(address)
                about[kind] += tensor.numel() * tensor.element_size()
        return [{**about, "updates": sorted(about["updates"])} for about in lines.values()]


def _measure_graph(tensor: torch.Tensor, seen: set[int], visited: set[Any]) -> int:
    """Return the bytes of the tensors that a tensor's graph keeps for its backward pass.

    Args:
        tensor: Result of the graph.
        seen: Addresses of memory that has been counted. New ones are added.
        visited: Nodes whose tensors have been counted. New ones are added.
    """
    total, nodes, num = 0, [tensor.grad_fn], 0
    while nodes and num < _MOST_NODES:
        node = nodes.pop()
        num += 1
        if node is None or node in visited:
            continue
        visited.add(node)
        nodes += [each for each, _ in getattr(node, "next_functions", ())]
        for name in dir(node):
            if not name.startswith("_saved_"):
                continue
            try:
                saved = getattr(node, name)
            except RuntimeError:  # backward has freed the saved tensors
                break
            for each in saved if isinstance(saved, list | tuple) else (saved,):
                if isinstance(each, torch.Tensor) and not isinstance(each, torch.nn.Parameter):
                    address = get_address(each)
                    if address > 0 and address not in seen:
                        seen.add(address)
                        total += each.numel() * each.element_size()
    return total
