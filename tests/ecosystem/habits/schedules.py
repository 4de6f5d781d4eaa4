"""Learning rates after each call of batch, schedule and optimizer."""

import torch

from tests.ecosystem.habits.material import decaying, loss_of, prepared, rate


def _rates(calls, schedule=decaying, **options):
    """Return the learning rate after each call: b (train on a batch), s (schedule.step), o (optimizer.step)."""
    accelerator, net, optimizer, data, ticks = prepared(schedule=schedule, **options)
    batches = iter(data)
    found = []
    for call in calls:
        if call == "b":
            with accelerator.accumulate(net):
                accelerator.backward(loss_of(net, next(batches)))
                optimizer.step()
                ticks.step()
                optimizer.zero_grad()
        elif call == "s":
            ticks.step()
        elif call == "o":
            optimizer.step()
        found.append(rate(optimizer))
    return found


def without_updates():
    """Call only the schedule."""
    return _rates("sssss")


def ticks_after_updates():
    """Call the schedule more often than there are updates."""
    return _rates("bsbss")


def two_calls_an_update():
    """Call the schedule twice per update, as if a callback called it too."""
    return _rates("bsbsbs")


def with_accumulation():
    """Call the schedule in each micro-batch of a window."""
    return _rates("bbb", gradient_accumulation_steps=2)


def called_between_micro_batches():
    """Call the schedule also outside the accumulate block."""
    return _rates("bsbs", gradient_accumulation_steps=2)


def apart_from_the_optimizer():
    """Use step_scheduler_with_optimizer=False."""
    return _rates("sbsbs", step_scheduler_with_optimizer=False)


def before_the_optimizer():
    """Call scheduler.step() before optimizer.step()."""
    accelerator, net, optimizer, data, ticks = prepared(schedule=decaying)
    found = []
    for batch in data:
        accelerator.backward(loss_of(net, batch))
        ticks.step()
        optimizer.step()
        optimizer.zero_grad()
        found.append(rate(optimizer))
    return found


def once_an_epoch():
    """Call the schedule once per epoch."""
    accelerator, net, optimizer, data, ticks = prepared(schedule=decaying)
    found = []
    for _ in range(3):
        for batch in data:
            accelerator.backward(loss_of(net, batch))
            optimizer.step()
            optimizer.zero_grad()
        ticks.step()
        found.append(rate(optimizer))
    return found


def plateau():
    """Use ReduceLROnPlateau with patience 2."""
    _accelerator, _net, optimizer, _data, ticks = prepared(
        schedule=lambda each: torch.optim.lr_scheduler.ReduceLROnPlateau(each, patience=2, factor=0.5)
    )
    found = []
    for value in (1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.5, 0.5):
        ticks.step(value)
        found.append(rate(optimizer))
    return found


def plateau_apart():
    """Use ReduceLROnPlateau with step_scheduler_with_optimizer=False."""
    *_, optimizer, _data, ticks = prepared(
        schedule=lambda each: torch.optim.lr_scheduler.ReduceLROnPlateau(each, patience=2, factor=0.5),
        step_scheduler_with_optimizer=False,
    )
    found = []
    for value in (1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.5, 0.5):
        ticks.step(value)
        found.append(rate(optimizer))
    return found


def one_cycle_past_its_end():
    """Make more steps than OneCycleLR's total_steps."""
    return _rates("bbbsss", lambda each: torch.optim.lr_scheduler.OneCycleLR(each, 0.5, total_steps=4))


def one_cycle_to_its_end():
    """Make four of OneCycleLR's eight steps."""
    return _rates("ssss", lambda each: torch.optim.lr_scheduler.OneCycleLR(each, 0.5, total_steps=8))


def cosine():
    """Use CosineAnnealingLR."""
    return _rates("bbs", lambda each: torch.optim.lr_scheduler.CosineAnnealingLR(each, 6))


