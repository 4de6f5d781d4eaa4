"""Records loss and gradient norm of three real trainings, 100,000 updates in all, for the false alarms of `on_spike`.

    python benchmarks/spikes/record.py            # about three minutes; writes curves.npz beside this file

Plain PyTorch on one thread, without Headway. For each training an int16 array [updates, 2]: 256 times the natural logarithm
of (loss, 2-norm of all gradients before clipping), rounded: 0.4 % a step.

- "text": a one-layer byte-level transformer on the standard library's source; AdamW, warm-up and cosine, clipped to 1.
- "noisy_classes": a perceptron on a mixture of 10 Gaussians of which 10 % of the labels are wrong; SGD with momentum, rate cut twice.
- "recurrent": a GRU on the adding problem with lengths of 10 to 30 (Hochreiter & Schmidhuber 1997); Adam, batches of 16, not clipped.
"""

import math
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy
import torch
from torch import Tensor, nn
from torch.nn import functional as F

UPDATES = {"text": 20_000, "noisy_classes": 70_000, "recurrent": 10_000}


class Text(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bytes, self.places = nn.Embedding(128, 48), nn.Embedding(32, 48)
        self.block = nn.TransformerEncoderLayer(48, 4, 128, 0.0, batch_first=True, norm_first=True)
        self.head = nn.Linear(48, 128)

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.full((x.shape[1], x.shape[1]), -math.inf).triu(1)
        return self.head(self.block(self.bytes(x) + self.places.weight[: x.shape[1]], mask))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cells, self.head = nn.GRU(2, 24, batch_first=True), nn.Linear(24, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.cells(x)[0][:, -1])[:, 0]


def text(generator: torch.Generator) -> Iterator[tuple[nn.Module, torch.optim.Optimizer, Tensor, float | None]]:
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    data = torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8).long() % 128
    model = Text()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    total = UPDATES["text"]
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / 500) * (0.55 + 0.45 * math.cos(math.pi * step / total))
    )
    for _ in range(total):
        at = torch.randint(len(data) - 33, (8,), generator=generator)
        rows = torch.stack([data[i : i + 33] for i in at])
        yield model, optimizer, F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten()), 1.0
        schedule.step()


def noisy_classes(
    generator: torch.Generator,
) -> Iterator[tuple[nn.Module, torch.optim.Optimizer, Tensor, float | None]]:
    centres = torch.randn(10, 32, generator=generator)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    total = UPDATES["noisy_classes"]
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [total // 2, 3 * total // 4])
    for _ in range(total):
        labels = torch.randint(10, (32,), generator=generator)
        rows = centres[labels] + 1.5 * torch.randn(32, 32, generator=generator)
        wrong = torch.rand(32, generator=generator) < 0.1
        labels = torch.where(wrong, torch.randint(10, (32,), generator=generator), labels)
        yield model, optimizer, F.cross_entropy(model(rows), labels), None
        schedule.step()


def recurrent(generator: torch.Generator) -> Iterator[tuple[nn.Module, torch.optim.Optimizer, Tensor, float | None]]:
    model = Recurrent()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    for _ in range(UPDATES["recurrent"]):
        length = int(torch.randint(10, 31, (), generator=generator))
        numbers = torch.rand(16, length, generator=generator)
        chosen = torch.rand(16, length, generator=generator).topk(2, dim=1).indices
        marks = torch.zeros(16, length).scatter_(1, chosen, 1.0)
        loss = F.mse_loss(model(torch.stack([numbers, marks], 2)), (numbers * marks).sum(1))
        yield model, optimizer, loss, None


def record(names: Iterable[str] = tuple(UPDATES)) -> dict[str, numpy.ndarray]:
    """The curves by name."""
    torch.set_num_threads(1)
    found = {}
    for number, train in enumerate((text, noisy_classes, recurrent)):
        if train.__name__ not in names:
            continue
        torch.manual_seed(number)
        curve = []
        for model, optimizer, loss, most in train(torch.Generator().manual_seed(number)):
            optimizer.zero_grad()
            loss.backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), most or math.inf)
            optimizer.step()
            curve.append((math.log(loss.item()), math.log(norm.item())))
        found[train.__name__] = numpy.rint(256 * numpy.array(curve)).astype(numpy.int16)
    return found


if __name__ == "__main__":
    path = Path(__file__).with_name("curves.npz")
    numpy.savez_compressed(path, **record())
    print(f"{path}: {path.stat().st_size / 1e3:.0f} kB")
