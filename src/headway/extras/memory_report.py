"""Out-of-memory report: the failed request, what memory is used for, and how much each suggested change would save.

The report is made while the error's stack frames still exist. It needs little memory, because it is made in plain
Python, and a small memory reserve is released first.
"""

import re
from dataclasses import dataclass
from itertools import islice
from types import FrameType
from typing import Any

import torch

from headway.common import scope
from headway.common.callsite import walk_stack
from headway.common.text import format_bytes, parse_bytes
from headway.core.memory.oom import EmergencyReserve, is_out_of_memory
from headway.core.memory.use import MemoryUse, memory_use
from headway.core.runtime import process
from headway.extras.memory_census import CATEGORIES, LiveStorage, TensorCensus, list_causes, list_frames, take_census
from headway.extras.memory_suggestions import MemorySuggestion, list_suggestions

_REPORT_ATTRIBUTE = "_headway_memory_report"
"""Attribute of an error that holds the text of its report."""
_HOST_TEXTS = ("DefaultCPUAllocator", "unable to mmap", "bad_alloc", "alloc_cpu")
"""Texts in errors about host memory."""
_REQUEST_PATTERNS = (
    re.compile(r"[Tt]ried to allocate ([\d.]+ ?[KMGT]?i?B)\b"),
    re.compile(r"tried to allocate (\d+) bytes"),
    re.compile(r"unable to mmap (\d+) bytes"),
    re.compile(r"Unable to allocate ([\d.]+ ?[KMGT]?i?B)\b"),  # numpy's
    re.compile(r"Invalid buffer size: ([\d.]+ ?[KMGT]?i?B)\b"),  # MPS's
    re.compile(r"Failed to CUDA (?:calloc|malloc|calloc async|host alloc) (\d+) bytes"),  # NCCL's
)


@dataclass(frozen=True)
class MemoryReport:
    """Memory use at one moment, by purpose, with suggestions to save memory.

    Attributes:
        asked: Bytes of the failed allocation. None if no allocation failed, or if the error does not state the size.
        use: Memory use of the device.
        by_category: Bytes by purpose. Tensors that Python cannot see are not included.
        largest: Largest live tensors.
        levers: Suggestions to save memory: first those without an estimate, then the others, largest saving first.
        sites: Source lines that allocated the largest tensors, if torch recorded them.
        is_complete: False if memory ran out while the report was made.
    """

    asked: int | None
    use: MemoryUse
    by_category: dict[str, int]
    largest: list[LiveStorage]
    levers: list[MemorySuggestion]
    sites: list[str]
    is_complete: bool = True

    def text(self) -> str:
        """Return the report as text of several lines, for a log or the terminal."""
        use = self.use
        is_host = use.device == "cpu"
        if self.asked is None:
            lines = [f"headway: memory on {use.device}"]
        else:
            lines = [f"headway: memory ran out on {use.device}: {format_bytes(self.asked)} were asked for"]
        holder = "the process" if is_host else f"tensors on {use.device}"
        reserved = "" if is_host else f", torch's allocator {format_bytes(use.reserved)}"
        occupied = f"all processes {format_bytes(use.occupied)} of {format_bytes(use.total)}"
        lines.append(f"  {holder} held {format_bytes(use.used)}{reserved}; {occupied}")
        lines += [f"    {format_bytes(size):>10}  {name}" for name, size in self.by_category.items() if size]
        unseen = use.used - sum(self.by_category.values())
        if unseen > 0:
            program = "the program itself, and " if is_host else ""
            lines.append(f"    {format_bytes(unseen):>10}  {program}tensors that only C++ holds")
        if self.largest:
            lines.append("  the largest tensors alive:")
            lines += [
                f"    {format_bytes(each.num_bytes):>10}  {_format_shape(each)}  {each.owner}" for each in self.largest
            ]
        if self.sites:
            lines += ["  where they were made:", *(f"    {site}" for site in self.sites)]
        if self.levers:
            lines.append("  what would help (estimates):")
            lines += [f"    {lever.text()}" for lever in self.levers]
        if not self.is_complete:
            lines.append("  (there was too little memory left to look at everything)")
        return "\n".join(lines)


def _format_shape(storage: LiveStorage) -> str:
    return f"{str(storage.dtype).removeprefix('torch.')}[{', '.join(map(str, storage.shape))}]"


