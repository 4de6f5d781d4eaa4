"""The Trainer on several ranks matches the Trainer on one, and a killed training continues as if it had not been killed."""

import os
import signal
from pathlib import Path

import pytest
import torch

from headway import EarlyStoppingCallback, Trainer, TrainerCallback, TrainingArguments
from headway.core.runtime.process import current
from headway.errors import MetricError
from tests.distributed.ranks import RankFailed, run_ranks
from tests.unit.trainer.models import Net, Points, Speaker, cross_entropy, texts


def make_arguments(folder, **given):
    base = {"output_dir": folder, "use_cpu": True, "disable_tqdm": True, "learning_rate": 0.01, "logging_steps": 1,
            "save_strategy": "no", "log_level": "error", "report_to": "none"}  # fmt: skip
    return TrainingArguments(**{**base, **given})


def flatten_weights(model):
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def read_curve(trainer):
    keys = ("loss", "grad_norm", "learning_rate", "eval_loss", "eval_accuracy")
    return [{key: entry[key] for key in keys if key in entry} for entry in trainer.state.log_history]


class Accuracy:
    """Metric that accumulates batches."""

    def reset(self):
        self.right = self.seen = 0

    def update(self, predictions, labels):
        self.right += int((predictions.argmax(-1) == labels).sum())
        self.seen += len(labels)

    def compute(self):
        return {"accuracy": self.right / self.seen, "seen": self.seen}


