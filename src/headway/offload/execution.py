"""Run a dispatched model with hooks that move weights and inputs to each module's device, and measure throughput."""

import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from headway.common.text import format_bytes
from headway.core.runtime.collectives.tree import list_tensors, to_device
from headway.core.runtime.copy_stream import StreamPoint
from headway.core.training.prepared.dispatched import EXECUTION
from headway.core.weights.locations import TensorLocation, is_mapped, iterate_own_locations, map_locations
from headway.log import get_logger
from headway.offload.pinning import compute_pin_limit, pin_tensors
from headway.offload.placement.budget import measure_available_memory
from headway.offload.placement.storage_devices import CPU, DISK, Placement, StorageDevice
from headway.offload.readahead import ReadAhead
from headway.offload.stream import DeviceStream
from headway.offload.transport import HostTransport, make_transport

logger = get_logger(__name__)

WINDOW = 512 << 20
"""Number of bytes of weights to read or copy ahead of use.

If a single module has more bytes of weights, the size of that module is used instead.
"""

_USE_WEIGHTS_OF_OTHERS = {"MultiheadAttention", "TransformerEncoderLayer"}
"""Names of torch's module classes whose forward uses the weights of submodules without calling the submodules."""


class Execution:
    """Forward hooks of one dispatched model, which move weights and arguments to the devices where its modules run.

    Args:
        model: Model whose tensors are already on their target devices.
        placement: Devices on which parts are stored, and on which they run.
        skip_keys: Names of keyword arguments that are not moved between devices.
        preload: Names of module classes whose weights are loaded together with those of their submodules.
        transport: Method of copying weights to the device, or None for the device's default.

    Attributes:
        model: The dispatched model.
        stream: `DeviceStream` that copies weights to the main device, or `ReadAhead` that reads memory-mapped weights
            into the page cache before they are used. None if no weights have to be copied or read.
        pace: Throughput of the last recorded forward, and the maximum that the measured bandwidth allows.
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
        # Device of the model's inputs, for each call of the model in progress. Calls can be nested.
        self._input_devices: list[torch.device | None] = []
        self._running_forwards: list[_ForwardMeasurement] = []
        # Forwards whose call has returned, but which the device might not have finished.
        self._returned_forwards: deque[_ForwardMeasurement] = deque()
        self.pace = ThroughputRatio()
        main, storage_devices = placement.main, placement.storage_devices
        is_streamed = main != CPU or transport is not None
        # Weights that are used in place are valid even if no hook has read them ahead.
        classes = {*preload, *_USE_WEIGHTS_OF_OTHERS} if is_streamed else set()
        modules_and_places = _list_units(model, storage_devices, classes, is_streamed)
        self._modules = [module for module, _ in modules_and_places]
        units = [places for _, places in modules_and_places]
        self.stream: ReadAhead | DeviceStream | None = None
        if units and is_streamed:
            transport = transport or make_transport(main)
            self.stream = DeviceStream(units, main, WINDOW, transport)
            if transport.pinned is not None:
                in_memory = [
                    place.tensor for name, place in map_locations(model).items() if storage_devices.get(name) == CPU
                ]
                pin_tensors(in_memory, compute_pin_limit(in_memory), transport.pinned)
        elif units:
            self.stream = ReadAhead(units, WINDOW, int(measure_available_memory() * 0.8))

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes for copying or pickling, without the records of forwards in progress.

        These are left out because their device events cannot be copied.
        """
        return {**self.__dict__, "_running_forwards": [], "_returned_forwards": deque()}

    def attach_hooks(self) -> None:
        """Register the hooks that move weights and arguments to the device where each module runs.

        If weights are streamed or read ahead, the forwards of the model are also measured. The model refers to this
        object until `remove_hooks` is called.
        """
        if self._placement.list_devices():
            self._attach_devices()
        if self.stream is not None:
            for index, module in enumerate(self._modules):
                self._handles.append(module.register_forward_pre_hook(_LoadWeights(self.stream, index), prepend=False))
                if isinstance(self.stream, DeviceStream):
                    restore = _RestoreWeights(self.stream, index)
                    self._handles.append(module.register_forward_hook(restore, prepend=True, always_call=True))
            # The first and the last hook of the model, so that the measurement includes the work of all other hooks.
            self._handles.append(self.model.register_forward_pre_hook(self._begin_forward, prepend=True))
            self._handles.append(self.model.register_forward_hook(self._end_forward, always_call=True))
        self.model.__dict__[EXECUTION] = self

    def remove_hooks(self) -> None:
        """Remove all hooks. Tensors are not moved."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self.model.__dict__.pop(EXECUTION, None)

    def is_all_on(self, device: torch.device) -> bool:
        """Whether all tensors of the model are stored on `device`, and the model also runs on it.

        Weights in mapped files count as stored on the CPU.
        """
        storage_devices: set[StorageDevice] = {
            CPU if each == DISK else each for each in self._placement.storage_devices.values()
        }
        return not isinstance(self.stream, DeviceStream) and storage_devices | {self._placement.main} == {device}

    def _attach_devices(self) -> None:
        """Register hooks that move arguments to each module's device.

        The model's results are moved back to the device of its inputs.
        """
        module_by_name = dict(self.model.named_modules())
        for name in self._placement.device_map:
            # A tensor that has its own entry is used by the module that owns it.
            module_name = name if name in module_by_name else name.rpartition(".")[0]
            module = module_by_name.get(module_name)
            if module is not None and module is not self.model:
                move = _MoveArguments(self._placement.get_run_device(name), self._skip_keys)
                self._handles.append(module.register_forward_pre_hook(move, with_kwargs=True))
        self._handles.append(self.model.register_forward_pre_hook(self._enter_model, with_kwargs=True, prepend=True))
        self._handles.append(self.model.register_forward_hook(self._return_outputs, with_kwargs=True, always_call=True))

    def _enter_model(self, module: nn.Module, args: object, kwargs: dict[str, Any]) -> Any:
        """Record the device of the model's inputs, and return them on the model's main device (forward pre-hook)."""
        first = next(list_tensors((args, kwargs)), None)
        self._input_devices.append(None if first is None else first.device)
        return _MoveArguments(self._placement.main, self._skip_keys)(module, args, kwargs)

    def _return_outputs(self, module: nn.Module, args: object, kwargs: dict[str, Any], output: object) -> Any:
        """Return the model's output on the device of its inputs (forward hook)."""
        # The output is None if the forward has failed, because the hook is always called.
        device = self._input_devices.pop() if self._input_devices else None
        return output if device is None or output is None else to_device(output, device)

    def _begin_forward(self, module: nn.Module, args: object) -> None:
        """Start to measure a forward of the model. It is used as a forward pre-hook."""
        assert self.stream is not None
        self.record_forwards()
        self._running_forwards.append(
            _ForwardMeasurement(time.perf_counter(), self._mark_progress(), self.stream.traffic.num_bytes)
        )

    def _end_forward(self, module: nn.Module, args: object, output: object) -> None:
        """End the measurement of the model's innermost forward in progress. It is used as a forward hook."""
        assert self.stream is not None
        if not self._running_forwards:
            return  # the model was copied during the forward
        forward = self._running_forwards.pop()
        forward.seconds = time.perf_counter() - forward.start_time
        forward.end_position = self._mark_progress()
        forward.num_bytes = self.stream.traffic.num_bytes - forward.earlier_bytes
        self._returned_forwards.append(forward)
        self.record_forwards()

    def _mark_progress(self) -> StreamPoint | None:
        """Return the current position in the device's compute stream, or None if the device computes synchronously."""
        return self.stream.mark_progress() if isinstance(self.stream, DeviceStream) else None

    def record_forwards(self, *, waits: bool = False) -> None:
        """Record the throughput of the forwards that the device has finished.

        On an accelerator, the call of a forward returns before the device has finished it. Such a forward is recorded
        later.

        Args:
            waits: Whether to wait until the device has finished all forwards whose calls have returned. Default: False.
        """
        assert self.stream is not None
        while self._returned_forwards:
            forward = self._returned_forwards[0]
            if forward.end_position is not None and waits:
                forward.end_position.wait()
            if forward.end_position is not None and not forward.end_position.is_reached():
                return
            self._returned_forwards.popleft()
            self.pace.record_forward(forward.compute_duration(), forward.num_bytes, self.stream.traffic.bandwidth)
            if self.pace.num_passes == 2:  # the first forward is slower, because it also learns the order
                logger.info("%s", self.pace.words())


