"""Training script that the sweep interrupts and restarts: `script.py MODE`, in the folder of its run.

Every rank appends the results of each micro-batch, each evaluation and the end to `log.ATTEMPT.RANK`. It also writes
marks to a FIFO before each phase, so that the sweep can choose the time of an interruption.
"""

import faulthandler
import hashlib
import json
import os
import random
import sys
import threading
import time
from pathlib import Path

ATTEMPT, RANK = os.environ["SWEEP_ATTEMPT"], os.environ.get("RANK", "0")
LATE = 100.0
"""Seconds after which a process writes its stacks. The sweep kills the run after 120 seconds."""
_log = os.open(f"log.{ATTEMPT}.{RANK}", os.O_CREAT | os.O_APPEND | os.O_WRONLY)
_marks = os.open("marks", os.O_RDWR)  # opening for reading and writing does not block


def mark(phase: str, number: object = 0) -> None:
    os.write(_marks, f"{RANK}|{phase}|{number}\n".encode())


def dump_stacks_if_late(name: str) -> None:
    """Write the stacks of all threads to a file after `LATE` seconds, for diagnosing a hang.

    This uses a Python thread. `dump_traceback_later` does not work in forked workers if the rank has called it: it
    waits forever for the rank's thread, which does not exist in the worker.
    """
    stacks = open(f"stacks.{ATTEMPT}.{name}", "w")  # noqa: SIM115  (open until written)
    late = threading.Timer(LATE, faulthandler.dump_traceback, [stacks])
    late.daemon = True
    late.start()


mark("set-up")
dump_stacks_if_late(RANK)

import numpy as np  # noqa: E402
import torch  # noqa: E402
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info  # noqa: E402

from headway import (  # noqa: E402
    Accelerator,
    LocalSGD,
    Mixture,
    PackedDataset,
    PackingCollator,
    PipelineOptions,
    ProjectConfiguration,
    TensorParallelOptions,
    set_seed,
)

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.sweep.modes import MODES, SHARDED, Mode  # noqa: E402

EPOCHS = 3
BATCH = 4
PAUSE = 0.004
"""Minimum seconds of a micro-batch, so that signals can arrive during it."""


def write_line(**line: object) -> None:
    os.write(_log, (json.dumps(line) + "\n").encode())


def make_noise() -> torch.Tensor:
    """Return noise from the RNG states of this process or worker."""
    return 0.1 * torch.randn(6) + 0.01 * random.random() + 0.01 * float(np.random.rand())


class Rows(Dataset):
    def __init__(self, num_rows: int, draws: bool = True, first: int = 0) -> None:
        self.num_rows, self.draws, self.first = num_rows, draws, first

    def __len__(self) -> int:
        return self.num_rows

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        index += self.first
        return index, torch.linspace(-1, 1, 6) * (index % 7) / 7 + (make_noise() if self.draws else 0)


class Stream(IterableDataset):
    """An iterable dataset that its own generator shuffles, equally on all ranks.

    Only workers add noise, because they have their own RNG states.
    """

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows
        self.generator = torch.Generator().manual_seed(5)

    def __iter__(self):
        order = torch.randperm(self.num_rows, generator=self.generator).tolist()
        worker = get_worker_info()
        if worker is not None:
            dump_stacks_if_late(f"{RANK}.worker{worker.id}.{os.getpid()}")
        for index in order if worker is None else order[worker.id :: worker.num_workers]:
            shift = torch.zeros(6) if worker is None else make_noise()
            yield index, torch.linspace(-1, 1, 6) * (index % 7) / 7 + shift


class Documents(Rows):
    """Samples with one to five tokens."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": torch.full((1 + index % 5,), self.first + index)}


def collate_packed(sequences: list[dict[str, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (tokens and sources of each sequence, noisy inputs of the model)."""
    batch = PackingCollator()(sequences)
    x = batch["input_ids"][:, :6] / 200 + 0.1 * batch["position_ids"][:, :6]
    return torch.cat([batch["input_ids"], batch["source"]], dim=1), x + torch.stack([make_noise() for _ in x])


