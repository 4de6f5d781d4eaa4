"""Samplers and streams that draw from torch's global generator: on several ranks, each epoch equals plain torch's."""

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, Sampler, WeightedRandomSampler

from headway import Accelerator, DataLoaderConfiguration, ProjectConfiguration
from tests.distributed.ranks import run_ranks

NUM_ROWS = 1000
NUM_DRAWN = 96
GLOBAL_BATCH = 12
NUM_EPOCHS = 3


class DrawsPerIndex(Sampler):
    """Sampler that draws a random number for each index."""

    def __len__(self):
        return NUM_DRAWN

    def __iter__(self):
        for _ in range(NUM_DRAWN):
            yield int(torch.randint(NUM_ROWS, ()))


class DrawsPerBatch(BatchSampler):
    """Batch sampler that draws random numbers for each batch."""

    def __init__(self, batch_size):
        super().__init__(range(NUM_ROWS), batch_size, False)

    def __len__(self):
        return NUM_DRAWN // self.batch_size

    def __iter__(self):
        for _ in range(len(self)):
            yield torch.randint(NUM_ROWS, (self.batch_size,)).tolist()


class DrawingStream(IterableDataset):
    """Stream whose samples are random numbers."""

    def __iter__(self):
        for _ in range(NUM_DRAWN):
            yield int(torch.randint(NUM_ROWS, ()))


def make_loader(kind, batch_size, **settings):
    if kind == "stream":
        return DataLoader(DrawingStream(), batch_size=batch_size, **settings)
    rows = range(NUM_ROWS)
    if kind == "per batch":
        return DataLoader(rows, batch_sampler=DrawsPerBatch(batch_size), **settings)
    samplers = {
        "weighted": lambda: WeightedRandomSampler(torch.arange(1.0, NUM_ROWS + 1), NUM_DRAWN),
        "per index": DrawsPerIndex,
        "with replacement": lambda: RandomSampler(rows, replacement=True, num_samples=NUM_DRAWN),
        "own generator": lambda: WeightedRandomSampler(
            torch.arange(1.0, NUM_ROWS + 1), NUM_DRAWN, generator=torch.Generator().manual_seed(5)
        ),
    }
    return DataLoader(rows, batch_size=batch_size, sampler=samplers[kind](), **settings)


def read_plain(kind, is_persistent=False):
    """Return the samples of each epoch of a plain loader. A second, shuffled loader is read after each epoch."""
    workers = {"num_workers": 1, "multiprocessing_context": "fork", "persistent_workers": True}
    loader = make_loader(kind, GLOBAL_BATCH, **(workers if is_persistent else {}))
    evaluated = DataLoader(range(20), batch_size=GLOBAL_BATCH, shuffle=True)
    torch.manual_seed(3)
    return [[torch.cat(list(each)).tolist() for each in (loader, evaluated)] for _ in range(NUM_EPOCHS)]


def read_epochs(kind, folder="", stop=None, resumes=False, num_workers=0, is_persistent=False, **config):
    """Return the samples of each epoch, or those before update `stop`, at which a checkpoint is saved."""
    project = ProjectConfiguration(folder or None, automatic_checkpoint_naming=bool(folder))
    accelerator = Accelerator(cpu=True, project_config=project, dataloader_config=DataLoaderConfiguration(**config))
    batch_size = GLOBAL_BATCH if config.get("split_batches") else GLOBAL_BATCH // accelerator.num_processes
    workers = {"num_workers": num_workers, "multiprocessing_context": "fork", "persistent_workers": is_persistent}
    model, loader, evaluated = accelerator.prepare(
        torch.nn.Linear(1, 1),
        make_loader(kind, batch_size, **(workers if num_workers else {})),
        DataLoader(range(20), batch_size=GLOBAL_BATCH // accelerator.num_processes, shuffle=True),
    )
    torch.manual_seed(99 if resumes else 3)
    if resumes:
        accelerator.resume("latest")
    epochs, count = [], 0
    for _ in accelerator.epochs(NUM_EPOCHS):
        rows = []
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(batch[:, None].float()).mean())
            torch.rand(1 + accelerator.process_index)  # training draws, and differently on each rank
            rows += accelerator.gather_for_metrics(batch).tolist()
            count += 1
            if count == stop:
                accelerator.save_state()
                return [*epochs, [rows]]
        epochs.append([rows, [row for batch in evaluated for row in accelerator.gather_for_metrics(batch).tolist()]])
    return epochs


def read_all(cases):
    return [read_epochs(*case, **config) for case, config in cases]


KINDS = ("weighted", "per index", "per batch", "with replacement", "stream", "own generator")
CONFIGS = [
    {},
    {"num_workers": 1},
    {"num_workers": 1, "is_persistent": True},
    {"split_batches": True},
    {"dispatch_batches": True},
]


def test_each_epoch_equals_that_of_a_plain_loader():
    cases = [((kind,), {}) for kind in KINDS] + [(("weighted",), config) for config in CONFIGS[1:]]
    cases += [(("stream",), {"dispatch_batches": True})]
    for (case, config), *ranks in zip(cases, *run_ranks(read_all, 2, cases)):
        for rank in ranks:
            assert rank == read_plain(*case, is_persistent="is_persistent" in config), (case, config)


def test_streams_and_samplers_with_seeds_repeat_no_epoch():
    cases = [(("stream",), {"num_workers": 1}), (("weighted",), {"data_seed": 5}), (("stream",), {"data_seed": 5})]
    for (first, second, third), (case, config) in zip(run_ranks(read_all, 2, cases)[0], cases):
        assert count_repeats(first[0], second[0]) < 20, (case, config)
        assert count_repeats(second[0], third[0]) < 20, (case, config)


def count_repeats(one, other):
    """Return how many samples of two epochs agree, if one is shifted so that as many as possible do."""
    size = len(one)
    return max(sum(map(int.__eq__, one[max(k, 0) :], other[max(-k, 0) :])) for k in range(-size // 2, size // 2))


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("kind", ["weighted", "per index", "per batch", "stream"])
def test_resumed_epochs_equal_those_of_a_plain_loader(kind, num_workers, tmp_path):
    if kind == "stream" and num_workers:
        pytest.skip("the numbers that a worker draws are functions of seed and epoch, not those of a plain loader")
    plain = read_plain(kind)
    stop = 11  # in the second epoch
    begun = run_ranks(read_epochs, 2, kind, str(tmp_path), stop)[0]
    assert begun == [plain[0], [plain[1][0][: 3 * GLOBAL_BATCH]]]
    for world_size in (2, 1, 3):
        rest = run_ranks(read_epochs, world_size, kind, str(tmp_path), None, True, num_workers)[0]
        assert rest == [[plain[1][0][3 * GLOBAL_BATCH :], plain[1][1]], plain[2]], world_size
