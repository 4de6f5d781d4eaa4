"""Small scenes on the device that is none; prints what each found, as JSON. A process of its own, see fake_device.

`python -m tests.synchronizations.scenes`
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
from headway.core.training.windows import UpdateClock
from headway.extras.replay import transaction
from headway.extras.throughput import Throughput
from headway.trainer.callbacks import TrainerControl
from headway.trainer.loop import Training
from tests.synchronizations.count import be_an_accelerator
from tests.synchronizations.fake_device import DEVICE, FakeDevice


class Graph:
    """An object that nobody looks into, as graph libraries have them."""

    def __init__(self, nodes: torch.Tensor) -> None:
        self.nodes = nodes

    def pin_memory(self) -> "Graph":
        return Graph(self.nodes.pin_memory())

    def to(self, device: torch.device, non_blocking: bool = False) -> "Graph":
        return Graph(self.nodes.to(device, non_blocking=non_blocking))


class Plain:
    """One that only knows `to`, and moves itself."""

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


def batch() -> dict[str, Any]:
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


def kinds(found: dict[str, Any]) -> dict[str, str]:
    """Where each part lies."""
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
    """A batch of everything, the side stream's way and the waiting one."""
    found: dict[str, Any] = {}
    for name, non_blocking in (("side", None), ("waiting", False)):
        transfer = make_transfer(DEVICE, non_blocking)
        assert transfer is not None
        given = batch()
        del given["sparse"]  # the device that is none has no sparse tensors
        fake.start_over()
        fake.recorded.clear()
        moved = transfer(given)
        waits = [place for _, place in fake.waits]
        found[name] = {"kinds": kinds(moved), "waits": fake.num_waits, "recorded": len(fake.recorded), "where": waits}
    return found


class Watched(SideStreamTransfer):
    """Notes that copies were waited for."""

    num_waits = 0

    def _wait_for_copies(self) -> None:
        self.num_waits += 1
        super()._wait_for_copies()


def pinned_source(fake: FakeDevice) -> list[int]:
    """What is pinned already is copied from where it lies, and waited for where it may be somebody's buffer."""
    found = []
    for tensor in (torch.ones(2).pin_memory(), torch.ones(2)):
        for are_fresh in (True, False):
            transfer, before = Watched(DEVICE, are_fresh), fake.pins
            transfer([tensor])
            found += [fake.pins - before, transfer.num_waits]
    return found


def without_record_stream(fake: FakeDevice) -> str:
    """A device that cannot keep a batch's memory for another stream gets batches the plain way."""
    fake.knows_record_stream = False
    found = make_transfer(DEVICE, None)
    fake.knows_record_stream = True
    return type(found).__name__


def padding(fake: FakeDevice) -> list[str]:
    """Labels with padding are noticed, and nobody waits."""
    lines: list[str] = []
    transaction.log.warning_once = lambda text, *args: lines.append(text)  # type: ignore[method-assign]
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
    """A bar's tokens a second are as of the drawing before."""
    accelerator = Accelerator()
    seconds, found = [0.0], []
    meter = Throughput(
        accelerator._training_step, LoaderEvents(), UpdateClock(), accelerator.runtime, now=lambda: seconds[0]
    )
    for number in range(1, 5):
        meter._on_backward()
        seconds[0] = float(number)
        meter._end_lap(seconds[0])
        meter.add(tokens=torch.tensor(100 * number).to(DEVICE))
        fake.start_over()
        found.append(f"{meter.fact()}; {fake.num_waits} waits")
    return [*found, f"{meter.total()['tokens_per_second']:.0f}"]


class OfTwo:
    """Stands for the exchange of two ranks, of which the other has the same: only the host's numbers may pass."""

    world_size = 2

    def reduce_numbers(self, values: list[float], op: str = "sum") -> list[float]:
        return [2 * value if op == "sum" else value for value in values]

    def sum_in_place(self, found: list[torch.Tensor]) -> None:
        for tensor in found:
            tensor.mul_(2)


def two_ranks(fake: FakeDevice) -> list[Any]:
    """What ranks tell each other about callbacks and losses."""
    task = BatchTask(None, lambda piece: piece, None, "mean")
    task.add(torch.ones(()).to(DEVICE), 4.0)
    control = TrainerControl(should_save=True)
    training = object.__new__(Training)
    exchange = SimpleNamespace(num_processes=2, collectives=OfTwo(), device=DEVICE)
    training.__dict__.update(_accelerator=exchange, _events=SimpleNamespace(has_foreign=True, control=control))
    fake.start_over()
    loss = task.loss(OfTwo())  # type: ignore[arg-type]
    training._synchronize_control()
    return [fake.num_waits, control.flags(), loss.item()]


def workers_pin(fake: FakeDevice) -> list[bool]:
    """With workers, torch's own thread pins."""
    accelerator = Accelerator()
    loaders = [DataLoader(list(range(4))), DataLoader(list(range(4)), num_workers=1)]
    return [accelerator.prepare(loader)._feed.inner.pin_memory for loader in loaders]


def readback(fake: FakeDevice) -> list[float]:
    """The value is that of the moment it was asked for."""
    tensor = torch.ones(()).to(DEVICE)
    asked = Readback(tensor)
    tensor.add_(1)
    fake.start_over()
    return [asked.read().item(), Readback(tensor).read().item(), float(fake.num_waits)]


def bar(fake: FakeDevice) -> list[str]:
    """What a bar shows of a tensor on the device."""
    out = io.StringIO()
    shown = track(range(3), interval=0.0, file=out)
    for number in shown:
        shown.show(loss=torch.tensor(float(number)).to(DEVICE), text="t")
    return [line.partition(" | text")[0] for line in out.getvalue().splitlines()]


def weigher(fake: FakeDevice) -> list[float]:
    """A forward that changes the piece is noticed, and its items are counted again."""
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
    """A loss that is not finite is told with its update, an update late or when the process ends, and nobody waits."""
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
    """Play all of them."""
    be_an_accelerator()
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
