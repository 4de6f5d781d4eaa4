"""Run small scenarios on the fake device, and print their results as JSON.

Run this in its own process (see fake_device): `python -m tests.synchronizations.scenes`
"""

import io
import json
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.utils.data import DataLoader

from headway import Accelerator, track
from headway.core.data.loader import LoaderEvents
from headway.core.data.transfer import SideStreamTransfer, make_transfer
from headway.core.runtime.device import CPU
from headway.core.runtime.readback import Readback
from headway.core.training.checks import notices
from headway.core.training.task import BatchTask
from headway.core.training.update_clock import UpdateClock
from headway.extras.replay import padding_check
from headway.extras.throughput import Throughput
from headway.trainer.callbacks import TrainerControl
from headway.trainer.loop import Training
from tests.synchronizations.count import register_accelerator
from tests.synchronizations.fake_device import DEVICE, FakeDevice


class Graph:
    """A custom object with `pin_memory` and `to`, like those of graph libraries."""

    def __init__(self, nodes: torch.Tensor) -> None:
        self.nodes = nodes

    def pin_memory(self) -> "Graph":
        return Graph(self.nodes.pin_memory())

    def to(self, device: torch.device, non_blocking: bool = False) -> "Graph":
        return Graph(self.nodes.to(device, non_blocking=non_blocking))


class Plain:
    """A custom object whose `to` moves it in place and has no `non_blocking` argument."""

    def __init__(self, nodes: torch.Tensor) -> None:
        self.nodes = nodes

    def to(self, device: torch.device) -> None:
        self.nodes = self.nodes.to(device)


class Pair(NamedTuple):
    one: torch.Tensor
    text: str


@dataclass
class Box:
    held: torch.Tensor
    made: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.made = torch.ones(1)


def make_batch() -> dict[str, Any]:
    return {
        "tensor": torch.ones(2),
        "pair": [Pair(torch.ones(2), "text")],
        "packed": pack_sequence([torch.ones(3), torch.ones(2)]),
        "graph": Graph(torch.ones(2)),
        "plain": Plain(torch.ones(2)),
        "box": Box(torch.ones(2)),
        "there": torch.ones(2).to(DEVICE),
        "sparse": torch.eye(2).to_sparse(),
    }


def get_device_types(found: dict[str, Any]) -> dict[str, str]:
    """Return the device type of each part of a batch."""
    packed: PackedSequence = found["packed"]
    return {
        "tensor": found["tensor"].device.type,
        "pair": found["pair"][0].one.device.type,
        "packed": f"{packed.data.device.type}, sizes on {packed.batch_sizes.device.type}",
        "graph": found["graph"].nodes.device.type,
        "plain": found["plain"].nodes.device.type,
        "box": f"{found['box'].held.device.type} {found['box'].made.device.type}",
        "there": found["there"].device.type,
    }


def transfers(fake: FakeDevice) -> dict[str, Any]:
    """Move a batch with every kind of object, with a side stream and with blocking copies."""
    found: dict[str, Any] = {}
    for name, non_blocking in (("side", None), ("waiting", False)):
        transfer = make_transfer(DEVICE, non_blocking)
        assert transfer is not None
        given = make_batch()
        del given["sparse"]  # the fake device has no sparse tensors
        fake.start_over()
        fake.recorded.clear()
        moved = transfer(given)
        waits = [place for _, place in fake.waits]
        found[name] = {
            "kinds": get_device_types(moved),
            "waits": fake.num_waits,
            "recorded": len(fake.recorded),
            "where": waits,
        }
    return found


class CountingTransfer(SideStreamTransfer):
    """A transfer that counts how often it waits for its copies."""

    num_waits = 0

    def _wait_for_copies(self) -> None:
        self.num_waits += 1
        super()._wait_for_copies()


def pinned_source(fake: FakeDevice) -> list[int]:
    """Copy pinned and pageable tensors, and return counts of pinned copies and waits.

    Pinned tensors are copied directly. The transfer waits for them if they may be a buffer that is reused.
    """
    found = []
    for tensor in (torch.ones(2).pin_memory(), torch.ones(2)):
        for are_fresh in (True, False):
            transfer, before = CountingTransfer(DEVICE, are_fresh), fake.pins
            transfer([tensor])
            found += [fake.pins - before, transfer.num_waits]
    return found


def without_record_stream(fake: FakeDevice) -> str:
    """Return the transfer class for a device without `record_stream`."""
    fake.knows_record_stream = False
    found = make_transfer(DEVICE, None)
    fake.knows_record_stream = True
    return type(found).__name__


def padding(fake: FakeDevice) -> list[str]:
    """Check batches with padded labels; return the warnings and the numbers of waits."""
    lines: list[str] = []
    padding_check.log.warning_once = lambda text, *args: lines.append(text)  # type: ignore[method-assign]
    accelerator = Accelerator(microbatching="auto")
    model = accelerator.prepare(torch.nn.Linear(1, 1).to(DEVICE))
    for _ in range(2):
        batch = {"x": torch.ones(2, 1).to(DEVICE), "labels": torch.tensor([1, -100]).to(DEVICE)}
        fake.start_over()
        for piece in accelerator.microbatches(batch):
            with accelerator.accumulate(model):
                accelerator.backward(model(piece["x"]).mean())
        lines.append(f"{fake.num_waits} waits")
    accelerator.free_memory()
    return lines


