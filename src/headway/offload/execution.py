"""Running a placed model: hooks that bring weights and inputs to where a module runs, and a word on the speed."""

import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from headway.common.text import format_bytes
from headway.log import get_logger
from headway.offload import EXECUTION
from headway.offload.placement.budget import available_memory
from headway.offload.placement.device_map import CPU, DISK, Home, Placement
from headway.offload.readahead import ReadAhead
from headway.offload.stream import DeviceStream
from headway.offload.transport import HostTransport, pin, pinnable, transport_to
from headway.runtime.collectives.tree import tensors, to_device
from headway.runtime.transfers import StreamPoint
from headway.weights.names import TensorLocation, is_mapped, own_places, places_of

logger = get_logger(__name__)

WINDOW = 512 << 20
"""Bytes to read or copy ahead of use, unless one module alone is larger."""

_USE_WEIGHTS_OF_OTHERS = {"MultiheadAttention", "TransformerEncoderLayer"}


class Execution:
    """The hooks of one dispatched model.

    Args:
        model: with every tensor at home.
        placement: where its parts stay, and where they run.
        skip_keys: keyword arguments that are not moved.
        preload: classes whose weights come in together with those of the modules inside.
        transport: how copies to the device are made; None: through a pinned ring.
    """

    def __init__(
        self,
        model: nn.Module,
        placement: Placement,
        skip_keys: list[str],
        preload: list[str],
        transport: HostTransport | None = None,
    ) -> None:
        self.model = model
        self._placement = placement
        self._skip_keys = frozenset(skip_keys)
        self._handles: list[Any] = []
        self._came_from: list[torch.device | None] = []
        self._begun: list[_Forward] = []
        self._ended: deque[_Forward] = deque()
        self.pace = ThroughputRatio()
        main, homes = placement.main, placement.homes
        streams = main != CPU or transport is not None
        found = _units(model, homes, set(preload) | _USE_WEIGHTS_OF_OTHERS if streams else set(), streams)
        self._modules, units = [module for module, _ in found], [places for _, places in found]
        self.stream: ReadAhead | DeviceStream | None = None
        if units and streams:
            transport = transport or transport_to(main)
            self.stream = DeviceStream(units, main, WINDOW, transport)
            if transport.pinned is not None:
                in_memory = [place.tensor for name, place in places_of(model).items() if homes.get(name) == CPU]
                pin(in_memory, pinnable(in_memory), transport.pinned)
        elif units:
            self.stream = ReadAhead(units, WINDOW, int(available_memory() * 0.8))

    def __getstate__(self) -> dict[str, Any]:
        """Without the forwards under way: a device's events cannot be copied."""
        return {**self.__dict__, "_begun": [], "_ended": deque()}

    def attach(self) -> None:
        """Register the hooks."""
        if self._placement.devices():
            self._attach_devices()
        if self.stream is not None:
            for index, module in enumerate(self._modules):
                self._handles.append(module.register_forward_pre_hook(_Enter(self.stream, index), prepend=False))
                if isinstance(self.stream, DeviceStream):
                    leave = _Leave(self.stream, index)
                    self._handles.append(module.register_forward_hook(leave, prepend=True, always_call=True))
            self._handles.append(self.model.register_forward_pre_hook(self._begin, prepend=True))
            self._handles.append(self.model.register_forward_hook(self._end, always_call=True))
        self.model.__dict__[EXECUTION] = self

    def remove(self) -> None:
        """Take all hooks off; the tensors stay where they are."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self.model.__dict__.pop(EXECUTION, None)

    def is_all_on(self, device: torch.device) -> bool:
        """Does all of the model lie on `device` and run there? Weights in mapped files are on the CPU."""
        homes: set[Home] = {CPU if home == DISK else home for home in self._placement.homes.values()}
        return not isinstance(self.stream, DeviceStream) and homes | {self._placement.main} == {device}

    def _attach_devices(self) -> None:
        """Arguments follow the modules named in the map to their devices; results go back to where the inputs were."""
        named = dict(self.model.named_modules())
        for name in self._placement.device_map:
            module = named.get(name) if name in named else named.get(name.rpartition(".")[0])
            if module is not None and module is not self.model:
                move = _Move(self._placement.runs_on(name), self._skip_keys)
                self._handles.append(module.register_forward_pre_hook(move, with_kwargs=True))
        self._handles.append(self.model.register_forward_pre_hook(self._come, with_kwargs=True, prepend=True))
        self._handles.append(self.model.register_forward_hook(self._return, with_kwargs=True, always_call=True))

    def _come(self, module: nn.Module, args: object, kwargs: dict[str, Any]) -> Any:
        first = next(tensors((args, kwargs)), None)
        self._came_from.append(None if first is None else first.device)
        return _Move(self._placement.main, self._skip_keys)(module, args, kwargs)

    def _return(self, module: nn.Module, args: object, kwargs: dict[str, Any], output: object) -> Any:
        device = self._came_from.pop() if self._came_from else None
        return output if device is None or output is None else to_device(output, device)

    def _begin(self, module: nn.Module, args: object) -> None:
        assert self.stream is not None
        self.settle()
        self._begun.append(_Forward(time.perf_counter(), self._mark(), self.stream.traffic.num_bytes))

    def _end(self, module: nn.Module, args: object, output: object) -> None:
        assert self.stream is not None
        if not self._begun:
            return
        forward = self._begun.pop()
        forward.seconds = time.perf_counter() - forward.begun
        forward.end, forward.moved = self._mark(), self.stream.traffic.num_bytes - forward.before
        self._ended.append(forward)
        self.settle()

    def _mark(self) -> StreamPoint | None:
        return self.stream.mark() if isinstance(self.stream, DeviceStream) else None

    def settle(self, is_awaited: bool = False) -> None:
        """Note the forwards that have ended, which on a device is later than their calls return.

        Args:
            is_awaited: wait for those that have not.
        """
        assert self.stream is not None
        while self._ended:
            ended = self._ended[0]
            if ended.end is not None and is_awaited:
                ended.end.wait()
            if ended.end is not None and not ended.end.is_reached():
                return
            self._ended.popleft()
            self.pace.note(ended.duration(), ended.moved, self.stream.traffic.bandwidth)
            if self.pace.num_passes == 2:  # the first one also learns the order
                logger.info("%s", self.pace.words())


@dataclass
class _Forward:
    """A forward: when it was called, how far the device's queue had come then and at its end, and the bytes that had moved before
    and did meanwhile."""

    begun: float
    start: StreamPoint | None
    before: int
    moved: int = 0
    seconds: float = 0.0
    end: StreamPoint | None = None

    def duration(self) -> float:
        """On the device where that tells, else until it returned."""
        on_device = self.start.seconds_until(self.end) if self.start is not None and self.end is not None else None
        return self.seconds if on_device is None else on_device


class ThroughputRatio:
    """How fast forwards are, beside the fastest that moving their weights allows."""

    def __init__(self) -> None:
        self.num_passes = 0
        self.seconds = 0.0
        self.num_bytes = 0
        self.bandwidth: float | None = None

    def note(self, seconds: float, num_bytes: int, bandwidth: float | None) -> None:
        """One forward took `seconds` and moved `num_bytes`; `bandwidth` is that of all so far, in bytes a second."""
        self.num_passes += 1
        self.seconds, self.num_bytes, self.bandwidth = seconds, num_bytes, bandwidth

    @property
    def ceiling(self) -> float | None:
        """Forwards a second that the measured bandwidth allows; None where nothing had to move."""
        return self.bandwidth / self.num_bytes if self.bandwidth and self.num_bytes else None

    def words(self) -> str:
        """One line for the log."""
        reached = f"{1 / self.seconds:.3g} forwards/s" if self.seconds else "no forward yet"
        if self.ceiling is None:
            return f"offloaded weights: all were in memory already, nothing had to be read; reached {reached}"
        assert self.bandwidth is not None
        return (
            f"offloaded weights: {format_bytes(self.num_bytes)} per forward at {format_bytes(self.bandwidth)}/s allow at most "
            f"{self.ceiling:.3g} forwards/s; reached {reached}"
        )


class _Enter:
    def __init__(self, stream: ReadAhead | DeviceStream, unit: int) -> None:
        self.stream, self.unit = stream, unit

    def __call__(self, module: nn.Module, args: object) -> None:
        self.stream.enter(self.unit)


class _Leave:
    def __init__(self, stream: DeviceStream, unit: int) -> None:
        self.stream, self.unit = stream, unit

    def __call__(self, module: nn.Module, args: object, output: object) -> None:
        self.stream.leave(self.unit)


class _Move:
    def __init__(self, device: Any, skip_keys: frozenset[str]) -> None:
        self.device, self.skip_keys = device, skip_keys

    def __call__(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        kept = {name: value for name, value in kwargs.items() if name in self.skip_keys}
        moved = {name: value for name, value in kwargs.items() if name not in self.skip_keys}
        return to_device(args, self.device), {**to_device(moved, self.device), **kept}


def _units(
    model: nn.Module, homes: Mapping[str, Home], whole: set[str], streams: bool
) -> list[tuple[nn.Module, list[TensorLocation]]]:
    """Modules and the tensors that have to be there when their forward begins, in the order of registration."""
    found: list[tuple[nn.Module, list[TensorLocation]]] = []
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        if id(module) in seen:
            continue
        inside = list(module.named_modules()) if type(module).__name__ in whole else [("", module)]
        places = []
        for path, part in inside:
            seen.add(id(part))
            names = ".".join(filter(None, (prefix, path)))
            places += _moving(part, f"{names}." if names else "", homes, streams)
        if places:
            found.append((module, places))
    return found


def _moving(module: nn.Module, dot: str, homes: Mapping[str, Home], streams: bool) -> list[TensorLocation]:
    """The module's own tensors that are not where it runs: in files (used there), or anywhere in the host's memory."""
    own = own_places(module)
    if streams:
        return [place for place in own if homes.get(dot + place.leaf) in (DISK, CPU)]
    return [place for place in own if homes.get(dot + place.leaf) == DISK and is_mapped(place.tensor)]


def undispatch(model: nn.Module) -> None:
    """Take off what dispatch_model() attached; the tensors stay where they are."""
    execution = model.__dict__.get(EXECUTION)
    if execution is not None:
        execution.remove()
    model.__dict__.pop("hf_device_map", None)


def device_stream_of(module: nn.Module) -> DeviceStream | None:
    """What copies the module's own weights to a device for its forward; None where nothing does."""
    entering = (hook for hook in module._forward_pre_hooks.values() if isinstance(hook, _Enter))
    return next((hook.stream for hook in entering if isinstance(hook.stream, DeviceStream)), None)


def offload_pace(model: nn.Module) -> ThroughputRatio | None:
    """How fast the forwards of a dispatched model are, beside what its measured bandwidth allows; None if it does not offload."""
    execution = model.__dict__.get(EXECUTION)
    if execution is None or execution.stream is None:
        return None
    execution.settle(is_awaited=True)
    return execution.pace  # type: ignore[no-any-return]
