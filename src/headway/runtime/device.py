"""Hardware as an object: what a device kind can do and what serves it. Kinds are torch's; none has an entry here.

What a kind can do is asked of torch's module for it (`torch.cuda`, `torch.npu`, ...), and which engine carries its tensors of
torch.distributed's table of default backends: an accelerator that a vendor's package registers with torch needs nothing else.
TPUs are refused by name: torch_xla brings a tracing execution model of its own that the strategies here have not been run on.
"""

import gc
import linecache
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import FrameType, ModuleType
from typing import Any

import torch

from headway.common import callsite, scope
from headway.common.optional import Later
from headway.errors import DeviceUnavailable, UnsupportedError

psutil = Later("psutil")

_REFUSED = {
    "tpu": "TPUs need torch_xla, which Headway does not support yet; use a CPU, or an accelerator that torch supports itself",
    "xla": "XLA devices need torch_xla, which Headway does not support yet; use a CPU, or an accelerator that torch supports itself",
}

_CPU_ENGINE = "gloo"


@dataclass(frozen=True)
class Hardware:
    """One kind of device.

    Attributes:
        kind: torch's device type.
    """

    kind: str

    @property
    def module(self) -> ModuleType:
        """torch's module for this kind (torch.cuda, torch.cpu, ...)."""
        return torch.get_device_module(self.kind)  # type: ignore[no-any-return]

    def ability(self, name: str) -> Callable[..., Any] | None:
        """A function of torch's module for this kind; None where it has none, as nothing but CUDA's has them all."""
        return getattr(self.module, name, None)

    def memory_ability(self, name: str) -> Callable[..., Any] | None:
        """The like for a figure of memory; `torch.accelerator` answers where its allocator counts and the module is silent."""
        found = self.ability(name)
        if found is None and self.kind != "cpu" and self.ability("current_allocated_memory") is None and _counts():
            return getattr(torch.accelerator, {"mem_get_info": "get_memory_info"}.get(name, name), None)
        return found

    @property
    def is_indexed(self) -> bool:
        """Does a machine hold several, addressed by index?"""
        return self.kind != "cpu" and self.ability("current_device") is not None

    @property
    def engine(self) -> str | None:
        """What carries this kind's tensors between processes, by torch.distributed's table; None where nothing is registered."""
        from torch.distributed import Backend

        return Backend.default_device_backend_map.get(self.kind)

    @property
    def backend(self) -> str:
        """What init_process_group is given; CPU tensors always travel over gloo beside the device's own engine.

        Raises:
            UnsupportedError: torch.distributed knows no engine for this kind.
        """
        if self.engine is None:
            raise UnsupportedError(
                f"no backend carries tensors of {self.kind} between processes: torch.distributed's table of default backends has "
                "none for it. Import the vendor's package that registers one (Backend.register_backend(..., "
                f"devices=['{self.kind}'])) before the Accelerator is created, name one with InitProcessGroupKwargs(backend="
                f"'cpu:gloo,{self.kind}:<backend>'), run one process, or pass cpu=True"
            )
        return _CPU_ENGINE if self.engine == _CPU_ENGINE else f"cpu:{_CPU_ENGINE},{self.kind}:{self.engine}"

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
        (self.ability("set_device") or torch.accelerator.set_device_index)(device)
        return device

    def supports_bf16(self) -> bool:
        """Does bf16 arithmetic run here (natively or well emulated)?"""
        probe = self.ability("is_bf16_supported")
        return True if probe is None else bool(probe())

    def supports_autocast(self, dtype: torch.dtype) -> bool:
        """Does torch.autocast cast to this type on this kind of device?"""
        if self.kind != torch._C._get_privateuse1_backend_name():
            return torch.amp.is_autocast_available(self.kind)
        # Autocast itself raises without it, and of another type it only warns.
        said = self.ability("get_amp_supported_dtype")
        return said is not None and dtype in said()

    def without_autocast(self) -> AbstractContextManager[Any]:
        """A block in which nothing is cast; torch.autocast itself refuses a vendor's device that knows none."""
        is_vendors = self.kind == torch._C._get_privateuse1_backend_name()
        if is_vendors and self.ability("get_amp_supported_dtype") is None:
            return nullcontext()
        return torch.autocast(self.kind, enabled=False)

    @property
    def can_pin(self) -> bool:
        """Is there pinned host memory for it, from which copies to the device need nobody to wait?"""
        if self.kind == "cpu":
            return False
        try:
            return torch.empty(1, pin_memory=True).is_pinned()
        except RuntimeError:
            return False

    def synchronize(self) -> None:
        """Wait until the current device has done its work."""
        if self.kind != "cpu":
            (self.ability("synchronize") or torch.accelerator.synchronize)()

    def empty_cache(self) -> None:
        """Collect garbage, then give cached device memory back to the driver."""
        gc.collect()
        self.release_cache()

    def release_cache(self) -> None:
        """Give cached device memory back to the driver, where the kind has a cache."""
        release = None if self.kind == "cpu" else self.memory_ability("empty_cache")
        if release is not None:
            release()

    def memory_in_use(self) -> int | None:
        """Bytes that tensors hold on the current device; None where the device does not count."""
        count = self.memory_ability("memory_allocated")
        return None if count is None or self.kind == "cpu" else int(count())

    def process_memory(self) -> int:
        """Bytes that tensors hold on the device; on a CPU, the process's resident memory."""
        in_use = self.memory_in_use()
        return int(psutil.Process().memory_info().rss) if in_use is None else in_use


def _counts() -> bool:
    """Does the accelerator's allocator count, so that torch.accelerator can tell its figures?"""
    try:
        return torch.accelerator.is_available() and bool(torch._C._accelerator_isAllocatorInitialized())
    except RuntimeError:  # it is an allocator of the oldest kind
        return False


CPU = Hardware("cpu")


class _Kinds(Mapping[str, Hardware]):
    """Every kind that torch has a module for, by its name; going through them gives the CPU and this machine's accelerator."""

    def __getitem__(self, kind: str) -> Hardware:
        if kind == "cpu":
            return CPU
        try:
            torch.get_device_module(kind)
        except RuntimeError:
            raise KeyError(kind) from None
        return Hardware(kind)

    def __iter__(self) -> Iterator[str]:
        yield "cpu"
        found = torch.accelerator.current_accelerator(check_available=True)
        if found is not None:
            yield found.type

    def __len__(self) -> int:
        return len(list(iter(self)))


HARDWARE: Mapping[str, Hardware] = _Kinds()


def detect() -> Hardware:
    """The accelerator that torch finds here, or the CPU."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return CPU if found is None or found.type in _REFUSED else HARDWARE[found.type]


def is_kind(name: str) -> bool:
    """Is this a type of device by torch's names, here or not? A vendor's own is one once its package is imported."""
    try:
        return torch.device(name).index is None
    except RuntimeError:
        return False


def by_name(name: str) -> Hardware:
    """The hardware called `name`.

    Raises:
        DeviceUnavailable: unknown, refused, or not on this machine; the message says which kinds are.
    """
    if name in _REFUSED:
        raise DeviceUnavailable(f"{name!r} was asked for: {_REFUSED[name]}")
    found = HARDWARE.get(name)
    if found is None or not found.is_available():
        state = (
            "is not on this machine"
            if is_kind(name)
            else "is not a kind of device that torch knows (a vendor's device is known once its package is imported)"
        )
        raise DeviceUnavailable(f"{name!r} {state}; available here: {', '.join(HARDWARE)}")
    return found


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