def sequential():
    """Use SequentialLR with a warm-up."""
    lr = torch.optim.lr_scheduler

    def schedule(optimizer):
        parts = [lr.LinearLR(optimizer, 0.1, total_iters=2), lr.ExponentialLR(optimizer, 0.9)]
        return lr.SequentialLR(optimizer, parts, [2])

    return _rates("bbbss", schedule)


def state_dict():
    """Save and load the state dict of a schedule."""
    *_, ticks = prepared(schedule=decaying)
    ticks.step()
    state = ticks.state_dict()
    ticks.load_state_dict(state)
    return [state["last_epoch"], state["_step_count"], ticks.get_last_lr()]


def adjusting():
    """Use GradientAccumulationPlugin(adjust_scheduler=True), which advances a counter."""
    from accelerate.utils import GradientAccumulationPlugin

    plugin = GradientAccumulationPlugin(num_steps=2, adjust_scheduler=True)
    accelerator, net, optimizer, data, ticks = prepared(schedule=decaying, gradient_accumulation_plugin=plugin)
    counts = []
    for batch in data:
        with accelerator.accumulate(net):
            accelerator.backward(loss_of(net, batch))
            optimizer.step()
            ticks.step()
            optimizer.zero_grad()
        counts.append(ticks.scheduler._step_count)
    return counts


def split_batches():
    """Use split_batches=True, so that an update is one step of the schedule."""
    from accelerate import DataLoaderConfiguration

    return _rates("bbs", dataloader_config=DataLoaderConfiguration(split_batches=True))


def attributes():
    """Read the attributes of a schedule that scripts use."""
    _accelerator, _net, optimizer, _data, ticks = prepared(schedule=decaying)
    return [
        type(ticks.scheduler).__name__,
        len(ticks.optimizers),
        ticks.optimizers[0] is optimizer,
        ticks.split_batches,
        ticks.step_with_optimizer,
        ticks.gradient_state.sync_gradients,
        ticks.get_last_lr(),
    ]


def two_optimizers():
    """Use a schedule for each of two optimizers."""
    from accelerate import Accelerator

    from tests.ecosystem.habits.material import model

    accelerator = Accelerator(cpu=True)
    first, second = model(), model(2)
    optimizers = [torch.optim.SGD(each.parameters(), 0.1) for each in (first, second)]
    ticks = [decaying(each) for each in optimizers]
    made = accelerator.prepare(first, second, *optimizers, *ticks)
    made[4].step()
    made[4].step()
    made[5].step()
    return [rate(made[2]), rate(made[3])]


def while_not_synchronizing():
    """Call the schedule while the gradient state does not synchronize."""
    accelerator, _net, optimizer, _data, ticks = prepared(schedule=decaying)
    accelerator.gradient_state._set_sync_gradients(False)
    ticks.step()
    found = [rate(optimizer)]
    accelerator.gradient_state._set_sync_gradients(True)
    ticks.step()
    return [*found, rate(optimizer)]


def lambda_schedule():
    """Use LambdaLR with a warm-up, like transformers."""
    return _rates("bbb", lambda each: torch.optim.lr_scheduler.LambdaLR(each, lambda tick: min(1.0, (tick + 1) / 8)))


def preparing_a_class():
    """Prepare a scheduler class, like skorch; prepare returns it unchanged."""
    from accelerate import Accelerator

    return Accelerator(cpu=True).prepare(torch.optim.lr_scheduler.StepLR).__name__


def a_schedule_of_the_scripts_own():
    """Prepare a schedule that is no LRScheduler; prepare returns it unchanged, and it steps once per call."""
    from accelerate import Accelerator

    class Own:
        ticks = 0

        def step(self):
            self.ticks += 1

        def state_dict(self):
            return {}

        def load_state_dict(self, state):
            """Do nothing."""

    ticks = Accelerator(cpu=True).prepare(Own())
    ticks.step()
    return ticks.ticks
