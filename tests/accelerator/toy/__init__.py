"""A toy accelerator that runs on the host: `register()` adds a device type "toy" with memory, streams and generators to torch.

It is a PrivateUse1 backend, like NPU, HPU, MUSA and MLU. Environment variables remove parts that some vendors do not implement:

    TOY_DEVICES: number of devices (default 2).
    TOY_MEMORY: bytes per device (default 1 GiB). Larger allocations raise torch.OutOfMemoryError.
    TOY_PLAIN=1: use an allocator without statistics.
    TOY_WITHOUT: comma-separated functions of `torch.toy` to remove, such as "get_amp_supported_dtype"; "group" removes collectives.
"""

import importlib.util
import os
from datetime import timedelta
from types import ModuleType
from typing import Any

import torch

from tests.accelerator.toy import build

WAITS = ("synchronize", "scalar", "to_host", "from_host", "shape")
"""Operations that make the host wait for a device, as counted by `torch.toy.waits()`, in this order: synchronizations of a
device, stream or event; reads of a scalar (`item`); blocking copies to the host; blocking copies from the host; results whose
shape depends on values. A copy blocks if its host memory is not pinned or `non_blocking` is not set.
After `torch.toy.trap_waits()`, each of these operations raises an error."""


def register() -> None:
    """Build the toy libraries if needed, and register the device with torch. Call this once per process."""
    libraries = build.build()
    without = os.environ.get("TOY_WITHOUT", "").split(",")
    torch.ops.load_library(str(libraries["device"]))
    torch.utils.rename_privateuse1_backend("toy")
    module = _module()
    for name in without:
        if hasattr(module, name):
            delattr(module, name)
    torch._register_device_module("toy", module)
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    if "group" not in without:
        _register_group(str(libraries["group"]))


def _module() -> ModuleType:
    """Return the module that becomes `torch.toy`."""
    module, ops, accelerator = ModuleType("torch.toy"), torch.ops.toy, torch.accelerator

    def index(device: Any = None) -> int:
        if device is None or (isinstance(device, (str, torch.device)) and torch.device(device).index is None):
            return accelerator.current_device_index()
        return device if isinstance(device, int) else int(torch.device(device).index)

    def manual_seed_all(seed: int) -> None:
        for each in range(ops.num_devices()):
            ops.manual_seed(each, seed % (1 << 63))

    found: dict[str, Any] = {
        "is_available": lambda: ops.num_devices() > 0,
        "is_initialized": lambda: True,
        "_is_in_bad_fork": lambda: False,
        "device_count": lambda: ops.num_devices(),
        "device": lambda device=None: accelerator.device_index(index(device)),
        "current_device": accelerator.current_device_index,
        "set_device": lambda device: accelerator.set_device_index(index(device)),
        "synchronize": lambda device=None: accelerator.synchronize(index(device)),
        "manual_seed": lambda seed: ops.manual_seed(index(), seed),
        "manual_seed_all": manual_seed_all,
        "get_rng_state": lambda device="toy": ops.rng_state(index(device)),
        "set_rng_state": lambda state, device="toy": ops.set_rng_state(index(device), state),
        "get_amp_supported_dtype": lambda: [torch.bfloat16, torch.float16],
        "get_device_name": lambda device=None: f"Toy {index(device)}",
        "empty_cache": accelerator.empty_cache,
        "memory_allocated": lambda device=None: accelerator.memory_allocated(index(device)),
        "memory_reserved": lambda device=None: accelerator.memory_reserved(index(device)),
        "max_memory_allocated": lambda device=None: accelerator.max_memory_allocated(index(device)),
        "reset_peak_memory_stats": lambda device=None: accelerator.reset_peak_memory_stats(index(device)),
        "memory_stats": lambda device=None: accelerator.memory_stats(index(device)),
        "mem_get_info": lambda device=None: accelerator.get_memory_info(index(device)),
        # Not part of torch's interface: these count operations that would make the host wait for a real device.
        "waits": lambda: dict(zip(WAITS, ops.waits(), strict=True)),
        "forget_waits": lambda: ops.forget_waits(),
        "trap_waits": lambda is_on=True: ops.trap_waits(is_on),
    }
    for name, function in found.items():
        setattr(module, name, function)
    return module


def _register_group(path: str) -> None:
    import torch.distributed as dist

    spec = importlib.util.spec_from_file_location("toy_group", path)
    assert spec is not None
    assert spec.loader is not None
    group = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(group)

    def create(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
        return group.Group(dist.ProcessGroupGloo(store, rank, size, timeout=timeout))

    dist.Backend.register_backend("toygloo", create, devices=["toy"])
