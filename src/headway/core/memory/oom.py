"""Out-of-memory errors: how to recognize them, for every allocator, and how to free the memory of a failed attempt.

Some errors are often caused by lack of memory but do not mention it. cuDNN's engine search swallows the out-of-memory
error of each engine it tries and reports that it found no engine. Libraries that cannot allocate their handle report
that they are not initialized. Unsupported shapes, broken installations and misuse cause the same messages. Such an
error counts as a lack of memory if an allocator or the driver reports a shortage. A wrong guess costs only one extra
attempt, because freeing memory ends the reported shortage.
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
from headway.core.memory.use import read_device_memory
from headway.core.runtime.device import HARDWARE, Hardware

_FULL_DEVICE_BYTES = 128 << 20
"""Free memory below which a device counts as full: a library's handle, workspace and kernels take up to this much."""

_RESERVE_BYTES = 8 << 20  # enough for a memory report and the modules that create it

# Each pattern is part of a message that an allocator or library writes. Many patterns match only at the start of a
# line, so that a sentence which merely mentions such an error does not match. They match at the start of any line,
# because a data worker's error contains the lines of the original error. They are compiled when the first error is
# examined, because that takes 4 ms.
_PATTERNS = (
    # torch's allocators, the runtimes and the drivers.
    r"^(?:[\w.]+: )?(?:CPU|CUDA|HIP|XPU|MPS backend|MTIA|NPU|HPU|MUSA|PrivateUse1) out of memory\b",
    r"^(?:[\w.]+: )?(?:CUDA|HIP|XPU)(?: driver)? error: out of memory\b",
    r"^(?:[\w.]+: )?Invalid buffer size: [\d.]+ [KMGT]i?B",  # MPS: larger than the device's limit for one buffer
    r"\bkIOGPUCommandBufferCallbackErrorOutOfMemory\b",
    r"\b(?:UR_RESULT|PI)_ERROR_OUT_OF_(?:DEVICE|HOST)_MEMORY\b|\bZE_RESULT_ERROR_OUT_OF_(?:DEVICE|HOST)_MEMORY\b",
    r"\bMODULE:PT_DEVMEM Allocation failed",
    # Libraries of kernels.
    r"rror: (?:CU|HIP)(?:BLAS|BLASLT|SOLVER|SPARSE|FFT|RAND|DSS)_(?:STATUS_)?ALLOC(?:ATION)?_FAILED\b",
    r"^(?:[\w.]+: )?cuDNN\b.*\bCUDNN_STATUS_(?:\w+_)?ALLOC(?:ATION)?_FAILED\b",  # cuDNN 9 adds HOST or DEVICE
    r"rror: (?:MIOPEN_STATUS|miopenStatus|rocblas_status_)\w*(?:ALLOC_?FAILED|AllocFailed|memory_error)\b",
    r"\bCUDA error: resource allocation failed when calling `cusparse",
    # "Not supported" usually means a shape or dtype. It counts only if the message also mentions memory.
    r"CUDNN_STATUS_NOT_SUPPORTED\b.*(?:out of memory|(?:unable|failed) to allocate|allocation failed)",
    r"\b(?:cudaErrorMemoryAllocation|hipErrorOutOfMemory): out of memory\b",  # Thrust and CUB: sorting, unique, nonzero
    r"^(?:[\w.]+: )?Triton Error \[\w+\]:(?: *Code: \d+, Mess\w+:)? out of memory\b",  # a module or a launch, by any driver
    r"\bin function [\w:]+: CUDA Error: out of memory\b",  # Transformer Engine
    r"\bCUDA_ERROR_OUT_OF_MEMORY\b",
    # NCCL and RCCL, which allocate memory themselves.
    r"\b(?:[Cc]uda|CUDA|HIP) failure:? (?:\d+ )?'out of memory'",
    r"\bFailed to CUDA (?:calloc|malloc|calloc async|host alloc) \d+ bytes\b",
    # The host.
    r"DefaultCPUAllocator: (?:can't allocate|not enough) memory\b",
    r"\bPosixMemAlign\b.*can't allocate|\bunable to mmap \d+ bytes\b.*Cannot allocate memory",
    r"^(?:[\w.]+: )?std::bad_alloc\b",
)

