"""Record loss and gradient norm of three real trainings, 100,000 updates in all, to count false alarms of `on_spike`.

    python benchmarks/spikes/record.py            # about three minutes; writes curves.npz beside this file

The trainings use plain PyTorch on one thread, without Headway. The file has an int16 array [updates, 2] for each: 256 times the
natural logarithm of (loss, 2-norm of all gradients before clipping), rounded. One unit is 0.4 %.

- "text": a one-layer byte-level transformer on the standard library's source; AdamW, warm-up and cosine, clipped to 1.
- "noisy_classes": a perceptron on a mixture of 10 Gaussians with 10 % wrong labels; SGD with momentum, learning rate cut twice.
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
    """Byte-level transformer with one layer."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes, self.positions = nn.Embedding(128, 48), nn.Embedding(32, 48)
        self.block = nn.TransformerEncoderLayer(48, 4, 128, 0.0, batch_first=True, norm_first=True)
        self.head = nn.Linear(48, 128)

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.full((x.shape[1], x.shape[1]), -math.inf).triu(1)
        return self.head(self.block(self.bytes(x) + self.positions.weight[: x.shape[1]], mask))


class Recurrent(nn.Module):
    """GRU that reads pairs (number, mark) and returns one number."""

    def __init__(self) -> None:
        super().__init__()
        self.cells, self.head = nn.GRU(2, 24, batch_first=True), nn.Linear(24, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.cells(x)[0][:, -1])[:, 0]


def train_text(generator: torch.Generator) -> Iterator[tuple[nn.Module, torch.optim.Optimizer, Tensor, float | None]]:
    """Yield (model, optimizer, loss, maximum gradient norm) of each update of the byte-level transformer."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    data = torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8).long() % 128
    model = Text()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    total = UPDATES["text"]
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / 500) * (0.55 + 0.45 * math.cos(math.pi * step / total))
    )
    for _ in range(total):
        starts = torch.randint(len(data) - 33, (8,), generator=generator)
        rows = torch.stack([data[i : i + 33] for i in starts])
        yield model, optimizer, F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten()), 1.0
        schedule.step()


def train_noisy_classes(
    generator: torch.Generator,
) -> Iterator[tuple[nn.Module, torch.optim.Optimizer, Tensor, float | None]]:
    """Yield (model, optimizer, loss, maximum gradient norm) of each update of the perceptron; it is not clipped."""
    centers = torch.randn(10, 32, generator=generator)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    total = UPDATES["noisy_classes"]
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [total // 2, 3 * total // 4])
    for _ in range(total):
        labels = torch.randint(10, (32,), generator=generator)
        rows = centers[labels] + 1.5 * torch.randn(32, 32, generator=generator)
        is_wrong = torch.rand(32, generator=generator) < 0.1
        labels = torch.where(is_wrong, torch.randint(10, (32,), generator=generator), labels)
        yield model, optimizer, F.cross_entropy(model(rows), labels), None
        schedule.step()


def train_recurrent(
    generator: torch.Generator,
) -> Iterator[tuple[nn.Module, torch.optim.Optimizer, Tensor, float | None]]:
    """Yield (model, optimizer, loss, maximum gradient norm) of each update of the GRU; it is not clipped."""
    model = Recurrent()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    for _ in range(UPDATES["recurrent"]):
        length = int(torch.randint(10, 31, (), generator=generator))
        numbers = torch.rand(16, length, generator=generator)
        chosen = torch.rand(16, length, generator=generator).topk(2, dim=1).indices
        marks = torch.zeros(16, length).scatter_(1, chosen, 1.0)
        loss = F.mse_loss(model(torch.stack([numbers, marks], 2)), (numbers * marks).sum(1))
        yield model, optimizer, loss, None


def record_curves(names: Iterable[str] = tuple(UPDATES)) -> dict[str, numpy.ndarray]:
    """Run the trainings of these names, and return their curves by name."""
    torch.set_num_threads(1)
    curves = {}
    trainings = {"text": train_text, "noisy_classes": train_noisy_classes, "recurrent": train_recurrent}
    for number, (name, train) in enumerate(trainings.items()):
        if name not in names:
            continue
        torch.manual_seed(number)
        curve = []
        for model, optimizer, loss, max_norm in train(torch.Generator().manual_seed(number)):
            optimizer.zero_grad()
            loss.backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm or math.inf)
            optimizer.step()
            curve.append((math.log(loss.item()), math.log(norm.item())))
        curves[name] = numpy.rint(256 * numpy.array(curve)).astype(numpy.int16)
    return curves


if __name__ == "__main__":
    path = Path(__file__).with_name("curves.npz")
    numpy.savez_compressed(path, **record_curves())
    print(f"{path}: {path.stat().st_size / 1e3:.0f} kB")
