"""Hardware as an object: what a device kind can do and what serves it. No vendor is named anywhere else.

A kind is added with one entry in HARDWARE. TPUs are refused by name: torch_xla brings a tracing execution model of its
own that the strategies here have not been run on.
"""

import gc
import linecache
from dataclasses import dataclass
from types import FrameType, ModuleType

import torch

from headway import callsite, scope
from headway.errors import DeviceUnavailable

_REFUSED = {
    "tpu": "TPUs need torch_xla, which Headway does not drive yet; use a CPU, CUDA, XPU or MPS machine",
    "xla": "XLA devices need torch_xla, which Headway does not drive yet; use a CPU, CUDA, XPU or MPS machine",
}


@dataclass(frozen=True)
class Hardware:
    """One kind of device.

    Attributes:
        kind: torch's device type.
        backend: what init_process_group is given; CPU tensors always travel over gloo beside the device's own engine.
        is_indexed: does a machine hold several, addressed by index?
    """

    kind: str
    backend: str
    is_indexed: bool

    @property
    def module(self) -> ModuleType:
        """torch's module for this kind (torch.cuda, torch.cpu, ...)."""
        return torch.get_device_module(self.kind)  # type: ignore[no-any-return]

    def is_available(self) -> bool:
        """Can this process use such a device?"""
        return bool(self.module.is_available())

    def num_devices(self) -> int:
        """How many of them this process sees."""
        return int(self.module.device_count()) if self.is_indexed else 1

    def device(self, local_rank: int) -> torch.device:
        """The device of the machine's `local_rank`-th process, made current where the kind knows a current device.

        Raises:
            DeviceUnavailable: the machine has fewer devices than local ranks.
        """
        if not self.is_indexed:
            return torch.device(self.kind)
        if local_rank >= self.num_devices():
            raise DeviceUnavailable(
                f"local rank {local_rank} has no {self.kind} device: this machine shows {self.num_devices()}. "
                f"Start at most {self.num_devices()} processes per machine, or pass cpu=True"
            )
        device = torch.device(self.kind, local_rank)
        self.module.set_device(device)
        return device

    def supports_bf16(self) -> bool:
        """Does bf16 arithmetic run here (natively or well emulated)?"""
        probe = getattr(self.module, "is_bf16_supported", None)
        return True if probe is None else bool(probe())

    def synchronize(self) -> None:
        """Wait until the current device has done its work."""
        if self.kind != "cpu":
            self.module.synchronize()

    def empty_cache(self) -> None:
        """Collect garbage, then give cached device memory back to the driver."""
        gc.collect()
        if self.kind != "cpu":
            self.module.empty_cache()

    def memory_in_use(self) -> int | None:
        """Bytes that tensors hold on the current device; None where the device does not count."""
        count = getattr(self.module, "memory_allocated", None)
        return None if count is None or self.kind == "cpu" else int(count())


CPU = Hardware("cpu", "gloo", is_indexed=False)
HARDWARE: dict[str, Hardware] = {
    "cpu": CPU,
    "cuda": Hardware("cuda", "cpu:gloo,cuda:nccl", is_indexed=True),
    "xpu": Hardware("xpu", "cpu:gloo,xpu:xccl", is_indexed=True),
    "mps": Hardware("mps", "gloo", is_indexed=False),
}


def detect() -> Hardware:
    """The accelerator that torch finds here, or the CPU."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return HARDWARE.get(found.type, CPU) if found is not None else CPU


def by_name(name: str) -> Hardware:
    """The hardware called `name`.

    Raises:
        DeviceUnavailable: unknown, refused, or not on this machine; the message says which kinds are.
    """
    if name in _REFUSED:
        raise DeviceUnavailable(f"{name!r} was asked for: {_REFUSED[name]}")
    here = [kind for kind, hardware in HARDWARE.items() if hardware.is_available()]
    if name not in here:
        state = "is not on this machine" if name in HARDWARE else "is not a known kind of device"
        raise DeviceUnavailable(f"{name!r} {state}; available here: {', '.join(here)}")
    return HARDWARE[name]


# ---------------------------------------------------------------- where CUDA was first used

_UNKNOWN = "before Headway was imported"


class FirstUse:
    """Where this process first used a CUDA device: the line of the user's that did, or the notebook's cell.

    Attributes:
        place: None where no CUDA device was used.
    """

    def __init__(self) -> None:
        self.place: str | None = None


def describe(frame: FrameType | None) -> str:
    """The user's innermost line from `frame` on; in a notebook with its cell's number.

    The cell is the one whose text holds the line, as IPython keeps it in `In`.
    """
    if frame is None:
        return _UNKNOWN
    path, line = frame.f_code.co_filename, frame.f_lineno
    text = linecache.getline(path, line).strip()
    cells = frame.f_globals.get("In")
    source = "".join(linecache.getlines(path)).strip()
    number = (
        next((n for n, cell in enumerate(cells) if cell.strip() == source), None) if isinstance(cells, list) else None
    )
    where = f"line {line} of the cell In [{number}]" if number and source else f"{path}:{line}"
    return f"{where}: {text}" if text else where


def _note_first_use() -> None:
    scope.own(FirstUse).place = describe(callsite.users_frame())


def _watch_for_first_use() -> None:
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        scope.own(FirstUse).place = _UNKNOWN
        return
    # torch calls what is queued here at that moment, below the line that led to it.
    queue = getattr(torch.cuda, "_lazy_call", None)
    if queue is not None:
        queue(_note_first_use)


_watch_for_first_use()
