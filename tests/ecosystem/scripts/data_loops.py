"""A regression on numbered rows: the rows of each rank and batch, and the results, for many ways to load the data."""

import argparse
import sys

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DataLoaderConfiguration, GradientAccumulationPlugin, set_seed
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    SequentialSampler,
    WeightedRandomSampler,
)
from tqdm.auto import tqdm

from tests.scripts.evidence import Evidence


class Rows(Dataset):
    def __init__(self, number):
        self.number = number

    def __len__(self):
        return self.number

    def __getitem__(self, index):
        return {"id": torch.tensor(index), "x": torch.tensor([index / 10.0, (index % 7) / 7.0])}


class Stream(IterableDataset):
    def __init__(self, number):
        self.rows = Rows(number)

    def __iter__(self):
        yield from (self.rows[index] for index in range(self.rows.number))


def parse(line):
    parser = argparse.ArgumentParser()
    parser.add_argument("--num_rows", type=int, default=22)
    parser.add_argument("--batch_size", type=int, default=4)
    parser.add_argument("--steps", type=int, default=1)
    parser.add_argument("--shuffle", action="store_true")
    parser.add_argument("--drop_last", action="store_true")
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--kind", default="map", help="map, stream, sampler, batch_sampler")
    parser.add_argument("--bar", action="store_true")
    parser.add_argument("--by_hand", action="store_true", help="step at every k-th backward pass, without accumulate")
    parser.add_argument("--no_sync_with_loader", action="store_true")
    parser.add_argument("--adjust", action="store_true")
    parser.add_argument("--uneven", action="store_true", help="join_uneven_inputs(even_batches=False)")
    parser.add_argument("--precision", default="no")
    parser.add_argument(
        "--loading", default="", help="split, dispatch, uneven, seedable, data_seed, separated by commas"
    )
    return parser.parse_args(line.split())


def make_loader(args):
    settings, rows = {"num_workers": args.workers}, Rows(args.num_rows)
    if args.kind == "stream":
        return DataLoader(Stream(args.num_rows), batch_size=args.batch_size, drop_last=args.drop_last, **settings)
    if args.kind == "sampler":
        sampler = WeightedRandomSampler(torch.arange(1.0, args.num_rows + 1), args.num_rows)
        return DataLoader(rows, batch_size=args.batch_size, sampler=sampler, **settings)
    if args.kind == "batch_sampler":
        sampler = BatchSampler(SequentialSampler(rows), args.batch_size, args.drop_last)
        return DataLoader(rows, batch_sampler=sampler, **settings)
    return DataLoader(rows, batch_size=args.batch_size, shuffle=args.shuffle, drop_last=args.drop_last, **settings)


def make_accelerator(args):
    options = set(args.loading.split(","))
    loading = DataLoaderConfiguration(
        split_batches="split" in options, dispatch_batches=True if "dispatch" in options else None,
        even_batches="uneven" not in options, use_seedable_sampler="seedable" in options,
        data_seed=7 if "data_seed" in options else None,
    )  # fmt: skip
    plugin = GradientAccumulationPlugin(
        num_steps=args.steps, sync_with_dataloader=not args.no_sync_with_loader, adjust_scheduler=args.adjust
    )
    return Accelerator(
        dataloader_config=loading, gradient_accumulation_plugin=plugin, mixed_precision=args.precision, cpu=True
    )


class Loop:
    def __init__(self, args, accelerator, note):
        self.args, self.accelerator, self.note = args, accelerator, note
        set_seed(3)
        model = torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda tick: 0.95**tick)
        self.model, self.optimizer, self.loader, self.scheduler = accelerator.prepare(
            model, optimizer, make_loader(args), scheduler
        )
        self.num_batches = 0
        if args.kind != "stream" and "dispatch" not in args.loading:
            note("length", len(self.loader), self.loader.total_batch_size, self.loader.total_dataset_length)

    def loss(self, batch):
        return (self.model(batch["x"]).squeeze(-1) - batch["id"] / 10.0).square().mean()

    def update(self):
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()

    def gradients(self):
        for parameter in self.model.parameters():
            self.note("gradients", parameter.grad.double().sum(), parameter.grad.double().norm())

    def step(self, batch):
        self.num_batches += 1
        if self.args.by_hand:
            loss = self.loss(batch)
            self.accelerator.backward(loss)
            if self.num_batches % self.args.steps == 0:
                self.gradients()
                self.update()
            return loss
        with self.accelerator.accumulate(self.model):
            loss = self.loss(batch)
            self.accelerator.backward(loss)
            self.note("syncs", self.accelerator.sync_gradients)
            if self.accelerator.sync_gradients:
                self.note("norm", self.accelerator.clip_grad_norm_(self.model.parameters(), 1.0))
                self.gradients()
            self.update()
        return loss

    def run(self):
        gather, note = self.accelerator.gather_for_metrics, self.note
        for _ in range(2):
            for batch in tqdm(self.loader, disable=True) if self.args.bar else self.loader:
                note("rows", batch["id"])
                note("place", self.accelerator.gradient_state.end_of_dataloader)
                loss = self.step(batch).detach()
                note("loss", loss)
                note("lr", self.scheduler.get_last_lr()[0])
                note("gathered rows", gather(batch["id"]))
                if "uneven" not in self.args.loading:
                    note("gathered loss", gather(loss), gather(loss).ndim)
                    note("mean loss", self.accelerator.gather(loss).mean())
                    texts = gather([f"row {each}" for each in batch["id"].tolist()])
                    note("texts", len(texts), *(int(text.split()[1]) for text in texts))
        note("draw", torch.rand(()))
        for parameter in self.model.parameters():
            note("parameters", parameter.double().sum(), parameter.double().norm())
        if self.args.uneven:
            with self.accelerator.join_uneven_inputs([self.model], even_batches=False):
                for batch in self.loader:
                    note("uneven rows", batch["id"])


evidence = None
for case in sys.argv[1:]:
    args = parse(case.strip(" ."))
    accelerator = make_accelerator(args)
    evidence = evidence or Evidence("evidence", accelerator.process_index)
    loop = Loop(args, accelerator, lambda name, *values, case=case: evidence.add(f"{case}: {name}", *values))
    loop.run()
    accelerator.free_memory()
    AcceleratorState._reset_state()
    GradientState._reset_state()
evidence.write()
accelerator.end_training()
