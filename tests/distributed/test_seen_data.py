"""Totals of samples and tokens over ranks: each data shard counts once, and other world sizes and layouts continue them."""

import logging

import pytest
import torch
from torch.utils.data import DataLoader

from headway import Accelerator, ProjectConfiguration, Trainer, TrainingArguments
from headway.trainer.collation import Collator
from tests.distributed.ranks import run_ranks
from tests.unit.trainer.models import Speaker, llama, texts

ROWS = texts(21)
"""Rows of tokens of different lengths. No number of ranks here divides their number."""
NUM_TOKENS = sum(len(row["input_ids"]) for row in ROWS)


def train(folder, strategy, num_updates, num_epochs=2):
    """Resume and train until `num_updates`, save, and return the totals before and after."""
    accelerator = Accelerator(
        cpu=True, strategy=strategy, project_config=ProjectConfiguration(folder, automatic_checkpoint_naming=True)
    )
    model = llama()
    loader = DataLoader(
        ROWS, batch_size=12 // accelerator.strategy.data_shard.count, collate_fn=Collator(pad_token_id=0)
    )
    model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
    accelerator.resume("latest")
    meter = accelerator.throughput
    before = meter.seen()
    for _ in accelerator.epochs(num_epochs):
        for batch in loader:
            mask = batch["attention_mask"][: loader.num_valid]
            with accelerator.accumulate(model):
                accelerator.backward(model(**batch).loss, weight=float((batch["labels"][:, 1:] != -100).sum()))
                optimizer.step()
                optimizer.zero_grad()
            meter.add(tokens=mask.sum())
            if accelerator.num_updates == num_updates:
                accelerator.save_state()
                return before, meter.seen()
    return before, meter.seen()


@pytest.mark.parametrize("second", [(1, "ddp"), (2, "fsdp"), (2, "tp=2")], ids=str)
def test_totals_continue_in_another_world_size_or_layout(second, tmp_path):
    """12 and 9 rows in the two updates of an epoch; the run is cut after the first update of the second epoch."""
    found = run_ranks(train, 2, str(tmp_path), "ddp", 3)
    first_rows = sum(len(row["input_ids"]) for row in ROWS[:12])
    half = {"num_updates": 3, "samples_seen": 33, "tokens_seen": NUM_TOKENS + first_rows}
    assert found == [({"num_updates": 0}, half)] * 2
    num_ranks, strategy = second
    whole = {"num_updates": 4, "samples_seen": 42, "tokens_seen": 2 * NUM_TOKENS}
    assert run_ranks(train, num_ranks, str(tmp_path), strategy, None) == [(half, whole)] * num_ranks


def train_trainer(folder, num_rows, resume):
    args = TrainingArguments(
        folder, use_cpu=True, disable_tqdm=True, per_device_train_batch_size=num_rows, num_train_epochs=2, save_steps=3,
        include_num_input_tokens_seen="non_padding", logging_steps=1, log_level="error", max_steps=-1,
    )  # fmt: skip
    trainer = Trainer(Speaker(), args, Collator(pad_token_id=0), ROWS)
    trainer.train(resume_from_checkpoint=resume)
    return [each["num_input_tokens_seen"] for each in trainer.state.log_history]


def test_trainer_counts_all_ranks_rows_and_none_that_pad_a_batch(tmp_path):
    found = run_ranks(train_trainer, 2, tmp_path, 6, None)
    assert found[0] == found[1]
    assert found[0][-1] == 2 * NUM_TOKENS
    assert found[0][1] == NUM_TOKENS  # after the two updates of the first epoch
    (resumed,) = run_ranks(train_trainer, 1, tmp_path, 12, str(tmp_path / "checkpoints" / "checkpoint_0"))
    assert resumed == found[0]


def count_on_some_ranks(strategy, adding):
    """Add tokens on the ranks in `adding`. Return the total number of tokens and the warnings of this rank."""
    messages = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: messages.append(record.getMessage())
    logging.getLogger("headway").addHandler(handler)
    accelerator = Accelerator(cpu=True, strategy=strategy)
    accelerator.prepare(llama())
    if accelerator.process_index in adding:
        accelerator.throughput.add(tokens=0)
        accelerator.throughput.add(tokens=3)
    return [accelerator.throughput.seen().get("tokens_seen", 0) for _ in range(2)], messages


@pytest.mark.parametrize(
    ("strategy", "adding", "total", "warns"),
    [("ddp", (0, 1), 6, False), ("ddp", (1,), 3, True), ("ddp", (), 0, False), ("tp=2", (0,), 3, False)],
)
def test_tokens_that_only_some_ranks_add_are_a_warning(strategy, adding, total, warns):
    """Both ranks of `tp=2` have one data shard, so it is enough if one of them adds its tokens."""
    results = run_ranks(count_on_some_ranks, 2, strategy, adding)
    assert [totals for totals, _ in results] == [[total] * 2] * 2
    text = "throughput.add() was called on the ranks of data shard 1, but not on those of shard 0"
    warnings = [message for message in results[0][1] if text in message]
    assert len(warnings) == int(warns)
