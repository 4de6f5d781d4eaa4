"""Complete programs like those in public bug reports: several features together, with gradients above the clipping limit."""

import json
import math
import os

import torch
from accelerate import Accelerator, DataLoaderConfiguration, skip_first_batches
from accelerate.local_sgd import LocalSGD
from accelerate.tracking import GeneralTracker, on_main_process
from accelerate.utils import (
    DistributedDataParallelKwargs,
    GradientAccumulationPlugin,
    ProjectConfiguration,
    broadcast,
    gather_object,
    pad_across_processes,
    set_seed,
)
from torch.utils.data import DataLoader, Dataset, TensorDataset

from tests.ecosystem.habits.material import Stream, loader, loss_of, model, prepared, rows, weights


class _Lengths(Dataset):
    """Sequences of different lengths, which the collate function pads."""

    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return torch.arange(1.0, 2 + index % 4), float(index)


def _pad(batch):
    inputs = torch.nn.utils.rnn.pad_sequence([each for each, _ in batch], batch_first=True)
    return {"inputs": inputs, "mask": inputs != 0, "labels": torch.tensor([[each] for _, each in batch])}


class _Net(torch.nn.Module):
    """Two linear layers with dropout between them."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.body = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.ReLU(), torch.nn.Dropout(0.3))
        self.head = torch.nn.Linear(8, 1)

    def forward(self, x):
        return self.head(self.body(x))


def _cosine(optimizer, steps=8):
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)


def _warm(optimizer):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 4))


def fine_tuning_with_dropout():
    """Train with shuffling, dropout, AdamW, warm-up, clipping in each micro-batch, and evaluation after each epoch."""
    set_seed(3)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    net = _Net()
    optimizer = torch.optim.AdamW(net.parameters(), 0.05)
    net, optimizer, data, held_out, schedule = accelerator.prepare(
        net, optimizer, loader(14, 2, shuffle=True), loader(7, 2), _warm(optimizer)
    )
    told = []
    for _ in range(2):
        net.train()
        for batch in data:
            with accelerator.accumulate(net):
                loss = loss_of(net, batch)
                accelerator.backward(loss)
                told.append([float(loss), float(accelerator.clip_grad_norm_(net.parameters(), 0.5))])
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
        net.eval()
        found = []
        for batch in held_out:
            with torch.no_grad():
                found += accelerator.gather_for_metrics(net(batch[0])).flatten().tolist()
        told.append(found)
    return told, weights(net)


def zeroing_before_the_step():
    """Call optimizer.zero_grad() at the start of the block, as in the first reports about clipping."""
    accelerator, net, optimizer, data, schedule = prepared(14, 2, schedule=_cosine, gradient_accumulation_steps=3)
    norms = []
    for batch in data:
        with accelerator.accumulate(net):
            optimizer.zero_grad()
            accelerator.backward(loss_of(net, batch))
            norms.append(float(accelerator.clip_grad_norm_(net.parameters(), 0.7)))
            optimizer.step()
            schedule.step()
    return norms, weights(net), schedule.get_last_lr()


def skipping_steps_by_their_norm():
    """Skip the step if the norm is too large."""
    accelerator, net, optimizer, data, _ = prepared(16, 2, gradient_accumulation_steps=2)
    told = []
    for batch in data:
        with accelerator.accumulate(net):
            accelerator.backward(loss_of(net, batch))
            norm = accelerator.clip_grad_norm_(net.parameters(), 1.0)
            told.append([float(norm), accelerator.sync_gradients])
            if norm < 60:
                optimizer.step()
            optimizer.zero_grad()
    return told, weights(net)


def windows_counted_by_the_loop():
    """Divide, clip and step by the loop's own count, without accumulate."""
    accelerator, net, optimizer, data, _ = prepared(14, 2)
    norms = []
    for index, batch in enumerate(data, start=1):
        accelerator.backward(loss_of(net, batch) / 3)
        norms.append(float(accelerator.clip_grad_norm_(net.parameters(), 0.5)))
        if index % 3 == 0 or index == len(data):
            optimizer.step()
            optimizer.zero_grad()
    return norms, weights(net)


