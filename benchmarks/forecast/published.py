"""The memory that was published for BERT-large on an RTX 3090 in 2022, forecast without a card."""

import warnings

from benchmarks.forecast.reference import LARGEST, PUBLISHED, PUBLISHED_V100, AdamWOf2022, batch, model, recompute
from headway.forecasting.device.allocator import MemoryEvent, replay
from headway.forecasting.device.devices import MIB, find, room, spread
from headway.forecasting.forecaster import BudgetSearch
from headway.forecasting.tracing.fake import trace
from headway.forecasting.tracing.step import StepRecipe
from headway.planning.optimizers import maker

DEVICE, V100 = find("rtx-3090"), find("v100-16gb")


def events(size: int, is_checkpointed: bool, accumulation: int = 2) -> list[MemoryEvent]:
    """Of two updates. Two micro-batches stand for the 4 and 8 of the tutorial, after which nothing new happens."""
    # transformers' Trainer computes the loss in a function, so outputs go when it returns.
    recipe = StepRecipe(AdamWOf2022, None, "no", accumulation, 1.0, keeps_gradients=True, loop="loss_function")
    return trace(model, lambda: batch(size), recipe, DEVICE, recompute if is_checkpointed else None).events


def row(size: int, is_checkpointed: bool) -> tuple[int, int, int]:
    """In use on the card, in bytes: least, likely, most."""
    return spread(DEVICE, replay(events(size, is_checkpointed)).reserved)


def on_a_v100(size: int, is_checkpointed: bool, is_half: bool, has_adafactor: bool) -> int:
    """Likely in use on the card, in bytes."""
    recipe = StepRecipe(
        maker("adafactor_transformers") if has_adafactor else AdamWOf2022, None, "fp16" if is_half else "no",
        2 if size == 1 else 1, 1.0, keeps_gradients=True, loop="loss_function",
    )  # fmt: skip
    traced = trace(model, lambda: batch(size), recipe, V100, recompute if is_checkpointed else None)
    return spread(V100, replay(traced.events).reserved)[1]


def largest() -> int:
    """The largest batch with checkpointing, which the tutorial trained without accumulation."""
    assert DEVICE.memory is not None
    return BudgetSearch(
        lambda size: events(size, True, 1), lambda each: replay(each).reserved, room(DEVICE, DEVICE.memory)
    ).run()


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