def memory_report(error: BaseException | None = None, num_largest: int = 8) -> MemoryReport:
    """Return a report on the current memory use, or on the memory use when `error` was raised.

    It searches this process's live tensors, on the device of the error, or else on this process's device. Uncaught
    out-of-memory errors get the report automatically. No other rank is involved.

    Args:
        error: Out-of-memory error whose frames still exist, so call it inside `except`. None (the default): report the
            current use.
        num_largest: Number of largest tensors to list. Default: 8.

    Returns:
        Bytes by purpose (such as weights, gradients, optimizer state), the largest tensors with their names, and
        suggestions. `text()` formats them.

    Example::

        print(memory_report().text())
    """
    scope.get_or_create(EmergencyReserve).release()
    device = _find_device(error)
    frames = list_frames(error) if error is not None else _list_caller_frames()
    use = memory_use(device)
    census = take_census(device.type, frames)
    requested_bytes = None if error is None else find_requested_bytes(error)
    return MemoryReport(
        asked=requested_bytes,
        use=use,
        by_category={name: census.sum_bytes(name) for name in CATEGORIES},
        largest=census.list_largest(num_largest),
        levers=list_suggestions(census, use, requested_bytes, frames),
        sites=_list_allocation_sites(device, census, num_largest),
        is_complete=census.is_complete,
    )


def explain(error: BaseException) -> str:
    """Return the text of the memory report for an out-of-memory error, or "" for any other error.

    The report is made once per error.
    """
    if not is_out_of_memory(error):
        return ""
    text = getattr(error, _REPORT_ATTRIBUTE, None)
    if text is None:
        try:
            text = memory_report(error).text()
        except MemoryError:
            text = "headway: memory ran out, and too little was left to report what it was used for"
        setattr(error, _REPORT_ATTRIBUTE, text)
    return str(text)


def find_requested_bytes(error: BaseException) -> int | None:
    """Return the size in bytes of the failed request, or None if neither the error nor any of its causes states it."""
    for each in islice(list_causes(error), 8):
        for pattern in _REQUEST_PATTERNS:
            match = pattern.search(str(each))
            if match is not None:
                return parse_bytes(int(match[1]) if match[1].isdecimal() else match[1])
    return None


def _find_device(error: BaseException | None) -> torch.device:
    """Return the device whose memory ran out. If the error does not name it, return this process's device."""
    text = str(error)
    own_device = process.current().device
    is_host = isinstance(error, MemoryError | OSError) or any(each in text for each in _HOST_TEXTS)
    if is_host or own_device.type == "cpu":
        return torch.device("cpu")
    index = re.search(r"GPU (\d+)", text)
    return own_device if index is None else torch.device(own_device.type, int(index[1]))


def _list_caller_frames() -> list[FrameType]:
    """Return the stack frames of the caller, outermost first."""
    innermost_first = list(walk_stack())
    own_frames = 2  # this function and `memory_report`
    return innermost_first[own_frames:][::-1]


def _list_allocation_sites(device: torch.device, census: TensorCensus, count: int) -> list[str]:
    """Return the source lines that allocated the largest blocks, or an empty list if torch's memory recording was off.

    Args:
        device: Device whose blocks are listed.
        census: Live tensors. If the census is incomplete, the list is empty.
        count: Maximum number of lines.
    """
    module = torch.get_device_module(device.type)
    snapshot = getattr(getattr(module, "memory", None), "_snapshot", None)
    if device.type == "cpu" or snapshot is None or not census.is_complete:
        return []
    blocks: list[dict[str, Any]] = [
        block
        for segment in snapshot(device)["segments"]
        for block in segment["blocks"]
        if block["state"] == "active_allocated" and block.get("frames")
    ]
    blocks.sort(key=lambda block: -block["size"])
    return [f"{format_bytes(block['size']):>10}  {_find_user_line(block['frames'])}" for block in blocks[:count]]


def _find_user_line(frames: list[dict[str, Any]]) -> str:
    """Return the innermost Python line of a recorded stack that is not in torch.

    If all lines are in torch, return the innermost one. If no Python line was recorded, return a text to that effect.
    """
    lines = [
        f"{frame['filename']}:{frame['line']} in {frame['name']}"
        for frame in frames
        if frame["filename"].endswith(".py")
    ]
    outside_torch = [line for line in lines if "/torch/" not in line]
    return (outside_torch or lines or ["no Python line was recorded"])[0]


def explain_unless_noted(error: BaseException) -> str:
    """Return the text of the memory report for an error, or "" if the error's notes already contain the report."""
    text = explain(error)
    return "" if text in getattr(error, "__notes__", ()) else text
