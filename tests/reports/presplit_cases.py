"""Map-style data sets, with and without a split or shuffle per rank, for the ranks of `test_presplit_data.py`."""

import random

import datasets
import numpy
import torch
from datasets.distributed import split_dataset_by_node
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    Sampler,
    Subset,
    TensorDataset,
    random_split,
)

from headway import Accelerator, DataLoaderConfiguration
from headway.errors import HeadwayError

ROWS = 64
SIZE = 4


class Rows(Dataset):
    """A data set with rows computed from the index. It records which rows are read, and opens a file at the first read."""

    opened = 0

    def __init__(self, rows, make=lambda row: row):
        self.rows, self.make = list(rows), make
        self.num_read, self.read = 0, []
        self.file = None

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        if self.file is None:
            self.file = object()
            Rows.opened += 1
        self.num_read += 1
        self.read.append(index)
        return self.make(self.rows[index])


class Strided(Sampler):
    """A sampler of every n-th index, which covers one rank's part only."""

    def __init__(self, rank, world):
        self.indices = range(rank, ROWS, world)

    def __len__(self):
        return ROWS // 2

    def __iter__(self):
        return iter(self.indices)


class Drawing(Sampler):
    """A sampler that calls a function for the order of each pass."""

    def __init__(self, draw):
        self.draw = draw
        self.num_passes = 0

    def __len__(self):
        return ROWS

    def __iter__(self):
        self.num_passes += 1
        return iter(self.draw())


class OwnNoise:
    """A transform with its own generator, seeded differently on each rank."""

    def __init__(self, seed):
        self.generator = numpy.random.default_rng(seed)

    def __call__(self, row):
        """Return the row with noise."""
        return {"x": torch.tensor(row + self.generator.normal()), "row": row}


def _make_hf_dataset():
    return datasets.Dataset.from_dict({"row": list(range(ROWS))})


def _make_loader(dataset, **settings):
    return DataLoader(dataset, batch_size=SIZE, **settings)