@dataclass
class _ForwardMeasurement:
    """Measurement of one forward of a dispatched model.

    Attributes:
        start_time: Time of the call in seconds (`time.perf_counter()`).
        start_position: Position in the device's compute stream at the call, or None if the device computes
            synchronously.
        earlier_bytes: Bytes of weights transferred before the call.
        num_bytes: Bytes of weights transferred during the forward.
        seconds: Seconds until the call returned.
        end_position: Position in the device's compute stream when the call returned, or None if the device computes
            synchronously.
    """

    start_time: float
    start_position: StreamPoint | None
    earlier_bytes: int
    num_bytes: int = 0
    seconds: float = 0.0
    end_position: StreamPoint | None = None

    def compute_duration(self) -> float:
        """Return the seconds that the device took or, if they were not measured, those until the call returned."""
        if self.start_position is None or self.end_position is None:
            return self.seconds
        device_seconds = self.start_position.measure_seconds_until(self.end_position)
        return self.seconds if device_seconds is None else device_seconds


class ThroughputRatio:
    """Throughput of an offloaded model's forwards, compared with the maximum that transfers of its weights allow.

    Attributes:
        num_passes: Number of forwards recorded.
        seconds: Duration of the last forward in seconds.
        num_bytes: Bytes of weights that the last forward transferred.
        bandwidth: Measured bandwidth of all transfers in bytes per second, or None before the first transfer.
    """

    def __init__(self) -> None:
        self.num_passes = 0
        self.seconds = 0.0
        self.num_bytes = 0
        self.bandwidth: float | None = None

    def record_forward(self, seconds: float, num_bytes: int, bandwidth: float | None) -> None:
        """Record the measurements of a forward.

        Args:
            seconds: Duration of the forward in seconds.
            num_bytes: Bytes of weights that the forward transferred.
            bandwidth: Bandwidth of all transfers so far in bytes per second, or None before the first transfer.
        """
        self.num_passes += 1
        self.seconds = seconds
        self.num_bytes = num_bytes
        self.bandwidth = bandwidth

    @property
    def ceiling(self) -> float | None:
        """Maximum number of forwards per second that the measured bandwidth allows.

        It is None if the last forward transferred no weights, or no bandwidth was measured.
        """
        return self.bandwidth / self.num_bytes if self.bandwidth and self.num_bytes else None

    def words(self) -> str:
        """Return one line for the log with the reached throughput and the maximum that the bandwidth allows."""
        reached = f"{1 / self.seconds:.3g} forwards/s" if self.seconds else "no forward yet"
        if self.ceiling is None:
            return f"offloaded weights: all were in memory already, nothing had to be read; reached {reached}"
        assert self.bandwidth is not None
        return (
            f"offloaded weights: {format_bytes(self.num_bytes)} per forward at {format_bytes(self.bandwidth)}/s allow at most "
            f"{self.ceiling:.3g} forwards/s; reached {reached}"
        )