def build_loader(mode: Mode, num_rows: int) -> DataLoader:
    more = {"multiprocessing_context": "fork"} if mode.num_workers else {}
    if mode.is_stream:
        return DataLoader(Stream(num_rows), batch_size=BATCH, num_workers=mode.num_workers, **more)
    if mode.is_mixture:
        lengths = {"web": num_rows - 17, "code": 12, "math": 5}
        kind = Documents if mode.is_packed else Rows
        sources = {name: kind(length, first=100 * at) for at, (name, length) in enumerate(lengths.items())}
        mixture = Mixture(sources, weights=[0.5, 0.2, 0.3], seed=5, when_source_ends="drop")
        if mode.is_packed:
            packed = PackedDataset(mixture, 8, window=16)
            return DataLoader(packed, BATCH, collate_fn=collate_packed, num_workers=mode.num_workers, **more)
        return DataLoader(mixture, batch_size=BATCH, num_workers=mode.num_workers, **more)
    return DataLoader(Rows(num_rows), batch_size=BATCH, shuffle=True, num_workers=mode.num_workers, **more)


class Block(torch.nn.Module):
    """A residual block that FSDP gathers as a unit and that tensor parallelism splits.

    Under tensor parallelism, dropout applies to split activations.
    """

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.dropout = torch.nn.LayerNorm(12), torch.nn.Dropout(0.2)
        self.up, self.down = torch.nn.Linear(12, 16), torch.nn.Linear(16, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.dropout(torch.tanh(self.up(self.norm(x)))))


class Short(torch.nn.Module):
    """A model that runs out of memory with more than two rows, while `is_short()` is true."""

    def __init__(self, body: torch.nn.Module) -> None:
        super().__init__()
        self.body, self.is_short = body, lambda: False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training and len(x) > 2 and self.is_short():
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return self.body(x)


PLAN = {"*.up": "colwise", "*.down": "rowwise"}


def make_options(layout: str) -> list[object]:
    if "pp" in layout:
        # A batch of four rows is split into two, one and one. The last batch of an epoch has one row.
        return [PipelineOptions(num_microbatches=3)]
    return [TensorParallelOptions(plan=PLAN)] if "tp" in layout else []


def build_network(layout: str = "ddp") -> torch.nn.Module:
    if layout != "ddp":
        return torch.nn.Sequential(torch.nn.Linear(6, 12), Block(), Block(), torch.nn.Linear(12, 1))
    return torch.nn.Sequential(
        torch.nn.Linear(6, 12), torch.nn.LayerNorm(12), torch.nn.Dropout(0.2), torch.nn.Linear(12, 1)
    )


