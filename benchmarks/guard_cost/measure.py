"""What the throughput meter and the guard against non-finite values cost per micro-batch; and the guard per update of a model.

One process, CPU, one thread. The loop is that of step_cost: a tiny model, so that the library is what is measured. For
the price of reading gradients, a model of 10 million parameters makes a fused AdamW update with and without the guard.
"""

import logging
from collections.abc import Callable

import torch

from benchmarks.step_cost.measure import NUM_BATCHES, STEPS, prepared
from benchmarks.timing import interleave, num_repeats, rows_of, save
from headway import Accelerator

UPDATES = 4


def updates(action: str | None, spike: str | None = None) -> Callable[[], None]:
    """UPDATES updates from gradients that are there."""
    accelerator = Accelerator(cpu=True, on_non_finite=action, on_spike=spike)
    model = torch.nn.ModuleList(torch.nn.Linear(1000, 1000, bias=False) for _ in range(10))
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), fused=True))
    grads = [torch.full_like(p, 1e-3) for p in model.parameters()]

    def run() -> None:
        for _ in range(UPDATES):
            # A window of its own, whose backward costs nothing beside the gradients that follow.
            accelerator.backward(model[0].weight[0, 0] * 1.0)
            for parameter, grad in zip(model.parameters(), grads):
                parameter.grad = grad
            optimizer.step()
            optimizer.zero_grad()

    return run


def main() -> None:
    """Measure and save."""
    torch.set_num_threads(1)
    logging.disable(logging.INFO)

    def loop(meter: bool = False, action: str | None = None, spike: str | None = None) -> Callable[[], None]:
        accelerator = Accelerator(gradient_accumulation_steps=STEPS, cpu=True, on_non_finite=action, on_spike=spike)
        run = prepared(accelerator)
        return run if not meter else (accelerator.throughput and run)

    small = {
        "headway": loop(), "headway, again (A/A)": loop(), "with throughput": loop(meter=True),
        "with on_non_finite='skip'": loop(action="skip"), "with on_spike='skip'": loop(spike="skip"),
    }  # fmt: skip
    rows = rows_of(interleave(small, num_repeats(100)), 1e6 / NUM_BATCHES)
    large = {
        "an update of 10 M parameters": updates(None), "the same, again (A/A)": updates(None),
        "the same with on_non_finite='skip'": updates("skip"), "the same with on_spike='skip'": updates(None, "skip"),
    }  # fmt: skip
    rows.update(rows_of(interleave(large, num_repeats(100) // 4), 1e6 / UPDATES))
    save("guard_cost", "us per micro-batch (the last four: per update)", rows)


if __name__ == "__main__":
    main()
