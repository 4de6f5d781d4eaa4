"""Test data without labels on two ranks: an error on both if no rank has a label, the exact update if one rank has some."""

import logging

import pytest
import torch
from torch.nn.functional import cross_entropy

from headway import Trainer, TrainingArguments
from headway.errors import DataError
from tests.distributed.ranks import run_ranks
from tests.unit.trainer.models import Speaker

ROWS = torch.randint(1, 60, (8, 6), generator=torch.Generator().manual_seed(3))
LEARNING_RATE = 0.5


def train(layout: str, folder: str, labeled: list[int]) -> tuple[str, int, list[str], torch.Tensor | None]:
    """Train on `ROWS` in batches of two per rank. Only the rows with these indices have labels.

    Returns:
        Error, number of updates, messages of all warnings, and the bias of the head (with "fsdp", on the main process only).
    """
    messages: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: messages.append(record.getMessage())
    logging.getLogger("headway").addHandler(handler)
    rows = [
        {"input_ids": row.tolist(), "labels": row.tolist() if index in labeled else [-100] * 6}
        for index, row in enumerate(ROWS)
    ]
    arguments = TrainingArguments(
        output_dir=folder, use_cpu=True, disable_tqdm=True, save_strategy="no", max_steps=2, logging_steps=1, report_to="none",
        per_device_train_batch_size=2, train_sampling_strategy="sequential", learning_rate=LEARNING_RATE, max_grad_norm=0.0,
        optim="sgd", lr_scheduler_type="constant", accelerator_config={"strategy": layout},
    )  # fmt: skip
    trainer = Trainer(Speaker(), arguments, train_dataset=rows)
    error = ""
    try:
        trainer.train()
    except DataError as raised:
        error = str(raised)
    weights = {} if error else trainer.accelerator.get_state_dict(trainer.model)
    return error, trainer.state.global_step, messages, weights.get("head.bias")


def train_in_plain_pytorch(labeled: list[int]) -> torch.Tensor:
    """Return the bias of the head after two updates, each on the labeled ones of four rows."""
    model = Speaker()
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    for first in (0, 4):
        rows = ROWS[[index for index in labeled if first <= index < first + 4]]
        optimizer.zero_grad()
        cross_entropy(model(rows)["logits"].flatten(0, 1), rows.flatten()).backward()
        optimizer.step()
    return model.head.bias.detach()


@pytest.mark.parametrize("layout", ["ddp", "fsdp"])
def test_no_label_on_any_rank_is_an_error_on_all(tmp_path, layout):
    for error, num_updates, _, _ in run_ranks(train, 2, layout, str(tmp_path), []):
        assert (
            "no label of the training data counts: in all 2 accumulation windows so far, 'labels' contained only -100"
            in error
        )
        assert num_updates == 0


@pytest.mark.parametrize("layout", ["ddp", "fsdp"])
def test_a_rank_without_labels_is_silent_and_exact(tmp_path, layout):
    labeled = [0, 1, 4]
    results = run_ranks(train, 2, layout, str(tmp_path), labeled)
    for error, num_updates, messages, _ in results:
        assert error == ""
        assert num_updates == 2
        assert messages == []
    for bias in (results[0][-1],) if layout == "fsdp" else (results[0][-1], results[1][-1]):
        torch.testing.assert_close(bias, train_in_plain_pytorch(labeled))
