"""Test that common mistakes with a Trainer raise an error at once, with advice."""

import datasets
import numpy
import pytest
import torch
from torch.utils.data import IterableDataset

from headway import Trainer, TrainingArguments
from headway.errors import CheckpointError, ConfigError, DataError, LossError
from tests.unit.trainer.models import Net, Points, WithLoss, arguments, cross_entropy, make

ROWS = [
    {"x": row, "labels": int(row.sum() > 0)} for row in torch.randn(8, 5, generator=torch.Generator().manual_seed(0))
]


class Stream(IterableDataset):
    def __iter__(self):
        return iter(ROWS)


# ---------------------------------------------------------------- loss


def test_model_that_does_not_accept_labels(tmp_path):
    for data in (Points(8), ROWS):
        with pytest.raises(
            LossError, match=r"Net.forward\(x\) cannot be called with a batch of (2 values|x, labels)"
        ) as exc_info:
            Trainer(Net(), arguments(tmp_path), train_dataset=data).train()
        assert "give the Trainer a loss_function(outputs, labels)" in str(exc_info.value)


def test_model_that_accepts_labels_and_returns_no_loss(tmp_path):
    class Silent(Net):
        def forward(self, x, labels=None):
            return {"logits": self.body(x)}

    with pytest.raises(
        LossError, match="Silent returned no loss \\(keys logits\\); let its forward return a dict with 'loss'"
    ):
        Trainer(Silent(), arguments(tmp_path), train_dataset=ROWS).train()


def test_outputs_without_logits_cannot_be_smoothed(tmp_path):
    class Scores(Net):
        def forward(self, x, labels=None):
            return {"loss": self.body(x).mean(), "scores": self.body(x)}

    settings = arguments(tmp_path, label_smoothing_factor=0.1)
    with pytest.raises(LossError, match="label_smoothing_factor needs outputs with `logits`"):
        Trainer(Scores(), settings, train_dataset=ROWS).train()


# ---------------------------------------------------------------- columns


@pytest.mark.parametrize("make_data", [list, lambda rows: datasets.Dataset.from_list([{**r, "x": r["x"].tolist()} for r in rows])],
                         ids=["rows", "datasets"])  # fmt: skip
def test_dropped_columns_are_named_once(tmp_path, caplog, make_data):
    data = make_data([{**row, "index": 3, "text": "a"} for row in ROWS])
    Trainer(WithLoss(), arguments(tmp_path, num_train_epochs=2), train_dataset=data).train()
    messages = [record.getMessage() for record in caplog.records if "left out" in record.getMessage()]
    assert len(messages) == 1
    assert "forward does not take are left out: index, text; remove_unused_columns=False keeps them" in messages[0]


@pytest.mark.parametrize("make_data", [list, datasets.Dataset.from_list], ids=["rows", "datasets"])
@pytest.mark.parametrize("columns", [{"text": "a", "label": 1}, {"text": "a"}])
def test_texts_that_are_not_tokenized(tmp_path, make_data, columns):
    with pytest.raises(
        DataError, match=r"takes only labels; it takes x\. Provide those \(tokenize texts, for example\)"
    ):
        Trainer(WithLoss(), arguments(tmp_path), train_dataset=make_data([columns] * 8)).train()


# ---------------------------------------------------------------- arguments


def test_exchanged_arguments_and_model_are_refused_with_the_right_order(tmp_path):
    args = arguments(tmp_path)
    with pytest.raises(
        ConfigError, match=r"the arguments were passed in place of the model; give Trainer\(model, args"
    ):
        Trainer(args, Net())
    with pytest.raises(
        ConfigError, match=r"the Trainer got tests's Points as args, which are headway.TrainingArguments"
    ):
        Trainer(Net(), Points())


