"""One rank of the measurement: a layout written by hand, the same once more, and the layout in an Accelerator."""

import json
import logging
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

import headway
from benchmarks.axes import by_hand, models
from benchmarks.timing import make_rows, summarize, time_interleaved

STEPS = 4
BUILDERS: dict[str, Callable[[models.Batch], by_hand.Step]] = {
    "tp": by_hand.build_tp_step,
    "cp": by_hand.build_cp_step,
    "ep": by_hand.build_ep_step,
    "fsdp+ep=2": by_hand.build_ep_step,
    "ep=2+tp=2": by_hand.build_ep_tp_step,
    "pp": by_hand.build_pp_step,
    "pp=2+fsdp": by_hand.build_pp_step,
    "pp=2+cp=2": partial(by_hand.build_pp_step, splits_sequences=True),
}


def build_headway_step(accelerator: Any, layout: str, make_batch: models.Batch) -> by_hand.Step:
    """Build the same step with an Accelerator."""
    model = (
        models.build_llama() if layout == "tp" else models.build_mixtral() if "ep" in layout else models.LabelledGPT()
    )
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-4))

    def run_backward() -> Any:
        if "pp" in layout:
            pair = (make_batch.ids, make_batch.labels)
            return accelerator.forward_backward(pair, lambda piece: model(*piece))
        loss = (
            model(make_batch.ids, make_batch.labels)
            if layout == "cp"
            else models.compute_loss(model(make_batch.ids).logits, make_batch.labels)
        )
        accelerator.backward(loss)
        return loss.detach()

    def step() -> float:
        loss = run_backward()
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return float(accelerator.reduce(loss, "mean") if "ep" in layout else loss)

    return step


def repeat_step(step: by_hand.Step) -> Callable[[], float | None]:
    """Return a function that runs STEPS updates and returns the last loss."""
    return lambda: [step() for _ in range(STEPS)][-1]


def main() -> None:
    """Measure all variants in turn; rank 0 writes the rows to the path in sys.argv[1]."""
    layout, path, repeats = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    logging.disable(logging.INFO)
    options = (
        [headway.PipelineOptions(schedule="1f1b", num_microbatches=models.NUM_MICROBATCHES)] if "pp" in layout else None
    )
    accelerator = headway.Accelerator(cpu=True, strategy=layout, kwargs_handlers=options)
    make_batch = models.make_batch(accelerator.strategy.data_shard.index)
    passes = {
        "by hand": repeat_step(BUILDERS[layout](make_batch)), "by hand, again (A/A)": repeat_step(BUILDERS[layout](make_batch)),
        "headway": repeat_step(build_headway_step(accelerator, layout, make_batch)),
    }  # fmt: skip
    losses = [run() for run in passes.values()]
    if any(loss is None or abs(loss - losses[-1]) > 1e-4 for loss in losses if loss is not None):
        raise ValueError(f"the hand-written steps and Headway's step have different losses: {losses}")
    times = time_interleaved(passes, repeats)
    floor = [wall for wall, _ in times["by hand"]]
    rows = {name: row for name, row in make_rows(times, 1e3 / STEPS).items() if isinstance(row, dict)}
    for name, row in rows.items():
        row["ratio"] = summarize([wall / base for (wall, _), base in zip(times[name], floor)])
    if accelerator.is_main_process:
        path.write_text(
            json.dumps({f"{layout} x{accelerator.num_processes}: {name}": row for name, row in rows.items()})
        )
    accelerator.end_training()


if __name__ == "__main__":
    main()
