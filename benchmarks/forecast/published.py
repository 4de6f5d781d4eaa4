"""The memory that was published for BERT-large on an RTX 3090 in 2022, forecast without a card."""

import warnings

from benchmarks.forecast.reference import LARGEST, PUBLISHED, PUBLISHED_V100, AdamWOf2022, batch, model, recompute
from headway.forecasting.device.allocator import MemoryEvent, replay_events
from headway.forecasting.device.devices import MIB, compute_allocator_limit, estimate_use, find_device
from headway.forecasting.forecaster import BudgetSearch
from headway.forecasting.tracing.fake import trace_step
from headway.forecasting.tracing.step import StepRecipe
from headway.planning.optimizers import resolve_optimizer

DEVICE, V100 = find_device("rtx-3090"), find_device("v100-16gb")


def events(size: int, is_checkpointed: bool, accumulation: int = 2) -> list[MemoryEvent]:
    """Of two updates. Two micro-batches stand for the 4 and 8 of the tutorial, after which nothing new happens."""
    # transformers' Trainer computes the loss in a function, so outputs go when it returns.
    recipe = StepRecipe(AdamWOf2022, None, "no", accumulation, 1.0, keeps_gradients=True, loop="loss_function")
    return trace_step(model, lambda: batch(size), recipe, DEVICE, recompute if is_checkpointed else None).events


def row(size: int, is_checkpointed: bool) -> tuple[int, int, int]:
    """In use on the card, in bytes: least, likely, most."""
    return estimate_use(DEVICE, replay_events(events(size, is_checkpointed)).reserved)


def on_a_v100(size: int, is_checkpointed: bool, is_half: bool, has_adafactor: bool) -> int:
    """Likely in use on the card, in bytes."""
    recipe = StepRecipe(
        resolve_optimizer("adafactor_transformers") if has_adafactor else AdamWOf2022, None, "fp16" if is_half else "no",
        2 if size == 1 else 1, 1.0, keeps_gradients=True, loop="loss_function",
    )  # fmt: skip
    traced = trace_step(model, lambda: batch(size), recipe, V100, recompute if is_checkpointed else None)
    return estimate_use(V100, replay_events(traced.events).reserved)[1]


def largest() -> int:
    """The largest batch with checkpointing, which the tutorial trained without accumulation."""
    assert DEVICE.memory is not None
    return BudgetSearch(
        lambda size: events(size, True, 1),
        lambda each: replay_events(each).reserved,
        compute_allocator_limit(DEVICE, DEVICE.memory),
    ).find_largest()


def main() -> None:
    """Print the table."""
    print("batch  checkpointing  forecast (from .. to)      published  error")
    for (size, is_checkpointed), published in PUBLISHED.items():
        least, likely, most = (value / MIB for value in row(size, is_checkpointed))
        shown = f"{likely:.0f} ({least:.0f} .. {most:.0f})"
        print(
            f"{size:5}  {'yes' if is_checkpointed else 'no':13}  {shown:25}  {published:9}  {likely / published - 1:+.1%}"
        )
    print("V100: batch, checkpointing, fp16, Adafactor: forecast, published, error")
    for run, published in PUBLISHED_V100.items():
        likely = on_a_v100(*run) / MIB
        print(f"{run}: {likely:.0f}, {published}, {likely / published - 1:+.1%}")
    print(f"largest batch with checkpointing: {largest()}, published {LARGEST}")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main()