class _LoadWeights:
    """Forward pre-hook that loads the weights that a module's forward uses.

    Args:
        stream: Object that loads the weights.
        unit: Index in `stream` of the module's weights.
    """

    def __init__(self, stream: ReadAhead | DeviceStream, unit: int) -> None:
        self.stream = stream
        self.unit = unit

    def __call__(self, module: nn.Module, args: object) -> None:
        self.stream.enter_unit(self.unit)


class _RestoreWeights:
    """Forward hook that restores a module's original weights after its device copies have been used.

    Args:
        stream: Object that copies the weights to the device.
        unit: Index in `stream` of the module's weights.
    """

    def __init__(self, stream: DeviceStream, unit: int) -> None:
        self.stream = stream
        self.unit = unit

    def __call__(self, module: nn.Module, args: object, output: object) -> None:
        self.stream.leave_unit(self.unit)


class _MoveArguments:
    """Forward pre-hook that moves a module's arguments to the device on which the module runs.

    Args:
        device: Device on which the module runs.
        skip_keys: Names of keyword arguments that are not moved.
    """

    def __init__(self, device: Any, skip_keys: frozenset[str]) -> None:
        self.device = device
        self.skip_keys = skip_keys

    def __call__(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        kept = {name: value for name, value in kwargs.items() if name in self.skip_keys}
        moved = {name: value for name, value in kwargs.items() if name not in self.skip_keys}
        return to_device(args, self.device), {**to_device(moved, self.device), **kept}


def _list_units(
    model: nn.Module, storage_devices: Mapping[str, StorageDevice], preloaded_classes: set[str], is_streamed: bool
) -> list[tuple[nn.Module, list[TensorLocation]]]:
    """Return the modules whose forward needs tensors to be loaded first, each with these tensors.

    The modules are in the order of registration.

    Args:
        model: Dispatched model.
        storage_devices: Device or "disk" where each tensor is stored between forwards, by name.
        preloaded_classes: Names of the classes whose weights are loaded together with those of their submodules.
        is_streamed: Whether weights in host memory are copied to a device.
    """
    units: list[tuple[nn.Module, list[TensorLocation]]] = []
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        if id(module) in seen:
            continue
        is_preloaded = type(module).__name__ in preloaded_classes
        members = list(module.named_modules()) if is_preloaded else [("", module)]
        places = []
        for path, member in members:
            seen.add(id(member))
            name = ".".join(filter(None, (prefix, path)))
            places += _list_loaded_tensors(member, f"{name}." if name else "", storage_devices, is_streamed)
        if places:
            units.append((module, places))
    return units


def _list_loaded_tensors(
    module: nn.Module, prefix: str, storage_devices: Mapping[str, StorageDevice], is_streamed: bool
) -> list[TensorLocation]:
    """Return the module's own tensors that have to be copied or read ahead for its forward.

    If weights are streamed to a device, these are all tensors in host memory or on disk. Otherwise they are the tensors
    in mapped files.

    Args:
        module: Module of the dispatched model.
        prefix: Prefix of the module's tensor names, such as "layers.0.", or "" for the model itself.
        storage_devices: Device or "disk" where each tensor is stored between forwards, by name.
        is_streamed: Whether weights in host memory are copied to a device.
    """
    own = iterate_own_locations(module)
    if is_streamed:
        return [place for place in own if storage_devices.get(prefix + place.leaf) in (DISK, CPU)]
    return [place for place in own if storage_devices.get(prefix + place.leaf) == DISK and is_mapped(place.tensor)]


def undispatch_model(model: nn.Module) -> None:
    """Remove the hooks and attributes that dispatch_model() attached, if any. Tensors are not moved."""
    execution = model.__dict__.get(EXECUTION)
    if execution is not None:
        execution.remove_hooks()
    model.__dict__.pop("hf_device_map", None)


def find_device_stream(module: nn.Module) -> DeviceStream | None:
    """Return the stream that copies the module's own weights to a device, or None if its weights are not streamed."""
    for hook in module._forward_pre_hooks.values():
        if isinstance(hook, _LoadWeights) and isinstance(hook.stream, DeviceStream):
            return hook.stream
    return None


def offload_pace(model: nn.Module) -> ThroughputRatio | None:
    """Return a dispatched model's throughput, compared with the maximum that the measured bandwidth allows.

    Call it after a forward. It waits until the device has finished the forwards.

    Args:
        model: Model that `dispatch_model`, `load_checkpoint_and_dispatch`, `cpu_offload` or `disk_offload` returned.

    Returns:
        Seconds and bytes of the last forward, the measured bandwidth, and `ceiling`, the maximum number of forwards per
        second. `words()` formats them. None if the model is not dispatched, or if no weights are copied to a device or
        read ahead.

    Example::

        model = disk_offload(model, "offload")
        outputs = model(inputs)
        print(offload_pace(model).words())
    """
    execution = model.__dict__.get(EXECUTION)
    if execution is None or execution.stream is None:
        return None
    execution.record_forwards(waits=True)
    return execution.pace  # type: ignore[no-any-return]
