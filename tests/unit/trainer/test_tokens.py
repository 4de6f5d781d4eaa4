"""`include_num_input_tokens_seen` counts what transformers' Trainer counts, also after a resume, and logs it."""

import json

import pytest
import torch
import transformers

from headway import Trainer, TrainerCallback, TrainingArguments
from headway.errors import ConfigError
from headway.trainer.collation import Collator
from tests.unit.trainer.models import Speaker, arguments, llama, texts

SAME = {
    "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "num_train_epochs": 2, "logging_steps": 2,
    "train_sampling_strategy": "sequential", "use_cpu": True, "disable_tqdm": True, "save_steps": 5, "max_grad_norm": 0,
}  # fmt: skip


class ReadState(TrainerCallback):
    """Callback for either Trainer that reads the state after each update."""

    def __init__(self):
        self.found = []

    def on_step_end(self, args, state, control, **kwargs):
        self.found.append((state.global_step, state.num_input_tokens_seen))


class TheirReadState(transformers.TrainerCallback):
    on_step_end = ReadState.on_step_end

    def __init__(self):
        self.found = []


def train(package, folder, mode, resume=None):
    """Train with one of the two libraries, and return the counts after each update and those in the log."""
    trainer_class, args_class, callback = (
        (Trainer, TrainingArguments, ReadState())
        if package == "ours"
        else (transformers.Trainer, transformers.TrainingArguments, TheirReadState())
    )
    args = args_class(output_dir=folder, include_num_input_tokens_seen=mode, **SAME)
    trainer = trainer_class(llama(), args, Collator(pad_token_id=0), texts(), callbacks=[callback])
    output = trainer.train(resume_from_checkpoint=resume)
    logged = [(entry["step"], entry.get("num_input_tokens_seen")) for entry in trainer.state.log_history]
    return callback.found, logged, trainer.state.num_input_tokens_seen, output.metrics.get("num_input_tokens_seen")


@pytest.mark.parametrize("mode", [True, "all", "non_padding", "no", False])
def test_counts_equal_those_of_transformers(mode, tmp_path):
    ours = train("ours", tmp_path / "ours", mode)
    assert ours == train("theirs", tmp_path / "theirs", mode)
    num_tokens = 2 * sum(len(row["input_ids"]) for row in texts())
    if mode == "non_padding":
        assert ours[2] == num_tokens
    elif mode in (True, "all"):
        assert ours[2] > num_tokens
    else:
        assert (ours[2], ours[3]) == (0, None)


def test_resumed_counts_equal_those_of_transformers(tmp_path):
    """The checkpoint of update 5 is the end of an epoch."""
    whole = train("ours", tmp_path / "ours", "non_padding")
    ours = train(
        "ours", tmp_path / "ours", "non_padding", resume=str(tmp_path / "ours" / "checkpoints" / "checkpoint_0")
    )
    train("theirs", tmp_path / "theirs", "non_padding")
    theirs = train("theirs", tmp_path / "theirs", "non_padding", resume=str(tmp_path / "theirs" / "checkpoint-5"))
    assert ours == theirs
    assert ours[0] == whole[0][5:]
    assert ours[1:] == whole[1:]


def test_without_attention_mask_the_pad_token_is_padding(tmp_path):
    class Tokenizer:
        pad_token_id = 0

        def save_pretrained(self, folder):
            pass

    def collate(rows):
        return {
            name: torch.nn.utils.rnn.pad_sequence([torch.tensor(row[name]) for row in rows], batch_first=True)
            for name in ("input_ids", "labels")
        }

    args = arguments(tmp_path, include_num_input_tokens_seen="non_padding")
    trainer = Trainer(Speaker(), args, collate, texts(), processing_class=Tokenizer())
    trainer.train()
    assert trainer.state.num_input_tokens_seen == sum(len(row["input_ids"]) for row in texts())


def test_log_of_the_run_has_samples_and_tokens(tmp_path):
    trainer = Trainer(Speaker(), arguments(tmp_path), Collator(pad_token_id=0), texts(10))
    trainer.train()
    rows = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    losses = [row.get("values", row) for row in rows if "loss" in row.get("values", row)]
    assert [row["samples_seen"] for row in losses] == [4, 8, 10]
    widths = [max(len(row["input_ids"]) for row in texts(10)[start : start + 4]) for start in (0, 4, 8)]
    assert [row["tokens_seen"] for row in losses][-1] >= min(widths) * 10
    assert "num_input_tokens_seen" not in losses[-1]


def test_missing_main_input_is_a_warning(tmp_path, caplog):
    model = Speaker()
    model.main_input_name = "pixel_values"
    trainer = Trainer(
        model, arguments(tmp_path, include_num_input_tokens_seen="all"), Collator(pad_token_id=0), texts(4)
    )
    trainer.train()
    assert trainer.state.num_input_tokens_seen == 0
    assert sum("counts nothing: a training batch has no tensor 'pixel_values'" in each for each in caplog.messages) == 1


def test_other_values_are_errors(tmp_path):
    with pytest.raises(ConfigError, match="include_num_input_tokens_seen='padding'; allowed: all, non_padding, no"):
        TrainingArguments(tmp_path, include_num_input_tokens_seen="padding")
    parser = transformers.HfArgumentParser(TrainingArguments)
    (args,) = parser.parse_args_into_dataclasses(["--include_num_input_tokens_seen", "non_padding"])
    assert args.include_num_input_tokens_seen == "non_padding"
