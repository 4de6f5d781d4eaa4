"""Forecasts of the memory that was published for BERT-large on an RTX 3090 in 2022, and on a V100."""

import warnings

from benchmarks.forecast.reference import (
    LARGEST,
    PUBLISHED,
    PUBLISHED_V100,
    AdamWOf2022,
    build_model,
    enable_checkpointing,
    make_batch,
)
from headway.forecasting.budget_search import BudgetSearch
from headway.forecasting.device.allocator import replay_events
from headway.forecasting.device.devices import MIB, compute_allocator_limit, estimate_use, find_device
from headway.forecasting.device.memory_events import StepMemory
from headway.forecasting.tracing.recipe import StepRecipe
from headway.forecasting.tracing.trace_step import trace_step
from headway.planning.optimizers import resolve_optimizer

DEVICE, V100 = find_device("rtx-3090"), find_device("v100-16gb")


def trace_memory(size: int, is_checkpointed: bool, accumulation: int = 2) -> StepMemory:
    """Return the memory of two updates.

    Two micro-batches stand for the tutorial's 4 and 8, because memory does not change after the second one.
    """
    # transformers' Trainer computes the loss in a function, so the outputs are freed when it returns.
    recipe = StepRecipe(AdamWOf2022, None, "no", accumulation, 1.0, keeps_gradients=True, loop="loss_function")
    return trace_step(
        build_model, lambda: make_batch(size), recipe, DEVICE, enable_checkpointing if is_checkpointed else None
    ).memory


def estimate_memory(size: int, is_checkpointed: bool) -> tuple[int, int, int]:
    """Return the bytes in use on the RTX 3090: (least, likely, most)."""
    return estimate_use(DEVICE, replay_events(trace_memory(size, is_checkpointed).events).reserved)


def estimate_v100_memory(size: int, is_checkpointed: bool, is_half: bool, has_adafactor: bool) -> int:
    """Return the likely bytes in use on the V100."""
    recipe = StepRecipe(
        resolve_optimizer("adafactor_transformers") if has_adafactor else AdamWOf2022, None, "fp16" if is_half else "no",
        2 if size == 1 else 1, 1.0, keeps_gradients=True, loop="loss_function",
    )  # fmt: skip
    traced = trace_step(
        build_model, lambda: make_batch(size), recipe, V100, enable_checkpointing if is_checkpointed else None
    )
    return estimate_use(V100, replay_events(traced.events).reserved).likely


def find_largest_batch() -> int:
    """Return the largest batch with checkpointing and without accumulation, as the tutorial trained it."""
    assert DEVICE.memory is not None
    return BudgetSearch(
        lambda size: trace_memory(size, True, 1),
        lambda memory: replay_events(memory.events).reserved,
        compute_allocator_limit(DEVICE, DEVICE.memory),
    ).find_largest()


def main() -> None:
    """Print the table."""
    print("batch  checkpointing  forecast (from .. to)      published  error")
    for (size, is_checkpointed), published in PUBLISHED.items():
        least, likely, most = (value / MIB for value in estimate_memory(size, is_checkpointed))
        estimate = f"{likely:.0f} ({least:.0f} .. {most:.0f})"
        print(
            f"{size:5}  {'yes' if is_checkpointed else 'no':13}  {estimate:25}  {published:9}  {likely / published - 1:+.1%}"
        )
    print("V100: batch, checkpointing, fp16, Adafactor: forecast, published, error")
    for run, published in PUBLISHED_V100.items():
        likely = estimate_v100_memory(*run) / MIB
        print(f"{run}: {likely:.0f}, {published}, {likely / published - 1:+.1%}")
    print(f"largest batch with checkpointing: {find_largest_batch()}, published {LARGEST}")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main()