def test_arguments_of_transformers_are_refused_with_a_remedy(tmp_path):
    import transformers

    theirs = transformers.TrainingArguments(str(tmp_path), use_cpu=True, report_to=[])
    with pytest.raises(ConfigError, match=r"got transformers's TrainingArguments as args.*with the same arguments"):
        Trainer(Net(), theirs)


def test_streams_where_a_length_is_needed(tmp_path):
    with pytest.raises(
        ConfigError, match="the training data has no length, so epochs cannot be counted; set max_steps"
    ):
        Trainer(WithLoss(), arguments(tmp_path), train_dataset=Stream()).train()
    grouped = arguments(tmp_path, max_steps=2, train_sampling_strategy="group_by_length")
    with pytest.raises(DataError, match="a stream has no length and no rows to choose from"):
        Trainer(WithLoss(), grouped, train_dataset=Stream()).train()
    largest = arguments(tmp_path, max_steps=2, per_device_train_batch_size="largest")
    with pytest.raises(ConfigError, match="a stream has none to try; give a number"):
        Trainer(WithLoss(), largest, train_dataset=Stream()).train()
    with pytest.raises(DataError, match="a generator is not a dataset"):
        Trainer(WithLoss(), arguments(tmp_path), train_dataset=(row for row in ROWS)).train()


# ---------------------------------------------------------------- resume


def test_folder_that_is_no_checkpoint(tmp_path):
    def told(asked):
        with pytest.raises(CheckpointError) as error:
            make(tmp_path).train(resume_from_checkpoint=asked)
        return str(error.value)

    assert "'nowhere' does not exist; this run has no checkpoint; True resumes" in told("nowhere")
    make(tmp_path, save_strategy="epoch").train()
    folder = tmp_path / "run"
    assert f"does not exist; {folder}/checkpoints holds checkpoint_0;" in told("checkpoint_1")
    assert f"is a run's folder, not a checkpoint; {folder}/checkpoints holds checkpoint_0" in told(folder)
    theirs = tmp_path / "checkpoint-500"
    theirs.mkdir()
    (theirs / "trainer_state.json").write_text("{}")
    assert "is a checkpoint of transformers, which cannot be resumed" in told(theirs)
    assert "is a file; a checkpoint is a folder" in told(theirs / "trainer_state.json")
    assert TrainingArguments(resume_from_checkpoint="true").resume_from_checkpoint is True


def test_loss_function_needs_no_labels_in_forward(tmp_path):
    assert (
        Trainer(Net(), arguments(tmp_path), train_dataset=Points(8), loss_function=cross_entropy).train().global_step
        == 2
    )


def test_text_and_dicts_are_no_datasets(tmp_path):
    trainer = Trainer(Net(), arguments(tmp_path), eval_dataset=ROWS)
    with pytest.raises(DataError, match="a str is not a dataset"):
        trainer.evaluate("validation")
    several = Trainer(Net(), arguments(tmp_path), eval_dataset={"first": ROWS, "second": ROWS})
    with pytest.raises(DataError, match="choose one by its name: first, second"):
        several.get_eval_dataloader()
    assert len(several.get_eval_dataloader("second").dataset) == len(ROWS)


def test_largest_batch_size_without_training_data_is_an_error(tmp_path):
    trainer = Trainer(Net(), arguments(tmp_path, per_device_train_batch_size="largest"), eval_dataset=ROWS)
    with pytest.raises(DataError, match="was given no train_dataset"):
        trainer.find_largest_batch_size()


@pytest.mark.parametrize(
    "value", [torch.tensor(0.5), torch.tensor([0.5]), torch.tensor([0.5]).numpy(), numpy.float32(0.5)]
)
def test_metric_of_one_element_is_a_number(tmp_path, value):
    trainer = Trainer(
        Net(),
        arguments(tmp_path),
        eval_dataset=ROWS,
        loss_function=cross_entropy,
        compute_metrics=lambda _: {"score": value},
    )
    assert trainer.evaluate()["eval_score"] == 0.5
