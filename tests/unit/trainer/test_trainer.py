"""Test the Trainer on one process: events, strategies, the best model, resuming, and consecutive trainings."""

import gc
import weakref
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import IterableDataset, TensorDataset

from headway import EarlyStoppingCallback, Trainer, TrainerCallback
from headway.core.tracking.runlog_reader import read_run
from headway.errors import ConfigError, DataError, LossError
from headway.trainer.callbacks import EVENTS
from tests.unit.trainer.models import (
    Net,
    Points,
    WithLoss,
    arguments,
    bert,
    classes,
    cross_entropy,
    losses,
    make,
    texts,
    weights,
)


class Listener:
    """Callback that records every event with the state of the training."""

    def __init__(self):
        self.told = []

    def __getattr__(self, name):
        if name not in EVENTS:
            raise AttributeError(name)

        def note(args, state, control, **kwargs):
            assert {"model", "optimizer", "lr_scheduler", "train_dataloader", "processing_class"} <= set(kwargs)
            self.told.append((name.removeprefix("on_"), state.global_step))

        return note


# ---------------------------------------------------------------- loop


def test_events_occur_in_the_order_of_the_docstring(tmp_path):
    listener = Listener()
    given = {"gradient_accumulation_steps": 2, "eval_strategy": "epoch", "save_strategy": "epoch", "logging_steps": 2}
    trainer = make(tmp_path, callbacks=[listener], data=Points(16), evaluation=Points(4), **given)
    trainer.train()
    update = ["step_begin", "substep_end", "pre_optimizer_step", "optimizer_step", "step_end"]
    names = [name for name, _ in listener.told]
    assert names == [
        "init_end", "train_begin", "epoch_begin", *update, *update, "log", "epoch_end", "prediction_step", "log", "evaluate", "save",
        "log", "train_end",
    ]  # fmt: skip
    steps = dict(listener.told)
    assert (steps["pre_optimizer_step"], steps["step_end"]) == (1, 2)
    drawn = Trainer.__doc__
    looped = [
        "train_begin",
        "epoch_begin",
        "step_begin",
        "pre_optimizer_step",
        "optimizer_step",
        "step_end",
        "epoch_end",
        "train_end",
    ]
    assert [name for name in dict.fromkeys(names) if name in looped] == looped
    places = [drawn.index(f"on_{name}") for name in looped]
    assert places == sorted(places)
    assert all(event in drawn for event in EVENTS if event != "on_predict")


def test_results_contain_the_values_that_notebooks_print(tmp_path):
    from headway import print_summary

    output = make(tmp_path).train()
    expected = {
        "train_runtime",
        "train_samples_per_second",
        "train_steps_per_second",
        "train_loss",
        "epoch",
        "train_memory_peak",
    }
    assert set(output.metrics) == expected
    assert output.metrics["train_memory_peak"] > 1 << 20
    assert output.metrics["epoch"] == 1.0
    step, loss, metrics = output
    assert (step, loss) == (5, output.training_loss)
    seconds = metrics["train_runtime"]
    assert metrics["train_samples_per_second"] * seconds == pytest.approx(20, rel=0.01)
    print_summary(output)


def test_memory_peaks_of_phases_are_logged_on_request(tmp_path):
    output = make(tmp_path, skip_memory_metrics=False, eval_strategy="epoch", evaluation=Points(4)).train()
    assert {"train_memory_peak_forward", "train_memory_peak_backward", "train_memory_peak_evaluation"} <= set(
        output.metrics
    )


@pytest.mark.parametrize(
    ("given", "num_updates", "epoch"),
    [({"num_train_epochs": 2}, 10, 2.0), ({"num_train_epochs": 0.5}, 3, 0.6), ({"max_steps": 7}, 7, 1.4),
     ({"max_steps": 12, "gradient_accumulation_steps": 2}, 12, 4.0), ({"num_train_epochs": 0}, 0, 0.0)],
    ids=["epochs", "half an epoch", "updates", "windows", "nothing"],
)  # fmt: skip
def test_number_of_updates_and_epochs(tmp_path, given, num_updates, epoch):
    trainer = make(tmp_path, **given)
    assert trainer.train().global_step == num_updates
    assert trainer.state.epoch == pytest.approx(epoch)