def digest(*trees: object) -> str:
    found = hashlib.sha256()

    def add(tree: object) -> None:
        if isinstance(tree, torch.Tensor):
            tree = getattr(tree, "to_local", lambda: tree)()  # this rank's shard
            if tree.is_meta:  # a parameter of another stage
                return
            found.update(tree.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        elif isinstance(tree, np.ndarray):
            found.update(tree.tobytes())
        elif isinstance(tree, dict):
            for key, value in sorted(tree.items(), key=lambda item: repr(item[0])):
                found.update(repr(key).encode())
                add(value)
        elif isinstance(tree, list | tuple):
            for value in tree:
                add(value)
        else:
            found.update(repr(tree).encode())

    for tree in trees:
        add(tree)
    return found.hexdigest()[:16]


def read_rng_states() -> dict[str, object]:
    return {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()}


class Run:
    """A custom training loop."""

    def __init__(self, mode: Mode) -> None:
        set_seed(11)
        self.mode = mode
        project = ProjectConfiguration("run", automatic_checkpoint_naming=True, total_limit=2)
        self.accelerator = accelerator = Accelerator(
            cpu=True, project_config=project, mixed_precision=mode.precision, gradient_accumulation_steps=mode.accumulation,
            split_batches=mode.is_split, strategy=mode.layout, microbatching="auto" if mode.is_short else None,
            kwargs_handlers=make_options(mode.layout),
        )  # fmt: skip
        model = Short(build_network()) if mode.is_short else build_network(mode.layout)
        if mode.is_short and RANK == "0":
            model.is_short = lambda: 4 <= accelerator.num_updates < 8
        optimizer = torch.optim.AdamW(model.parameters(), 0.01)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.8)
        second = [build_loader(mode, mode.rows)] if mode.reading in ("zip", "in turn") else []
        evaluated = DataLoader(Rows(11), batch_size=BATCH)
        self.model, self.optimizer, self.schedule, self.loader, self.evaluated, *self.second = accelerator.prepare(
            model, optimizer, schedule, build_loader(mode, mode.rows), evaluated, *second
        )
        self.others: list[object] = []
        if mode.learning == "models":
            generator = torch.nn.Linear(6, 6)
            self.generator, self.generator_optimizer = accelerator.prepare(
                generator, torch.optim.Adam(generator.parameters(), 0.01)
            )
            self.others = [self.generator.state_dict(), self.generator_optimizer.state_dict()]
        self.local = LocalSGD(accelerator, self.model, 3, enabled=mode.learning == "local")
        mark("resume")
        accelerator.resume("latest")
        self.is_first = True

    def iterate_batches(self):
        """Yield (loader, batch) for one epoch."""
        if self.mode.reading == "zip":
            for (samples, x), (others, y) in zip(self.loader, self.second[0]):
                yield self.loader, (torch.cat([samples, others]), torch.cat([x, y]))
        else:
            for loader in (self.loader, *self.second):
                for batch in loader:
                    yield loader, batch

    def train(self) -> None:
        with self.local:
            self.train_in_block()
        mark("the end")
        self.accelerator.wait_for_save()
        write_line(
            updates=self.accelerator.num_updates, weights=digest(self.model.state_dict(), *self.others),
            streams=digest(read_rng_states()), optimizer=digest(self.optimizer.state_dict()),
            schedule=digest(self.schedule.state_dict()),
            # Not the loaders' whole states: after `zip`, the second loader's position depends on where the run was interrupted.
            loaders=[each.epoch_at_resume for each in (self.loader, self.evaluated, *self.second)],
        )  # fmt: skip
        self.accelerator.end_training()

    def train_in_block(self) -> None:
        for epoch in self.accelerator.epochs(EPOCHS):
            self.model.train()
            for number, (loader, batch) in enumerate(self.iterate_batches()):
                self.step(epoch, loader, *batch)
            mark("between epochs", epoch)
            time.sleep(PAUSE)
            self.evaluate(epoch)
            mark("saving", f"after {epoch}")
            self.accelerator.save_state(blocking=self.mode.is_blocking)

    def step(self, epoch: int, loader, samples: torch.Tensor, x: torch.Tensor) -> None:
        accelerator, place = self.accelerator, f"{epoch}.{self.number_of(loader)}.{loader.num_consumed}"
        phase = "first batch" if self.is_first else "last batch" if loader.is_last else "batch"
        mark(phase, 0 if self.is_first else place)
        self.is_first = False
        time.sleep(PAUSE * (1 + int(RANK) * self.mode.is_uneven))
        learn = {"function": self.learn_by_function, "models": self.train_critic_and_generator}.get(
            self.mode.learning, self.learn
        )
        loss = learn(x)
        write_line(place=place, update=accelerator.num_updates, loss=loss.item().hex(), lr=self.schedule.get_last_lr()[0].hex(),
             samples=samples.tolist())  # fmt: skip
        if self.is_saved_at(loader):
            mark("saving", place)
            accelerator.save_state(blocking=self.mode.is_blocking)

    def loss_of(self, x: torch.Tensor) -> torch.Tensor:
        return (self.model(x).squeeze(1) - x.sum(1)).square().mean()

    def learn(self, x: torch.Tensor) -> torch.Tensor:
        with self.accelerator.accumulate(self.model):
            loss = self.loss_of(x)
            self.accelerator.backward(loss)
            self.update()
        if self.mode.learning == "local":
            self.local.step()
        return loss

    def learn_by_function(self, x: torch.Tensor) -> torch.Tensor:
        loss = self.accelerator.forward_backward(x, self.loss_of)
        self.update()
        return loss

    def train_critic_and_generator(self, x: torch.Tensor) -> torch.Tensor:
        """Update a GAN's critic (`self.model`), then its generator, in separate windows. Return the sum of both losses."""
        accelerator, seeds = self.accelerator, torch.randn(len(x), 6)
        with accelerator.accumulate(self.model):
            critic_loss = (self.model(x) - 1).square().mean() + self.model(
                self.generator(seeds).detach()
            ).square().mean()
            accelerator.backward(critic_loss)
            self.update()
        with accelerator.accumulate(self.generator):
            generator_loss = (self.model(self.generator(seeds)) - 1).square().mean()
            accelerator.backward(generator_loss)
            self.generator_optimizer.step()
            self.generator_optimizer.zero_grad()
        return critic_loss.detach() + generator_loss.detach()

    def update(self) -> None:
        if self.accelerator.sync_gradients:
            self.accelerator.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()

    def number_of(self, loader) -> int:
        return [self.loader, *self.second].index(loader)

    def is_saved_at(self, loader) -> bool:
        """Whether to save after this batch: the same on every rank and after every resume, also inside windows."""
        per_step = BATCH * (1 if self.mode.is_split else self.accelerator.strategy.data_shard.count)
        return loader.is_last or loader.num_consumed // per_step % 3 == 2

    @torch.no_grad()
    def evaluate(self, epoch: int) -> None:
        self.model.eval()
        total = torch.zeros(())
        for number, (_, x) in enumerate(self.evaluated):
            mark("evaluation", f"{epoch}.{number}")
            time.sleep(PAUSE)
            total += self.accelerator.gather_for_metrics(self.model(x).abs()).sum()
        write_line(epoch=epoch, evaluation=total.item().hex())


