"""Tests of attributes set on a prepared loader: they work or raise as in PyTorch. Once, they were silently ignored."""

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from headway import Accelerator, DataLoaderConfiguration
from headway.errors import DataError


class Stream(IterableDataset):
    """A stream of six rows."""

    def __iter__(self):
        return iter(range(6))


class Rows(list):
    """Rows that change when the worker's initialization function has run."""

    added = 0

    def __getitem__(self, index):
        return super().__getitem__(index) + self.added


def format_samples(samples):
    return [f"row {sample}" for sample in samples]


def _make_datasets():
    return {"rows": list(range(6)), "stream": Stream()}


@pytest.mark.parametrize("kind", ["rows", "stream"])
@pytest.mark.parametrize("num_workers", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("config", [{}, {"dispatch_batches": True}], ids=str)
def test_collate_fn_set_after_prepare_works_as_in_torch(kind, num_workers, config):
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(**config))
    plain = DataLoader(_make_datasets()[kind], batch_size=2, num_workers=num_workers)
    loader = accelerator.prepare(DataLoader(_make_datasets()[kind], batch_size=2, num_workers=num_workers))
    for each in (plain, loader):
        list(each)
        each.collate_fn = format_samples
    assert list(loader) == list(plain) == [["row 0", "row 1"], ["row 2", "row 3"], ["row 4", "row 5"]]
    assert loader.collate_fn is plain.collate_fn


def add_ten(worker_id):
    Rows.added = 10


@pytest.mark.slow
def test_worker_init_fn_set_after_prepare_works_as_in_torch():
    plain = DataLoader(Rows(range(4)), batch_size=2, num_workers=1)
    loader = Accelerator(cpu=True).prepare(DataLoader(Rows(range(4)), batch_size=2, num_workers=1))
    for each in (plain, loader):
        each.worker_init_fn = add_ten
        each.prefetch_factor = 4
        each.timeout = 60
    assert torch.equal(torch.cat(list(loader)), torch.cat(list(plain)))
    assert torch.cat(list(loader)).tolist() == [10, 11, 12, 13]


@pytest.mark.parametrize(
    "name", ["dataset", "batch_size", "sampler", "batch_sampler", "drop_last", "persistent_workers"]
)
def test_attributes_that_torch_fixes_raise_torchs_error(name):
    plain = DataLoader(range(6), batch_size=2)
    loader = Accelerator(cpu=True).prepare(DataLoader(range(6), batch_size=2))
    with pytest.raises(ValueError, match=f"^{name} attribute should not be set") as expected:
        setattr(plain, name, getattr(plain, name))
    with pytest.raises(ValueError, match=f"^{name} attribute should not be set") as exc_info:
        setattr(loader, name, getattr(loader, name))
    assert str(exc_info.value) == str(expected.value)
    assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3], [4, 5]]


@pytest.mark.parametrize("name", ["num_workers", "generator", "multiprocessing_context", "in_order"])
def test_attributes_that_sharding_depends_on_raise_with_advice(name):
    loader = Accelerator(cpu=True).prepare(DataLoader(range(6), batch_size=2))
    with pytest.raises(DataError, match=rf"loader\.{name} cannot be set after prepare.*before you prepare"):
        setattr(loader, name, None)


class ScalingLoader(DataLoader):
    """A loader with its own collate method, which scales the samples."""

    def __init__(self, dataset, **settings):
        super().__init__(dataset, collate_fn=self.scale, **settings)
        self.factor = 1

    def scale(self, samples):
        return [sample * self.factor for sample in samples]


def test_attributes_of_a_custom_loader_class_reach_its_methods():
    loader = Accelerator(cpu=True).prepare(ScalingLoader(range(4), batch_size=2))
    loader.factor, loader.note = 3, "mine"
    assert list(loader) == [[0, 3], [6, 9]]
    assert (loader.factor, loader.note) == (3, "mine")
    rest = loader.skip(1)
    rest.factor = 5
    assert list(rest) == [[10, 15]]