def _get_block(rank, world):
    return range(rank * ROWS // world, (rank + 1) * ROWS // world)


UNLIKE = {
    "a tensor": lambda rank, world: _make_loader(torch.arange(ROWS)[rank::world]),
    "a NumPy array": lambda rank, world: _make_loader(numpy.arange(ROWS)[rank::world]),
    "a list": lambda rank, world: _make_loader(list(range(ROWS))[rank::world]),
    "a list of texts": lambda rank, world: _make_loader([f"text {row}" for row in _get_block(rank, world)]),
    "floats": lambda rank, world: _make_loader(torch.arange(ROWS * 1.0)[rank::world]),
    "pictures": lambda rank, world: _make_loader(torch.arange(ROWS, dtype=torch.uint8).reshape(-1, 1, 1)[rank::world]),
    "a TensorDataset": lambda rank, world: _make_loader(
        TensorDataset(torch.arange(ROWS)[list(_get_block(rank, world))])
    ),
    "an own dataset": lambda rank, world: _make_loader(Rows(range(rank, ROWS, world))),
    "a dataset of dicts": lambda rank, world: _make_loader(Rows(range(rank, ROWS, world), lambda row: {"row": row})),
    "a Subset": lambda rank, world: _make_loader(Subset(Rows(range(ROWS)), range(rank, ROWS, world))),
    "a Subset of equal rows": lambda rank, world: _make_loader(Subset(torch.zeros(ROWS), range(rank, ROWS, world))),
    "a ConcatDataset": lambda rank, world: _make_loader(ConcatDataset([Rows(_get_block(rank, world)), Rows([5])])),
    "random_split": lambda rank, world: _make_loader(
        random_split(Rows(range(ROWS)), [48, 16], torch.Generator().manual_seed(rank))[1]
    ),
    "datasets: shard": lambda rank, world: _make_loader(_make_hf_dataset().shard(world, rank)),
    "datasets: select": lambda rank, world: _make_loader(_make_hf_dataset().select(range(rank, ROWS, world))),
    "datasets: split_dataset_by_node": lambda rank, world: _make_loader(
        split_dataset_by_node(_make_hf_dataset(), rank, world)
    ),
    "datasets: shuffle": lambda rank, world: _make_loader(_make_hf_dataset().shuffle()),
    "datasets: train_test_split": lambda rank, world: _make_loader(
        _make_hf_dataset().train_test_split(test_size=0.25)["test"]
    ),
    "a strided sampler": lambda rank, world: _make_loader(Rows(range(ROWS)), sampler=Strided(rank, world)),
    "a sampler's own random.Random": lambda rank, world: _make_loader(
        Rows(range(ROWS)), sampler=Drawing(lambda: random.Random(rank).sample(range(ROWS), ROWS))
    ),
    "a sampler's own NumPy generator": lambda rank, world: _make_loader(
        Rows(range(ROWS)), sampler=Drawing(lambda: numpy.random.default_rng(rank).permutation(ROWS).tolist())
    ),
    "a batch sampler": lambda rank, world: DataLoader(
        Rows(range(ROWS)), batch_sampler=BatchSampler(Strided(rank, world), SIZE, False)
    ),
    "a list of batches": lambda rank, world: DataLoader(
        Rows(range(ROWS)), batch_sampler=[[row, row + world] for row in range(rank, ROWS - 2, 2 * world)]
    ),
}


def _add_global_noise(row):
    noise = random.random() + numpy.random.rand() + torch.rand(()).item()
    return {"x": torch.tensor(row + noise), "row": row}


_MODULE_GENERATOR = numpy.random.default_rng()


def _add_noise_of_new_generator(row):
    return {"x": torch.tensor(row + numpy.random.default_rng().normal()), "row": row}


def _add_noise_of_module_generator(row):
    return {"x": torch.tensor(row + _MODULE_GENERATOR.normal()), "row": row}


def _fail_at_damaged_rows(row):
    if row in (0, 21):
        raise ValueError(f"row {row} is damaged")
    return row


class Keyed(Dataset):
    """A data set with strings as keys."""

    def __len__(self):
        return ROWS

    def __getitem__(self, key):
        return int(key.removeprefix("key"))


LIKE = {
    "an own dataset": lambda rank, world: _make_loader(Rows(range(ROWS))),
    "datasets": lambda rank, world: _make_loader(_make_hf_dataset()),
    "datasets: shuffle with a seed": lambda rank, world: _make_loader(_make_hf_dataset().shuffle(seed=3)),
    "augmented by global generators": lambda rank, world: _make_loader(Rows(range(ROWS), _add_global_noise)),
    "augmented by an own generator": lambda rank, world: _make_loader(Rows(range(ROWS), OwnNoise(rank))),
    "augmented by a new generator": lambda rank, world: _make_loader(Rows(range(ROWS), _add_noise_of_new_generator)),
    "augmented by a module's generator": lambda rank, world: _make_loader(
        Rows(range(ROWS), _add_noise_of_module_generator)
    ),
    "rows computed with other rounding": lambda rank, world: _make_loader(
        Rows(range(ROWS), lambda row: torch.tensor(row * (1 + 1e-6 * rank)))
    ),
    "samples in other folders": lambda rank, world: _make_loader(
        Rows(range(ROWS), lambda row: {"path": f"/local/{rank}/{row}.png", "row": row})
    ),
    "keys": lambda rank, world: _make_loader(Keyed(), sampler=[f"key{row}" for row in range(ROWS)]),
    "a sampler that draws globally": lambda rank, world: _make_loader(
        Rows(range(ROWS)), sampler=Drawing(lambda: random.sample(range(ROWS), ROWS))
    ),
    "shuffled": lambda rank, world: _make_loader(Rows(range(ROWS)), shuffle=True),
}


def _read(loader):
    rows = []
    for batch in loader:
        values = batch["row"] if isinstance(batch, dict) else batch[0] if isinstance(batch, list) else batch
        rows += values[: loader.num_valid].tolist() if isinstance(values, torch.Tensor) else list(values)
    return rows


def read(make, kind=Accelerator):
    """Return the valid rows of one epoch on this rank (or the error), and whether preparing left the data untouched."""
    accelerator = kind(cpu=True, dataloader_config=DataLoaderConfiguration())
    rank = accelerator.process_index
    random.seed(rank)
    numpy.random.seed(rank)
    torch.manual_seed(rank)
    loader = make(rank, accelerator.num_processes)
    before = _describe_state(loader)
    try:
        prepared = accelerator.prepare(loader)
        is_untouched = _describe_state(loader) == before
        return (_read(prepared) if kind is Accelerator else [len(batch) for batch in prepared]), is_untouched
    except HeadwayError as error:
        return f"{type(error).__name__}: {error}", _describe_state(loader) == before


def _describe_state(loader):
    dataset, sampler = loader.dataset, loader.sampler
    own = (dataset.num_read, list(dataset.read), dataset.file) if isinstance(dataset, Rows) else ()
    make = getattr(dataset, "make", None)
    noise = make.generator.bit_generator.state if isinstance(make, OwnNoise) else None
    states = random.getstate(), numpy.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    module = _MODULE_GENERATOR.bit_generator.state
    return own, noise, getattr(sampler, "num_passes", 0) == 0, states, module


def read_all(cases, kind=Accelerator):
    """Return the result of `read` for each case on this rank."""
    return {name: read(make, kind) for name, make in cases.items()}
