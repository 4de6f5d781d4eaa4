"""Test `TokenDataset`: its samples, large files, workers, and its use with mixtures, packing and the Accelerator."""

import pickle
from pathlib import Path

import numpy
import pytest
import torch
from torch.utils.data import DataLoader, Subset

from headway import Accelerator, Mixture, PackedDataset, TokenBatchSampler, TokenDataset
from headway.errors import DataError
from headway.language_data.token_files import dataset as dataset_module
from headway.language_data.token_files.documents import Separator, find_ends
from tests.unit.language_data.token_files.token_file_writers import write_pair, write_raw

LENGTHS = [5, 1, 12, 3, 8, 30, 2]
DOCUMENTS = [[100 * number + place for place in range(length)] for number, length in enumerate(LENGTHS)]


def write_documents(folder: Path) -> str:
    return write_pair(folder / "web", [[document] for document in DOCUMENTS])


def test_blocks_have_labels(tmp_path: Path) -> None:
    path = write_raw(tmp_path / "train.bin", range(1, 12))
    dataset = TokenDataset(path, 5, dtype="uint16")
    assert sorted(dataset[0]) == ["input_ids", "labels"]
    assert dataset[1]["labels"].tolist() == dataset[1]["input_ids"].tolist() == [6, 7, 8, 9, 10]
    sample = dataset[0]
    sample["labels"][0] = -100
    assert sample["input_ids"][0] == 1
    assert dataset[0]["labels"][0] == 1
    shifted = TokenDataset(path, 5, dtype="uint16", labels="shifted")
    assert {name: values.tolist() for name, values in shifted[1].items()} == {
        "input_ids": [6, 7, 8, 9, 10],
        "shift_labels": [7, 8, 9, 10, 11],
    }
    predicted = [token for index in range(len(shifted)) for token in shifted[index]["shift_labels"].tolist()]
    assert predicted == list(range(2, 12))
    assert shifted.num_dropped_tokens == 0
    assert len(TokenDataset(write_raw(tmp_path / "ten.bin", range(10)), 5, dtype="uint16", labels="shifted")) == 1


@pytest.mark.parametrize("labels", ["same", "shifted"])
def test_batches_are_the_samples(tmp_path: Path, labels: str) -> None:
    files = [write_raw(tmp_path / f"{number}.bin", range(100 * number, 100 * number + 33)) for number in range(3)]
    dataset = TokenDataset(files, 8, dtype="uint16", labels=labels)  # type: ignore[arg-type]
    indices = [11, 0, 5, -1, 4, 4]
    batch = dataset.__getitems__(indices)
    for sample, index in zip(batch, indices):
        expected = dataset[index]
        assert sorted(sample) == sorted(expected)
        for name, values in expected.items():
            assert torch.equal(sample[name], values)
            assert sample[name].dtype == torch.int64
    second = "labels" if labels == "same" else "shift_labels"
    batch[4][second].fill_(-100)
    assert torch.equal(batch[4]["input_ids"], batch[5]["input_ids"])
    assert torch.equal(batch[5][second], dataset[4][second])
    assert dataset.__getitems__([]) == []
    with pytest.raises(IndexError, match="sample 12 of"):
        dataset.__getitems__([0, 12])


def test_indices(tmp_path: Path) -> None:
    dataset = TokenDataset(write_documents(tmp_path))
    assert len(dataset) == 7
    assert dataset[-1]["input_ids"].tolist() == DOCUMENTS[6]
    assert dataset[numpy.int64(2)]["input_ids"].tolist() == DOCUMENTS[2]
    for index in (7, -8):
        with pytest.raises(IndexError, match="of a TokenDataset with 7 samples"):
            dataset[index]
    assert [sample["input_ids"].tolist() for sample in dataset] == DOCUMENTS  # iteration ends with IndexError


def test_files_with_more_than_2_to_the_31_tokens(tmp_path: Path) -> None:
    """The file is sparse: only its last tokens use space on the disk."""
    count = 2**31 + 1000
    path = tmp_path / "large.bin"
    with path.open("wb") as file:
        file.truncate(2 * count)
        file.seek(2 * (count - 5))
        file.write(numpy.array([1, 2, 3, 4, 5], numpy.uint16).tobytes())
    dataset = TokenDataset(path, 1000, dtype="uint16", labels="shifted", vocab_size=10)
    assert len(dataset) == (count - 1) // 1000 == 2_147_484
    assert (count - 1) % 1000 == 647
    blocks = TokenDataset(path, 4, dtype="uint16")
    assert blocks[-1]["input_ids"].tolist() == [2, 3, 4, 5]
    with pytest.raises(DataError, match=f"token ID 5 at position {count - 1}"):
        TokenDataset(path, 4, dtype="uint16", vocab_size=5)
    mapped = numpy.memmap(path, numpy.uint16, "r")
    tail = mapped[count - 2**20 :]
    assert (find_ends(tail, Separator(3, is_first=False)) == [2**20 - 2, 2**20]).all()