def train_with_trainer(mode: Mode) -> None:
    from headway import Trainer, TrainerCallback, TrainingArguments

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = build_network()

        def forward(self, x, labels, number):
            if self.training:
                write_line(samples=number.tolist())
            logits = self.body(x)
            return {"loss": (logits.squeeze(1) - labels).square().mean(), "logits": logits}

    class Recorder(TrainerCallback):
        is_first = True
        optimizer = ""

        def on_train_end(self, args, state, control, **kwargs):
            self.optimizer = digest(kwargs["optimizer"].state_dict())

        def on_train_begin(self, args, state, control, **kwargs):
            mark("resume")

        def on_step_begin(self, args, state, control, **kwargs):
            is_last = (state.global_step + 1) % (state.max_steps // EPOCHS) == 0
            phase = "first batch" if self.is_first else "last batch" if is_last else "batch"
            mark(phase, 0 if self.is_first else state.global_step)
            self.is_first = False
            time.sleep(PAUSE)
            if state.global_step % args.save_steps == args.save_steps - 1:
                mark("saving", state.global_step)

        def on_epoch_end(self, args, state, control, **kwargs):
            mark("between epochs", round(state.epoch))

        def on_prediction_step(self, args, state, control, **kwargs):
            mark("evaluation", state.global_step)
            time.sleep(PAUSE)

        def on_log(self, args, state, control, logs, **kwargs):
            kept = {
                name: value.hex()
                for name, value in logs.items()
                if name in ("loss", "learning_rate", "grad_norm", "eval_loss")
            }
            if kept:
                write_line(update=state.global_step, place=state.global_step, **kept)

    set_seed(11)
    points = torch.randn(mode.rows, 6, generator=torch.Generator().manual_seed(2))
    rows = [{"x": row, "labels": row.sum(), "number": number} for number, row in enumerate(points)]
    settings = TrainingArguments(
        "out", per_device_train_batch_size=BATCH, num_train_epochs=EPOCHS, save_steps=3, save_total_limit=2, logging_steps=1,
        eval_strategy="epoch", learning_rate=0.01, use_cpu=True, disable_tqdm=True, report_to="none",
    )  # fmt: skip
    teller = Recorder()
    trainer = Trainer(Net(), settings, train_dataset=rows, eval_dataset=rows[:11], callbacks=[teller])
    trainer.train(resume_from_checkpoint=True)
    mark("the end")
    write_line(updates=trainer.state.global_step, weights=digest(trainer.model.state_dict()), streams=digest(read_rng_states()),
         optimizer=teller.optimizer)  # fmt: skip


class Progress:
    """Position of a script that counts its epochs and batches itself."""

    def __init__(self) -> None:
        self.epoch = self.batch = 0

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "batch": self.batch}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch, self.batch = state["epoch"], state["batch"]