def test_batch_may_be_a_dict_a_tuple_or_a_tensor(tmp_path):
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(5))

        def forward(self, x):
            return (x - self.weight).square().mean()

    x = Points(20).x
    curves = []
    for data, model, function in [
        ([{"x": row, "labels": int(row.sum() > 0)} for row in x], WithLoss(), None),
        ([{"x": row.tolist(), "label": int(row.sum() > 0), "name": "unused"} for row in x], WithLoss(), None),
        ([{"x": row, "label": int(row.sum() > 0)} for row in x], Net(), cross_entropy),
        (Points(20), Net(), cross_entropy), (TensorDataset(x, (x.sum(1) > 0).long()), WithLoss(), None),
    ]:  # fmt: skip
        trainer = Trainer(model, arguments(tmp_path), train_dataset=data, eval_dataset=data, loss_function=function)
        trainer.train()
        curves.append(losses(trainer))
        assert trainer.evaluate()["eval_loss"] < 0.9
    assert all(curve == pytest.approx(curves[0], abs=1e-6) for curve in curves[1:])
    trainer = Trainer(Own(), arguments(tmp_path), train_dataset=list(x), eval_dataset=list(x))
    trainer.train()
    assert trainer.evaluate()["eval_loss"] < x.square().mean()


def test_columns_that_forward_does_not_accept_are_removed(tmp_path):
    from datasets import Dataset

    rows = {"x": Points(20).x.tolist(), "label": Points(20).y.tolist(), "text": ["a"] * 20}
    trainer = Trainer(WithLoss(), arguments(tmp_path), train_dataset=Dataset.from_dict(rows))
    trainer.train()
    plain = Trainer(WithLoss(), arguments(tmp_path), train_dataset=Points(20))
    plain.train()
    assert losses(trainer) == pytest.approx(losses(plain), abs=1e-6)
    with pytest.raises(DataError, match="takes only labels"):
        Trainer(WithLoss(), arguments(tmp_path), train_dataset=Dataset.from_dict({"text": ["a"]})).train()


class Stream(IterableDataset):
    def __iter__(self):
        yield from (Points(20)[index] for index in range(20))


def test_stream_needs_a_number_of_updates(tmp_path):
    trainer = make(tmp_path, data=Stream(), max_steps=8)
    assert trainer.train().global_step == 8
    with pytest.raises(ConfigError, match="set max_steps"):
        make(tmp_path, data=Stream()).train()


def test_epoch_of_a_stream_ends_after_its_last_batch(tmp_path):
    epochs = []

    class Note(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            epochs.append(state.epoch)

        def on_epoch_end(self, args, state, control, **kwargs):
            epochs.append(state.epoch)

    given = {"max_steps": 8, "gradient_accumulation_steps": 2, "per_device_train_batch_size": 2}
    make(tmp_path, data=Stream(), callbacks=[Note], **given).train()
    assert epochs == [0.125, 0.25, 0.375, 0.5, 0.625, 1.0, 1.125, 1.25, 1.375, 1.375]


def test_values_logged_at_the_end_of_training_reach_the_log(tmp_path):
    class Final(TrainerCallback):
        def on_train_end(self, args, state, control, **kwargs):
            trainer.log({"final": 1.0})

    trainer = make(tmp_path, callbacks=[Final])
    trainer.train()
    assert [value for *_, value in read_run(tmp_path / "run").values["final"]] == [1.0]


def test_frozen_batch_norm_stays_in_evaluation_mode(tmp_path):
    modes = []

    class Freeze(TrainerCallback):
        def on_train_begin(self, args, state, control, model, **kwargs):
            model[1].eval()

        def on_step_begin(self, args, state, control, model, **kwargs):
            modes.append([module.training for module in (model, model[0], model[1])])

    model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4))
    trainer = make(tmp_path, model, callbacks=[Freeze], evaluation=Points(8), eval_strategy="steps", eval_steps=2)
    trainer.train()
    trainer.evaluate()
    assert modes == [[True, True, False]] * 5
    assert [module.training for module in (model, model[0], model[1])] == [True, True, False]


