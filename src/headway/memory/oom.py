"""Recognises out-of-memory errors of every allocator, and frees what a failed attempt still holds.

Errors that memory often causes and that do not say so: what the allocators and the driver say decides.

cuDNN's search for an engine swallows an out-of-memory error of each engine that it tries, and reports that it found none;
libraries that cannot allocate their handle report that they are not initialised. The same texts come from unsupported
shapes, broken installations and misuse. A wrong guess costs one more attempt: after it memory has been given back, and
neither sign of shortage is left.
"""

import ctypes
import errno
import gc
import re
import sys
import traceback
from collections.abc import Iterator
from typing import Any

import torch

from headway.common import scope
from headway.memory.use import free_and_total
from headway.runtime.device import HARDWARE, Hardware

_SHORT_BYTES = 128 << 20
"""Less than this is nearly nothing: a library's handle, its workspace and its kernels take up to that."""

_HINTS = re.compile(
    "|".join(
        (
            # ATen's convolutions through cuDNN 8 and 9, with torch.backends.cudnn.benchmark (FIND) and without (GET).
            r"\b(?:FIND|GET) was unable to find an engine to execute this computation",
            r"rror: (?:CU|HIP)BLAS_STATUS_(?:NOT_INITIALIZED|INTERNAL_ERROR) when calling `(?:cu|hip)blas\w*Create",
            r"\bcuDNN error: CUDNN_STATUS_(?:NOT_INITIALIZED|INTERNAL_ERROR)\b",
            r"\bcusolver error: CUSOLVER_STATUS_(?:NOT_INITIALIZED|INTERNAL_ERROR), when calling `cusolver\w*Create",
            r"\bcuFFT error: CUFFT_INTERNAL_ERROR\b",
            r"\bCUDA error: insufficient resources when calling `cusparse",
            r"\b(?:UR_RESULT|PI)_ERROR_OUT_OF_RESOURCES\b",
        )
    )
)


class _Counted(dict[torch.device, int]):
    """How many out-of-memory errors each allocator had counted when memory was last given back."""


def start_over() -> None:
    """Memory has been given back: what ran out before says nothing about what comes."""
    counted = scope.own(_Counted)
    for hardware, device in _in_use():
        counted[device] = _num_ooms(hardware, device)


def _is_short(hardware: Hardware, device: torch.device) -> bool:
    """Has its allocator run out since memory was last given back, or does its driver have nearly nothing left?"""
    try:
        now, before = _num_ooms(hardware, device), scope.own(_Counted).get(device, 0)
        if now > before or 0 < now < before:  # fewer: a script has reset the allocator's counters
            return True
        return free_and_total(hardware, device)[0] < _SHORT_BYTES
    except RuntimeError:  # after a failed assertion on the device nothing can be asked any more
        return False


def _num_ooms(hardware: Hardware, device: torch.device) -> int:
    tell = hardware.memory_ability("memory_stats")
    return 0 if tell is None else int(tell(device).get("num_ooms", 0))


def _in_use() -> Iterator[tuple[Hardware, torch.device]]:
    """Devices of which this process holds memory, where their allocator can be asked."""
    for hardware in HARDWARE.values():
        held, told = map(hardware.memory_ability, ("memory_reserved", "mem_get_info"))
        if hardware.kind == "cpu" or not hardware.is_available() or held is None or told is None:
            continue
        for index in range(hardware.num_devices()):
            device = torch.device(hardware.kind, index)
            if held(device):
                yield hardware, device


_RESERVE_BYTES = 8 << 20  # a report, and the modules that make it

# Each pattern is what an allocator or library itself writes. The first ones are at the start of a line (a data worker's
# error brings its own lines along), so that a sentence which merely mentions such an error does not match.
_TEXTS = tuple(
    re.compile(text, re.MULTILINE)
    for text in (
        # torch's allocators, the runtimes and the drivers.
        r"^(?:[\w.]+: )?(?:CPU|CUDA|HIP|XPU|MPS backend|MTIA|NPU|HPU|MUSA|PrivateUse1) out of memory\b",
        r"^(?:[\w.]+: )?(?:CUDA|HIP|XPU)(?: driver)? error: out of memory\b",
        r"^(?:[\w.]+: )?Invalid buffer size: [\d.]+ [KMGT]i?B",  # MPS: more than one buffer of the device may have
        r"\bkIOGPUCommandBufferCallbackErrorOutOfMemory\b",
        r"\b(?:UR_RESULT|PI)_ERROR_OUT_OF_(?:DEVICE|HOST)_MEMORY\b|\bZE_RESULT_ERROR_OUT_OF_(?:DEVICE|HOST)_MEMORY\b",
        r"\bMODULE:PT_DEVMEM Allocation failed",
        # Libraries of kernels.
        r"rror: (?:CU|HIP)(?:BLAS|BLASLT|SOLVER|SPARSE|FFT|RAND|DSS)_(?:STATUS_)?ALLOC(?:ATION)?_FAILED\b",
        r"^(?:[\w.]+: )?cuDNN\b.*\bCUDNN_STATUS_(?:\w+_)?ALLOC(?:ATION)?_FAILED\b",  # cuDNN 9 says whose: HOST or DEVICE
        r"rror: (?:MIOPEN_STATUS|miopenStatus|rocblas_status_)\w*(?:ALLOC_?FAILED|AllocFailed|memory_error)\b",
        r"\bCUDA error: resource allocation failed when calling `cusparse",
        # "Not supported" is mostly a shape or a type; only its own text can say that it was memory.
        r"CUDNN_STATUS_NOT_SUPPORTED\b.*(?:out of memory|(?:unable|failed) to allocate|allocation failed)",
        r"\b(?:cudaErrorMemoryAllocation|hipErrorOutOfMemory): out of memory\b",  # Thrust and CUB: sorting, unique, nonzero
        r"^(?:[\w.]+: )?Triton Error \[\w+\]:(?: *Code: \d+, Mess\w+:)? out of memory\b",  # a module or a launch, by any driver
        r"\bin function [\w:]+: CUDA Error: out of memory\b",  # Transformer Engine
        r"\bCUDA_ERROR_OUT_OF_MEMORY\b",
        # NCCL and RCCL, which have memory of their own.
        r"\b(?:[Cc]uda|CUDA|HIP) failure:? (?:\d+ )?'out of memory'",
        r"\bFailed to CUDA (?:calloc|malloc|calloc async|host alloc) \d+ bytes\b",
        # The host.
        r"DefaultCPUAllocator: (?:can't allocate|not enough) memory\b",
        r"\bPosixMemAlign\b.*can't allocate|\bunable to mmap \d+ bytes\b.*Cannot allocate memory",
        r"^(?:[\w.]+: )?std::bad_alloc\b",
    )
)


