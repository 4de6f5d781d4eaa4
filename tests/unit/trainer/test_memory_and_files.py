"""Test the Trainer when memory runs out, the files that it writes, and its output."""

import json
from dataclasses import dataclass

import pytest
import torch
from torch._subclasses.fake_tensor import is_fake

from headway import Trainer, TrainerCallback
from headway.core.tracking.report import load
from headway.core.tracking.report.event_kinds import count_kinds
from headway.core.tracking.report.key_figures import list_key_figures
from headway.core.tracking.runlog_reader import read_run
from headway.errors import BatchSizeError, ConfigError, MemoryExhausted
from headway.forecasting.device import local_device
from headway.trainer import largest_batch
from headway.trainer.display import PrinterCallback, ProgressCallback
from tests.unit.trainer.models import Net, Points, arguments, cross_entropy, losses, make, texts, weights

# ---------------------------------------------------------------- memory


class Small(Net):
    """Model that runs out of memory in training above a number of rows."""

    def __init__(self, most):
        super().__init__()
        self.most, self.seen = most, []

    def forward(self, x):
        if self.training:
            self.seen.append(len(x))
            if len(x) > self.most:
                raise torch.OutOfMemoryError("CUDA out of memory.")
        return super().forward(x)


def test_training_continues_in_smaller_pieces_after_out_of_memory(tmp_path):
    given = {"per_device_train_batch_size": 16, "num_train_epochs": 2, "gradient_accumulation_steps": 2}
    whole = make(tmp_path, data=Points(40), **given)
    whole.train()
    cut = make(tmp_path, Small(5), data=Points(40), auto_find_batch_size=True, **given)
    cut.train()
    assert losses(cut) == pytest.approx(losses(whole), abs=1e-6)
    assert torch.allclose(weights(cut.model), weights(whole.model), atol=1e-6)
    assert cut.model.seen[:6] == [16, 8, 4, 4, 4, 4]
    assert cut.model.seen.count(16) == 1, "the run did not start again"
    with pytest.raises(MemoryExhausted):
        make(tmp_path, Small(0), auto_find_batch_size=True).train()


def test_pieces_of_texts_are_weighted_by_their_labels(tmp_path):
    from tests.unit.trainer.models import llama

    class Tight(type(llama())):
        def forward(self, input_ids=None, **kwargs):
            if self.training and len(input_ids) > 3:
                raise torch.OutOfMemoryError("CUDA out of memory.")
            return super().forward(input_ids=input_ids, **kwargs)

    given = {"per_device_train_batch_size": 8, "train_sampling_strategy": "sequential", "remove_unused_columns": False}
    whole = Trainer(llama(), arguments(tmp_path, **given), train_dataset=texts(16))
    whole.train()
    tight = llama()
    tight.__class__ = Tight
    cut = Trainer(tight, arguments(tmp_path, auto_find_batch_size=True, **given), train_dataset=texts(16))
    cut.train()
    assert losses(cut) == pytest.approx(losses(whole), rel=1e-5)


def test_largest_batch_is_searched(tmp_path, monkeypatch):
    monkeypatch.setenv("HEADWAY_HOME", str(tmp_path / "home"))
    model = Small(13)
    before = weights(model)
    trainer = make(tmp_path, model, data=Points(64), per_device_train_batch_size="largest", save_strategy="epoch")
    trainer.train()
    assert trainer.state.train_batch_size == 13
    assert trainer.state.global_step == 5
    reference = make(tmp_path / "b", data=Points(64), per_device_train_batch_size=13)
    assert torch.equal(before, weights(reference.model)), "both begin alike"
    reference.train()
    assert losses(trainer) == losses(reference), "trials leave no trace"
    with pytest.raises(BatchSizeError):
        make(tmp_path, Small(0), per_device_train_batch_size="largest").train()
    with pytest.raises(ConfigError, match="tries updates"):
        Trainer(model, arguments(tmp_path, per_device_train_batch_size="largest"),
                optimizers=(torch.optim.SGD(model.parameters()), None))  # fmt: skip


@pytest.mark.parametrize("returns", [True, False])
def test_largest_batch_is_searched_with_an_overridden_optimizer(tmp_path, monkeypatch, returns):
    monkeypatch.setenv("HEADWAY_HOME", str(tmp_path / "home"))
    made = []

    class Own(Trainer):
        def create_optimizer(self):
            if self.optimizer is None:
                self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
                made.append(self.optimizer)
            return self.optimizer if returns else None

    given = arguments(tmp_path, per_device_train_batch_size="largest")
    trainer = Own(Small(13), given, train_dataset=Points(64), loss_function=cross_entropy)
    assert trainer.find_largest_batch_size() == 13
    assert trainer.optimizer is None
    assert len(made) > 1  # no trial continues with the optimizer of another
    trainer.train()
    assert trainer.state.train_batch_size == 13


class Limited(Net):
    """Model that runs out of memory above a number of rows in real steps, but not in a forecast."""

    def __init__(self, most):
        super().__init__()
        self.most, self.tried = most, []

    def forward(self, x):
        if self.training and not is_fake(x):
            self.tried.append(len(x))
            if len(x) > self.most:
                raise torch.OutOfMemoryError("CUDA out of memory.")
        return super().forward(x)


