"""Measure the tensors of earlier updates that are still alive, and the memory that their autograd graphs keep."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from headway.verify.record_types import AliveTensorsEntry
from headway.verify.sharded_tensors import get_address

_MOST_NODES = 5000
"""Largest number of nodes that are visited in the autograd graph of a tensor."""


def measure_alive_tensors(
    alive: Sequence[tuple[int, str, torch.Tensor]], known_addresses: Iterable[int]
) -> list[AliveTensorsEntry]:
    """Return the updates and the memory of tensors that are still alive, by the line of the script that made them.

    Memory that several tensors or graphs keep is counted once, for the last of them.

    Args:
        alive: Tuples of (number of the update, line that made the tensor, tensor), in order of creation.
        known_addresses: Memory addresses of parameters and buffers, which are not counted.
    """
    entries: dict[str, AliveTensorsEntry] = {}
    counted_addresses = set(known_addresses)
    visited_nodes: set[Any] = set()
    for update, line, tensor in reversed(alive):
        entry = entries.setdefault(line, {"line": line, "updates": [], "tensor_bytes": 0, "graph_bytes": 0})
        if update not in entry["updates"]:
            entry["updates"].append(update)
        if tensor.grad_fn is None:
            entry["tensor_bytes"] += _count_bytes(tensor, counted_addresses)
            continue
        if tensor.grad_fn not in visited_nodes:
            entry["graph_bytes"] += _measure_graph(tensor, counted_addresses, visited_nodes)
        entry["graph_bytes"] += _count_bytes(tensor, counted_addresses)
    for entry in entries.values():
        entry["updates"].sort()
    return list(entries.values())


def _count_bytes(tensor: torch.Tensor, counted_addresses: set[int]) -> int:
    """Return the bytes of a tensor; 0 if its memory has been counted or if it has none.

    Args:
        tensor: Tensor to count.
        counted_addresses: Addresses of memory that has been counted. The tensor's address is added.
    """
    address = get_address(tensor)
    if address <= 0 or address in counted_addresses:
        return 0
    counted_addresses.add(address)
    return tensor.numel() * tensor.element_size()


def _measure_graph(tensor: torch.Tensor, counted_addresses: set[int], visited_nodes: set[Any]) -> int:
    """Return the bytes of the tensors that a tensor's graph keeps for its backward pass. Parameters are left out.

    Args:
        tensor: Result of the graph.
        counted_addresses: Addresses of memory that has been counted. New ones are added.
        visited_nodes: Nodes whose tensors have been counted. New ones are added.
    """
    total, num_nodes = 0, 0
    waiting: list[Any] = [tensor.grad_fn]
    while waiting and num_nodes < _MOST_NODES:
        node = waiting.pop()
        num_nodes += 1
        if node is None or node in visited_nodes:
            continue
        visited_nodes.add(node)
        waiting += [following for following, _ in getattr(node, "next_functions", ())]
        for saved in _list_saved_tensors(node):
            total += _count_bytes(saved, counted_addresses)
    return total


def _list_saved_tensors(node: Any) -> list[torch.Tensor]:
    """Return the tensors, other than parameters, that a node of an autograd graph has saved for its backward pass."""
    tensors = []
    for name in dir(node):
        if not name.startswith("_saved_"):
            continue
        try:
            saved = getattr(node, name)
        except RuntimeError:  # backward has freed the saved tensors
            break
        for each in saved if isinstance(saved, list | tuple) else (saved,):
            if isinstance(each, torch.Tensor) and not isinstance(each, torch.nn.Parameter):
                tensors.append(each)
    return tensors
