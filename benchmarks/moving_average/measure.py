"""Cost of `ExponentialMovingAverage` per update and per evaluation, compared with a hand-written average.

It is measured in one process, on one CPU thread. The model has the shapes of four GPT-2 blocks of width 768, with 28
million parameters in 48 tensors. The average by hand is one call of `torch._foreach_lerp_` on lists of the model's
tensors, which are built once.

`python benchmarks/run.py moving_average` runs it, and rewrites the table in benchmarks/README.md.
"""

import logging
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.timing import get_num_repeats, make_rows, save_result, time_interleaved
from headway import Accelerator, ExponentialMovingAverage

DECAY = 0.999
UPDATES = 4


def make_model() -> torch.nn.Module:
    """Return a model with the parameters of four GPT-2 blocks."""
    width = 768
    blocks = [
        torch.nn.Sequential(
            torch.nn.LayerNorm(width), torch.nn.Linear(width, 3 * width), torch.nn.Linear(width, width),
            torch.nn.LayerNorm(width), torch.nn.Linear(width, 4 * width), torch.nn.Linear(4 * width, width),
        )
        for _ in range(4)
    ]  # fmt: skip
    return torch.nn.Sequential(*blocks)


class Subject:
    """Prepared model with a moving average, and hand-written loops over the same tensors.

    The hand-written loops use the same tensors, because the placement of tensors in memory changes the time.

    Args:
        options: Arguments of `ExponentialMovingAverage`.
    """

    def __init__(self, **options: Any) -> None:
        accelerator = Accelerator(cpu=True)
        model = make_model()
        self.model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0))
        self.ema = ExponentialMovingAverage(self.model, decay=DECAY, **options)
        self.optimizer = optimizer.optimizer
        self.listeners = accelerator._run.hooks.updated
        self.weights = [parameter.detach() for parameter in self.model.parameters()]
        self.averages = list(self.ema.state_dict()["average"].values())
        self.num_updates = 0

    def update(self) -> None:
        """Report UPDATES updates to the average, as a prepared optimizer does."""
        for _ in range(UPDATES):
            self.num_updates += 1
            for note_update in self.listeners:
                note_update(self.optimizer, self.num_updates)
        assert self.ema.num_updates == self.num_updates

    def update_with_foreach(self) -> None:
        """Update the averages with `torch._foreach_lerp_` instead of Headway, UPDATES times."""
        for _ in range(UPDATES):
            torch._foreach_lerp_(self.averages, self.weights, 1 - DECAY)

    def swap(self) -> None:
        """Swap averages into the model and back, UPDATES times."""
        for _ in range(UPDATES):
            with self.ema.swap_weights():
                pass

    def swap_by_hand(self) -> None:
        """Store the weights, copy the averages into the model, and restore the weights, UPDATES times.

        diffusers and torch_ema swap weights in this way.
        """
        for _ in range(UPDATES):
            stored = [weight.clone() for weight in self.weights]
            torch._foreach_copy_(self.weights, self.averages)
            torch._foreach_copy_(self.weights, stored)


def make_torch_update() -> Callable[[], None]:
    """Return a function that updates a `torch.optim.swa_utils.AveragedModel` UPDATES times."""
    model = make_model()
    swa = torch.optim.swa_utils
    average = swa.AveragedModel(model, multi_avg_fn=swa.get_ema_multi_avg_fn(DECAY))

    def run() -> None:
        for _ in range(UPDATES):
            average.update_parameters(model)

    return run


def main() -> None:
    """Measure all variants in turn, and save the result."""
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    every_update, every_tenth = Subject(), Subject(every=10)
    updates = {
        "an update, by hand (foreach)": every_update.update_with_foreach,
        "an update, by hand, again (A/A)": every_update.update_with_foreach,
        "an update, headway": every_update.update, "an update, headway, every=10": every_tenth.update,
        "an update, AveragedModel": make_torch_update(),
    }  # fmt: skip
    rows = make_rows(time_interleaved(updates, get_num_repeats(40)), 1e6 / UPDATES)
    swaps = {
        "averages into the model and back, by hand": every_update.swap_by_hand,
        "averages into the model and back, headway": every_update.swap,
    }
    rows.update(make_rows(time_interleaved(swaps, get_num_repeats(40)), 1e6 / UPDATES))
    save_result("moving_average", "us per update or evaluation", rows)


if __name__ == "__main__":
    main()
