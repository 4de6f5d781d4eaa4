"""Errors that memory often causes and that do not say so: what the allocators and the driver say decides.

cuDNN's search for an engine swallows an out-of-memory error of each engine that it tries, and reports that it found none;
libraries that cannot allocate their handle report that they are not initialised. The same texts come from unsupported
shapes, broken installations and misuse. A wrong guess costs one more attempt: after it memory has been given back, and
neither sign of shortage is left.
"""

import re
from collections.abc import Iterator

import torch

from headway.common import scope
from headway.memory.free import free_and_total
from headway.runtime.device import HARDWARE, Hardware

_SHORT_BYTES = 128 << 20
"""Less than this is nearly nothing: a library's handle, its workspace and its kernels take up to that."""

_TEXTS = re.compile(
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


def may_be_memory(text: str) -> bool:
    """Is this the text of an error that memory often causes?"""
    return _TEXTS.search(text) is not None


def is_memory_short() -> bool:
    """Has an allocator run out since memory was last given back, or does the driver have nearly nothing left?"""
    return any(_is_short(hardware, device) for hardware, device in _in_use())


def start_over() -> None:
    """Memory has been given back: what ran out before says nothing about what comes."""
    counted = scope.own(_Counted)
    for hardware, device in _in_use():
        counted[device] = _num_ooms(hardware, device)


def _is_short(hardware: Hardware, device: torch.device) -> bool:
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