def train_as_accelerate(mode: Mode) -> None:
    from headway.compat import install_as_accelerate

    install_as_accelerate()
    from accelerate import Accelerator
    from accelerate.utils import ProjectConfiguration, set_seed

    os.environ["HEADWAY_PREEMPTION"] = "1"
    set_seed(11)
    project = ProjectConfiguration("run", automatic_checkpoint_naming=True, total_limit=2)
    accelerator, model = Accelerator(cpu=True, project_config=project), build_network()
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.8)
    loaders = DataLoader(Rows(mode.rows, False), BATCH, shuffle=True), DataLoader(Rows(11, False), BATCH)
    model, optimizer, schedule, loader, evaluated = accelerator.prepare(model, optimizer, schedule, *loaders)
    at = Progress()
    accelerator.register_for_checkpointing(at)
    mark("resume")
    if list(Path("run/checkpoints").glob("checkpoint_*")):
        accelerator.load_state()
    is_first = True
    while at.epoch < EPOCHS:
        model.train()
        loader.set_epoch(at.epoch)
        left = accelerator.skip_first_batches(loader, at.batch) if at.batch else loader
        for samples, x in left if at.batch < len(loader) else ():
            is_last = at.batch == len(loader) - 1
            place = f"{at.epoch}.{at.batch}"
            mark("first batch" if is_first else "last batch" if is_last else "batch", 0 if is_first else place)
            is_first = False
            time.sleep(PAUSE)
            with accelerator.accumulate(model):
                loss = (model(x).squeeze(1) - x.sum(1)).square().mean()
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            at.batch += 1
            write_line(
                place=place, loss=loss.item().hex(), lr=schedule.get_last_lr()[0].hex(), samples=samples.tolist()
            )
            if is_last or at.batch % 3 == 2:
                mark("saving", place)
                accelerator.save_state()
        mark("between epochs", at.epoch)
        time.sleep(PAUSE)
        model.eval()
        total = torch.zeros(())
        for number, (_, x) in enumerate(evaluated):
            mark("evaluation", f"{at.epoch}.{number}")
            time.sleep(PAUSE)
            with torch.no_grad():
                total += accelerator.gather_for_metrics(model(x).abs()).sum()
        write_line(epoch=at.epoch, evaluation=total.item().hex())
        at.epoch, at.batch = at.epoch + 1, 0
        mark("saving", f"after {at.epoch}")
        accelerator.save_state()
    mark("the end")
    write_line(
        weights=digest(model.state_dict()), streams=digest(read_rng_states()), optimizer=digest(optimizer.state_dict())
    )
    accelerator.end_training()


if __name__ == "__main__":
    chosen = {**MODES, **SHARDED}[sys.argv[1]]
    if chosen.reading == "trainer":
        train_with_trainer(chosen)
    elif chosen.reading == "accelerate":
        train_as_accelerate(chosen)
    else:
        Run(chosen).train()
    mark("over")
