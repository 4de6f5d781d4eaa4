"""Mistakes with mixtures and packing."""

from typing import Any

from torch.utils.data import DataLoader

from headway import Mixture, PackedDataset
from tests.wrong_use.row import Section, error
from tests.wrong_use.script import Script

section = Section("Mixtures and packing")
row = section.row


def make_documents(count: int, length: int = 3) -> list[dict[str, Any]]:
    """Return `count` samples of token IDs, each with `length` tokens."""
    return [{"input_ids": [number % 50] * length} for number in range(count)]


def read_mixture(s: Script, weights: Any, count: int = 8, **options: Any) -> None:
    """Prepare a loader of a mixture of two sources, and read one batch."""
    accelerator = s.start()
    mixture = Mixture({"web": make_documents(8), "code": make_documents(count)}, weights=weights, **options)
    next(iter(accelerator.prepare(DataLoader(mixture, batch_size=2, collate_fn=list))))


@row("a negative weight in a `Mixture`", error("'code' is -0.5"))
def negative_source_weight(s: Script) -> None:
    read_mixture(s, [0.5, -0.5])


@row("weights of a `Mixture` that are all 0", error("are 0"))
def zero_weights(s: Script) -> None:
    read_mixture(s, [0, 0])


@row("a `Mixture` with more weights than sources", error("3 numbers for 2 sources"))
def too_many_weights(s: Script) -> None:
    read_mixture(s, [1, 1, 1])


@row("a `Mixture` with an empty source", error("source 'code' is empty"))
def empty_source(s: Script) -> None:
    read_mixture(s, [1, 1], count=0)


@row("a `Mixture` in a DataLoader that shuffles", error("leave shuffle=True out"))
def shuffled_mixture(s: Script) -> None:
    accelerator = s.start()
    mixture = Mixture({"web": make_documents(8), "code": make_documents(8)}, weights=[1, 1])
    accelerator.prepare(DataLoader(mixture, batch_size=2, shuffle=True, collate_fn=list))


@row("a sample that is longer than the packed sequences", error("long_samples="))
def long_sample(s: Script) -> None:
    s.start()
    PackedDataset([*make_documents(4), *make_documents(1, length=20)], 16)


@row("a different number of lengths than of samples, for packing", error("lengths has 3 entries for 4 samples"))
def too_few_lengths(s: Script) -> None:
    s.start()
    PackedDataset(make_documents(4), 16, lengths=[3, 3, 3])
