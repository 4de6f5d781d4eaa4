"""`predict_with_generate` gives the predictions, labels and metrics of transformers' Seq2SeqTrainer."""

import numpy
import pytest
import torch
import transformers

from headway import Trainer, TrainingArguments
from headway.errors import ConfigError, MetricError
from headway.trainer.collation import Collator
from tests.unit.trainer.models import Speaker, llama

SAME = {"per_device_eval_batch_size": 2, "use_cpu": True, "disable_tqdm": True, "report_to": "none"}
STOPS = [1, 3, 4, 5, 6, 7, 8, 9]
"""A quarter of the tokens end a row, so that generated rows differ in length."""


def t5(**given):
    torch.manual_seed(3)
    config = transformers.T5Config(
        vocab_size=32, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, decoder_start_token_id=0, dropout_rate=0.0,
        pad_token_id=0, eos_token_id=1,
    )  # fmt: skip
    model = transformers.T5ForConditionalGeneration(config)
    for parameter in model.parameters():
        parameter.data *= 3  # otherwise, all rows generate the same tokens
    model.generation_config.eos_token_id = STOPS
    return model


def make_rows(num_rows=8):
    """Rows of different lengths, whose labels have one length, so that a mean over labels is a mean over rows."""
    rng = numpy.random.default_rng(0)
    return [
        {"input_ids": rng.integers(3, 32, rng.integers(3, 9)).tolist(), "labels": rng.integers(3, 32, 6).tolist()}
        for _ in range(num_rows)
    ]


def compute_metrics(prediction):
    ids, labels = numpy.asarray(prediction.predictions), numpy.asarray(prediction.label_ids)
    return {"sum": int(ids.sum()), "length": float((ids > 0).sum(1).mean()), "labels": int(labels.sum())}


def make_ours(folder, model=None, **given):
    args = TrainingArguments(folder, log_level="error", predict_with_generate=True, **{**SAME, **given})
    return Trainer(
        model or t5(), args, Collator(pad_token_id=0), eval_dataset=make_rows(), compute_metrics=compute_metrics
    )


def make_theirs(folder, **given):
    args = transformers.Seq2SeqTrainingArguments(
        folder, log_level="error", predict_with_generate=True, **{**SAME, **given}
    )
    return transformers.Seq2SeqTrainer(
        t5(), args, Collator(pad_token_id=0), eval_dataset=make_rows(), compute_metrics=compute_metrics
    )


def drop_speeds(metrics):
    return {
        name: value
        for name, value in metrics.items()
        if "second" not in name and "time" not in name and name != "epoch"
    }


@pytest.mark.parametrize(
    ("given", "options"),
    [
        ({"generation_max_length": 9}, {}),
        ({"generation_num_beams": 3, "generation_max_length": 12}, {}),
        ({"generation_config": transformers.GenerationConfig(max_new_tokens=5, pad_token_id=0, eos_token_id=STOPS,
                                                             decoder_start_token_id=0)}, {}),
        ({"generation_config": transformers.GenerationConfig(max_length=30, pad_token_id=0, eos_token_id=STOPS,
                                                             decoder_start_token_id=0)}, {}),
        ({"generation_max_length": 9}, {"max_length": 15, "num_beams": 2}),
        ({"generation_max_length": 9}, {"max_new_tokens": 24}),
    ],
)  # fmt: skip
def test_predictions_and_metrics_equal_those_of_transformers(given, options, tmp_path):
    ours, theirs = make_ours(tmp_path / "ours", **given), make_theirs(tmp_path / "theirs", **given)
    assert drop_speeds(ours.evaluate(**options)) == pytest.approx(drop_speeds(theirs.evaluate(**options)), rel=1e-5)
    found, expected = ours.predict(make_rows(6), **options), theirs.predict(make_rows(6), **options)
    assert found.predictions.tolist() == expected.predictions.tolist()
    assert found.label_ids.tolist() == expected.label_ids.tolist()
    assert drop_speeds(found.metrics) == pytest.approx(drop_speeds(expected.metrics), rel=1e-5)
    lengths = {int((row > 0).sum()) for row in found.predictions}
    assert len(lengths) > 1, "the rows should end at different tokens"


def test_data_without_labels_is_predicted(tmp_path):
    rows = [{"input_ids": row["input_ids"]} for row in make_rows()]
    given = {"generation_max_length": 9}
    ours = make_ours(tmp_path / "ours", **given).predict(rows)
    theirs = make_theirs(tmp_path / "theirs", **given).predict(rows)
    assert ours.predictions.tolist() == theirs.predictions.tolist()
    assert ours.label_ids is None


def test_default_length_is_that_of_transformers_after_its_first_batch(tmp_path):
    ours, theirs = make_ours(tmp_path / "ours"), make_theirs(tmp_path / "theirs")
    theirs.predict(make_rows(2))
    found = ours.predict(make_rows())
    assert found.predictions.tolist() == theirs.predict(make_rows()).predictions.tolist()
    assert found.predictions.shape == (8, 20)


def make_short(folder):
    """A Trainer that generates four tokens per row by default."""
    return make_ours(folder, generation_config=transformers.GenerationConfig(
        pad_token_id=0, eos_token_id=STOPS, decoder_start_token_id=0, max_length=4))  # fmt: skip


