"""Hardware abstraction: the capabilities of a device type, queried from torch instead of listed per type.

Capabilities come from torch's module for the device type (`torch.cuda`, `torch.npu`, ...). The communication backend
for the type's tensors comes from torch.distributed's table of default backends. An accelerator that a vendor's package
registers with torch therefore needs no code here. TPUs are rejected by name, because torch_xla has its own tracing
execution model and the strategies have not been run on it.

Importing this module also makes torch report the first use of CUDA (see `first_use`).
"""

import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from headway.common.optional import LazyModule
from headway.core.runtime import _torch
from headway.core.runtime.first_use import watch_first_use
from headway.errors import DeviceUnavailable, UnsupportedError

psutil = LazyModule("psutil")

_UNSUPPORTED = {
    "tpu": "TPUs need torch_xla, which Headway does not support yet; use a CPU, or an accelerator that torch supports itself",
    "xla": "XLA devices need torch_xla, which Headway does not support yet; use a CPU, or an accelerator that torch supports itself",
}

_CPU_BACKEND = "gloo"


@dataclass(frozen=True)
class Hardware:
    """A device type, such as "cuda", with the features that torch reports for it.

    Attributes:
        kind: Name of the device type in torch, such as "cuda" or "cpu".
    """

    kind: str

    @property
    def module(self) -> ModuleType:
        """torch's module for this device type (torch.cuda, torch.cpu, ...)."""
        return torch.get_device_module(self.kind)  # type: ignore[no-any-return]

    def find_function(self, name: str) -> Callable[..., Any] | None:
        """Return a function of torch's module for this device type, or None if the module lacks it.

        Only CUDA's module has all functions that Headway uses.
        """
        return getattr(self.module, name, None)

    def find_memory_function(self, name: str) -> Callable[..., Any] | None:
        """Return a memory function of torch's module for this device type, or None if there is none.

        If the module has no memory functions, the function of `torch.accelerator` is returned, provided that the
        device's allocator counts memory.
        """
        function = self.find_function(name)
        if function is not None or self.kind == "cpu":
            return function
        # A module such as torch.mps has memory functions of its own, under other names than torch.accelerator.
        has_own_functions = self.find_function("current_allocated_memory") is not None
        if has_own_functions or not _has_counting_allocator():
            return None
        accelerator_name = "get_memory_info" if name == "mem_get_info" else name
        return getattr(torch.accelerator, accelerator_name, None)

    @property
    def is_indexed(self) -> bool:
        """Whether a machine can have more than one device of this type, so that devices are addressed by index."""
        return self.kind != "cpu" and self.find_function("current_device") is not None

    @property
    def default_backend(self) -> str | None:
        """Name of torch.distributed's default backend for tensors of this device type, or None if none is registered."""
        from torch.distributed import Backend

        return Backend.default_device_backend_map.get(self.kind)

    @property
    def backend_string(self) -> str:
        """Backends for `init_process_group`, such as "cpu:gloo,cuda:nccl".

        CPU tensors always use gloo, in addition to the device's own backend.

        Raises:
            UnsupportedError: If torch.distributed has no default backend for this device type.
        """
        if self.default_backend is None:
            raise UnsupportedError(
                f"torch.distributed has no default backend for tensors on {self.kind} devices. Import the vendor's package that "
                f"registers one (Backend.register_backend(..., devices=['{self.kind}'])) before the Accelerator is created, name "
                f"one with InitProcessGroupKwargs(backend='cpu:gloo,{self.kind}:<backend>'), run one process, or pass cpu=True"
            )
        if self.default_backend == _CPU_BACKEND:
            return _CPU_BACKEND
        return f"cpu:{_CPU_BACKEND},{self.kind}:{self.default_backend}"

    def is_available(self) -> bool:
        """Whether this process can use a device of this type."""
        return bool(self.module.is_available())

    def count_devices(self) -> int:
        """Return the number of devices of this type that this process can see."""
        return int(self.module.device_count()) if self.is_indexed else 1

    def select_device(self, local_rank: int) -> torch.device:
        """Return the device for a local rank, and make it the current device if its type has a current device.

        Raises:
            DeviceUnavailable: If this machine has too few devices of this type.
        """
        if not self.is_indexed:
            return torch.device(self.kind)
        if local_rank >= self.count_devices():
            raise DeviceUnavailable(
                f"local rank {local_rank} has no {self.kind} device: this machine shows {self.count_devices()}. "
                f"Start at most {self.count_devices()} processes per machine, or pass cpu=True"
            )
        device = torch.device(self.kind, local_rank)
        (self.find_function("set_device") or torch.accelerator.set_device_index)(device)
        return device

    def supports_bf16(self) -> bool:
        """Whether bf16 arithmetic runs on this device type, natively or by emulation.

        True if torch's module for the device type cannot tell.
        """
        probe = self.find_function("is_bf16_supported")
        return True if probe is None else bool(probe())

    def supports_autocast(self, dtype: torch.dtype) -> bool:
        """Whether torch.autocast can cast to `dtype` on this device type."""
        if self.kind != _torch.get_vendor_device_name():
            return torch.amp.is_autocast_available(self.kind)
        # torch.autocast raises without this function, and only warns of an unsupported dtype.
        list_dtypes = self.find_function("get_amp_supported_dtype")
        return list_dtypes is not None and dtype in list_dtypes()

    def disable_autocast(self) -> AbstractContextManager[Any]:
        """Return a context in which autocast is off.

        The context does nothing for a vendor's device type without autocast support, for which torch.autocast would
        raise an error.
        """
        is_vendor_type = self.kind == _torch.get_vendor_device_name()
        if is_vendor_type and self.find_function("get_amp_supported_dtype") is None:
            return nullcontext()
        return torch.autocast(self.kind, enabled=False)

    @property
    def can_pin(self) -> bool:
        """Whether pinned host memory is available, so that copies to the device do not block the host."""
        if self.kind == "cpu":
            return False
        try:
            return torch.empty(1, pin_memory=True).is_pinned()
        except RuntimeError:
            return False

    def synchronize(self) -> None:
        """Wait until the current device has finished its work. Do nothing on a CPU."""
        if self.kind != "cpu":
            (self.find_function("synchronize") or torch.accelerator.synchronize)()

    def empty_cache(self) -> None:
        """Run Python's garbage collector, then return cached device memory to the driver, if the device type has a cache."""
        gc.collect()
        self.release_cache()

    def release_cache(self) -> None:
        """Return cached device memory to the driver, if the device type has a cache."""
        release = None if self.kind == "cpu" else self.find_memory_function("empty_cache")
        if release is not None:
            release()

    def get_memory_in_use(self) -> int | None:
        """Return the bytes that tensors occupy on the current device, or None if its allocator does not count them."""
        count = self.find_memory_function("memory_allocated")
        return None if count is None or self.kind == "cpu" else int(count())

    def get_process_memory(self) -> int:
        """Return the bytes that tensors occupy on the current device.

        On a CPU, or if the device's allocator does not count them, return the process's resident memory in bytes.
        """
        in_use = self.get_memory_in_use()
        return int(psutil.Process().memory_info().rss) if in_use is None else in_use


