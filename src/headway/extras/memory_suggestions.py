"""Suggestions for saving memory, based on a census of live tensors and on the device's memory use."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType

import torch

from headway.common.text import format_bytes
from headway.core.memory.use import MemoryUse
from headway.extras.memory_census import TensorCensus

_MIN_BYTES = 16 << 20
"""Activations or optimizer state of at most this size get no suggestions."""
_MANY_LOSSES = 16
"""Number of scalars with an autograd graph above which the losses were probably collected without `detach()`."""


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
    suggestions = [
        *_suggest_for_activations(census, asked or 0, frames),
        *_suggest_for_optimizer(census, frames),
        *_suggest_for_device(use, asked),
    ]
    if census.num_graph_scalars > _MANY_LOSSES:
        advice = f"{census.num_graph_scalars} scalars keep their graphs alive: collect loss.item() or loss.detach()"
        suggestions.append(MemorySuggestion(None, advice))
    return sorted(suggestions, key=lambda each: -math.inf if each.saves is None else -each.saves)


def _suggest_for_activations(census: TensorCensus, asked: int, frames: list[FrameType]) -> Iterator[MemorySuggestion]:
    """Yield suggestions that reduce the memory of activations, such as activation checkpointing.

    Args:
        census: Live tensors.
        asked: Bytes of the failed request, or 0 if no request failed.
        frames: Stack frames through which the error propagated.
    """
    saved_bytes = census.sum_bytes("saved for backward")
    activation_bytes = saved_bytes + census.sum_bytes("other tensors")
    if not _is_in_optimizer(frames):
        activation_bytes += asked  # a request that failed in forward or backward is one more activation
    if activation_bytes < _MIN_BYTES:
        return
    modules = [module for root in census.roots for module in root.modules()]
    yield MemorySuggestion(
        activation_bytes // 2,
        "half the micro-batch and twice the accumulation (microbatching='auto' does it by itself)",
    )
    is_in_eval_mode = bool(modules) and not any(module.training for module in modules)
    if saved_bytes and is_in_eval_mode:
        yield MemorySuggestion(None, "the model is in eval mode and keeps activations: evaluate under torch.no_grad()")
    num_blocks = _guess_num_blocks(modules)
    if num_blocks > 1 and not any(map(_is_checkpointed, modules)):
        yield MemorySuggestion(
            activation_bytes - activation_bytes // num_blocks, "accelerator.checkpoint_activations(model)"
        )
    storages = [each for each in census.storages.values() if each.category == "saved for backward"]
    float32_bytes = sum(each.num_bytes for each in storages if each.dtype == torch.float32)
    if float32_bytes > activation_bytes // 2:
        yield MemorySuggestion(float32_bytes // 2, "mixed_precision='bf16'")


def _guess_num_blocks(modules: list[torch.nn.Module]) -> int:
    """Return the length of the longest ModuleList or Sequential, or 1 if there is none."""
    lists = [module for module in modules if isinstance(module, torch.nn.ModuleList | torch.nn.Sequential)]
    return max(map(len, lists), default=1)


def _is_checkpointed(module: torch.nn.Module) -> bool:
    """Whether activation checkpointing is enabled for a module, by Headway or by transformers."""
    attributes = vars(module)
    return "_headway_checkpoint" in attributes or attributes.get("gradient_checkpointing") is True


def _is_in_optimizer(frames: list[FrameType]) -> bool:
    """Whether the stack contains code of torch's optimizers."""
    return any("/torch/optim/" in frame.f_code.co_filename.replace("\\", "/") for frame in frames)


def _suggest_for_optimizer(census: TensorCensus, frames: list[FrameType]) -> Iterator[MemorySuggestion]:
    """Yield suggestions that reduce the memory of optimizer states.

    Args:
        census: Live tensors.
        frames: Stack frames through which the error propagated.
    """
    state_bytes, parameter_bytes = census.sum_bytes("optimizer state"), census.sum_bytes("parameters")
    names = sorted({type(optimizer).__name__ for optimizer in census.optimizers})
    if state_bytes > max(_MIN_BYTES, parameter_bytes):  # Adafactor's factored state takes about 1 % of Adam's
        yield MemorySuggestion(
            state_bytes - state_bytes // 100, f"torch.optim.Adafactor in place of {', '.join(names)}"
        )
        yield MemorySuggestion(state_bytes // 2, "torch.optim.SGD with momentum, where it trains as well")
    groups = (group for optimizer in census.optimizers for group in optimizer.param_groups)
    if _is_in_optimizer(frames) and not all(group.get("fused") for group in groups):
        yield MemorySuggestion(
            parameter_bytes, "fused=True, or foreach=False, for the optimizer: no temporary copies in step()"
        )


def _suggest_for_device(use: MemoryUse, asked: int | None) -> Iterator[MemorySuggestion]:
    """Yield suggestions about a GPU's memory that no live tensor occupies.

    Args:
        use: Memory use of the device.
        asked: Bytes of the failed request, or None if no request failed.
    """
    if use.device == "cpu":
        return
    unused_bytes = use.reserved - use.used
    if asked is not None and unused_bytes > asked:
        yield MemorySuggestion(
            unused_bytes, "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True against holes in the allocator's memory"
        )
    foreign_bytes = use.occupied - use.reserved  # of other processes, and of this one outside of torch's allocator
    if foreign_bytes > max(1 << 30, use.total // 10):
        yield MemorySuggestion(
            foreign_bytes, "another process holds memory on this device; see headway.memory_use().processes"
        )