def test_options_of_one_evaluation_are_not_those_of_the_next(tmp_path):
    trainer = make_short(tmp_path)
    short = trainer.predict(make_rows()).predictions.shape
    assert trainer.predict(make_rows(), max_length=18).predictions.shape != short
    assert trainer.predict(make_rows()).predictions.shape == short == (8, 4)


@pytest.mark.parametrize(
    ("entry", "before"),
    [
        ("iterate_predictions", "evaluate"),
        ("iterate_predictions", "predict"),
        ("iterate_predictions", "failed evaluate"),
        ("evaluation_loop", "evaluate"),
        ("prediction_step", "evaluate"),
    ],
)
def test_options_of_an_evaluation_end_with_it(entry, before, tmp_path):
    trainer, rows = make_short(tmp_path), make_rows()
    if before == "evaluate":
        trainer.evaluate(max_length=18)
    elif before == "predict":
        trainer.predict(rows, max_length=18)
    else:
        with pytest.raises(Exception, match="negative dimension"):
            trainer.evaluate(max_length=18, num_beams=-1)
    if entry == "iterate_predictions":
        iterator = trainer.iterate_predictions(rows)
        widths = {next(iterator)[0].shape[1]}
        trainer.evaluate(max_length=18)  # between two batches
        widths |= {predictions.shape[1] for predictions, _ in iterator}
    elif entry == "prediction_step":
        batch = Collator(pad_token_id=0)(rows[:2])
        with torch.no_grad():
            widths = {trainer.prediction_step(trainer.model.eval(), batch, False)[1].shape[1]}
    else:
        widths = {trainer.evaluation_loop(trainer.get_test_dataloader(rows)).predictions.shape[1]}
    assert widths == {4}


def test_nested_evaluation_keeps_the_options_of_the_outer_one(tmp_path):
    trainer, widths = make_short(tmp_path), []

    def compute_nested(prediction):
        if not widths:
            widths.append(prediction.predictions.shape[1])
            assert trainer.predict(make_rows(2)).predictions.shape == (2, 4)
            batch = Collator(pad_token_id=0)(make_rows()[:8])
            widths.append(trainer.prediction_step(trainer.model, batch, False)[1].shape[1])
        return 0.0

    trainer.compute_metrics = compute_nested
    trainer.evaluate(max_length=18)
    assert widths[0] == widths[1] > 4


def test_model_trains_on_labels_and_is_evaluated_by_generation(tmp_path):
    rows = make_rows()
    args = TrainingArguments(tmp_path, log_level="error", predict_with_generate=True, eval_strategy="steps", eval_steps=2,
                             save_strategy="best", metric_for_best_model="length", max_steps=4, **SAME)  # fmt: skip
    trainer = Trainer(t5(), args, Collator(pad_token_id=0), rows, rows, compute_metrics=compute_metrics)
    trainer.train()
    assert trainer.state.best_metric in {entry.get("eval_length") for entry in trainer.state.log_history}


def test_decoder_only_model_continues_the_prompt(tmp_path):
    """The rows have one length, so no prompt is padded."""
    rows = [{"input_ids": [5, 6, index], "labels": [5, 6, index]} for index in range(1, 4)]
    trainer = make_ours(tmp_path, llama(), generation_max_length=8)
    found = trainer.predict(rows).predictions
    model = llama()
    expected = model.generate(torch.tensor([row["input_ids"] for row in rows]), max_length=8, do_sample=False)
    assert found[:, :8].tolist() == expected.tolist()
    assert (found[:, 8:] == 0).all()


def test_padding_token_can_be_that_of_the_generation_config(tmp_path):
    """Without labels, because T5 itself needs a padding token in its config to shift them."""
    rows = [{"input_ids": row["input_ids"]} for row in make_rows()]
    expected = make_ours(tmp_path).predict(rows).predictions
    model = t5()
    model.config.pad_token_id = None
    trainer = make_ours(tmp_path, model)
    assert (trainer.predict(rows).predictions == expected).all()


def test_wrong_use_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match=r"needs a model with generate\(\).*Speaker has no generate\(\)"):
        make_ours(tmp_path, Speaker())
    without_config = t5()
    without_config.generation_config = None
    with pytest.raises(ConfigError, match=r"T5ForConditionalGeneration has no generation_config"):
        make_ours(tmp_path, without_config)
    with pytest.raises(ConfigError, match=r"max_length: arguments of generate\(\) need .*predict_with_generate=True"):
        Trainer(t5(), TrainingArguments(tmp_path, **SAME), eval_dataset=make_rows()).evaluate(max_length=3)
    with pytest.raises(MetricError, match=r"generate\(\) returned 4 rows for a batch of 2"):
        make_ours(tmp_path).evaluate(num_beams=2, num_return_sequences=2)
    with pytest.raises(ConfigError, match="generation_config=7; give a GenerationConfig"):
        TrainingArguments(tmp_path, generation_config=7)
    with pytest.raises(ConfigError, match="sortish_sampler is not an argument: use train_sampling_strategy"):
        TrainingArguments(tmp_path, sortish_sampler=True)