def _has_counting_allocator() -> bool:
    """Whether the accelerator's allocator counts memory, so that `torch.accelerator` can report it."""
    try:
        return torch.accelerator.is_available() and bool(_torch.is_allocator_initialized())
    except RuntimeError:  # an allocator that implements only the oldest interface
        return False


CPU = Hardware("cpu")
"""The only `Hardware` object of the CPU, so that `hardware is CPU` can be tested."""


class _HardwareByName(Mapping[str, Hardware]):
    """Mapping from name to `Hardware` for all device types that torch has a module for.

    Iteration yields only the CPU and this machine's accelerator.
    """

    def __getitem__(self, device_type: str) -> Hardware:
        if device_type == "cpu":
            return CPU
        try:
            torch.get_device_module(device_type)
        except RuntimeError:
            raise KeyError(device_type) from None
        return Hardware(device_type)

    def __iter__(self) -> Iterator[str]:
        yield "cpu"
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        if accelerator is not None:
            yield accelerator.type

    def __len__(self) -> int:
        return len(list(iter(self)))


HARDWARE: Mapping[str, Hardware] = _HardwareByName()


def detect_hardware() -> Hardware:
    """Return the type of the accelerator that torch finds on this machine, or the CPU.

    An accelerator that Headway does not support (TPU) is ignored.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return CPU if accelerator is None or accelerator.type in _UNSUPPORTED else HARDWARE[accelerator.type]


def is_device_type(name: str) -> bool:
    """Whether torch knows this device type, such as "cuda", even if the machine has no such device.

    False for a name with an index, such as "cuda:0". A vendor's device type is known only after the vendor's package has
    been imported.
    """
    try:
        return torch.device(name).index is None
    except RuntimeError:
        return False


def find_hardware(name: str) -> Hardware:
    """Return the `Hardware` object of a device type.

    Args:
        name: Device type in torch.

    Raises:
        DeviceUnavailable: If the type is unknown, unsupported or not on this machine. The message lists the available
            types.
    """
    if name in _UNSUPPORTED:
        raise DeviceUnavailable(f"{name!r} was asked for: {_UNSUPPORTED[name]}")
    hardware = HARDWARE.get(name)
    if hardware is None or not hardware.is_available():
        state = (
            "is not on this machine"
            if is_device_type(name)
            else "is not a kind of device that torch knows (a vendor's device is known once its package is imported)"
        )
        raise DeviceUnavailable(f"{name!r} {state}; available here: {', '.join(HARDWARE)}")
    return hardware


watch_first_use()