def test_index_with_more_than_2_to_the_31_tokens(tmp_path: Path) -> None:
    from headway.language_data.token_files.indexed import write_index

    lengths = numpy.array([2**31 - 1, 2**31 - 1, 5, 0, 3])
    dtype = numpy.dtype("int32")
    with (tmp_path / "large.idx").open("wb") as index:
        write_index(index, lengths, dtype)
    with (tmp_path / "large.bin").open("wb") as file:
        file.truncate(4 * int(lengths.sum()))
        file.seek(4 * (int(lengths.sum()) - 8))
        file.write(numpy.arange(1, 9, dtype=dtype).tobytes())
    dataset = TokenDataset(tmp_path / "large")
    assert dataset.num_tokens == 2**32 + 6
    assert dataset.lengths.tolist() == lengths.tolist()
    assert [dataset[index]["input_ids"].tolist() for index in (2, 3, 4)] == [[1, 2, 3, 4, 5], [], [6, 7, 8]]


def test_documents_across_chunks_of_a_scan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headway.language_data.token_files.documents._CHUNK", 4)
    tokens = numpy.array([1, 0, 2, 0, 0, 3, 4, 0, 5])
    assert find_ends(tokens, Separator(0, is_first=False)).tolist() == [2, 4, 5, 8, 9]
    assert find_ends(tokens, Separator(0, is_first=True)).tolist() == [1, 3, 4, 7, 9]


def test_scans_are_stored_and_follow_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scans = []
    original = find_ends

    def count_scans(tokens, separator):
        scans.append(len(tokens))
        return original(tokens, separator)

    monkeypatch.setattr("headway.language_data.token_files.documents.find_ends", count_scans)
    path = write_raw(tmp_path / "train.bin", [1, 0, 2])
    for expected in (2, 2):
        assert len(TokenDataset(path, dtype="uint16", eos_token_id=0, cache_dir=tmp_path)) == expected
    assert scans == [3]
    assert len(TokenDataset(path, dtype="uint16", eos_token_id=2, cache_dir=tmp_path)) == 1
    write_raw(tmp_path / "train.bin", [1, 0, 2, 0, 3, 0])
    dataset = TokenDataset(path, dtype="uint16", eos_token_id=0, cache_dir=tmp_path)
    assert (len(dataset), scans) == (3, [3, 3, 6])
    assert dataset.lengths.tolist() == [2, 2, 2]


def test_pickles_contain_no_tokens(tmp_path: Path) -> None:
    dataset = TokenDataset(write_raw(tmp_path / "train.bin", numpy.arange(60_000)), 10, dtype="uint16")
    assert dataset[5]["input_ids"][0] == 50
    content = pickle.dumps(dataset)
    assert len(content) < 2000
    assert pickle.loads(content)[7]["input_ids"].tolist() == list(range(70, 80))


@pytest.mark.parametrize("context", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_workers(tmp_path: Path, context: str) -> None:
    dataset = TokenDataset(write_raw(tmp_path / "train.bin", range(400)), 10, dtype="uint16")
    loader = DataLoader(dataset, batch_size=4, num_workers=2, multiprocessing_context=context)
    assert torch.cat([batch["input_ids"].flatten() for batch in loader]).tolist() == list(range(400))


def test_many_files_are_not_open_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dataset_module, "_MAX_OPEN_FILES", 3)
    for number in range(8):
        write_raw(tmp_path / f"{number}.bin", [number, number])
    dataset = TokenDataset(f"{tmp_path}/*.bin", 2, dtype="uint16")
    for index in (0, 7, 3, 5, 0, 1, 7):
        assert dataset[index]["input_ids"].tolist() == [index, index]
    assert len(dataset._open_files) == 3


def test_files_that_change_are_errors(tmp_path: Path) -> None:
    path = Path(write_raw(tmp_path / "train.bin", range(20)))
    dataset = TokenDataset(path, 4, dtype="uint16")
    write_raw(tmp_path / "new.bin", range(30))
    (tmp_path / "new.bin").replace(path)
    with pytest.raises(DataError, match="has 60 bytes, and had 40 when the dataset was created"):
        dataset[0]
    path.unlink()
    with pytest.raises(DataError, match="was removed after the dataset was created"):
        dataset[0]