class StopOnOneRank(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 2 and not state.is_world_process_zero:
            control.should_training_stop = True


class LimitedNet(Net):
    """Net that runs out of memory on rank 1 with more than two rows."""

    def forward(self, x):
        if self.training and len(x) > 2 and os.environ["RANK"] == "1":
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return super().forward(x)


def train_all(folder, num_rows):
    """Train and evaluate several models, with micro-batches of `num_rows` rows on each rank, and return all results."""
    out = {}
    # 27 rows in windows of 12: the last window of an epoch has 3, which two ranks of 3 cannot share evenly.
    given = {"per_device_train_batch_size": num_rows, "gradient_accumulation_steps": 2, "num_train_epochs": 2}
    both = {**given, "eval_strategy": "epoch", "per_device_eval_batch_size": num_rows}
    points = Trainer(Net(), make_arguments(folder / "points", **both), train_dataset=Points(27), eval_dataset=Points(13),
                     loss_function=cross_entropy, compute_metrics=Accuracy())  # fmt: skip
    points.train()
    found = points.predict(Points(13))
    out["points"] = read_curve(points), flatten_weights(points.model)
    out["predictions"] = (
        torch.as_tensor(found.predictions),
        torch.as_tensor(found.label_ids),
        found.metrics["test_seen"],
    )
    tokens = Trainer(
        Speaker(), make_arguments(folder / "tokens", **both), train_dataset=texts(27), eval_dataset=texts(7)
    )
    tokens.train()
    out["tokens"] = read_curve(tokens), flatten_weights(tokens.model)
    out["logits"] = tokens.predict(texts(7)).predictions.shape
    tight = Trainer(LimitedNet(), make_arguments(folder / "tight", **given, auto_find_batch_size=True), train_dataset=Points(27),
                    loss_function=cross_entropy)  # fmt: skip
    tight.train()
    out["tight"] = read_curve(tight), flatten_weights(tight.model)
    stopped = Trainer(Net(), make_arguments(folder / "stopped", **given), train_dataset=Points(27), loss_function=cross_entropy,
                      callbacks=[StopOnOneRank])  # fmt: skip
    out["stopped"] = stopped.train().global_step
    return out


def assert_close(a, b):
    assert len(a[0]) == len(b[0]) > 4
    for one, other in zip(a[0], b[0]):
        assert one == pytest.approx(other, rel=1e-4, abs=1e-6)
    assert torch.allclose(a[1], b[1], atol=1e-5)


def test_two_ranks_match_one_with_the_same_global_batch(tmp_path):
    (one,) = run_ranks(train_all, 1, tmp_path / "one", 6)
    ranks = run_ranks(train_all, 2, tmp_path / "two", 3)
    for rank in ranks:
        for name in ("points", "tokens", "tight"):
            assert_close(rank[name], one[name])
        for a, b in zip(rank["predictions"][:2], one["predictions"][:2]):
            assert torch.allclose(a, b, atol=1e-5)
        assert rank["predictions"][2] == one["predictions"][2] == 13
        assert rank["logits"] == one["logits"]
        assert rank["stopped"] == 2
    assert torch.allclose(one["tight"][1], one["points"][1], atol=1e-6)
    assert one["stopped"] == 6
    assert torch.equal(ranks[0]["tokens"][1], ranks[1]["tokens"][1])


class Kill(TrainerCallback):
    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


class Terminate(TrainerCallback):
    """Sends SIGTERM to rank 0 during an evaluation."""

    def on_prediction_step(self, args, state, control, **kwargs):
        if state.global_step == 6 and state.is_world_process_zero:
            os.kill(os.getpid(), signal.SIGTERM)


def train(folder, kill_at=None, resume=None):
    args = make_arguments(
        folder, num_train_epochs=3, per_device_train_batch_size=2, gradient_accumulation_steps=2, save_strategy="steps",
        save_steps=2, eval_strategy="steps", eval_steps=3, per_device_eval_batch_size=1, logging_steps=2,
        lr_scheduler_type="cosine",
    )  # fmt: skip
    trainer = Trainer(Net(0.3), args, train_dataset=Points(18), eval_dataset=Points(5), loss_function=cross_entropy,
                      callbacks=[Terminate if kill_at == "evaluation" else Kill(kill_at)] if kill_at else None)  # fmt: skip
    output = trainer.train(resume_from_checkpoint=resume)
    return read_curve(trainer), flatten_weights(trainer.model), output.training_loss, output.global_step


def test_killed_training_continues_bit_for_bit(tmp_path):
    """One run is killed after an update. Another gets SIGTERM in an evaluation, which the resumed run makes up for."""
    whole = run_ranks(train, 2, tmp_path / "whole")
    assert whole[0][3] == 9
    for name, when, message in (("killed", 7, "did not finish"), ("ended", "evaluation", "Preempted")):
        with pytest.raises(RankFailed, match=message):
            run_ranks(train, 2, tmp_path / name, when, timeout=100)
        assert list(Path(tmp_path, name, "checkpoints").glob("checkpoint_*"))
        resumed = run_ranks(train, 2, tmp_path / name, None, True)
        for rank in (0, 1):
            assert resumed[rank][0] == whole[rank][0]
            assert torch.equal(resumed[rank][1], whole[rank][1])
            assert resumed[rank][2:] == whole[rank][2:]


def check_evaluation(folder):
    """Train with a metric that raises on rank 1 only. Both ranks get the error before the first update."""

    def metrics(prediction):
        if os.environ["RANK"] == "1":
            raise KeyError("f1")
        return {"f1": 0.5}

    args = make_arguments(folder, eval_strategy="epoch", metric_for_best_model="f1")
    trainer = Trainer(
        Net(),
        args,
        train_dataset=Points(8),
        eval_dataset=Points(6),
        loss_function=cross_entropy,
        compute_metrics=metrics,
    )
    with pytest.raises(MetricError) as exc_info:
        trainer.train()
    return str(exc_info.value), trainer.state.global_step


def test_evaluation_check_that_fails_on_one_rank_ends_all_ranks(tmp_path):
    (first, step), (second, other) = run_ranks(check_evaluation, 2, tmp_path)
    assert (step, other) == (0, 0)
    assert "the evaluation failed on another rank: MetricError: compute_metrics raised KeyError: 'f1'" in first
    assert second.startswith("compute_metrics raised KeyError: 'f1'")


class NotANumberNet(Net):
    """Net whose outputs are NaN."""

    def forward(self, x):
        return super().forward(x) * float("nan")


def evaluate_one_sample(folder):
    """Evaluate one sample, which only rank 0 reads. Return the names of the metrics."""
    trainer = Trainer(
        NotANumberNet(), make_arguments(folder), eval_dataset=Points(1), loss_function=cross_entropy
    )  # fmt: skip
    return sorted(trainer.evaluate())


def test_nan_loss_is_on_all_ranks_even_if_some_have_no_sample(tmp_path):
    first, second = run_ranks(evaluate_one_sample, 2, tmp_path)
    assert first == second
    assert "eval_loss" in first


class StopAtTwo(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = state.global_step == 2


def train_with_a_callback_on_one_rank(folder):
    """Train with a callback that only the main process has. Return the number of updates."""
    given = {"max_steps": 5, "per_device_train_batch_size": 2}
    trainer = Trainer(Net(), make_arguments(folder, **given), train_dataset=Points(40), loss_function=cross_entropy)
    if trainer.accelerator.is_main_process:
        trainer.add_callback(StopAtTwo())
    trainer.train()
    return trainer.state.global_step


def test_callback_of_one_rank_acts_on_all_ranks(tmp_path):
    assert run_ranks(train_with_a_callback_on_one_rank, 2, tmp_path) == [2, 2]


class Falling:
    """Streaming metric whose value falls from evaluation to evaluation, or rises on all ranks but the first."""

    def __init__(self, rises):
        self.value, self.step = 0.5, 0.1 if rises else -0.1

    def update(self, predictions, labels):
        pass

    def compute(self):
        self.value += self.step
        return {"score": self.value}


def train_with_a_metric(folder, strategy, callback_rank, differs):
    """Train with EarlyStoppingCallback on one rank or on none. Return the number of updates, the best one, and the weights."""
    given = {"max_steps": 6, "per_device_train_batch_size": 2, "eval_strategy": "steps", "eval_steps": 2, "learning_rate": 0.1,
             "save_strategy": "steps", "save_steps": 2, "load_best_model_at_end": True, "eval_sanity_check": False,
             "metric_for_best_model": "score", "greater_is_better": True,
             "accelerator_config": {"strategy": strategy}}  # fmt: skip
    rank = current().rank
    trainer = Trainer(Net(), make_arguments(folder, **given), train_dataset=Points(40), eval_dataset=Points(8),
                      loss_function=cross_entropy, compute_metrics=Falling(rises=differs and rank == 1),
                      callbacks=[EarlyStoppingCallback()] if rank == callback_rank else [])  # fmt: skip
    trainer.train()
    whole = [getattr(p, "full_tensor", lambda p=p: p)().tolist() for p in trainer.model.parameters()]
    return trainer.state.global_step, trainer.state.best_global_step, trainer.state.best_model_checkpoint, whole


@pytest.mark.parametrize("rank", [0, 1])
def test_early_stopping_of_one_rank_ends_all_ranks(tmp_path, rank):
    first, second = run_ranks(train_with_a_metric, 2, tmp_path, "ddp", rank, False)
    assert first == second
    assert first[:2] == (4, 2)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_ranks_whose_metrics_differ_choose_the_same_checkpoint(tmp_path, strategy):
    first, second = run_ranks(train_with_a_metric, 2, tmp_path, strategy, None, True)
    assert first == second
    assert first[:2] == (6, 2)


class Request(TrainerCallback):
    """Sets a flag of the control in one event, after a number of updates, on the main process only."""

    def __init__(self, event, flag, update):
        def act(args, state, control, **kwargs):
            if state.global_step == update and state.is_world_process_zero:
                setattr(control, flag, True)

        setattr(self, event, act)


REQUESTS = {
    # (event, flag that rank 0 sets in it, after this update): (updates, updates with an evaluation, epochs, checkpoints).
    # Without a request, a training makes 3 of the 5 updates of an epoch. It evaluates after each of them, and saves after update 2
    # and at its end.
    ("on_train_begin", "should_training_stop", 0): (0, [], 0.0, 0),
    ("on_train_begin", "should_evaluate", 0): (3, [0, 1, 2, 3], 0.6, 2),
    ("on_epoch_begin", "should_epoch_stop", 0): (3, [1, 2, 3], 1.4, 2),
    ("on_substep_end", "should_training_stop", 1): (2, [1, 2], 0.4, 1),
    ("on_log", "should_save", 1): (3, [1, 2, 3], 0.6, 3),
    ("on_evaluate", "should_training_stop", 1): (1, [1], 0.2, 0),
    ("on_save", "should_training_stop", 2): (2, [1, 2], 0.4, 1),
}


def train_with_requests_of_one_rank(folder):
    """Train once for each of `REQUESTS`. Return what each training did, in the form of its values."""
    results = {}
    for event, flag, update in REQUESTS:
        given = {"max_steps": 3, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "logging_steps": 1,
                 "eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 2}  # fmt: skip
        place = folder / f"{event}_{flag}"
        trainer = Trainer(Net(), make_arguments(place, **given), train_dataset=Points(40), eval_dataset=Points(8),
                          loss_function=cross_entropy, callbacks=[Request(event, flag, update)])  # fmt: skip
        trainer.train()
        evaluated = [entry["step"] for entry in trainer.state.log_history if "eval_loss" in entry]
        num_saved = len(list((place / "checkpoints").glob("checkpoint_*")))
        epochs = round(trainer.state.epoch, 2)
        results[event, flag, update] = (trainer.state.global_step, evaluated, epochs, num_saved)
    return results


def test_request_in_any_event_of_one_rank_acts_on_all_ranks(tmp_path):
    first, second = run_ranks(train_with_requests_of_one_rank, 2, tmp_path)
    assert first == second == REQUESTS


class Flags(Speaker):
    """Predicts a flag for each token."""

    def forward(self, input_ids, attention_mask=None, labels=None):
        found = super().forward(input_ids, attention_mask, labels)
        return {**found, "logits": found["logits"].argmax(-1) > 30}


def predict_flags_of_different_lengths(folder):
    rows = [{"input_ids": [1] * (3 + index % 2)} for index in range(4)]
    trainer = Trainer(Flags(), make_arguments(folder, per_device_eval_batch_size=1))
    with pytest.raises(MetricError, match=r"torch\.bool have rows of different lengths"):
        trainer.predict(rows)
    return True


def test_flags_of_different_lengths_are_refused_on_all_ranks(tmp_path):
    assert run_ranks(predict_flags_of_different_lengths, 2, tmp_path) == [True, True]
