"""Where a window began: what a save in its middle goes back to."""

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from headway.checkpoint.format.values import encode
from headway.checkpoint.state import CollectedState


@dataclass
class WindowSnapshot:
    """Where a window began; the streams and what forward changes only in a run that is known to save.

    Attributes:
        streams: the random streams.
        loaders: each loader's state.
        local_steps: of each model in local SGD.
        pieces: how batches are cut.
        changed: what forward changes in the models.
    """

    streams: dict[str, Any] | None
    loaders: list[dict[str, Any]]
    local_steps: list[int | None]
    pieces: dict[str, int | None]
    changed: "Changed | None" = None


class Changed:
    """What forward changes in models besides their parameters, as it was when the window began: buffers, extra state.

    A resumed run makes the window's forwards again; with the buffers of its middle, batch norm would count them twice.
    The copies are made again and again in the same memory.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, torch.Tensor] = {}
        self._extra: list[dict[str, Any]] = []

    def note(self, models: Sequence[torch.nn.Module]) -> None:
        """Copy it."""
        now = {name: buffer.detach() for index, model in enumerate(models) for name, buffer in _buffers(index, model)}
        fits = self._buffers.keys() == now.keys() and all(_is_like(self._buffers[name], now[name]) for name in now)
        if not fits:
            self._buffers = {name: buffer.clone() for name, buffer in now.items()}
        elif now:
            torch._foreach_copy_(list(self._buffers.values()), [now[name] for name in self._buffers])
        self._extra = [
            {name: copy.deepcopy(module.get_extra_state()) for name, module in _with_extra_state(model)}
            for model in models
        ]

    def put_into(self, collected: CollectedState) -> None:
        """Let a state that was collected since hold it in place of what is there now."""
        collected.tensors.update((name, kept) for name, kept in self._buffers.items() if name in collected.tensors)
        for index, (kept, extra) in enumerate(zip(self._extra, collected.state["extra"])):
            for name in kept.keys() & extra.keys():
                extra[name] = encode(kept[name], f"extra/{index}/{name}", collected.tensors)


def has_changing_state(models: Sequence[torch.nn.Module]) -> bool:
    """Is there anything that forward may change?"""
    return any(any(True for _ in _buffers(0, model)) or any(True for _ in _with_extra_state(model)) for model in models)


def _buffers(index: int, model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The buffers that a checkpoint holds, by their names in it."""
    for prefix, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                yield f"model/{index}/{prefix}{'.' if prefix else ''}{name}", buffer


def _with_extra_state(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    for prefix, module in model.named_modules():
        if type(module).get_extra_state is not torch.nn.Module.get_extra_state:
            yield f"{prefix}{'.' if prefix else ''}_extra_state", module


def _is_like(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype and one.device == other.device