# Messages that may have other causes. They count only if a device is short of memory.
_AMBIGUOUS_PATTERNS = (
    # ATen's convolutions through cuDNN 8 and 9, with torch.backends.cudnn.benchmark (FIND) and without (GET).
    r"\b(?:FIND|GET) was unable to find an engine to execute this computation",
    r"rror: (?:CU|HIP)BLAS_STATUS_(?:NOT_INITIALIZED|INTERNAL_ERROR) when calling `(?:cu|hip)blas\w*Create",
    r"\bcuDNN error: CUDNN_STATUS_(?:NOT_INITIALIZED|INTERNAL_ERROR)\b",
    r"\bcusolver error: CUSOLVER_STATUS_(?:NOT_INITIALIZED|INTERNAL_ERROR), when calling `cusolver\w*Create",
    r"\bcuFFT error: CUFFT_INTERNAL_ERROR\b",
    r"\bCUDA error: insufficient resources when calling `cusparse",
    r"\b(?:UR_RESULT|PI)_ERROR_OUT_OF_RESOURCES\b",
)


# ---------------------------------------------------------------- recognizing errors


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means that memory ran out, on a device or on the host.

    True for torch.OutOfMemoryError, MemoryError, and OSError with ENOMEM. Also true for a RuntimeError with an
    out-of-memory message from an allocator (CUDA, HIP, XPU, MPS, CPU), a library such as cuBLAS, cuDNN, NCCL or
    Triton, or std::bad_alloc. Ambiguous messages (no engine found, library not initialized) count if a device is
    short of memory at this moment, so call this before memory is freed.

    Causes and contexts count, too (`raise ... from None` cuts them off), and so do errors raised by a backend of
    torch.compile. An exception group counts if every error in it does. KeyboardInterrupt and SystemExit never count.

    Args:
        error: Exception that was caught.

    Example::

        try:
            train(batch_size)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            release_memory(error)
            batch_size //= 2
    """
    return _is_out_of_memory(error, set())


def _is_out_of_memory(error: BaseException, seen: set[int]) -> bool:
    """Whether an error was caused by a lack of memory, according to its class, its message, or its causes.

    A group of errors counts only if all of its members do.

    Args:
        error: Error to examine.
        seen: IDs of the errors on the way to this one, because causes can form a cycle. Each call adds to it.
    """
    if id(error) in seen:
        return False
    seen.add(id(error))
    members = _list_members(error)
    if members:
        # Each member has its own copy, because several members can have one cause.
        return all(_is_out_of_memory(member, seen.copy()) for member in members)
    if not isinstance(error, Exception):
        return False
    if _is_memory_error(error):
        return True
    inner = _get_inner_error(error)
    if inner is not None and _is_out_of_memory(inner, seen):
        return True
    # As in a traceback: the explicit cause, or the context unless `raise ... from` suppresses it.
    origin = error.__cause__
    if origin is None and not error.__suppress_context__:
        origin = error.__context__
    return origin is not None and _is_out_of_memory(origin, seen)


def _is_memory_error(error: Exception) -> bool:
    """Whether the type or the message of an error means that memory ran out. Its causes are not examined."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    if not isinstance(error, RuntimeError):
        return False
    message = str(error)
    if any(re.search(pattern, message, re.MULTILINE) for pattern in _PATTERNS):
        return True
    if not any(re.search(pattern, message) for pattern in _AMBIGUOUS_PATTERNS):
        return False
    return any(_is_short_of_memory(hardware, device) for hardware, device in _list_devices_in_use())


def _list_members(error: BaseException) -> tuple[BaseException, ...]:
    """Return the exceptions in an exception group. The result is empty for other exceptions.

    Exception groups are recognized by their attributes, because Python 3.10 has them only from a backport.
    """
    members = getattr(error, "exceptions", ())
    is_group = isinstance(members, tuple) and all(isinstance(member, BaseException) for member in members)
    return members if is_group else ()


def _get_inner_error(error: BaseException) -> BaseException | None:
    """Return the error of a torch.compile backend that torch has wrapped in another error, or None."""
    inner = getattr(error, "inner_exception", None)
    return inner if isinstance(inner, BaseException) else None


def _is_short_of_memory(hardware: Hardware, device: torch.device) -> bool:
    """Whether the allocator has run out since memory was last freed, or the driver has almost no memory left."""
    try:
        num_ooms = _count_device_ooms(hardware, device)
        num_ooms_before = scope.get_or_create(_CountedErrors).get(device, 0)
        # A lower number other than 0: a script has reset the allocator's counters, and memory has run out since.
        if num_ooms > num_ooms_before or 0 < num_ooms < num_ooms_before:
            return True
        free, _ = read_device_memory(hardware, device)
        return free < _FULL_DEVICE_BYTES
    except RuntimeError:  # after a failed assertion on the device, all queries fail
        return False


def _count_device_ooms(hardware: Hardware, device: torch.device) -> int:
    """Return the allocator's count of its out-of-memory errors on a device. 0 if it counts none."""
    read_stats = hardware.find_memory_function("memory_stats")
    return 0 if read_stats is None else int(read_stats(device).get("num_ooms", 0))