def a_stream_with_uneven_ends():
    """Accumulate over a stream whose last round is not full."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    net = torch.nn.Linear(1, 1)
    torch.nn.init.constant_(net.weight, 0.5)
    torch.nn.init.zeros_(net.bias)
    net, optimizer, data = accelerator.prepare(
        net, torch.optim.SGD(net.parameters(), 0.01), DataLoader(Stream(13), batch_size=2)
    )
    told = []
    for _ in range(2):
        for batch in data:
            with accelerator.accumulate(net):
                accelerator.backward((net(batch.float().reshape(-1, 1)) ** 2).mean())
                told.append(
                    [len(batch), accelerator.sync_gradients, float(accelerator.clip_grad_norm_(net.parameters(), 0.1))]
                )
                optimizer.step()
                optimizer.zero_grad()
    return told, weights(net)


def padded_batches():
    """Gather predictions of different widths from a collate function that pads."""
    accelerator = Accelerator(cpu=True)
    data = accelerator.prepare(DataLoader(_Lengths(10), batch_size=2, collate_fn=_pad))
    found = []
    for batch in data:
        found.append(accelerator.gather_for_metrics(pad_across_processes(batch["inputs"], dim=1)).tolist())
    return found


def metrics_as_objects():
    """Call gather_object with strings, and gather_for_metrics with use_gather_object."""
    accelerator = Accelerator(cpu=True)
    data = accelerator.prepare(DataLoader(list(range(7)), batch_size=2))
    texts, cut = [], []
    for batch in data:
        mine = [f"row {each}" for each in batch.tolist()]
        texts += gather_object(mine)
        cut += accelerator.gather_for_metrics(mine, use_gather_object=True)
    return texts, cut


def two_optimizers_for_one_model():
    """Train body and head with different optimizers, and clip both together."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    net = _Net().eval()
    first, second = torch.optim.SGD(net.body.parameters(), 0.1), torch.optim.Adam(net.head.parameters(), 0.1)
    net, first, second, data, schedule = accelerator.prepare(net, first, second, loader(14), _cosine(first))
    norms = []
    for batch in data:
        with accelerator.accumulate(net):
            accelerator.backward(loss_of(net, batch))
            norms.append(float(accelerator.clip_grad_norm_(net.parameters(), 0.4)))
            for optimizer in (first, second):
                optimizer.step()
                optimizer.zero_grad()
            schedule.step()
    return norms, weights(net)


def generator_and_discriminator():
    """Train a GAN with two models and two optimizers, each clipped by its own norm."""
    accelerator = Accelerator(cpu=True)
    maker, judge = model(2, 3), model(3, 1)
    both = [torch.optim.Adam(each.parameters(), 0.05) for each in (maker, judge)]
    maker, judge, made_by, judged_by, data = accelerator.prepare(maker, judge, *both, loader())
    told = []
    for batch in data:
        noise = batch[0][:, :2]
        judged_by.zero_grad()
        loss = judge(maker(noise).detach()).mean() - judge(batch[0]).mean()
        accelerator.backward(loss)
        told.append(float(accelerator.clip_grad_norm_(judge.parameters(), 0.3)))
        judged_by.step()
        made_by.zero_grad()
        accelerator.backward(-judge(maker(noise)).mean())
        told.append(float(accelerator.clip_grad_norm_(maker.parameters(), 0.3)))
        made_by.step()
    return told, weights(maker), weights(judge)


