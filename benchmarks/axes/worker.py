"""One rank of the measurement: a layout by hand, once more, and through an Accelerator."""

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
from benchmarks.timing import interleave, rows_of, summary

STEPS = 4
BUILDERS: dict[str, Callable[[models.Batch], by_hand.Step]] = {
    "tp": by_hand.tp, "cp": by_hand.cp, "ep": by_hand.ep, "fsdp+ep=2": by_hand.ep, "ep=2+tp=2": by_hand.ep_tp,
    "pp": by_hand.pp, "pp=2+fsdp": by_hand.pp, "pp=2+cp=2": partial(by_hand.pp, splits_sequences=True),
}  # fmt: skip


def prepared(accelerator: Any, layout: str, batch: models.Batch) -> by_hand.Step:
    """The same step through an Accelerator."""
    model = models.llama() if layout == "tp" else models.mixtral() if "ep" in layout else models.LabelledGPT()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-4))

    def learn() -> Any:
        if "pp" in layout:
            pair = (batch.ids, batch.labels)
            return accelerator.forward_backward(pair, lambda piece: model(*piece))
        loss = (
            model(batch.ids, batch.labels) if layout == "cp" else models.loss_of(model(batch.ids).logits, batch.labels)
        )
        accelerator.backward(loss)
        return loss.detach()

    def step() -> float:
        loss = learn()
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return float(accelerator.reduce(loss, "mean") if "ep" in layout else loss)

    return step


def repeated(step: by_hand.Step) -> Callable[[], float | None]:
    """Several updates; the last one's loss."""
    return lambda: [step() for _ in range(STEPS)][-1]


def main() -> None:
    """Measure; rank 0 writes the rows to the path given."""
    layout, path, repeats = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    logging.disable(logging.INFO)
    options = (
        [headway.PipelineOptions(schedule="1f1b", num_microbatches=models.NUM_MICROBATCHES)] if "pp" in layout else None
    )
    accelerator = headway.Accelerator(cpu=True, strategy=layout, kwargs_handlers=options)
    batch = models.batch(accelerator.strategy.data_shard.index)
    passes = {
        "by hand": repeated(BUILDERS[layout](batch)), "by hand, again (A/A)": repeated(BUILDERS[layout](batch)),
        "headway": repeated(prepared(accelerator, layout, batch)),
    }  # fmt: skip
    losses = [run() for run in passes.values()]
    if any(loss is None or abs(loss - losses[-1]) > 1e-4 for loss in losses if loss is not None):
        raise ValueError(f"by hand and prepared are not the same: {losses}")
    found = interleave(passes, repeats)
    floor = [wall for wall, _ in found["by hand"]]
    rows = {name: row for name, row in rows_of(found, 1e3 / STEPS).items() if isinstance(row, dict)}
    for name, row in rows.items():
        row["ratio"] = summary([wall / base for (wall, _), base in zip(found[name], floor)])
    if accelerator.is_main_process:
        path.write_text(
            json.dumps({f"{layout} x{accelerator.num_processes}: {name}": row for name, row in rows.items()})
        )
    accelerator.end_training()


if __name__ == "__main__":
    main()
