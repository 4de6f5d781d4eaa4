"""What packed batches cost beside padded ones, per thousand tokens of the samples, and the share of padding they save."""

import logging
import time
from typing import Any

import numpy
import torch
from torch.utils.data import DataLoader

from benchmarks.loader_cost.measure import walk
from benchmarks.timing import interleave, num_repeats, rows_of, save
from headway.language_data.packing_plan import make_packing_plan

LENGTH, NUM_SAMPLES, NUM_ROWS = 2048, 2000, 8


def pad(samples: list[Any]) -> dict[str, torch.Tensor]:
    """Rows of one batch, padded to the longest, with labels and a mask."""
    tokens = torch.nn.utils.rnn.pad_sequence([sample["input_ids"] for sample in samples], True)
    longest = tokens.shape[1]
    sizes = torch.tensor([len(sample["input_ids"]) for sample in samples])
    mask = torch.arange(longest) < sizes[:, None]
    return {"input_ids": tokens, "labels": tokens.masked_fill(~mask, -100), "attention_mask": mask.long()}


def main() -> None:
    """Measure and save."""
    repeats = num_repeats(20)
    torch.set_num_threads(1)
    logging.disable(logging.INFO)
    import headway

    draw = numpy.random.default_rng(0)
    lengths = numpy.clip(draw.lognormal(5.5, 1, NUM_SAMPLES).astype(int), 2, LENGTH)
    samples = [{"input_ids": torch.randint(1, 1000, (int(length),))} for length in lengths]
    packed = headway.PackedDataset(samples, LENGTH, lengths=lengths, seed=1)
    per_batch = round(NUM_ROWS * LENGTH / lengths.mean())
    collate = headway.PackingCollator()
    plain = DataLoader(samples, per_batch, shuffle=True, collate_fn=pad)  # type: ignore[arg-type]
    passes = {
        "padded to the longest row, torch": walk(plain),
        "padded to the longest row, again (A/A)": walk(plain),
        "packed, torch": walk(DataLoader(packed, NUM_ROWS, shuffle=True, collate_fn=collate)),
        "packed, headway": walk(
            headway.Accelerator(cpu=True).prepare(DataLoader(packed, NUM_ROWS, shuffle=True, collate_fn=collate))
        ),
    }
    rows = rows_of(interleave(passes, repeats), 1e9 / lengths.sum())
    share = 1 - lengths.sum() / sum(batch["input_ids"].numel() for batch in plain)
    many = numpy.clip(draw.lognormal(6, 1, 1_000_000).astype(int), 1, 4096)
    began = time.process_time()
    plan = make_packing_plan(many, 4096, seed=1)
    seconds = time.process_time() - began
    note = (
        f"Padding: {share:.1%} of all positions in padded batches of {per_batch} samples, {packed.plan.padding_share:.2%} in packed "
        f"ones of {NUM_ROWS} x {LENGTH} tokens. The plan of 1,000,000 samples for sequences of 4,096 tokens takes {seconds:.1f} s of "
        f"CPU time and has {plan.padding_share:.2%} of padding."
    )
    save("packing", "us per 1000 tokens", rows, note)


if __name__ == "__main__":
    main()
