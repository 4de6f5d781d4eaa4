"""Reported: data that each rank had split or shuffled by itself were shared out again, so that half of them was never read."""

import os
import time

import pytest
from torch.utils.data import DataLoader, Dataset

from headway import Accelerator
from headway.compat.accelerate.accelerator import AccelerateAccelerator
from tests.distributed.ranks import run_ranks
from tests.reports.presplit_cases import LIKE, ROWS, UNLIKE, read_all
from tests.reports.stream_cases import Heard


def read_each():
    heard = Heard()
    return read_all(UNLIKE), read_all(LIKE), heard.texts


@pytest.fixture(scope="module")
def ranks():
    return run_ranks(read_each, 2)


@pytest.mark.parametrize("name", UNLIKE)
def test_data_that_differ_between_ranks_are_refused_on_all_of_them(ranks, name):
    (first, is_untouched), (second, _) = (unlike[name] for unlike, _, _ in ranks)
    is_of_sampler = "sampler" in name or "batches" in name
    assert first == second
    assert first.startswith(
        "DataError: the ranks' samplers" if is_of_sampler else "DataError: ranks gave prepare() different data"
    )
    assert "same" in first  # the one way out
    assert "unprepared" in first or "do not prepare()" in first  # the other
    assert is_untouched or is_of_sampler  # which shows with the first pass


@pytest.mark.parametrize("name", LIKE)
def test_data_that_are_alike_are_read_once_and_looked_at_without_a_trace(ranks, name):
    (first, is_untouched), (second, _) = (like[name] for _, like, _ in ranks)
    assert [round(row) for row in sorted(first + second)] == list(range(ROWS))
    assert is_untouched
    assert ranks[0][2] == []


PARTS = ("a list of texts", "a ConcatDataset", "random_split", "datasets: train_test_split", "a list of batches")


def test_one_process_reads_each_of_them_as_it_is():
    ((unlike, like, heard),) = run_ranks(read_each, 1)
    for name, (rows, is_untouched) in (unlike | like).items():
        assert is_untouched, name
        assert len(rows) == ROWS or name in PARTS, name
    assert heard == []


def read_under_the_name():
    heard = Heard()
    return read_all(UNLIKE, AccelerateAccelerator), heard.texts


def test_under_accelerates_name_they_are_shared_out_again_with_a_warning():
    (found, heard), _ = run_ranks(read_under_the_name, 2)
    assert all(isinstance(rows, list) for rows, _ in found.values())
    assert any("ranks gave prepare() different data" in text for text in heard)
    assert any("the ranks' samplers" in text for text in heard)


class Slow(Dataset):
    """Takes half a second for a sample; some samples are damaged on one rank only."""

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


def test_slow_and_damaged_samples_cost_a_second_and_nothing_else():
    assert all(1 <= number <= 8 for number in run_ranks(prepare_slow, 2))


class Lazy(Dataset):
    """Opens its file with the first sample; workers that are forked later must not share the position of one file."""

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


def test_files_that_are_opened_with_the_first_sample_stay_closed_until_workers_open_them(tmp_path):
    path = tmp_path / "bytes"
    path.write_bytes(bytes(range(8)))
    first, second = run_ranks(read_lazily, 2, str(path))
    assert sorted(first + second) == list(range(8))