class EmergencyReserve:
    """Pages that were never written are not memory yet, but address space that a report can use where that is limited."""

    def __init__(self) -> None:
        self._pages: bytearray | None = None

    def fill(self) -> None:
        """Set it aside."""
        self._pages = self._pages or bytearray(_RESERVE_BYTES)

    def release(self) -> None:
        """Let it be used."""
        self._pages = None


def is_out_of_memory(error: BaseException) -> bool:
    """Did memory run out, on a device or on the host?

    True for torch's own out-of-memory type, MemoryError, an OSError of ENOMEM, and a RuntimeError with the text of an allocator
    (CUDA, HIP, XPU, MPS, the CPU's), of cuBLAS, cuDNN, NCCL, Triton and their like, or of std::bad_alloc. Texts that have
    other reasons too (no engine found, a library not initialised) count where a device is short of memory at this
    moment: ask before memory is given back. Causes and contexts count (`raise ... from None` cuts them off), and what a backend of
    torch.compile raised; a group counts where every error in it does. An interrupt or exit never does, whatever it
    interrupted.
    """
    return _is_out_of_memory(error, set())


def _is_out_of_memory(error: BaseException, seen: set[int]) -> bool:
    if id(error) in seen:
        return False
    seen.add(id(error))
    members = _members(error)
    if members:
        return all(_is_out_of_memory(member, seen) for member in members)
    if not isinstance(error, Exception):
        return False
    if _says_so(error):
        return True
    inner = _inner(error)
    if inner is not None and _is_out_of_memory(inner, seen):
        return True
    origin = error.__cause__ if error.__cause__ is not None or error.__suppress_context__ else error.__context__
    return origin is not None and _is_out_of_memory(origin, seen)


def _says_so(error: Exception) -> bool:
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    if not isinstance(error, RuntimeError):
        return False
    said = str(error)
    if any(text.search(said) for text in _TEXTS):
        return True
    return _HINTS.search(said) is not None and any(_is_short(hardware, device) for hardware, device in _in_use())


def _members(error: BaseException) -> tuple[BaseException, ...]:
    """What an exception group holds (Python 3.10 knows the groups of a backport only)."""
    held = getattr(error, "exceptions", ())
    return held if isinstance(held, tuple) and all(isinstance(member, BaseException) for member in held) else ()


def _inner(error: BaseException) -> BaseException | None:
    """What a compiler of torch.compile raised, where torch names it in an error of its own, `from None`."""
    inner = getattr(error, "inner_exception", None)
    return inner if isinstance(inner, BaseException) else None


def free_after(error: BaseException) -> None:
    """Drop the frames that a failed attempt left behind, then collect garbage and empty the devices' caches.

    An error's traceback keeps every frame it came through, and each frame its tensors; emptying a cache before those are
    gone frees nothing. After this call the error, its causes and contexts have no tracebacks: format them before.
    """
    drop_frames(error)
    clear_device_cache(garbage_collection=True)


def drop_frames(error: BaseException) -> None:
    """Clear the finished frames that the error and all its origins hold, and let go of them."""
    for each in _related(error):
        traceback.clear_frames(each.__traceback__)
        each.__traceback__ = None


def _related(error: BaseException) -> Iterator[BaseException]:
    """The error, its causes and contexts (suppressed or not) and the members of groups, each once."""
    waiting, seen = [error], set()
    while waiting:
        each = waiting.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        yield each
        others = (each.__cause__, each.__context__, _inner(each), *_members(each))
        waiting += [other for other in others if other is not None]


def release_memory(*objects: Any) -> list[None]:
    """Collect garbage and empty the devices' caches: `model, optimizer = release_memory(model, optimizer)`.

    Args:
        objects: what the caller lets go of. Only rebinding the caller's own names frees it; an exception among them
            loses its traceback, with the frames that it holds.

    Returns:
        As many Nones.
    """
    for each in objects:
        if isinstance(each, BaseException):
            drop_frames(each)
    result = [None] * len(objects)
    del objects
    clear_device_cache(garbage_collection=True)
    return result


def clear_device_cache(garbage_collection: bool = False) -> None:
    """Give memory that no tensor uses back: the devices' caches to the driver, free heap pages to the system.

    Args:
        garbage_collection: collect reference cycles first, which may hold tensors.
    """
    if garbage_collection:
        gc.collect()
    for hardware in HARDWARE.values():
        hardware.release_cache()
    start_over()
    if _trim is not None:
        _trim(0)


def _find_trim() -> Any:
    """glibc's malloc_trim: without it freed tensors of moderate size stay in the process."""
    if not sys.platform.startswith("linux"):
        return None
    return getattr(ctypes.CDLL(None), "malloc_trim", None)


_trim = _find_trim()