def a_frozen_part():
    """Train only the head, with an optimizer that has all parameters."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    net = _Net().eval()
    net.body.requires_grad_(False)
    net, optimizer, data = accelerator.prepare(net, torch.optim.SGD(net.parameters(), 0.1), loader(14))
    norms = []
    for batch in data:
        with accelerator.accumulate(net):
            accelerator.backward(loss_of(net, batch))
            norms.append(float(accelerator.clip_grad_norm_(net.parameters(), 0.2)))
            optimizer.step()
            optimizer.zero_grad()
    return norms, weights(net)


def unused_parameters():
    """Use find_unused_parameters with a branch that half of the batches use."""

    class Branched(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = model(), model()

        def forward(self, x, takes_second):
            return self.second(x) if takes_second else self.first(x)

    accelerator = Accelerator(
        cpu=True, gradient_accumulation_steps=2, kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)]
    )  # fmt: skip
    net = Branched()
    net, optimizer, data = accelerator.prepare(net, torch.optim.SGD(net.parameters(), 0.1), loader(16))
    norms = []
    for index, batch in enumerate(data):
        with accelerator.accumulate(net):
            loss = torch.nn.functional.mse_loss(net(batch[0], index % 4 > 1), batch[1])
            accelerator.backward(loss)
            norms.append(float(accelerator.clip_grad_norm_(net.parameters(), 0.5)))
            optimizer.step()
            optimizer.zero_grad()
    return norms, weights(net)


def saving_with_hooks():
    """Use a save hook that writes the weights itself and pops them, and a load hook that pops the models."""
    accelerator, net, optimizer, data, _ = prepared(8)
    told = []

    def save(models, states, folder):
        told.append([len(models), len(states), sorted(states[0]) if states else []])
        if accelerator.is_main_process:
            torch.save(accelerator.unwrap_model(models[0]).state_dict(), os.path.join(folder, "own.bin"))
        while states:
            states.pop()

    def load(models, folder):
        told.append(len(models))
        accelerator.unwrap_model(models.pop()).load_state_dict(torch.load(os.path.join(folder, "own.bin")))

    accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(load)
    for batch in data:
        accelerator.backward(loss_of(net, batch))
        optimizer.step()
        optimizer.zero_grad()
    accelerator.save_state("kept")
    accelerator.wait_for_everyone()
    kept = weights(net)
    with torch.no_grad():
        for each in net.parameters():
            each.zero_()
    accelerator.load_state("kept")
    has_model = os.path.exists("kept/model.safetensors")
    return told, kept == weights(net), kept, has_model, os.path.exists("kept/own.bin")


def saved_and_resumed_in_mid_epoch():
    """Load a checkpoint from the middle of an epoch, and skip the batches that were already used."""
    set_seed(5)
    config = ProjectConfiguration(project_dir="run", automatic_checkpoint_naming=True, total_limit=2)
    accelerator, net, optimizer, data, schedule = prepared(16, 2, schedule=_cosine, project_config=config)
    for index, batch in enumerate(data):
        accelerator.backward(loss_of(net, batch))
        accelerator.clip_grad_norm_(net.parameters(), 0.5)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if index == 1:
            accelerator.save_state()
    whole = weights(net)
    accelerator.load_state("run/checkpoints/checkpoint_0")
    for batch in skip_first_batches(data, 2):
        accelerator.backward(loss_of(net, batch))
        accelerator.clip_grad_norm_(net.parameters(), 0.5)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return whole == weights(net), whole, schedule.get_last_lr(), accelerator.save_iteration


def registered_objects():
    """Save and load a registered EMA with a counter."""

    class Average:
        def __init__(self, net):
            self.shadow = [each.detach().clone() for each in net.parameters()]
            self.count = 0

        def update(self, net):
            self.count += 1
            for kept, each in zip(self.shadow, net.parameters()):
                kept.lerp_(each.detach(), 0.5)

        def state_dict(self):
            return {"shadow": self.shadow, "count": self.count}

        def load_state_dict(self, state):
            self.shadow, self.count = state["shadow"], state["count"]

    accelerator, net, optimizer, data, _ = prepared(8)
    average = Average(net)
    accelerator.register_for_checkpointing(average)
    for batch in data:
        accelerator.backward(loss_of(net, batch))
        accelerator.clip_grad_norm_(net.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        average.update(net)
    accelerator.save_state("kept")
    accelerator.wait_for_everyone()
    kept = [each.tolist() for each in average.shadow]
    average.shadow, average.count = [], 0
    accelerator.load_state("kept")
    return average.count, kept == [each.tolist() for each in average.shadow], kept


def a_tracker_of_its_own():
    """Return the rows that a custom tracker receives in a run with accumulation."""

    class Lines(GeneralTracker):
        name = "lines"
        requires_logging_directory = False

        def __init__(self):
            super().__init__()
            self.lines = []

        @property
        def tracker(self):
            return self.lines

        @on_main_process
        def store_init_configuration(self, values):
            self.lines.append(["config", values])

        @on_main_process
        def log(self, values, step=None, **more):
            self.lines.append([step, values, more])

    tracker = Lines()
    accelerator, net, optimizer, data, _ = prepared(12, 2, gradient_accumulation_steps=2, log_with=tracker)
    accelerator.init_trackers("run", config={"rate": 0.1, "name": "x"})
    step = 0
    for batch in data:
        with accelerator.accumulate(net):
            loss = loss_of(net, batch)
            accelerator.backward(loss)
            norm = accelerator.clip_grad_norm_(net.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            step += 1
            mean = accelerator.gather(loss.detach()).mean().item()
            accelerator.log({"loss": mean, "norm": float(norm)}, step=step)
    accelerator.end_training()
    return json.loads(json.dumps(tracker.lines)) if accelerator.is_main_process else None


def local_sgd_with_clipping():
    """Use LocalSGD and clip each rank's own gradients."""
    accelerator, net, optimizer, data, _ = prepared(16)
    norms = []
    with LocalSGD(accelerator=accelerator, model=net, local_sgd_steps=3, enabled=True) as local:
        for batch in data:
            with accelerator.accumulate(net):
                accelerator.backward(loss_of(net, batch))
                norms.append(float(accelerator.clip_grad_norm_(net.parameters(), 0.5)))
                optimizer.step()
                optimizer.zero_grad()
                local.step()
    return norms, weights(net)


