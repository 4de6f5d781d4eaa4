"""The out-of-memory report: what was asked, what was in use and by what, and which levers would help, by how much.

It is made while the failed frames are still alive, of plain Python and little memory; a small reserve is let go of first.

Which levers would save memory, and about how much, by what a census of live tensors shows.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from types import FrameType
from typing import Any

import torch

from headway.common import scope
from headway.common.callsite import stack
from headway.common.text import format_bytes, parse_bytes
from headway.memory.census import CATEGORIES, LiveStorage, TensorCensus, chain_of, frames_of, take
from headway.memory.oom import EmergencyReserve, is_out_of_memory
from headway.memory.use import MemoryUse, memory_use
from headway.runtime import process

_SMALL = 16 << 20
_MANY_LOSSES = 16


@dataclass(frozen=True)
class MemorySuggestion:
    """One thing to do.

    Attributes:
        saves: bytes, by estimate; None where there is none.
        what: what to do.
    """

    saves: int | None
    what: str

    def text(self) -> str:
        """One line."""
        return self.what if self.saves is None else f"{self.what}: up to {format_bytes(self.saves)}"


def find_levers(
    census: TensorCensus, use: MemoryUse, asked: int | None, frames: list[FrameType]
) -> list[MemorySuggestion]:
    """The levers that fit, the largest saving first.

    Estimates: half of what is saved for backward for half the micro-batch, or for bf16; all but one of n blocks' for
    checkpointing n blocks; what of the optimizer's state goes beyond the other optimizer's.

    Args:
        census: what lives.
        use: of the same device.
        asked: what could not be had.
        frames: through which the error came.
    """
    found = [
        *_activation_levers(census, asked or 0, frames),
        *_optimizer_levers(census, frames),
        *_device_levers(use, asked),
    ]
    if census.num_graph_scalars > _MANY_LOSSES:
        kept = f"{census.num_graph_scalars} scalars hold their graphs alive: collect loss.item() or loss.detach()"
        found.append((None, kept))
    found.sort(key=lambda lever: -(lever[0] if lever[0] is not None else 1 << 62))
    return [MemorySuggestion(saves, what) for saves, what in found]


_Levers = Iterator[tuple[int | None, str]]


def _activation_levers(census: TensorCensus, asked: int, frames: list[FrameType]) -> _Levers:
    # What was asked for in forward or backward is one more activation.
    saved = census.total("saved for backward") + census.total("other tensors") + (0 if _in_optimizer(frames) else asked)
    if saved < _SMALL:
        return
    modules = [module for root in census.roots for module in root.modules()]
    yield saved // 2, "half the micro-batch and twice the accumulation (microbatching='auto' does it by itself)"
    if census.total("saved for backward") and modules and not any(module.training for module in modules):
        yield None, "the model is in eval mode and keeps activations: evaluate under torch.no_grad()"
    depth = max(
        (len(module) for module in modules if isinstance(module, torch.nn.ModuleList | torch.nn.Sequential)), default=1
    )
    is_checkpointed = any(
        "_headway_checkpoint" in vars(module) or vars(module).get("gradient_checkpointing") is True
        for module in modules
    )
    if depth > 1 and not is_checkpointed:
        yield saved - saved // depth, "accelerator.checkpoint_activations(model)"
    floats = sum(
        h.num_bytes for h in census.holdings.values() if h.category == "saved for backward" and h.dtype == torch.float32
    )
    if floats > saved // 2:
        yield floats // 2, "mixed_precision='bf16'"


def _in_optimizer(frames: list[FrameType]) -> bool:
    return any("/torch/optim/" in frame.f_code.co_filename.replace("\\", "/") for frame in frames)


def _optimizer_levers(census: TensorCensus, frames: list[FrameType]) -> _Levers:
    state, weights = census.total("optimizer state"), census.total("parameters")
    names = sorted({type(optimizer).__name__ for optimizer in census.optimizers})
    if state > max(_SMALL, weights):
        yield state - state // 100, f"torch.optim.Adafactor in place of {', '.join(names)}"
        yield state // 2, "torch.optim.SGD with momentum, where it trains as well"
    groups = (group for optimizer in census.optimizers for group in optimizer.param_groups)
    if _in_optimizer(frames) and not all(group.get("fused") for group in groups):
        yield weights, "fused=True, or foreach=False, for the optimizer: no temporary copies in step()"


def _device_levers(use: MemoryUse, asked: int | None) -> _Levers:
    if use.device == "cpu":
        return
    unused = use.reserved - use.used
    if asked is not None and unused > asked:
        yield unused, "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True against holes in the allocator's memory"
    others = use.occupied - use.reserved
    if others > max(1 << 30, use.total // 10):
        yield others, "another process holds memory on this device; see headway.memory_use().processes"


_NOTE = "_headway_memory_report"
_HOST_TEXTS = ("DefaultCPUAllocator", "unable to mmap", "bad_alloc", "alloc_cpu")
_ASKED = (
    re.compile(r"[Tt]ried to allocate ([\d.]+ ?[KMGT]?i?B)\b"),
    re.compile(r"tried to allocate (\d+) bytes"),
    re.compile(r"unable to mmap (\d+) bytes"),
    re.compile(r"Unable to allocate ([\d.]+ ?[KMGT]?i?B)\b"),  # numpy's
    re.compile(r"Invalid buffer size: ([\d.]+ ?[KMGT]?i?B)\b"),  # MPS's
    re.compile(r"Failed to CUDA (?:calloc|malloc|calloc async|host alloc) (\d+) bytes"),  # NCCL's
)


@dataclass(frozen=True)
class MemoryReport:
    """What memory is used for, at one moment.

    Attributes:
        asked: bytes that could not be had; None where nothing was asked or the error does not say.
        use: of the device in question.
        by_category: bytes by what they are for; tensors that Python cannot see are not in it.
        largest: the largest tensors alive.
        levers: what would help, the largest saving first.
        sites: where the largest were allocated, where torch recorded it.
        is_complete: False where memory ran out while the report was made.
    """

    asked: int | None
    use: MemoryUse
    by_category: dict[str, int]
    largest: list[LiveStorage]
    levers: list[MemorySuggestion]
    sites: list[str]
    is_complete: bool = True

    def text(self) -> str:
        """The report as people read it."""
        use = self.use
        is_host = use.device == "cpu"
        lines = [f"headway: memory on {use.device}"]
        if self.asked is not None:
            lines = [f"headway: memory ran out on {use.device}: {format_bytes(self.asked)} were asked for"]
        what = "the process" if is_host else f"tensors on {use.device}"
        reserved = "" if is_host else f", torch's allocator {format_bytes(use.reserved)}"
        occupied = f"all processes {format_bytes(use.occupied)} of {format_bytes(use.total)}"
        lines.append(f"  {what} held {format_bytes(use.used)}{reserved}; {occupied}")
        lines += [f"    {format_bytes(size):>10}  {name}" for name, size in self.by_category.items() if size]
        unseen = use.used - sum(self.by_category.values())
        if unseen > 0:
            program = "the program itself, and " if is_host else ""
            lines.append(f"    {format_bytes(unseen):>10}  {program}tensors that only C++ holds")
        if self.largest:
            lines.append("  the largest tensors alive:")
            lines += [f"    {format_bytes(h.num_bytes):>10}  {_shape(h)}  {h.owner}" for h in self.largest]
        if self.sites:
            lines += ["  where they were made:", *(f"    {site}" for site in self.sites)]
        if self.levers:
            lines.append("  what would help (estimates):")
            lines += [f"    {lever.text()}" for lever in self.levers]
        if not self.is_complete:
            lines.append("  (there was too little memory left to look at everything)")
        return "\n".join(lines)


def _shape(holding: LiveStorage) -> str:
    return f"{str(holding.dtype).removeprefix('torch.')}[{', '.join(map(str, holding.shape))}]"


def memory_report(error: BaseException | None = None, num_largest: int = 8) -> MemoryReport:
    """Look at what memory is used for now, or was when `error` was raised (its frames must still be held).

    Args:
        error: an out-of-memory error; None: just look.
        num_largest: how many of the largest tensors are listed.
    """
    scope.own(EmergencyReserve).release()
    device = _device_of(error)
    frames = frames_of(error) if error is not None else _stack()
    use = memory_use(device)
    census = take(device.type, frames)
    asked = None if error is None else asked_bytes(error)
    return MemoryReport(
        asked,
        use,
        {name: census.total(name) for name in CATEGORIES},
        census.largest(num_largest),
        find_levers(census, use, asked, frames),
        _sites(device, census, num_largest),
        census.is_complete,
    )


def explain(error: BaseException) -> str:
    """The report's text for an out-of-memory error, made once; "" for any other error."""
    if not is_out_of_memory(error):
        return ""
    made = getattr(error, _NOTE, None)
    if made is None:
        try:
            made = memory_report(error).text()
        except MemoryError:
            made = "headway: memory ran out, and too little was left to say by what it was used"
        setattr(error, _NOTE, made)
    return str(made)