def test_missing_data_is_reported(tmp_path):
    with pytest.raises(ConfigError, match="needs a model"):
        Trainer(args=arguments(tmp_path))
    with pytest.raises(ConfigError, match="two names"):
        Trainer(Net(), arguments(tmp_path), compute_loss_func=cross_entropy, loss_function=cross_entropy)
    with pytest.raises(DataError, match="no train_dataset"):
        Trainer(Net(), arguments(tmp_path)).train()
    with pytest.raises(DataError, match="no eval_dataset"):
        make(tmp_path).evaluate()
    with pytest.raises(LossError, match="returned no loss"):
        Trainer(Net(), arguments(tmp_path), train_dataset=list(Points(8).x)).train()
    with pytest.raises(DataError, match="is not a dataset"):
        Trainer(Net(), arguments(tmp_path), train_dataset=3.5).train()
    with pytest.raises(ConfigError, match="is not a callback"):
        make(tmp_path, callbacks=[object()])


def test_compute_loss_can_be_overridden(tmp_path):
    class Doubled(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False):
            outputs = model(inputs[0])
            loss = 2 * cross_entropy(outputs, inputs[1])
            return (loss, outputs) if return_outputs else loss

    doubled = Doubled(Net(), arguments(tmp_path), train_dataset=Points(20), eval_dataset=Points(20))
    doubled.train()
    plain = make(tmp_path)
    plain.train()
    assert losses(doubled)[0] == pytest.approx(2 * losses(plain)[0])
    assert doubled.evaluate()["eval_loss"] > plain.evaluate(Points(20))["eval_loss"]


def test_loss_function_may_accept_the_number_of_items(tmp_path):
    seen = []

    def function(outputs, labels, num_items_in_batch=None):
        seen.append(num_items_in_batch)
        return (
            nn.functional.cross_entropy(outputs.logits.flatten(0, -2), labels.flatten(), reduction="sum")
            / num_items_in_batch
        )

    from tests.unit.trainer.models import llama

    rows = texts(8)
    Trainer(llama(), arguments(tmp_path), train_dataset=rows, compute_loss_func=function).train()
    assert sum(seen) == sum(label != -100 for row in rows for label in row["labels"][1:])


def test_fp16_and_bf16_reach_the_accelerator(tmp_path):
    trainer = make(tmp_path, bf16=True)
    trainer.train()
    assert trainer.accelerator.mixed_precision == "bf16"
    assert losses(trainer)[-1] < losses(trainer)[0] * 1.2


def test_updates_skipped_by_fp16_are_logged(tmp_path):
    def steep(*args):
        return cross_entropy(*args) * 1e4

    options = arguments(tmp_path, fp16=True, logging_steps=1, max_steps=4)
    trainer = Trainer(Net(), options, train_dataset=Points(40), loss_function=steep)
    trainer.train()
    logged = [entry["skipped_updates"] for entry in trainer.state.log_history if "skipped_updates" in entry]
    assert logged[-1] == trainer.accelerator.clock.num_skipped > 0


# ---------------------------------------------------------------- consecutive trainings


def test_consecutive_trainers_restore_the_model(tmp_path):
    model = bert()
    kind, layer = type(model), type(model.bert.encoder.layer[0])
    for checkpointing in (True, False, True):
        trainer = Trainer(
            model, arguments(tmp_path, gradient_checkpointing=checkpointing, bf16=True), train_dataset=classes(8)
        )
        seen = []
        trainer.add_callback(Peek(seen))
        trainer.train()
        assert seen == [checkpointing]
        assert (type(model), type(model.bert.encoder.layer[0])) == (kind, layer)
        assert not model.is_gradient_checkpointing
        assert "forward" not in vars(model)
        assert not model._forward_pre_hooks
        assert all(parameter.grad is None for parameter in model.parameters())


class Peek(TrainerCallback):
    def __init__(self, seen):
        self.seen = seen

    def on_train_begin(self, args, state, control, model, **kwargs):
        self.seen.append(model.is_gradient_checkpointing)


def test_memory_of_the_optimizer_is_freed_after_training(tmp_path):
    held = []

    class Hold(TrainerCallback):
        def on_step_end(self, args, state, control, optimizer, **kwargs):
            held[:] = [
                weakref.ref(optimizer.optimizer),
                *map(weakref.ref, optimizer.state[next(iter(optimizer.state))].values()),
            ]

    trainer = make(tmp_path, callbacks=[Hold])
    trainer.train()
    gc.collect()
    assert len(held) > 2
    assert [reference() for reference in held] == [None] * len(held)