def local_sgd_with_accumulation():
    """Use LocalSGD with windows of two batches."""
    accelerator, net, optimizer, data, _ = prepared(24, gradient_accumulation_steps=2)
    norms = []
    with LocalSGD(accelerator=accelerator, model=net, local_sgd_steps=2, enabled=True) as local:
        for batch in data:
            with accelerator.accumulate(net):
                accelerator.backward(loss_of(net, batch))
                norms.append(float(accelerator.clip_grad_norm_(net.parameters(), 0.5)))
                optimizer.step()
                optimizer.zero_grad()
                local.step()
    return norms, weights(net)


def early_stopping_by_a_trigger():
    """Call set_trigger on one rank and check_trigger on all ranks."""
    accelerator, net, optimizer, data, _ = prepared(24)
    stopped = None
    for index, batch in enumerate(data):
        accelerator.backward(loss_of(net, batch))
        accelerator.clip_grad_norm_(net.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        if index == 2 and accelerator.is_main_process:
            accelerator.set_trigger()
        if accelerator.check_trigger():
            stopped = index
            break
    return stopped, weights(net)


def best_of_the_evaluations():
    """Keep the unwrapped weights of the epoch with the lowest gathered evaluation loss."""
    accelerator, net, optimizer, data, _ = prepared(12)
    held_out = accelerator.prepare(loader(7, 2))
    best, kept, told = math.inf, None, []
    for _ in range(3):
        for batch in data:
            accelerator.backward(loss_of(net, batch))
            accelerator.clip_grad_norm_(net.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
        losses = []
        for batch in held_out:
            with torch.no_grad():
                losses.append(accelerator.gather_for_metrics((net(batch[0]) - batch[1]).pow(2)))
        value = torch.cat(losses).mean().item()
        told.append(value)
        if value < best:
            best = value
            kept = {name: each.clone() for name, each in accelerator.get_state_dict(net).items()}
    return told, {name: each.tolist() for name, each in kept.items()}


def a_schedule_on_a_plateau():
    """Prepare ReduceLROnPlateau and pass it the loss."""
    accelerator = Accelerator(cpu=True)
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
    net, optimizer, data, schedule = accelerator.prepare(net, optimizer, loader(), schedule)
    rates = []
    for epoch in range(4):
        for batch in data:
            accelerator.backward(loss_of(net, batch))
            accelerator.clip_grad_norm_(net.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
        schedule.step(1.0 + epoch)
        rates.append(optimizer.param_groups[0]["lr"])
    return rates, weights(net)


def a_cyclic_schedule():
    """Use OneCycleLR over the updates of the run, with a step in each micro-batch."""
    accelerator, net, optimizer, data, schedule = prepared(
        16, 2, schedule=lambda it: torch.optim.lr_scheduler.OneCycleLR(it, 0.2, total_steps=8), gradient_accumulation_steps=2
    )  # fmt: skip
    rates = []
    for batch in data:
        with accelerator.accumulate(net):
            accelerator.backward(loss_of(net, batch))
            accelerator.clip_grad_norm_(net.parameters(), 0.5)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            rates.append([optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["momentum"]])
    return rates, weights(net)


def steps_of_schedules_by_hand():
    """Use step_scheduler_with_optimizer=False."""
    accelerator, net, optimizer, data, schedule = prepared(
        14, 2, schedule=_cosine, gradient_accumulation_steps=3, step_scheduler_with_optimizer=False
    )
    rates = []
    for batch in data:
        with accelerator.accumulate(net):
            accelerator.backward(loss_of(net, batch))
            accelerator.clip_grad_norm_(net.parameters(), 0.5)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            rates += schedule.get_last_lr()
    return rates, weights(net)


def rewards_with_baselines():
    """Train a policy gradient loop: advantages normalized over all processes, and two updates per batch."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    net = model(3, 2)
    net, optimizer, data = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), 0.05), loader(8, 2))
    told = []
    for batch in data:
        rewards = batch[1].flatten()
        every = accelerator.gather(rewards)
        advantages = (rewards - every.mean()) / (every.std() + 1e-4)
        for _ in range(2):
            with accelerator.accumulate(net):
                chosen = torch.log_softmax(net(batch[0]), -1)[:, 0]
                loss = -(chosen * advantages).mean()
                accelerator.backward(loss)
                norm = accelerator.clip_grad_norm_(net.parameters(), 0.01)
                told.append([float(norm), accelerator.reduce(loss.detach(), "mean").item()])
                optimizer.step()
                optimizer.zero_grad()
    return told, weights(net)


def distillation():
    """Train a student with a prepared teacher in evaluation mode."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    teacher, student = _Net(), model()
    teacher, student, optimizer, data = accelerator.prepare(
        teacher.eval(), student, torch.optim.SGD(student.parameters(), 0.1), loader(14)
    )
    norms = []
    for batch in data:
        with accelerator.accumulate(student):
            with torch.no_grad():
                aim = teacher(batch[0])
            accelerator.backward(torch.nn.functional.mse_loss(student(batch[0]), 9 * aim))
            norms.append(float(accelerator.clip_grad_norm_(student.parameters(), 0.2)))
            optimizer.step()
            optimizer.zero_grad()
    return norms, weights(student), weights(teacher) == weights(_Net())


def batches_split_and_dispatched():
    """Use dispatch_batches and split_batches with accumulation and clipping."""
    config = DataLoaderConfiguration(dispatch_batches=True, split_batches=True)
    accelerator, net, optimizer, data, schedule = prepared(
        18, 4, schedule=_cosine, gradient_accumulation_steps=2, dataloader_config=config
    )
    told = []
    for batch in data:
        with accelerator.accumulate(net):
            accelerator.backward(loss_of(net, batch))
            norm = accelerator.clip_grad_norm_(net.parameters(), 0.5)
            told.append([len(batch[0]), float(norm), accelerator.sync_gradients])
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    return told, weights(net), schedule.get_last_lr()


def changing_steps_between_epochs():
    """Use sync_with_dataloader=False and change the number of steps in the second epoch."""
    plugin = GradientAccumulationPlugin(num_steps=4, sync_with_dataloader=False)
    accelerator, net, optimizer, data, _ = prepared(14, 2, gradient_accumulation_plugin=plugin)
    told = []
    for epoch in range(2):
        accelerator.gradient_accumulation_steps = 4 - epoch
        for batch in data:
            with accelerator.accumulate(net):
                accelerator.backward(loss_of(net, batch))
                norm = accelerator.clip_grad_norm_(net.parameters(), 0.5)
                told.append([float(norm), accelerator.sync_gradients])
                optimizer.step()
                optimizer.zero_grad()
    return told, weights(net)


def a_second_run_in_one_process():
    """Call free_memory, and train another model with the same Accelerator."""
    accelerator, net, optimizer, data, _ = prepared(gradient_accumulation_steps=2)
    found = []
    for _ in range(2):
        for batch in data:
            with accelerator.accumulate(net):
                accelerator.backward(loss_of(net, batch))
                accelerator.clip_grad_norm_(net.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
        found.append(weights(net))
        net, optimizer, data = accelerator.free_memory(net, optimizer, data)
        fresh = model()
        net, optimizer, data = accelerator.prepare(fresh, torch.optim.Adam(fresh.parameters(), 0.1), loader())
    return found, accelerator.step


def weights_of_tokens():
    """Divide a loss that is summed over tokens by their number in the window on all processes."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    net = torch.nn.Linear(1, 1)
    torch.nn.init.constant_(net.weight, 0.5)
    torch.nn.init.zeros_(net.bias)
    data = DataLoader(_Lengths(12), batch_size=2, collate_fn=_pad)
    net, optimizer, data = accelerator.prepare(net, torch.optim.SGD(net.parameters(), 0.01), data)
    batches, told = iter(data), []
    for _ in range(len(data) // 2):
        window = [next(batches) for _ in range(2)]
        count = accelerator.gather(torch.tensor(sum(int(each["mask"].sum()) for each in window))).sum()
        for batch in window:
            with accelerator.accumulate(net):
                loss = (net(batch["inputs"].unsqueeze(-1)).squeeze(-1) ** 2 * batch["mask"]).sum()
                accelerator.backward(loss * 2 * accelerator.num_processes / count)
                told.append([float(count), float(accelerator.clip_grad_norm_(net.parameters(), 0.5))])
                optimizer.step()
                optimizer.zero_grad()
    return told, weights(net)


def broadcast_choices():
    """Broadcast a choice of rank 0, and create a file in main_process_first."""
    accelerator = Accelerator(cpu=True)
    with accelerator.main_process_first():
        if accelerator.is_main_process:
            with open("made", "w") as file:
                file.write("x")
        is_there = os.path.exists("made")
    chosen = broadcast(torch.tensor([7.0 if accelerator.is_main_process else 0.0]))
    with accelerator.split_between_processes(list("abcde"), apply_padding=True) as mine:
        every = gather_object(mine)
    return is_there, chosen.tolist(), mine, every[:5]


def rows_of_a_dataset():
    """Return the rows of each process in two shuffled epochs with set_epoch."""
    set_seed(11)
    accelerator = Accelerator(cpu=True)
    data = accelerator.prepare(DataLoader(TensorDataset(rows(11)[1]), batch_size=2, shuffle=True))
    found = []
    for epoch in range(2):
        data.set_epoch(epoch)
        found.append([batch[0].flatten().tolist() for batch in data])
    return found
