"""Test attributes of the Trainer's optimizer and schedule that can be read after training."""

import gc
import weakref

import pytest
import torch

from headway import Trainer, TrainerCallback
from headway.errors import StateError
from tests.unit.trainer.models import Net, Points, arguments, cross_entropy, weights


@pytest.mark.parametrize("name", ["linear", "reduce_lr_on_plateau", "own"])
def test_optimizer_can_be_read_after_training(tmp_path, name):
    class CustomTrainer(Trainer):
        def create_scheduler(self, num_training_steps, optimizer=None):
            if name != "own":
                return super().create_scheduler(num_training_steps, optimizer)
            one, other = (torch.optim.lr_scheduler.ConstantLR(optimizer, factor) for factor in (0.5, 0.25))
            return torch.optim.lr_scheduler.SequentialLR(optimizer, [one, other], [3])

    last = {}
    held = []

    class LastRates(TrainerCallback):
        def on_step_end(self, args, state, control, optimizer, lr_scheduler, **kwargs):
            last.update(rates=[group["lr"] for group in optimizer.param_groups], schedule=lr_scheduler.get_last_lr())
            held[:] = [weakref.ref(optimizer.state[next(iter(optimizer.state))]["exp_avg"])]

    given = {"lr_scheduler_type": "linear" if name == "own" else name, "eval_strategy": "epoch", "max_steps": 4}
    trainer = CustomTrainer(Net(), arguments(tmp_path, **given), train_dataset=Points(20), eval_dataset=Points(4),
                  loss_function=cross_entropy, callbacks=[LastRates])  # fmt: skip
    assert trainer.optimizer is None
    trainer.train()
    assert isinstance(trainer.optimizer, torch.optim.AdamW)
    assert trainer.get_learning_rates() == [group["lr"] for group in trainer.optimizer.param_groups] == last["rates"]
    assert trainer.lr_scheduler.get_last_lr() == last["schedule"]
    assert trainer.lr_scheduler.optimizer is trainer.optimizer
    weight = trainer.model.body[0].weight
    assert trainer.get_optimizer_group(weight)["weight_decay"] == 0.0
    with pytest.raises(StateError, match="freed when the training ended"):
        trainer.optimizer.state_dict()
    gc.collect()
    assert held[0]() is None
    assert trainer.train().global_step == 4  # with a new optimizer
    assert trainer.evaluate()["eval_loss"] > 0


def test_schedule_free_optimizer_trains_and_leaves_the_averaged_weights(tmp_path):
    schedulefree = pytest.importorskip("schedulefree", reason="schedulefree is not installed")
    model, data = Net(), Points(20)
    optimizer = schedulefree.AdamWScheduleFree(model.parameters(), lr=0.01)
    optimizer.train()
    for start in range(0, 20, 4):
        optimizer.zero_grad()
        cross_entropy(model(data.x[start : start + 4]), data.y[start : start + 4]).backward()
        optimizer.step()
    optimizer.eval()
    with torch.no_grad():
        expected = cross_entropy(model(data.x), data.y).item()

    given = {"lr_scheduler_type": "constant", "train_sampling_strategy": "sequential", "max_grad_norm": 0}
    given |= {"eval_strategy": "steps", "eval_steps": 2}
    kind = schedulefree.AdamWScheduleFree, {"lr": 0.01}
    trainer = Trainer(Net(), arguments(tmp_path, **given), train_dataset=data, eval_dataset=data, loss_function=cross_entropy,
                      optimizer_cls_and_kwargs=kind)  # fmt: skip
    trainer.train()
    assert torch.allclose(weights(trainer.model), weights(model), atol=1e-6)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(expected, abs=1e-6)
    assert torch.allclose(weights(trainer.model), weights(model), atol=1e-6)