def _list_devices_in_use() -> Iterator[tuple[Hardware, torch.device]]:
    """Yield the devices on which this process holds memory, and whose allocator and driver report their memory."""
    for hardware in HARDWARE.values():
        read_reserved = hardware.find_memory_function("memory_reserved")
        can_read_free = hardware.find_memory_function("mem_get_info") is not None
        if hardware.kind == "cpu" or not hardware.is_available() or read_reserved is None or not can_read_free:
            continue
        for index in range(hardware.count_devices()):
            device = torch.device(hardware.kind, index)
            if read_reserved(device):
                yield hardware, device


# ---------------------------------------------------------------- freeing memory


def release_memory(*objects: Any) -> list[None]:
    """Collect garbage, empty the devices' caches, and return one None per object, to assign to the caller's names.

    It affects this process only. An Accelerator also refers to its prepared objects, so use its method `free_memory`
    for these.

    Args:
        objects: Objects that the caller no longer needs. Their memory is freed only when the caller's names no longer
            refer to them, so assign the result and call `release_memory()` again. An exception loses its traceback, and
            so the frames that it keeps alive.

    Returns:
        A list with one None per object, even for one object.

    Example::

        model, optimizer = release_memory(model, optimizer)
    """
    for each in objects:
        if isinstance(each, BaseException):
            drop_frames(each)
    result = [None] * len(objects)
    del objects
    clear_device_cache(garbage_collection=True)
    return result


def free_memory_of_failure(error: BaseException) -> None:
    """Free the memory of a failed attempt: drop its frames, collect garbage and empty the devices' caches.

    An error's traceback keeps every frame alive, and each frame keeps its tensors. While they exist, emptying a cache
    frees nothing. Afterwards the error and its causes have no tracebacks, so format them first.

    Args:
        error: Error of the attempt.
    """
    drop_frames(error)
    clear_device_cache(garbage_collection=True)


def drop_frames(error: BaseException) -> None:
    """Clear the stack frames that the error, its causes and its contexts keep alive, and remove their tracebacks."""
    for each in _iterate_related(error):
        traceback.clear_frames(each.__traceback__)
        each.__traceback__ = None


def _iterate_related(error: BaseException) -> Iterator[BaseException]:
    """Yield the error, its causes and contexts (even suppressed ones), and the members of exception groups.

    Each exception is yielded only once.
    """
    pending, seen = [error], set()
    while pending:
        each = pending.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        yield each
        related = (each.__cause__, each.__context__, _get_inner_error(each), *_list_members(each))
        pending += [other for other in related if other is not None]


def clear_device_cache(garbage_collection: bool = False) -> None:
    """Release unused memory: the devices' caches to the driver, and free heap pages to the operating system.

    It affects all visible devices, in this process only. Memory of tensors that still exist is not released.

    Args:
        garbage_collection: Whether to collect reference cycles first, which can keep tensors alive. Default: False.
    """
    if garbage_collection:
        gc.collect()
    for hardware in HARDWARE.values():
        hardware.release_cache()
    note_freed_memory()
    if _malloc_trim is not None:
        _malloc_trim(0)


def note_freed_memory() -> None:
    """Record that memory has been freed, so that earlier out-of-memory errors no longer indicate a shortage."""
    counted = scope.get_or_create(_CountedErrors)
    for hardware, device in _list_devices_in_use():
        counted[device] = _count_device_ooms(hardware, device)


class _CountedErrors(dict[torch.device, int]):
    """Number of out-of-memory errors per device when memory was last freed.

    If a device's allocator now reports a higher number, memory has run out since.
    """


def _find_malloc_trim() -> Any:
    """Return glibc's malloc_trim, or None on other systems. Without it, the heap keeps the memory of freed tensors."""
    if not sys.platform.startswith("linux"):
        return None
    return getattr(ctypes.CDLL(None), "malloc_trim", None)


_malloc_trim = _find_malloc_trim()


# ---------------------------------------------------------------- memory for reports


class EmergencyReserve:
    """Reserved address space that is freed when memory has run out, so that a memory report can be written.

    The pages of the reserve are never written, so they take no physical memory. The reserve is useful only if the
    address space is limited (`ulimit -v`).
    """

    def __init__(self) -> None:
        self._pages: bytearray | None = None

    def allocate_reserve(self) -> None:
        """Allocate the reserve."""
        self._pages = self._pages or bytearray(_RESERVE_BYTES)

    def release(self) -> None:
        """Free the reserve, so that its address space can be used."""
        self._pages = None