def test_failed_training_leaves_the_model_unchanged(tmp_path):
    class Broken(TrainerCallback):
        def on_step_end(self, *args, **kwargs):
            raise KeyboardInterrupt

    model = bert()
    kind = type(model)
    with pytest.raises(KeyboardInterrupt):
        Trainer(
            model,
            arguments(tmp_path, bf16=True, gradient_checkpointing=True),
            train_dataset=classes(8),
            callbacks=[Broken],
        ).train()
    assert type(model) is kind
    assert not model.is_gradient_checkpointing
    assert Trainer(model, arguments(tmp_path), train_dataset=classes(8)).train().global_step == 2


def test_second_training_starts_from_the_beginning(tmp_path):
    def again():
        return Net(0.5)

    trainer = Trainer(
        None, arguments(tmp_path), train_dataset=Points(20), model_init=again, loss_function=cross_entropy
    )
    first, second = trainer.train(), None
    curve = losses(trainer)
    second = trainer.train()
    assert (first.global_step, second.global_step) == (5, 5)
    assert losses(trainer) == curve


def test_given_optimizer_is_kept(tmp_path):
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    trainer = Trainer(
        model,
        arguments(tmp_path),
        train_dataset=Points(20),
        loss_function=cross_entropy,
        optimizers=(optimizer, scheduler),
    )
    trainer.train()
    assert trainer.optimizer is optimizer
    assert optimizer.param_groups[0]["lr"] == 0.5**6


# ---------------------------------------------------------------- the best model, early stopping, plateaus


class ScriptedMetric:
    """Metric that returns given values in order."""

    def __init__(self, values):
        self.values = iter(values)

    def __call__(self, prediction):
        return {"score": next(self.values)}


BEST = {"eval_strategy": "steps", "eval_steps": 1, "metric_for_best_model": "score"}


def test_best_weights_are_restored_at_the_end(tmp_path):
    noted = {}

    class Note(TrainerCallback):
        def on_step_end(self, args, state, control, model, **kwargs):
            noted[state.global_step] = weights(model)

    values = [0.1, 0.9, float("nan"), 0.9, 0.3]
    trainer = make(tmp_path, callbacks=[Note], evaluation=Points(4), metrics=ScriptedMetric(values), save_strategy="steps",
                   save_steps=1, save_total_limit=1, load_best_model_at_end=True, **BEST)  # fmt: skip
    trainer.train()
    assert (trainer.state.best_metric, trainer.state.best_global_step) == (0.9, 2)
    assert trainer.state.best_model_checkpoint.endswith("checkpoint_1")
    assert torch.equal(weights(trainer.model), noted[2])
    assert not torch.equal(noted[2], noted[5])
    left = sorted(path.name for path in (tmp_path / "run" / "checkpoints").glob("checkpoint_*"))
    assert left == ["checkpoint_1", "checkpoint_4"]


@pytest.mark.parametrize(
    ("scores", "given", "best"),
    [
        ([0.5, 0.7, 0.9, 0.8, 0.6], {"save_steps": 2}, 4),
        ([0.9, 0.5, 0.7, 0.6, 0.4, 0.3], {"save_steps": 1, "eval_on_start": True}, 2),
    ],
)
def test_best_weights_are_those_of_a_checkpoint(tmp_path, scores, given, best):
    noted = {}

    class Note(TrainerCallback):
        def on_step_end(self, args, state, control, model, **kwargs):
            noted[state.global_step] = weights(model)

    trainer = make(tmp_path, callbacks=[Note], evaluation=Points(4), metrics=ScriptedMetric(scores), save_strategy="steps",
                   load_best_model_at_end=True, **given, **BEST)  # fmt: skip
    trainer.train()
    assert trainer.state.best_global_step == best
    assert torch.equal(weights(trainer.model), noted[best])


def test_callback_can_save_an_evaluation_that_is_not_the_best(tmp_path):
    class Save(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            control.should_save = state.global_step == 3

    trainer = make(tmp_path, callbacks=[Save], evaluation=Points(4), metrics=ScriptedMetric([0.9, 0.5, 0.7, 0.6, 0.4]),
                   save_strategy="best", **BEST)  # fmt: skip
    trainer.train()
    assert len(list((tmp_path / "run" / "checkpoints").glob("checkpoint_*"))) == 2


def test_best_weights_are_found_after_a_change_of_directory(tmp_path, monkeypatch):
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "first")
    trainer = make(Path(), evaluation=Points(4), metrics=ScriptedMetric([0.1, 0.9, 0.3, 0.4, 0.5]), save_strategy="steps",
                   save_steps=1, load_best_model_at_end=True, **BEST)  # fmt: skip
    monkeypatch.chdir(tmp_path / "second")
    trainer.train()
    assert trainer.state.best_model_checkpoint == str(tmp_path / "first" / "run" / "checkpoints" / "checkpoint_1")


