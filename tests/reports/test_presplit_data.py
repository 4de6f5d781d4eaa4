"""Tests of data that each rank has split or shuffled itself. Sharding them again once skipped half of the samples."""

import os
import time

import pytest
from torch.utils.data import DataLoader, Dataset

from headway import Accelerator
from headway.compat.accelerate.accelerator import AccelerateAccelerator
from tests.distributed.ranks import run_ranks
from tests.reports.presplit_cases import LIKE, ROWS, UNLIKE, read_all
from tests.reports.stream_cases import WarningRecorder


def read_all_cases():
    recorder = WarningRecorder()
    return read_all(UNLIKE), read_all(LIKE), recorder.texts


@pytest.fixture(scope="module")
def ranks():
    return run_ranks(read_all_cases, 2)


@pytest.mark.parametrize("name", UNLIKE)
def test_data_that_differ_between_ranks_are_refused_on_all_ranks(ranks, name):
    (first, is_untouched), (second, _) = (unlike[name] for unlike, _, _ in ranks)
    is_sampler_case = "sampler" in name or "batches" in name
    assert first == second
    assert first.startswith(
        "DataError: the ranks' samplers" if is_sampler_case else "DataError: ranks gave prepare() different data"
    )
    assert "same" in first  # the first remedy
    assert "unprepared" in first or "do not prepare()" in first  # the second remedy
    assert is_untouched or is_sampler_case  # a sampler's order shows only in the first pass


@pytest.mark.parametrize("name", LIKE)
def test_equal_data_are_read_once_and_left_untouched_by_prepare(ranks, name):
    (first, is_untouched), (second, _) = (like[name] for _, like, _ in ranks)
    assert [round(row) for row in sorted(first + second)] == list(range(ROWS))
    assert is_untouched
    assert ranks[0][2] == []


PARTS = ("a list of texts", "a ConcatDataset", "random_split", "datasets: train_test_split", "a list of batches")


def test_one_process_reads_all_data():
    ((unlike, like, warnings),) = run_ranks(read_all_cases, 1)
    for name, (rows, is_untouched) in (unlike | like).items():
        assert is_untouched, name
        assert len(rows) == ROWS or name in PARTS, name
    assert warnings == []


def read_with_accelerate_api():
    recorder = WarningRecorder()
    return read_all(UNLIKE, AccelerateAccelerator), recorder.texts


def test_accelerate_api_shards_them_again_with_a_warning():
    (results, warnings), _ = run_ranks(read_with_accelerate_api, 2)
    assert all(isinstance(rows, list) for rows, _ in results.values())
    assert any("ranks gave prepare() different data" in text for text in warnings)
    assert any("the ranks' samplers" in text for text in warnings)


class Slow(Dataset):
    """A data set that needs half a second per sample. Every sample is damaged on all ranks but rank 0."""

    num_read = 0

    def __init__(self, rank):
        self.rank = rank

    def __len__(self):
        return 10_000

    def __getitem__(self, index):
        Slow.num_read += 1
        time.sleep(0.5)
        if self.rank:
            raise OSError(f"sample {index} cannot be read here")
        return index


def prepare_slow():
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(DataLoader(Slow(accelerator.process_index)))
    return Slow.num_read


def test_prepare_reads_few_slow_samples_and_ignores_damaged_ones():
    assert all(1 <= number <= 8 for number in run_ranks(prepare_slow, 2))


class Lazy(Dataset):
    """A data set that opens its file at the first sample. Workers forked later must not share that file's position."""

    def __init__(self, path):
        self.path, self.file = path, None

    def __len__(self):
        return 8

    def __getitem__(self, index):
        if self.file is None:
            self.file = open(self.path, "rb")  # noqa: SIM115
            self.pid = os.getpid()
        assert self.pid == os.getpid()
        self.file.seek(index)
        return self.file.read(1)[0]


def read_lazily(path):
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(DataLoader(Lazy(path), batch_size=1, num_workers=2, multiprocessing_context="fork"))
    return [batch.item() for batch in loader]


def test_prepare_does_not_open_files_that_workers_open(tmp_path):
    path = tmp_path / "bytes"
    path.write_bytes(bytes(range(8)))
    first, second = run_ranks(read_lazily, 2, str(path))
    assert sorted(first + second) == list(range(8))
