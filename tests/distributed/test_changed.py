"""Resuming with other data or another learning rate schedule raises an error, unless the script allows the change."""

import logging

import pytest
import torch
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR
from torch.utils.data import DataLoader, SubsetRandomSampler, TensorDataset

from headway import Accelerator, ProjectConfiguration, set_seed
from headway.errors import CheckpointError
from tests.distributed.ranks import run_ranks

STEPS = 40
"""Number of updates after which the learning rate is 0."""


def make_linear_decay(count):
    """Return a linear decay, as a script writes it that expects `count` processes."""
    return lambda tick: max(0.0, 1 - tick / (STEPS * count))


class CapturedWarnings(logging.Handler):
    def __init__(self):
        super().__init__(logging.WARNING)
        self.lines = []
        logging.getLogger("headway").addHandler(self)

    def emit(self, record):
        self.lines.append(record.getMessage())


def train(folder, *, rows=36, chosen=None, count=None, stop_after=None, updates=7, changed=(), **options):
    """Train, and return the samples read, the rate of each update and the warnings. If resuming fails, return the error.

    The error comes with whether the weights are unchanged.

    Args:
        folder: Folder of the run.
        rows: Number of samples.
        chosen: Number of samples that a subset sampler selects. Default: all.
        count: Number of processes that the schedule assumes, or -1 for a cosine schedule. Default: the true number.
        stop_after: Update after which to save and stop. Default: none.
        updates: Update after which to stop without a save.
        changed: `changed` of `resume`.
        options: Further arguments of the Accelerator.
    """
    set_seed(7)
    warned = CapturedWarnings()
    accelerator = Accelerator(
        cpu=True, project_config=ProjectConfiguration(folder, automatic_checkpoint_naming=True), **options
    )
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    count = accelerator.num_processes if count is None else count
    schedule = CosineAnnealingLR(optimizer, count) if count < 0 else LambdaLR(optimizer, make_linear_decay(count))
    data = TensorDataset(torch.arange(float(rows))[:, None])
    sampler = None if chosen is None else SubsetRandomSampler(range(chosen))
    loader = DataLoader(data, batch_size=6 // accelerator.num_processes, shuffle=sampler is None, sampler=sampler)
    others = DataLoader(TensorDataset(torch.zeros(rows, 1)), batch_size=2)
    model, optimizer, loader, schedule, _ = accelerator.prepare(model, optimizer, loader, schedule, others)
    weight = model.weight.detach().clone()
    try:
        accelerator.resume("latest", **({"changed": changed} if changed != () else {}))
    except CheckpointError as error:
        return str(error), torch.equal(weight, model.weight)
    seen, rates = [], []
    for _ in accelerator.epochs(3):
        for (x,) in loader:
            rates.append(optimizer.param_groups[0]["lr"])
            with accelerator.accumulate(model):
                accelerator.backward(model(x).mean())
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            seen += accelerator.gather_for_metrics(x).flatten().int().tolist()
            if accelerator.num_updates == stop_after:
                accelerator.save_state()
                return seen, rates, warned.lines
            if accelerator.num_updates == updates:
                return seen, rates, warned.lines
    return seen, rates, warned.lines


def train_with_settings(folder, settings):
    return train(folder, **settings)


@pytest.mark.parametrize("stop_after", [2, pytest.param(6, marks=pytest.mark.matrix)])
@pytest.mark.parametrize(("before", "after"), [({}, {"rows": 48}), ({}, {"rows": 9}), ({"chosen": 30}, {"chosen": 24})])
def test_resume_with_data_of_another_length_names_both_lengths(before, after, stop_after, tmp_path):
    run_ranks(train_with_settings, 2, str(tmp_path), {**before, "stop_after": stop_after})
    lengths = [(each.get("chosen") or each.get("rows", 36)) for each in (before, after)]
    for error, has_stayed in run_ranks(train_with_settings, 2, str(tmp_path), after):
        assert f"had {lengths[0]} samples when the checkpoint was saved, and has {lengths[1]}" in error
        assert "changed='data'" in error
        assert has_stayed


def test_changed_data_restarts_its_epoch(tmp_path):
    run_ranks(train_with_settings, 2, str(tmp_path), {"stop_after": 8, "updates": 9})
    for seen, rates, warned in run_ranks(
        train_with_settings, 2, str(tmp_path), {"rows": 48, "changed": "data", "updates": 16}
    ):
        assert sorted(seen) == list(range(48))  # the second epoch, of which two updates had been made
        assert rates[0] == 1 - 8 / STEPS
        assert warned == []


def test_changed_length_is_a_warning_with_changed_none(tmp_path):
    """With Accelerate's rules (`changed=None`), the script itself skips batches, so other data only causes a warning."""
    run_ranks(train_with_settings, 1, str(tmp_path), {"stop_after": 2})
    ((seen, _, warned),) = run_ranks(train_with_settings, 1, str(tmp_path), {"rows": 48, "changed": None, "updates": 3})
    assert len(seen) == 6
    assert [line.partition(" (tests/")[0] for line in warned] == [
        "loader 1 (TensorDataset): 36 -> 48 samples",
        "loader 0 (TensorDataset) had 36 samples when the checkpoint was saved, and has 48",
    ]


def test_rate_that_depends_on_the_number_of_processes_is_an_error(tmp_path):
    (_, rates, warned), _ = run_ranks(train_with_settings, 2, str(tmp_path), {"stop_after": 4})
    assert rates == pytest.approx([1 - update / STEPS for update in range(4)])
    assert warned == []  # a correct script causes no warning
    ((error, has_stayed),) = run_ranks(train_with_settings, 1, str(tmp_path), {})
    assert "its learning rate at tick 8 was 0.9, and is 0.8" in error
    assert "Compute it with the former number, 2" in error
    assert "scheduler_ticks='updates'" in error
    assert has_stayed
    for remedy in ({"count": 2}, {"count": 1, "scheduler_ticks": "updates"}):
        ((_, rates, warned),) = run_ranks(train_with_settings, 1, str(tmp_path), remedy)
        assert rates == pytest.approx([1 - update / STEPS for update in range(4, 7)]), remedy
        assert warned == []
    ((_, rates, _),) = run_ranks(train_with_settings, 1, str(tmp_path), {"changed": ["schedule"]})
    assert rates[1:] == pytest.approx([0.75, 0.7])


def test_changed_schedule_on_as_many_processes_is_a_warning(tmp_path):
    run_ranks(train_with_settings, 2, str(tmp_path), {"stop_after": 4})
    for rank, (_, rates, warned) in enumerate(run_ranks(train_with_settings, 2, str(tmp_path), {"count": 4})):
        assert rates[1:] == pytest.approx([1 - 10 / 160, 1 - 12 / 160])
        line = "schedule 0 (LambdaLR): its learning rate at tick 8 was 0.9, and is 0.95"
        assert [each.partition(" (tests/")[0] for each in warned] == ([] if rank else [f"[rank 0] {line}"])


def test_schedule_with_other_ticks_is_an_error(tmp_path):
    run_ranks(train_with_settings, 2, str(tmp_path), {"count": -1, "stop_after": 2})
    for error, has_stayed in run_ranks(
        train_with_settings, 2, str(tmp_path), {"count": -1, "scheduler_ticks": "updates"}
    ):
        assert (
            "schedule 0 (CosineAnnealingLR) counted ticks by the rule 'per process' when it was saved, and counts them by 'updates'"
            in error
        )
        assert has_stayed


def train_with_trainer(folder, rows, stop_after, **settings):
    """Train with the Trainer, and return (update, rate, maximum updates) of each update and the rows of each batch."""
    from headway import Trainer, TrainerCallback, TrainingArguments

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.body = torch.nn.Linear(6, 1)

        def forward(self, x, labels):
            seen.append(len(x))
            return {"loss": (self.body(x).squeeze(1) - labels).square().mean()}

    class StepRecorder(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == stop_after:
                control.should_save = control.should_training_stop = True

        def on_log(self, args, state, control, logs, **kwargs):
            if "loss" in logs:
                warned.append((state.global_step, round(logs["learning_rate"], 6), state.max_steps))

    warned, seen = [], []
    data = [{"x": torch.ones(6) * number, "labels": torch.tensor(1.0)} for number in range(rows)]
    arguments = TrainingArguments(
        folder, per_device_train_batch_size=4, num_train_epochs=2, logging_steps=1, learning_rate=1.0,
        use_cpu=True, disable_tqdm=True, resume_from_checkpoint=not stop_after, **settings,
    )  # fmt: skip
    try:
        Trainer(Net(), arguments, train_dataset=data, callbacks=[StepRecorder()]).train()
    except CheckpointError as error:
        return str(error), seen
    return warned, seen


def test_trainer_keeps_its_rates_on_another_number_of_processes(tmp_path):
    run_ranks(train_with_trainer, 2, str(tmp_path), 40, 4)
    ((warned, _),) = run_ranks(train_with_trainer, 1, str(tmp_path), 40, None)
    assert warned == [(update, round(1 - (update - 1) / 10, 6), 10) for update in range(5, 11)]


def test_trainer_accepts_other_data_with_ignore_data_skip(tmp_path):
    run_ranks(resume_trainer_with_other_data, 1, str(tmp_path))


def resume_trainer_with_other_data(folder):
    train_with_trainer(folder, 40, 4)
    error, _ = train_with_trainer(folder, 24, None)
    assert "had 40 samples when the checkpoint was saved, and has 24" in error
    warned, seen = train_with_trainer(folder, 24, None, ignore_data_skip=True)
    assert seen == [4] * 8  # an epoch of six batches, and the remaining two updates
    assert [update for update, _, _ in warned] == list(range(5, 13))