def test_later_run_ignores_the_best_model_of_an_earlier_run(tmp_path):
    given = {"save_strategy": "best", "save_total_limit": 1, "load_best_model_at_end": True, **BEST}
    make(tmp_path, evaluation=Points(4), metrics=ScriptedMetric([0.9, 0.95, 0.99, 0.1, 0.1]), **given).train()
    trainer = make(tmp_path, evaluation=Points(4), metrics=ScriptedMetric([0.2, 0.6, 0.5, 0.4, 0.3]), **given)
    trainer.train()
    assert trainer.state.best_model_checkpoint.endswith("checkpoint_4")
    left = sorted(path.name for path in (tmp_path / "run" / "checkpoints").glob("checkpoint_*"))
    assert left == ["checkpoint_2", "checkpoint_4"]  # the best checkpoint of the earlier run is not kept


def test_training_stops_without_improvement(tmp_path):
    stop = EarlyStoppingCallback(early_stopping_patience=2, early_stopping_threshold=0.05)
    trainer = make(
        tmp_path, callbacks=[stop], evaluation=Points(4), metrics=ScriptedMetric([0.1, 0.5, 0.52, 0.54, 0.9]), **BEST
    )
    assert trainer.train().global_step == 4
    with pytest.raises(ConfigError, match="metric of evaluations"):
        make(tmp_path, callbacks=[EarlyStoppingCallback()]).train()
    with pytest.raises(ConfigError, match="is not among the evaluation's metrics: eval_loss"):
        make(tmp_path, evaluation=Points(4), **BEST).train()


@pytest.mark.parametrize(("scores", "on_start"), [([], False), ([0.9], True)])
def test_plateau_lowers_the_learning_rate(tmp_path, scores, on_start):
    trainer = make(tmp_path, evaluation=Points(4), metrics=ScriptedMetric([*scores, 0.5, 0.4, 0.3, 0.2, 0.1]),
                   lr_scheduler_type="reduce_lr_on_plateau", eval_on_start=on_start,
                   lr_scheduler_kwargs={"patience": 0, "factor": 0.5}, **BEST)  # fmt: skip
    trainer.train()
    rates = [entry["learning_rate"] for entry in trainer.state.log_history if "loss" in entry]
    assert rates == pytest.approx([0.01, 0.01, 0.005, 0.0025, 0.00125])


# ---------------------------------------------------------------- resuming


RESUMED = {"num_train_epochs": 3, "gradient_accumulation_steps": 2, "logging_steps": 3, "eval_strategy": "steps", "eval_steps": 4,
           "save_strategy": "steps", "save_steps": 2}  # fmt: skip