def figures(fake: FakeDevice) -> list[str]:
    """Return the throughput figures that a progress bar shows. They have the state of the previous drawing."""
    accelerator = Accelerator()
    seconds, found = [0.0], []
    meter = Throughput(
        accelerator._training_step, LoaderEvents(), UpdateClock(), accelerator.runtime, now=lambda: seconds[0]
    )
    for number in range(1, 5):
        meter._handle_backward()
        seconds[0] = float(number)
        meter._end_lap(seconds[0])
        meter.add(tokens=torch.tensor(100 * number).to(DEVICE))
        fake.start_over()
        found.append(f"{meter.format_rates()}; {fake.num_waits} waits")
    return [*found, f"{meter.total()['tokens_per_second']:.0f}"]


class CollectivesOfTwoRanks:
    """Collectives of two ranks with equal values, which accept only numbers on the host."""

    world_size = 2

    def reduce_numbers(self, values: list[float], op: str = "sum") -> list[float]:
        return [2 * value if op == "sum" else value for value in values]

    def sum_in_place(self, found: list[torch.Tensor]) -> None:
        for tensor in found:
            tensor.mul_(2)


def two_ranks(fake: FakeDevice) -> list[Any]:
    """Exchange a loss and the Trainer's control flags between two ranks."""
    task = BatchTask(None, lambda piece: piece, None, "mean")
    task.add(torch.ones(()).to(DEVICE), 4.0)
    control = TrainerControl(should_save=True)
    training = object.__new__(Training)
    exchange = SimpleNamespace(num_processes=2, collectives=CollectivesOfTwoRanks(), device=DEVICE)
    handler = SimpleNamespace(has_user_callbacks=True, control=control)
    training.__dict__.update(_accelerator=exchange, _has_user_callbacks=False, _callback_handler=handler)
    fake.start_over()
    loss = task.loss(CollectivesOfTwoRanks())  # type: ignore[arg-type]
    training._synchronize_control()
    return [fake.num_waits, control.flags(), loss.item()]


def workers_pin(fake: FakeDevice) -> list[bool]:
    """Return whether the DataLoader pins memory, without and with workers."""
    accelerator = Accelerator()
    loaders = [DataLoader(list(range(4))), DataLoader(list(range(4)), num_workers=1)]
    return [accelerator.prepare(loader)._feed.inner_loader.pin_memory for loader in loaders]


def readback(fake: FakeDevice) -> list[float]:
    """Read values back. The result is the value at the time of the request."""
    tensor = torch.ones(()).to(DEVICE)
    asked = Readback(tensor)
    tensor.add_(1)
    fake.start_over()
    return [asked.read().item(), Readback(tensor).read().item(), float(fake.num_waits)]


def bar(fake: FakeDevice) -> list[str]:
    """Return what a progress bar shows for a tensor on the device."""
    out = io.StringIO()
    shown = track(range(3), interval=0.0, file=out)
    for number in shown:
        shown.show(loss=torch.tensor(float(number)).to(DEVICE), text="t")
    return [line.partition(" | text")[0] for line in out.getvalue().splitlines()]


def weigher(fake: FakeDevice) -> list[float]:
    """Train with a weight function while forward changes its input. Headway notices this and counts the items again."""
    losses = []
    for changes in (False, True):
        accelerator = Accelerator(microbatching="auto")
        model = accelerator.prepare(torch.nn.Linear(1, 1, bias=False).to(DEVICE))
        labels = torch.tensor([1, 2, 3, 4]).to(DEVICE)

        def forward(piece: torch.Tensor, changes: bool = changes, model: torch.nn.Module = model) -> torch.Tensor:
            if changes:
                piece[0] = -100
            kept = (piece != -100).float()
            return (model(torch.ones(4, 1).to(DEVICE))[:, 0] * 0 + kept).sum() / 12

        loss = accelerator.forward_backward(
            labels, forward, weight=lambda piece: (piece != -100).sum(), reduction="sum"
        )
        losses.append(loss.item() * 12)
        accelerator.free_memory()
    return losses


def notice(fake: FakeDevice) -> list[Any]:
    """Train with a loss that is not finite, and return the warnings and the updates at which they appear.

    The warning comes one update later, or at the end of the process.
    """
    found: list[Any] = []
    notices.log.warning = lambda text, *args, **more: found.append((text % args).partition(".")[0])  # type: ignore[method-assign]
    for bad in (2, 4):
        accelerator = Accelerator(gradient_accumulation_steps=2)
        model = torch.nn.Linear(1, 1).to(DEVICE)
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        rows = [torch.full((2, 1), float("nan") if micro == 2 * bad else 1.0).to(DEVICE) for micro in range(1, 9)]
        fake.start_over()
        for row in rows:
            with accelerator.accumulate(model):
                accelerator.backward(model(row).mean())
                optimizer.step()
                optimizer.zero_grad()
            found += [accelerator.num_updates] if accelerator.sync_gradients else []
        found.append(f"{fake.num_waits} waits")
        accelerator._training_step.guard._notice._read_all()  # type: ignore[attr-defined]
    return found


def main() -> None:
    """Run all scenes and print their results."""
    register_accelerator()
    with FakeDevice() as fake:
        assert Accelerator().device.type == DEVICE.type != CPU.kind
        scenes = (
            transfers,
            pinned_source,
            without_record_stream,
            workers_pin,
            readback,
            bar,
            weigher,
            padding,
            figures,
            notice,
            two_ranks,
        )
        print(json.dumps({scene.__name__: scene(fake) for scene in scenes}))


if __name__ == "__main__":
    main()
