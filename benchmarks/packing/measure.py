"""Cost of packed batches compared with padded ones, per thousand tokens of the samples, and the share of padding that they save.

`python benchmarks/run.py packing` runs it, and rewrites the table in benchmarks/README.md.
"""

import logging
import time
from typing import Any

import numpy
import torch
from torch.utils.data import DataLoader

from benchmarks.loader_cost.measure import make_pass
from benchmarks.timing import get_num_repeats, make_rows, save_result, time_interleaved
from headway.language_data.packing_plan import make_packing_plan

LENGTH, NUM_SAMPLES, NUM_ROWS = 2048, 2000, 8


def pad(samples: list[Any]) -> dict[str, torch.Tensor]:
    """Collate samples into one batch, padded to the longest, with labels and a mask."""
    tokens = torch.nn.utils.rnn.pad_sequence([sample["input_ids"] for sample in samples], True)
    longest = tokens.shape[1]
    sizes = torch.tensor([len(sample["input_ids"]) for sample in samples])
    mask = torch.arange(longest) < sizes[:, None]
    return {"input_ids": tokens, "labels": tokens.masked_fill(~mask, -100), "attention_mask": mask.long()}


def main() -> None:
    """Measure all variants in turn and write result.json."""
    repeats = get_num_repeats(20)
    torch.set_num_threads(1)
    logging.disable(logging.INFO)
    import headway

    rng = numpy.random.default_rng(0)
    lengths = numpy.clip(rng.lognormal(5.5, 1, NUM_SAMPLES).astype(int), 2, LENGTH)
    samples = [{"input_ids": torch.randint(1, 1000, (int(length),))} for length in lengths]
    packed = headway.PackedDataset(samples, LENGTH, lengths=lengths, seed=1)
    samples_per_batch = round(NUM_ROWS * LENGTH / lengths.mean())
    collate = headway.PackingCollator()
    padded = DataLoader(samples, samples_per_batch, shuffle=True, collate_fn=pad)  # type: ignore[arg-type]
    passes = {
        "padded to the longest row, torch": make_pass(padded),
        "padded to the longest row, again (A/A)": make_pass(padded),
        "packed, torch": make_pass(DataLoader(packed, NUM_ROWS, shuffle=True, collate_fn=collate)),
        "packed, headway": make_pass(
            headway.Accelerator(cpu=True).prepare(DataLoader(packed, NUM_ROWS, shuffle=True, collate_fn=collate))
        ),
    }
    rows = make_rows(time_interleaved(passes, repeats), 1e9 / lengths.sum())
    share = 1 - lengths.sum() / sum(batch["input_ids"].numel() for batch in padded)
    million_lengths = numpy.clip(rng.lognormal(6, 1, 1_000_000).astype(int), 1, 4096)
    start = time.process_time()
    plan = make_packing_plan(million_lengths, 4096, seed=1)
    seconds = time.process_time() - start
    note = (
        f"Padding: {share:.1%} of all positions in padded batches of {samples_per_batch} samples, "
        f"{packed.plan.padding_share:.2%} in packed ones of {NUM_ROWS} x {LENGTH} tokens. "
        f"The plan of 1,000,000 samples for sequences of 4,096 tokens takes {seconds:.1f} s of CPU time "
        f"and has {plan.padding_share:.2%} of padding."
    )
    save_result("packing", "us per 1000 tokens", rows, note)


if __name__ == "__main__":
    main()