class Stop(TrainerCallback):
    """Callback that raises an error after an update."""

    def __init__(self, step, event="on_step_end"):
        self.step = step
        setattr(self, event, self.fail)

    def fail(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            raise ZeroDivisionError


@pytest.mark.parametrize(
    ("stop", "event", "evaluated"),
    [
        *((stop, "on_step_end", "steps") for stop in (3, 5, 7)),
        *((stop, event, "epoch") for stop in (6, 9) for event in ("on_epoch_end", "on_prediction_step")),
    ],
)
def test_resumed_training_equals_the_uninterrupted_one(tmp_path, stop, event, evaluated):
    """18 rows in batches of 4, so that the last window of an epoch is short. Dropout draws random numbers."""

    def build(name, callbacks=None):
        return make(
            tmp_path / name, Net(0.3), callbacks, Points(18), Points(6), **RESUMED | {"eval_strategy": evaluated}
        )

    whole = build("a")
    output = whole.train()
    with pytest.raises(ZeroDivisionError):
        build("b", [Stop(stop, event)]).train()
    resumed = build("b")
    again = resumed.train(resume_from_checkpoint=True)
    assert torch.equal(weights(resumed.model), weights(whole.model))
    measured = ("runtime", "per_second", "memory")

    def kept(trainer):
        return [
            {k: v for k, v in e.items() if not any(word in k for word in measured)} for e in trainer.state.log_history
        ]

    assert kept(resumed) == kept(whole)
    assert (again.global_step, again.training_loss) == (output.global_step, output.training_loss)
    log = read_run(tmp_path / "b" / "run")
    curve = [(step, value) for step, _, value in log.values["loss"]]
    assert curve == [(e["step"], e["loss"]) for e in whole.state.log_history if "loss" in e]


class SaveAndStop(TrainerCallback):
    """Callback that saves a checkpoint at an event, and then raises an error."""

    def __init__(self, step, event):
        self.step = step
        setattr(self, event, self.save)

    def save(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            self.trainer.accelerator.save_state()
            raise ZeroDivisionError


@pytest.mark.parametrize("event", ["on_step_end", "on_log"])
def test_log_entry_pending_at_a_save_is_made_once(tmp_path, event):
    """A user's callback saves while the entry of update 3 is due, or right after it was added to the history."""
    given = {
        "num_train_epochs": 2,
        "logging_steps": 3,
        "max_grad_norm": 1.0,
        "save_strategy": "steps",
        "save_steps": 100,
    }
    whole = make(tmp_path / "a", Net(0.3), None, Points(18), **given)
    whole.train()
    callback = SaveAndStop(3, event)
    callback.trainer = make(tmp_path / "b", Net(0.3), [callback], Points(18), **given)
    with pytest.raises(ZeroDivisionError):
        callback.trainer.train()
    resumed = make(tmp_path / "b", Net(0.3), None, Points(18), **given)
    resumed.train(resume_from_checkpoint=True)
    entries = [[e for e in each.state.log_history if "loss" in e] for each in (whole, resumed)]
    assert [entry["step"] for entry in entries[0]] == [3, 6, 9]
    assert {"loss", "learning_rate", "grad_norm"} <= set(entries[0][0])
    assert entries[1] == entries[0]


def test_resume_without_a_checkpoint_starts_from_the_beginning(tmp_path):
    assert make(tmp_path).train(resume_from_checkpoint=True).global_step == 5
    finished = make(tmp_path / "x", save_strategy="steps", save_steps=5)
    finished.train()
    again = make(tmp_path / "x", save_strategy="steps", save_steps=5)
    assert again.train(resume_from_checkpoint=True).global_step == 5
    folder = tmp_path / "x" / "run" / "checkpoints" / "checkpoint_0"
    assert make(tmp_path / "x", num_train_epochs=2).train(resume_from_checkpoint=folder).global_step == 10


def test_log_of_the_run_is_complete(tmp_path):
    trainer = make(tmp_path, evaluation=Points(4), eval_strategy="epoch", save_strategy="epoch")
    trainer.train()
    trainer.evaluate(metric_key_prefix="final")
    run = read_run(tmp_path / "run")
    names = {"loss", "learning_rate", "grad_norm", "epoch", "eval_loss", "memory", "memory_peak", "samples_per_second", "data_wait",
             "train_loss", "final_loss"}  # fmt: skip
    assert names <= set(run.values)
    assert [value for _, _, value in run.values["loss"]] == losses(trainer)
    assert [step for step, _, _ in run.values["loss"]] == [1, 2, 3, 4, 5]
    assert any(event.name == "checkpoint" for event in run.events)
    assert run.config["learning_rate"] == 0.01
    again = make(tmp_path, logging_steps=4)
    again.train()
    assert [step for step, _, _ in read_run(tmp_path / "run").values["loss"]] == [4], (
        "the log contains values of the earlier run"
    )


def test_trackers_receive_values(tmp_path):
    pytest.importorskip("tensorboard")
    make(tmp_path, report_to="tensorboard", num_train_epochs=0.2).train()
    assert list(tmp_path.rglob("events.out.tfevents.*"))


@pytest.mark.slow
def test_trackers_receive_the_name_of_the_run(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    store = f"sqlite:///{tmp_path}/store.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", store)
    make(tmp_path, report_to="mlflow", run_name="second try", num_train_epochs=0.2).train()
    client = mlflow.MlflowClient(store)
    (run,) = client.search_runs([client.get_experiment_by_name("run").experiment_id])
    assert run.info.run_name == "second try"
    assert (tmp_path / "run" / "log.jsonl").is_file()