def test_state_identifies_the_data(tmp_path: Path) -> None:
    path = write_raw(tmp_path / "train.bin", range(20))
    dataset = TokenDataset(path, 4, dtype="uint16")
    state = dataset.state_dict()
    TokenDataset(path, 4, dtype="uint16").load_state_dict(state)
    for other in (TokenDataset(path, 5, dtype="uint16"), TokenDataset(path, 4, dtype="uint16", labels="shifted")):
        with pytest.raises(DataError, match="have changed since the state was saved"):
            other.load_state_dict(state)
    write_raw(tmp_path / "train.bin", range(1, 21))
    with pytest.raises(DataError, match="have changed since the state was saved"):
        TokenDataset(path, 4, dtype="uint16").load_state_dict(state)


def test_packing_reads_only_the_lengths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = TokenDataset(write_documents(tmp_path))
    monkeypatch.setattr(TokenDataset, "__getitem__", lambda *args: pytest.fail("a sample was read"))
    packed = PackedDataset(dataset, 16, strategy="split")
    monkeypatch.undo()
    joined = [token for document in DOCUMENTS for token in document]
    padding = -len(joined) % 16
    rows = [packed[index] for index in range(len(packed))]
    assert torch.cat([row["input_ids"] for row in rows]).tolist() == joined + [0] * padding
    firsts = {document[0] for document in DOCUMENTS}
    for row in rows[:-1]:
        starts = (row["position_ids"] == 0).tolist()
        is_first = [int(token) in firsts for token in row["input_ids"]]
        assert starts == [place == 0 or first for place, first in enumerate(is_first)]
        assert (row["labels"] == -100).tolist() == starts


def test_packing_of_blocks_warns_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write_documents(tmp_path)
    blocks = TokenDataset(path, 8)
    assert TokenBatchSampler(blocks.lengths, tokens_per_batch=16, seed=1)
    PackedDataset(TokenDataset(path), 32)
    assert caplog.messages == []
    PackedDataset(blocks, 16)
    PackedDataset(blocks, 16)
    (message,) = caplog.messages
    assert "treats each block of 8 tokens as a document" in message


def test_mixture_and_token_batches(tmp_path: Path) -> None:
    web = TokenDataset(write_documents(tmp_path))
    blocks = TokenDataset(write_raw(tmp_path / "books.bin", range(100)), 10, dtype="uint16")
    mixture = Mixture({"web": web, "books": blocks}, weights=[0.5, 0.5], num_samples=14, seed=3)
    read = [mixture[position] for position in range(14)]
    assert sorted(sample["input_ids"].tolist() for sample in read if sample["source"] == 0) == sorted(DOCUMENTS)
    starts = [sample["input_ids"][0].item() for sample in read if sample["source"] == 1]
    assert len(set(starts)) == 7
    assert {start % 10 for start in starts} == {0}
    packed = PackedDataset(mixture, 32)
    assert sum(len(packed[index]["source"]) for index in range(len(packed))) == 14
    sampler = TokenBatchSampler(web.lengths, tokens_per_batch=64, seed=1)
    assert sorted(index for batch in sampler for index in batch) == list(range(7))
    assert TokenBatchSampler(blocks.lengths, tokens_per_batch=20, seed=1)


def test_prepared_loader_resumes_in_the_middle(tmp_path: Path) -> None:
    """The order is that of a plain DataLoader with the same seed."""
    dataset = Subset(TokenDataset(write_raw(tmp_path / "train.bin", range(800)), 10, dtype="uint16"), range(60))

    def read(loader: DataLoader, count: int | None = None) -> list[list[int]]:
        found = []
        for batch in loader:
            found.append(batch["input_ids"][:, 0].tolist())
            if len(found) == count:
                break
        return found

    torch.manual_seed(4)
    expected = read(DataLoader(dataset, batch_size=8, shuffle=True))
    torch.manual_seed(4)
    loader = Accelerator(cpu=True).prepare(DataLoader(dataset, batch_size=8, shuffle=True, num_workers=2))
    first = read(loader, 3)
    state = loader.state_dict()
    other = Accelerator(cpu=True).prepare(DataLoader(dataset, batch_size=8, shuffle=True))
    other.load_state_dict(state)
    assert first + read(other) == expected