def asked_bytes(error: BaseException) -> int | None:
    """How much the allocator was asked for, where the error or one of its causes says so."""
    for each in islice(chain_of(error), 8):
        for pattern in _ASKED:
            if (found := pattern.search(str(each))) is not None:
                return parse_bytes(int(found[1]) if found[1].isdecimal() else found[1])
    return None


def _device_of(error: BaseException | None) -> torch.device:
    text = str(error)
    here = process.current().device
    is_host = isinstance(error, MemoryError | OSError) or any(mark in text for mark in _HOST_TEXTS)
    if is_host or here.type == "cpu":
        return torch.device("cpu")
    index = re.search(r"GPU (\d+)", text)
    return here if index is None else torch.device(here.type, int(index[1]))


def _stack() -> list[FrameType]:
    """The frames of the caller, outermost first."""
    return list(stack())[:1:-1]


def _sites(device: torch.device, census: TensorCensus, count: int) -> list[str]:
    """Where the allocator says that the largest blocks were made: only after torch's own recording was switched on."""
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
    return [f"{format_bytes(block['size']):>10}  {_first_python(block['frames'])}" for block in blocks[:count]]


def _first_python(frames: list[dict[str, Any]]) -> str:
    """The innermost Python line outside of torch."""
    lines = [
        f"{frame['filename']}:{frame['line']} in {frame['name']}"
        for frame in frames
        if frame["filename"].endswith(".py")
    ]
    outside = [line for line in lines if "/torch/" not in line]
    return (outside or lines or ["no Python line was recorded"])[0]


# ---------------------------------------------------------------- where nobody catches it


def untold(error: BaseException) -> str:
    """The report, unless it was added to the error as a note."""
    text = explain(error)
    return "" if text in getattr(error, "__notes__", ()) else text
