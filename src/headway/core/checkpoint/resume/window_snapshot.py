"""Snapshot of the start of an accumulation window (the micro-batches of one update).

After a save in the middle of a window, the resumed run continues at the window's start.
"""

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from headway.core.checkpoint._torch import foreach_copy_
from headway.core.checkpoint.format.values import encode_value, find_references
from headway.core.checkpoint.state import CollectedState
from headway.core.training.seen_data import RankCounts
from headway.core.weights.compiled import rename_bare_items


@dataclass
class WindowSnapshot:
    """State at the start of an accumulation window, which is the series of micro-batches of one update.

    A save within the window stores this state in place of the current state. `rng_states` and `forward_state` are
    recorded only in runs that are expected to save.

    Attributes:
        rng_states: RNG states. None if the run is not expected to save.
        loaders: State of each loader.
        epoch: Epoch of the loop. A window that continues in the next epoch starts in the epoch before it.
        finished_passes: Number of finished passes of that epoch, by the loaders' seeds.
        num_calls: For each learning rate scheduler, the number of `step` calls that do not depend on updates.
        local_steps: For each model, the number of steps made in its local SGD block. None if it is in no such block.
        pieces: State of automatic micro-batching: the limit on rows per micro-batch, and the search for it. Empty if
            batches are not split automatically.
        seen: Counts of the samples and tokens that this rank has trained on.
        forward_state: Copies of the buffers and extra state, which forward passes can change. None if the run is not
            expected to save.
    """

    rng_states: dict[str, Any] | None
    loaders: list[dict[str, Any]]
    epoch: int
    finished_passes: dict[int, int]
    num_calls: list[int]
    local_steps: list[int | None]
    pieces: dict[str, int | None]
    seen: RankCounts
    forward_state: "ForwardStateCopies | None" = None


class ForwardStateCopies:
    """Copies of the state that forward passes change, buffers and extra state, at the start of an accumulation window.

    A resumed run repeats the window's forward passes. If it started from the buffers at the time of the save, batch
    norm would count these passes twice. The memory of the copies is reused in each window.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, torch.Tensor] = {}
        self._extra_states: list[dict[str, Any]] = []

    def record_state(self, models: Sequence[torch.nn.Module]) -> None:
        """Copy the current persistent buffers and extra states of the models.

        Args:
            models: Models without wrappers.
        """
        current = {
            name: buffer.detach()
            for index, model in enumerate(models)
            for name, buffer in _iterate_buffers(index, model)
        }
        can_reuse = self._buffers.keys() == current.keys() and all(
            _has_equal_layout(self._buffers[name], current[name]) for name in current
        )
        if not can_reuse:
            self._buffers = {name: buffer.clone() for name, buffer in current.items()}
        elif current:
            foreach_copy_(list(self._buffers.values()), [current[name] for name in self._buffers])
        self._extra_states = [
            {name: copy.deepcopy(module.get_extra_state()) for name, module in _iterate_extra_state_modules(model)}
            for model in models
        ]

    def replace_state(self, collected: CollectedState) -> None:
        """Replace the buffers and extra states in a collected state with the copies from the start of the window.

        The window is the accumulation window in which `record_state` was called. Parameters and optimizer states are not
        replaced. Names that are missing in `collected` are skipped.
        """
        collected.tensors.update((name, values) for name, values in self._buffers.items() if name in collected.tensors)
        for index, (copies, extra) in enumerate(zip(self._extra_states, collected.state["extra"])):
            for name in copies.keys() & extra.keys():
                for reference in find_references(extra[name]):
                    del collected.tensors[reference["name"]]
                extra[name] = encode_value(copies[name], f"extra/{index}/{name}", collected.tensors)


def has_changing_state(models: Sequence[torch.nn.Module]) -> bool:
    """Whether the models have persistent buffers or extra state, which a forward pass can change."""
    has_buffers = any(list(_iterate_buffers(0, model)) for model in models)
    return has_buffers or any(list(_iterate_extra_state_modules(model)) for model in models)


def _iterate_buffers(index: int, model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, buffer) for each persistent buffer of a model. The name is the one in the checkpoint.

    Args:
        index: Index of the model.
        model: Model without wrappers.
    """
    named: list[tuple[str, torch.Tensor]] = []
    for module_name, module in model.named_modules():
        prefix = f"{module_name}." if module_name else ""
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                named.append((f"model/{index}/{prefix}{name}", buffer))
    yield from rename_bare_items(named)


def _iterate_extra_state_modules(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """Yield (name in the checkpoint, module) for each module of a model that has extra state."""
    named = [
        (f"{prefix}{'.' if prefix else ''}_extra_state", module)
        for prefix, module in model.named_modules()
        if type(module).get_extra_state is not torch.nn.Module.get_extra_state
    ]
    yield from rename_bare_items(named)


def _has_equal_layout(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype and one.device == other.device
