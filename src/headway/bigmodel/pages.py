"""Pages of mapped files: are they in memory, bring them in, give them back. By the kernel's calls where it has them."""

import ctypes
import mmap
import sys
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

# Linux 5.14 and 5.4; Python's mmap module does not name them.
_MADV_POPULATE_READ = 22
_MADV_PAGEOUT = 21
_STEP = 8 << 20


@cache
def _libc() -> Any:
    """The C library; its calls run without Python's lock. None where it has not what is needed here."""
    if not sys.platform.startswith("linux"):
        return None
    libc = ctypes.CDLL(None, use_errno=True)
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p]
    return libc


def _range(tensor: torch.Tensor) -> tuple[int, int]:
    """The whole pages a tensor touches: address and length."""
    start = tensor.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    end = tensor.data_ptr() + tensor.numel() * tensor.element_size()
    return start, -(-(end - start) // mmap.PAGESIZE) * mmap.PAGESIZE


def share_resident(tensor: torch.Tensor) -> float | None:
    """The share of a tensor's pages that are in memory, 0 to 1; None where the system does not say."""
    libc = _libc()
    if libc is None or not tensor.numel():
        return None
    start, length = _range(tensor)
    pages = ctypes.create_string_buffer(length // mmap.PAGESIZE)
    if libc.mincore(start, length, pages):
        return None
    # The lowest bit says it; the others are reserved.
    return sum(map((1).__and__, pages.raw)) / len(pages.raw) if pages.raw.strip(b"\1") else 1.0


def is_resident(tensor: torch.Tensor) -> bool:
    """Is every page of the tensor in memory? False where the system does not say."""
    return not tensor.numel() or share_resident(tensor) == 1.0


def bring_in(tensor: torch.Tensor, is_wanted: Callable[[], bool] = lambda: True) -> None:
    """Read a tensor's pages from its file, in order, and map them; returns when they are there.

    Other threads run meanwhile. Between pieces of 8 MiB it is asked whether they are still wanted.
    """
    libc = _libc()
    start, length = _range(tensor)
    for offset in range(0, length, _STEP):
        if not is_wanted():
            return
        if libc is None or libc.madvise(start + offset, min(_STEP, length - offset), _MADV_POPULATE_READ):
            _touch(tensor, offset)


def _touch(tensor: torch.Tensor, offset: int) -> None:
    """Read a byte of every page: slower, and does on any system."""
    flat = tensor.detach().view(-1).view(torch.uint8)
    flat[offset : offset + _STEP : mmap.PAGESIZE].sum()


def give_back(tensor: torch.Tensor) -> None:
    """Tell the kernel that the tensor's pages are not needed soon. Its values stay: pages changed in memory are kept."""
    libc = _libc()
    # Whole pages of its own only: those at its ends also hold its neighbours.
    start = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (tensor.data_ptr() + tensor.numel() * tensor.element_size()) // mmap.PAGESIZE * mmap.PAGESIZE
    if libc is not None and end > start:
        libc.madvise(start, end - start, _MADV_PAGEOUT)
