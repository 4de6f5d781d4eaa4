"""Random training loops with any combination of features, compared with the same loop in plain PyTorch.

    python -m tests.sweep.loops                          # 200 loops from seed 0, in about half an hour on two cores
    python -m tests.sweep.loops --first 70 --count 30    # loops 70 to 99

A seed determines a layout, a dataset and its loader, an optimizer, a schedule, windows, a form of the loop and a loss
(`loop_parts.py`). Half of the loops are saved after some micro-batch and resumed in new processes, some in another layout.
Everything is in float64: the final weights must equal those of a loop by hand on one process, up to 1e-8. Differences are
printed with their seed, and the exit code is 1.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from headway import (
    Accelerator,
    ActivationCheckpointing,
    DataLoaderConfiguration,
    GradientAccumulationPlugin,
    PipelineOptions,
    ProjectConfiguration,
)
from tests.distributed.layouts import PADDING
from tests.distributed.ranks import RankFailed, run_ranks
from tests.sweep.loop_parts import (
    SHARDS,
    Loop,
    build_evaluation_loader,
    build_loader,
    build_model,
    build_optimizers,
    build_schedule,
    compute_penalty,
    compute_row_losses,
    draw_loop,
    list_trained_parameters,
    make_rows,
)

CLOSE = 1e-8


@dataclass
class Result:
    """Result of a loop: whole weights, their moving averages, and the learning rates and gradient norms of its updates."""

    weights: dict[str, torch.Tensor]
    averages: dict[str, torch.Tensor]
    rates: list[list[float]]
    norms: list[float]
    num_updates: int


def _update_averages(averages: dict[str, torch.Tensor], model: nn.Module) -> None:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name in averages:
                averages[name].lerp_(parameter, 0.1)


# ---------------------------------------------------------------- by hand


def train_by_hand(loop: Loop) -> Result:
    """Run the loop in plain PyTorch on one process. A batch has the rows that all ranks read at a time."""
    model = build_model(loop)
    optimizers = build_optimizers(loop, model)
    schedule = build_schedule(loop, optimizers[0])
    ids, targets, _ = make_rows(loop)
    found = Result({}, {n: p.detach().clone() for n, p in model.named_parameters() if loop.averages}, [], [], 0)
    window: list[list[int]] = []

    def update() -> None:
        rows = [row for batch in window for row in batch]
        means, sums = compute_row_losses(model(ids[rows]), targets[rows])
        loss = sums.sum() / (targets[rows] != PADDING).sum() if loop.loss in ("tokens", "sum") else means.mean()
        loss = loss + compute_penalty(model) if loop.loss == "penalty" else loss
        (loss * (len(window) / loop.steps if loop.form == "by hand" else 1.0)).backward()
        if loop.clip == "norm":
            found.norms.append(nn.utils.clip_grad_norm_(list_trained_parameters(model), 0.5).item())
        if loop.clip == "value":
            nn.utils.clip_grad_value_(list_trained_parameters(model), 0.01)
        for optimizer in optimizers:
            optimizer.step()
        if loop.schedule == "plateau":
            schedule.step(1.0)
        elif loop.schedule not in ("", "epoch"):
            per_update = 1 if loop.is_split else loop.num_shards
            for _ in range({"": per_update, "micro-batches": per_update * len(window), "updates": 1}[loop.ticks]):
                schedule.step()
        for optimizer in optimizers:
            optimizer.zero_grad()
        found.rates.append([group["lr"] for group in optimizers[0].param_groups])
        found.num_updates += 1
        window.clear()
        _update_averages(found.averages, model)

    for rounds in _list_batches(loop):
        for rows, is_last in rounds:
            window.append(rows)
            if len(window) == loop.steps or (is_last and not loop.crosses_epochs):
                update()
        if loop.schedule == "epoch":
            schedule.step()
    return replace(found, weights={name: tensor.detach() for name, tensor in model.state_dict().items()})


def _list_batches(loop: Loop) -> Iterator[list[tuple[list[int], bool]]]:
    """Return each epoch's batches, as (rows, whether it is the loader's last batch), from a plain DataLoader."""
    torch.manual_seed(loop.seed + 2)
    loader, evaluated = build_loader(loop, loop.whole_batch), DataLoader(TensorDataset(torch.arange(2)))
    length = loop.num_rows // loop.whole_batch if loop.drops_last else -(-loop.num_rows // loop.whole_batch)
    epochs, count = [], 0
    for epoch in range(loop.num_epochs):
        rounds: list[tuple[list[int], bool]] = []
        for number, batch in enumerate(loader):
            is_last = number + 1 == length
            if is_last or number not in loop.skipped:
                rounds.append((_columns(batch)[2].tolist(), is_last))
                count += 1
                if loop.evaluates_every and count % loop.evaluates_every == 0:
                    next(iter(evaluated))
            if epoch == 0 and number + 1 == loop.ends_at:
                break
        epochs.append(rounds)
    return iter(epochs)


def _columns(batch: Any) -> tuple[torch.Tensor, ...]:
    return tuple(batch.values() if isinstance(batch, dict) else batch)


# ---------------------------------------------------------------- on ranks


def make_settings(loop: Loop, layout: str, folder: str) -> dict[str, Any]:
    """Return the arguments of the Accelerator."""
    options: list[Any] = [ActivationCheckpointing()] if loop.recomputes else []
    if loop.pipeline and "pp" in layout:
        options.append(PipelineOptions(schedule=loop.pipeline))
    windows = (
        {"gradient_accumulation_steps": loop.steps}
        if loop.form == "by hand"
        else {
            "gradient_accumulation_plugin": GradientAccumulationPlugin(
                loop.steps, sync_with_dataloader=not loop.crosses_epochs
            )
        }
    )
    ticks = {
        "": {},
        "micro-batches": {"adjust_scheduler_to_accumulation": True},
        "updates": {"scheduler_ticks": "updates"},
    }
    return {
        "cpu": True,
        "strategy": None if layout == "none" else layout.partition("@")[0],
        "preemption": False,
        "kwargs_handlers": options,
        "project_config": ProjectConfiguration(folder, automatic_checkpoint_naming=True),
        "dataloader_config": DataLoaderConfiguration(
            split_batches=loop.is_split, even_batches=False, dispatch_batches=loop.dispatches or None
        ),
        **windows,
        **({"microbatching": "auto"} if loop.out_of_memory else {}),
        **({"step_scheduler_with_optimizer": False} if loop.schedule == "epoch" else ticks[loop.ticks]),
    }  # fmt: skip


class Run:
    """The loop as a user of Headway writes it."""

    def __init__(self, loop: Loop, layout: str, folder: str) -> None:
        self.loop = loop
        self.accelerator = Accelerator(**make_settings(loop, layout, folder))
        model = build_model(loop)
        optimizers = build_optimizers(loop, model)
        schedule = build_schedule(loop, optimizers[0])
        size = loop.whole_batch if loop.is_split else loop.batch_size
        torch.manual_seed(loop.seed + 2)
        self.model, self.loader, self.evaluation, *self.optimizers = self.accelerator.prepare(
            model, build_loader(loop, size), build_evaluation_loader(loop), *optimizers
        )
        self.schedule = None if schedule is None else self.accelerator.prepare(schedule)
        if loop.out_of_memory and self.accelerator.is_last_process:
            self._left = loop.out_of_memory
            self.model.register_forward_pre_hook(self._exhaust)
        averages = {n: p.detach().clone() for n, p in self.model.named_parameters() if loop.averages}
        self.found = Result({}, averages, [], [], 0)

    def _exhaust(self, model: nn.Module, inputs: Any) -> None:
        if model.training and len(inputs[0]) > 1:
            self._left -= 1
            if self._left == 0:
                raise torch.OutOfMemoryError("CUDA out of memory.")

    def __call__(self, stop: int) -> Result | None:
        """Train. Return None if the run was saved and ended after `stop` micro-batches."""
        loop, count = self.loop, 0
        self.accelerator.resume("latest")
        for epoch in self.accelerator.epochs(loop.num_epochs):
            for number, batch in enumerate(self.loader):
                is_left = epoch == 0 and number + 1 == loop.ends_at
                if number in loop.skipped and not self.loader.is_last:
                    if is_left:
                        break
                    continue
                if self._micro_batch(*_columns(batch)[:2], number + 1):
                    self.found.rates.append([group["lr"] for group in self.optimizers[0].param_groups])
                    _update_averages(self.found.averages, self.model)
                count += 1
                if loop.evaluates_every and count % loop.evaluates_every == 0:
                    self._evaluate()
                if count == stop:
                    self.accelerator.save_state(blocking=not loop.in_background)
                    self.accelerator.end_training()
                    return None
                if is_left:
                    break
            if loop.schedule == "epoch":
                self.schedule.step()
        return self._make_result()

    def _make_result(self) -> Result:
        whole = {name: tensor.detach().clone() for name, tensor in self.accelerator.get_state_dict(self.model).items()}
        averages = {n: t.full_tensor() if hasattr(t, "full_tensor") else t for n, t in self.found.averages.items()}
        return replace(self.found, weights=whole, averages=averages, num_updates=self.accelerator.num_updates)

    def _evaluate(self) -> None:
        self.model.eval()
        seen = [row for (rows,) in self.evaluation for row in self.accelerator.gather_for_metrics(rows).tolist()]
        self.model.train()
        assert seen == list(range(self.loop.num_rows)), seen

    def _micro_batch(self, ids: torch.Tensor, targets: torch.Tensor, number: int) -> bool:
        """Run one micro-batch, and return whether it made an update."""
        loop, accelerator = self.loop, self.accelerator
        if loop.form == "by hand":
            accelerator.backward(self._loss(ids, targets))
            if loop.loss == "penalty":
                accelerator.backward(compute_penalty(self.model))
            return (number % loop.steps == 0 or self.loader.is_last) and self._update(True)
        if loop.form == "forward_backward":
            weight = (lambda piece: (piece[1] != PADDING).sum()) if loop.loss in ("tokens", "sum") else None
            reduction = "sum" if loop.loss == "sum" else "mean"
            accelerator.forward_backward((ids, targets), lambda piece: self._loss(*piece), weight, reduction)
            return self._update(accelerator.sync_gradients)
        if loop.form == "microbatches":
            for piece in accelerator.microbatches((ids, targets)):
                with accelerator.accumulate(self.model):
                    self._backward(*piece)
            return self._update(accelerator.sync_gradients)
        with accelerator.accumulate(self.model):
            self._backward(ids, targets)
            if loop.loss == "penalty":
                accelerator.backward(compute_penalty(self.model))
            return self._update(accelerator.sync_gradients)

    def _loss(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        means, sums = compute_row_losses(self.model(ids), targets)
        if self.loop.loss == "mask":
            return (means * self.loader.mask).sum()
        if self.loop.loss == "tokens":
            return sums.sum() / (targets != PADDING).sum().clamp(min=1)
        return sums.sum() if self.loop.loss == "sum" else means.mean()

    def _backward(self, ids: torch.Tensor, targets: torch.Tensor) -> None:
        options: dict[str, Any] = {}
        if self.loop.loss in ("tokens", "sum"):
            options["weight"] = (targets != PADDING).sum()
        if self.loop.loss == "mask":
            options["weight"] = self.loader.mask.sum()
        if self.loop.loss in ("sum", "mask"):
            options["reduction"] = "sum"
        self.accelerator.backward(self._loss(ids, targets), **options)

    def _update(self, is_due: bool) -> bool:
        if is_due and self.loop.clip == "norm":
            self.found.norms.append(float(self.accelerator.clip_grad_norm_(self.model.parameters(), 0.5)))
        if is_due and self.loop.clip == "value":
            self.accelerator.clip_grad_value_(self.model.parameters(), 0.01)
        for optimizer in self.optimizers:
            optimizer.step()
        if self.loop.schedule == "plateau" and is_due:
            self.schedule.step(1.0)
        elif self.loop.schedule not in ("", "epoch", "plateau"):
            self.schedule.step()
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        return is_due


def train_on_ranks(loop: Loop, layout: str, folder: str, stop: int = 0) -> Result | None:
    return Run(loop, layout, folder)(stop)


# ---------------------------------------------------------------- beside each other


def find_differences(loop: Loop) -> list[str]:
    """Run the loop on its ranks and by hand, and return how the results differ."""
    with tempfile.TemporaryDirectory() as folder:
        found = run_ranks(
            train_on_ranks, SHARDS[loop.layout][0], loop, loop.layout, folder, loop.saved_at, timeout=240
        )[0]
        is_whole = found is not None  # not interrupted by a save, so the result contains all updates
        if found is None:
            found = run_ranks(train_on_ranks, SHARDS[loop.resumed][0], loop, loop.resumed, folder, timeout=240)[0]
    expected = train_by_hand(loop)
    wrong = (
        [f"{found.num_updates} updates, not {expected.num_updates}"]
        if found.num_updates != expected.num_updates
        else []
    )
    wrong += _compare("weight", found.weights, expected.weights)
    if is_whole:
        wrong += _compare("average", found.averages, expected.averages)
        for kind, mine, other in (("rate", found.rates, expected.rates), ("norm", found.norms, expected.norms)):
            if len(mine) != len(other) or not torch.allclose(torch.tensor(mine), torch.tensor(other), rtol=CLOSE):
                wrong.append(f"{kind}s {mine[:4]}, not {other[:4]}")
    return wrong


def _compare(kind: str, found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> list[str]:
    if found.keys() != expected.keys():
        return [f"{kind}s of {sorted(found.keys() ^ expected.keys())}"]
    off = {name: float((found[name] - tensor).abs().max()) for name, tensor in expected.items()}
    worst = max(off, key=off.__getitem__, default="")
    return [f"{kind} {worst} by {off[worst]:.1e}"] if worst and not off[worst] <= CLOSE else []


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--first", type=int, default=0, help="first seed")
    parser.add_argument("--count", type=int, default=200, help="number of loops")
    args = parser.parse_args()
    torch.set_num_threads(1)
    num_wrong = 0
    for seed in range(args.first, args.first + args.count):
        loop, began = draw_loop(seed), time.monotonic()
        try:
            wrong = find_differences(loop)
        except RankFailed as error:
            lines = [line for line in str(error).splitlines() if line.startswith("headway.errors.")]
            wrong = lines[:1] or [str(error)]
        num_wrong += bool(wrong)
        print(f"{seed}: {'; '.join(wrong) or 'equal'} ({time.monotonic() - began:.0f} s)", flush=True)
        if wrong:
            print(f"    {loop}", flush=True)
    print(f"{args.count - num_wrong} of {args.count} are equal")
    return int(num_wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
