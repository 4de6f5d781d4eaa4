"""Which levers would save memory, and about how much, by what a census of live tensors shows."""

from dataclasses import dataclass
from types import FrameType

import torch

from headway.common.text import format_bytes
from headway.memory.census import TensorCensus
from headway.memory.use import MemoryUse

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
        found.append(
            MemorySuggestion(
                None,
                f"{census.num_graph_scalars} scalars hold their graphs alive: collect loss.item() or loss.detach()",
            )
        )
    return sorted(found, key=lambda lever: -(lever.saves if lever.saves is not None else 1 << 62))


def _activation_levers(census: TensorCensus, asked: int, frames: list[FrameType]) -> list[MemorySuggestion]:
    # What was asked for in forward or backward is one more activation.
    saved = census.total("saved for backward") + census.total("other tensors") + (0 if _in_optimizer(frames) else asked)
    if saved < _SMALL:
        return []
    modules = [module for root in census.roots for module in root.modules()]
    levers = [
        MemorySuggestion(
            saved // 2, "half the micro-batch and twice the accumulation (microbatching='auto' does it by itself)"
        )
    ]
    if census.total("saved for backward") and modules and not any(module.training for module in modules):
        levers.append(
            MemorySuggestion(None, "the model is in eval mode and keeps activations: evaluate under torch.no_grad()")
        )
    depth = max(
        (len(module) for module in modules if isinstance(module, torch.nn.ModuleList | torch.nn.Sequential)), default=1
    )
    is_checkpointed = any(
        "_headway_checkpoint" in vars(module) or vars(module).get("gradient_checkpointing") is True
        for module in modules
    )
    if depth > 1 and not is_checkpointed:
        levers.append(MemorySuggestion(saved - saved // depth, "accelerator.checkpoint_activations(model)"))
    floats = sum(
        h.num_bytes for h in census.holdings.values() if h.category == "saved for backward" and h.dtype == torch.float32
    )
    if floats > saved // 2:
        levers.append(MemorySuggestion(floats // 2, "mixed_precision='bf16'"))
    return levers


def _in_optimizer(frames: list[FrameType]) -> bool:
    return any("/torch/optim/" in frame.f_code.co_filename.replace("\\", "/") for frame in frames)


def _optimizer_levers(census: TensorCensus, frames: list[FrameType]) -> list[MemorySuggestion]:
    levers, state, weights = [], census.total("optimizer state"), census.total("parameters")
    names = sorted({type(optimizer).__name__ for optimizer in census.optimizers})
    if state > max(_SMALL, weights):
        levers.append(MemorySuggestion(state - state // 100, f"torch.optim.Adafactor in place of {', '.join(names)}"))
        levers.append(MemorySuggestion(state // 2, "torch.optim.SGD with momentum, where it trains as well"))
    if _in_optimizer(frames):
        loops = [group for optimizer in census.optimizers for group in optimizer.param_groups if not group.get("fused")]
        if loops:
            levers.append(
                MemorySuggestion(
                    weights, "fused=True, or foreach=False, for the optimizer: no temporary copies in step()"
                )
            )
    return levers


def _device_levers(use: MemoryUse, asked: int | None) -> list[MemorySuggestion]:
    if use.device == "cpu":
        return []
    levers, unused = [], use.reserved - use.used
    if asked is not None and unused > asked:
        levers.append(
            MemorySuggestion(
                unused, "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True against holes in the allocator's memory"
            )
        )
    others = use.occupied - use.reserved
    if others > max(1 << 30, use.total // 10):
        levers.append(
            MemorySuggestion(others, "another process holds memory on this device; see headway.memory_use().processes")
        )
    return levers
