"""Cost per micro-batch of the throughput meter and of the guard against non-finite values; and the guard's cost per update.

One process, CPU, one thread. The loop is that of step_cost: a tiny model, so that the time is the library's. To measure
the cost of reading gradients, a model of 10 million parameters makes a fused AdamW update with and without the guard.

`python benchmarks/run.py guard_cost` runs it, and rewrites the table in benchmarks/README.md.
"""

import logging
from collections.abc import Callable

import torch

from benchmarks.step_cost.measure import NUM_BATCHES, STEPS, make_prepared_loop
from benchmarks.timing import get_num_repeats, make_rows, save_result, time_interleaved
from headway import Accelerator

UPDATES = 4


def make_updates(action: str | None, spike: str | None = None) -> Callable[[], None]:
    """Return a function that makes UPDATES updates from gradients that already exist."""
    accelerator = Accelerator(cpu=True, on_non_finite=action, on_spike=spike)
    model = torch.nn.ModuleList(torch.nn.Linear(1000, 1000, bias=False) for _ in range(10))
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), fused=True))
    grads = [torch.full_like(p, 1e-3) for p in model.parameters()]

    def run() -> None:
        for _ in range(UPDATES):
            # The backward opens a new window; it costs next to nothing, because the gradients are set below.
            accelerator.backward(model[0].weight[0, 0] * 1.0)
            for parameter, grad in zip(model.parameters(), grads):
                parameter.grad = grad
            optimizer.step()
            optimizer.zero_grad()

    return run


def main() -> None:
    """Measure all variants in turn and write result.json."""
    torch.set_num_threads(1)
    logging.disable(logging.INFO)

    def make_loop(meter: bool = False, action: str | None = None, spike: str | None = None) -> Callable[[], None]:
        accelerator = Accelerator(gradient_accumulation_steps=STEPS, cpu=True, on_non_finite=action, on_spike=spike)
        if meter:
            _ = accelerator.throughput  # the first access switches the meter on
        return make_prepared_loop(accelerator)

    micro_batches = {
        "headway": make_loop(), "headway, again (A/A)": make_loop(), "with throughput": make_loop(meter=True),
        "with on_non_finite='skip'": make_loop(action="skip"), "with on_spike='skip'": make_loop(spike="skip"),
    }  # fmt: skip
    rows = make_rows(time_interleaved(micro_batches, get_num_repeats(100)), 1e6 / NUM_BATCHES)
    updates = {
        "an update of 10 M parameters": make_updates(None),
        "an update of 10 M parameters, again (A/A)": make_updates(None),
        "an update of 10 M parameters, on_non_finite='skip'": make_updates("skip"),
        "an update of 10 M parameters, on_spike='skip'": make_updates(None, "skip"),
    }
    rows.update(make_rows(time_interleaved(updates, get_num_repeats(100) // 4), 1e6 / UPDATES))
    save_result("guard_cost", "us per micro-batch (rows of an update: us per update)", rows)


if __name__ == "__main__":
    main()