def search_batch_size(tmp_path, monkeypatch, model, budget):
    monkeypatch.setattr(local_device, "read_free_address_space", lambda: budget)
    monkeypatch.setattr(largest_batch, "read_free_address_space", lambda: budget)
    trainer = make(tmp_path, model, data=Points(4000), per_device_train_batch_size="largest")
    before = weights(model)
    found = trainer.find_largest_batch_size()
    assert torch.equal(before, weights(model))
    return found, list(dict.fromkeys(model.tried))


def test_search_starts_at_the_forecast_size(tmp_path, monkeypatch):
    probe, tried = search_batch_size(tmp_path, monkeypatch, Limited(4000), 50_000)
    first = tried[0]
    assert 8 < first < probe, "the stand-in for a device has more memory than the budget says"
    found, tried = search_batch_size(tmp_path, monkeypatch, Limited(first + 1), 50_000)
    assert tried == [first, first + int(0.05 * first)]
    assert found == first


def test_search_works_without_a_forecast(tmp_path, monkeypatch, caplog):
    class Reads(Limited):
        def forward(self, x):
            return super().forward(x * float(x.sum() > -1e9))

    with caplog.at_level("INFO", "headway"):
        found, tried = search_batch_size(tmp_path, monkeypatch, Reads(20), 50_000)
    assert found == 20
    assert tried[0] == 8
    lines = [record.getMessage() for record in caplog.records if "cannot be forecast" in record.getMessage()]
    assert len(lines) == 1
    assert "the search begins with 8" in lines[0]


# ---------------------------------------------------------------- files and output


def test_saved_model_is_read_by_transformers(tmp_path):
    import transformers

    config = transformers.BertConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, vocab_size=60
    )
    model = transformers.BertForMaskedLM(config)
    trainer = Trainer(model, arguments(tmp_path), train_dataset=[{"input_ids": [1, 2], "labels": [3, -100]}] * 4)
    trainer.train()
    trainer.save_model(tmp_path / "saved")
    again = transformers.BertForMaskedLM.from_pretrained(tmp_path / "saved")
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name]), name
    assert json.loads((tmp_path / "saved" / "training_args.json").read_text())["learning_rate"] == 0.01
    trainer.save_metrics("train", {"a": 1.0})
    assert json.loads((tmp_path / "run" / "train_results.json").read_text()) == {"a": 1.0}


def test_pop_callback_removes_the_given_object_and_not_an_equal_one(tmp_path):
    @dataclass
    class Note(TrainerCallback):
        text: str = "equal"

        def on_log(self, *args, **kwargs): ...

    first, second = Note(), Note()
    trainer = make(tmp_path, callbacks=[first, second])
    assert trainer.pop_callback(second) is second
    assert [each is first for each in trainer.callback_handler.callbacks if isinstance(each, Note)] == [True]


def test_progress_bars_and_final_table_are_shown_unless_the_log_is_quiet(tmp_path, capsys):
    trainer = make(tmp_path, disable_tqdm=False, evaluation=Points(4), eval_strategy="epoch")
    trainer.train()
    output = capsys.readouterr().err
    assert "training: 5/5 | loss" in output
    assert "evaluation: 1/1" in output
    assert "samples per second" in output
    assert "last eval_loss" in output
    quiet = make(tmp_path, log_level="error", disable_tqdm=False)
    quiet.train()
    assert "samples per second" not in capsys.readouterr().err
    assert isinstance(trainer.pop_callback(ProgressCallback), ProgressCallback)
    assert trainer.pop_callback(ProgressCallback) is None
    trainer.add_callback(PrinterCallback)
    trainer.train()
    assert "update 5: loss" in capsys.readouterr().out


def test_rows_of_similar_length_share_a_batch(tmp_path):
    from tests.unit.trainer.models import llama

    widths = []

    class Look(TrainerCallback):
        def on_train_begin(self, args, state, control, train_dataloader, **kwargs):
            for batch in train_dataloader:
                widths.append([int((row != 0).sum()) for row in batch["input_ids"]])

    rows = texts(64, 2, 40)
    for grouped in (False, True):
        Trainer(
            llama(), arguments(tmp_path, group_by_length=grouped, max_steps=1), train_dataset=rows, callbacks=[Look]
        ).train()
    padding = [sum(max(batch) * len(batch) - sum(batch) for batch in half) for half in (widths[:16], widths[16:])]
    assert padding[1] * 4 < padding[0]
    assert sorted(width for batch in widths[16:] for width in batch) == sorted(len(row["input_ids"]) for row in rows)
    assert max(widths[16]) == max(len(row["input_ids"]) for row in rows), "the longest row is not in the first batch"


def test_training_followed_by_evaluation_is_one_attempt(tmp_path):
    """A training that begins after another has ended is no restart either."""
    trainer = make(tmp_path, evaluation=Points(4))
    trainer.train()
    trainer.evaluate()
    trainer.evaluate(metric_key_prefix="test")
    run = read_run(tmp_path / "run")
    assert len(run.starts) == 1
    assert run.events == []
    assert run.is_ended
    assert run.summary["seconds"] > trainer.state.log_history[-3]["train_runtime"]
    (data,) = load([tmp_path / "run"])
    assert {"loss", "eval_loss", "test_loss"} <= set(data.series)
    assert data.events == []
    assert [fact.note for fact in list_key_figures(data) if fact.name == "Duration"] == [""]
    assert "restart" not in count_kinds([data])
    trainer.train()
    (data,) = load([tmp_path / "run"])
    assert [event.kind for event in data.events] == ["started_over"]
