"""Suggestions for saving memory, based on a census of live tensors and on the device's memory use."""

from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType

import torch

from headway.common.text import format_bytes
from headway.core.memory.use import MemoryUse
from headway.extras.memory_census import TensorCensus

_SMALL = 16 << 20
_MANY_LOSSES = 16
_Levers = Iterator[tuple[int | None, str]]


@dataclass(frozen=True)
class MemorySuggestion:
    """Suggestion for a change to the training that saves memory.

    Attributes:
        saves: Estimated bytes saved, or None if there is no estimate.
        what: Change to make, as a phrase.
    """

    saves: int | None
    what: str

    def text(self) -> str:
        """Return the suggestion as one line."""
        return self.what if self.saves is None else f"{self.what}: up to {format_bytes(self.saves)}"


def list_suggestions(
    census: TensorCensus, use: MemoryUse, asked: int | None, frames: list[FrameType]
) -> list[MemorySuggestion]:
    """Return the suggestions that apply: first those without an estimate, then the others, largest saving first.

    The activations are estimated as the tensors saved for backward, the other tensors, and the failed request if it was
    not made by an optimizer. Halving the micro-batch is estimated to save half of them. Checkpointing n blocks is
    estimated to save (n - 1) / n of them. bf16 saves half of the tensors saved for backward in float32. Another
    optimizer saves the part of the optimizer state that it does not need.

    Args:
        census: Live tensors.
        use: Memory use of the device whose tensors the census counts.
        asked: Bytes of the failed request, or None if no request failed.
        frames: Stack frames through which the error propagated.
    """
    found = [
        *_suggest_for_activations(census, asked or 0, frames),
        *_suggest_for_optimizer(census, frames),
        *_suggest_for_device(use, asked),
    ]
    if census.num_graph_scalars > _MANY_LOSSES:
        kept = f"{census.num_graph_scalars} scalars hold their graphs alive: collect loss.item() or loss.detach()"
        found.append((None, kept))
    found.sort(key=lambda lever: -(lever[0] if lever[0] is not None else 1 << 62))
    return [MemorySuggestion(saves, what) for saves, what in found]


def _suggest_for_activations(census: TensorCensus, asked: int, frames: list[FrameType]) -> _Levers:
    # A request that failed in forward or backward is one more activation.
    saved = (
        census.sum_bytes("saved for backward")
        + census.sum_bytes("other tensors")
        + (0 if _is_in_optimizer(frames) else asked)
    )
    if saved < _SMALL:
        return
    modules = [module for root in census.roots for module in root.modules()]
    yield saved // 2, "half the micro-batch and twice the accumulation (microbatching='auto' does it by itself)"
    if census.sum_bytes("saved for backward") and modules and not any(module.training for module in modules):
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


def _is_in_optimizer(frames: list[FrameType]) -> bool:
    return any("/torch/optim/" in frame.f_code.co_filename.replace("\\", "/") for frame in frames)


def _suggest_for_optimizer(census: TensorCensus, frames: list[FrameType]) -> _Levers:
    state, weights = census.sum_bytes("optimizer state"), census.sum_bytes("parameters")
    names = sorted({type(optimizer).__name__ for optimizer in census.optimizers})
    if state > max(_SMALL, weights):
        yield state - state // 100, f"torch.optim.Adafactor in place of {', '.join(names)}"
        yield state // 2, "torch.optim.SGD with momentum, where it trains as well"
    groups = (group for optimizer in census.optimizers for group in optimizer.param_groups)
    if _is_in_optimizer(frames) and not all(group.get("fused") for group in groups):
        yield weights, "fused=True, or foreach=False, for the optimizer: no temporary copies in step()"


def _suggest_for_device(use: MemoryUse, asked: int | None) -> _Levers:
    if use.device == "cpu":
        return
    unused = use.reserved - use.used
    if asked is not None and unused > asked:
        yield unused, "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True against holes in the allocator's memory"
    others = use.occupied - use.reserved
    if others > max(1 << 30, use.total // 10):
        yield others, "another process holds memory on this device; see headway.memory_use().processes"
