"""Test the formats of token files and their checks, with files that were written by hand."""

import struct
from pathlib import Path

import numpy
import pytest
import torch

from headway import TokenDataset
from headway.errors import ConfigError, DataError
from tests.unit.language_data.token_files.token_file_writers import (
    make_index,
    write_llm_c,
    write_pair,
    write_raw,
)

TOKENS = [3, 7, 500, 11, 0, 42, 9, 1000, 0, 5, 6, 8]


def read_all(dataset: TokenDataset) -> list[list[int]]:
    samples = [dataset[index] for index in range(len(dataset))]
    assert {sample["input_ids"].dtype for sample in samples} == {torch.int64}
    return [sample["input_ids"].tolist() for sample in samples]


@pytest.mark.parametrize("dtype", ["uint16", "uint32", "int32", "int64"])
def test_raw_files(tmp_path: Path, dtype: str) -> None:
    for name in ("train.bin", "part-0.npy"):
        path = write_raw(tmp_path / name, TOKENS, dtype)
        assert read_all(TokenDataset(path, 5, dtype=dtype)) == [TOKENS[:5], TOKENS[5:10]]
        documents = TokenDataset(path, dtype=dtype, eos_token_id=0, cache_dir=tmp_path)
        assert read_all(documents) == [TOKENS[:5], TOKENS[5:9], TOKENS[9:]]


def test_files_of_llm_c(tmp_path: Path) -> None:
    path = write_llm_c(tmp_path / "gpt2.bin", [50256, 1, 2, 50256, 3, 4, 5])
    assert read_all(TokenDataset(path, 3)) == [[50256, 1, 2], [50256, 3, 4]]
    assert read_all(TokenDataset(path, bos_token_id=50256, cache_dir=tmp_path)) == [[50256, 1, 2], [50256, 3, 4, 5]]
    path = write_llm_c(tmp_path / "llama3.bin", [128000, 1, 2, 3], magic=20240801, version=7)
    assert read_all(TokenDataset(path, 2, vocab_size=128256)) == [[128000, 1], [2, 3]]


@pytest.mark.parametrize("dtype", ["uint16", "uint32", ">u2"])
def test_files_of_numpy(tmp_path: Path, dtype: str) -> None:
    numpy.save(tmp_path / "tokens.npy", numpy.array(TOKENS, dtype))
    assert read_all(TokenDataset(tmp_path / "tokens.npy", 4, vocab_size=1001)) == [TOKENS[:4], TOKENS[4:8], TOKENS[8:]]


@pytest.mark.parametrize("dtype", ["uint8", "int8", "int16", "int32", "int64", "uint16"])
def test_indexed_datasets(tmp_path: Path, dtype: str) -> None:
    documents = [[[1, 2, 3], [4]], [[5]], [], [[6, 7], [8], [9, 10]], [[]], [[11]]]
    prefix = write_pair(tmp_path / "web", documents, dtype)
    expected = [[token for sequence in document for token in sequence] for document in documents]
    for path in (prefix, f"{prefix}.bin", f"{prefix}.idx"):
        dataset = TokenDataset(path)
        assert read_all(dataset) == expected
        assert dataset.lengths.tolist() == [len(document) for document in expected]
    assert read_all(TokenDataset(prefix, 4)) == [[1, 2, 3, 4], [5, 6, 7, 8]]


def test_several_files_in_order(tmp_path: Path) -> None:
    for number in (2, 0, 1):
        write_pair(tmp_path / f"part-{number}", [[[10 * number, 1]], [[10 * number, 2, 3]]])
    expected = [[10 * number, *rest] for number in range(3) for rest in ([1], [2, 3])]
    for pattern in ("part-*.bin", "part-*", "*.idx"):
        assert read_all(TokenDataset(f"{tmp_path}/{pattern}")) == expected
    write_raw(tmp_path / "part-3.bin.partial", [1, 2, 3])
    assert len(TokenDataset(f"{tmp_path}/part-*")) == 6
    listed = [tmp_path / "part-1", tmp_path / "part-0.idx"]
    assert read_all(TokenDataset(listed)) == expected[2:4] + expected[:2]
    blocks = TokenDataset(f"{tmp_path}/part-*.bin", 2)  # five tokens in each file, so that one is left out
    assert read_all(blocks) == [each for number in range(3) for each in ([10 * number, 1], [10 * number, 2])]
    assert (blocks.num_tokens, blocks.num_dropped_tokens) == (15, 3)
    with pytest.raises(DataError, match=r"part-1\.bin is named twice"):
        TokenDataset([tmp_path / "part-1", tmp_path / "part-*.idx"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "does not contain the type of its tokens, and there is no train.idx next to it; give dtype='uint16'"),
        ({"dtype": "float32"}, "not a type of token IDs; give one of 'uint8'"),
        ({"dtype": "uint16"}, "has no index of its documents; give sequence_length= for blocks, or eos_token_id="),
        ({"dtype": "uint16", "sequence_length": 0}, "sequence_length=0; give a whole number, 1 or more"),
        ({"dtype": "uint16", "sequence_length": True}, "sequence_length=True"),
        ({"dtype": "uint16", "sequence_length": 4, "eos_token_id": 0}, "have no effect"),
        ({"dtype": "uint16", "eos_token_id": 0, "bos_token_id": 0}, "both given"),
        ({"dtype": "uint16", "eos_token_id": 0, "labels": "shifted"}, "needs sequence_length="),
        ({"dtype": "uint16", "sequence_length": 4, "labels": "next"}, "give one of 'same', 'shifted'"),
        ({"dtype": "uint16", "sequence_length": 4, "vocab_size": 0}, "vocab_size=0"),
        ({"dtype": "uint16", "eos_token_id": -1}, "eos_token_id=-1"),
    ],
)
def test_wrong_arguments(tmp_path: Path, arguments: dict, message: str) -> None:
    path = write_raw(tmp_path / "train.bin", TOKENS)
    with pytest.raises(ConfigError) as caught:
        TokenDataset(path, cache_dir=tmp_path, **arguments)
    assert message in str(caught.value)


def test_arguments_that_contradict_files(tmp_path: Path) -> None:
    prefix = write_pair(tmp_path / "web", [[[1, 2]]], "int32")
    with pytest.raises(ConfigError, match=r"dtype='uint16' contradicts .*web\.bin, whose tokens are int32"):
        TokenDataset(prefix, dtype="uint16")
    with pytest.raises(ConfigError, match=r"\.idx files list the documents"):
        TokenDataset(prefix, eos_token_id=0)
    with pytest.raises(ConfigError, match="token files are memory-mapped, so they must be local"):
        TokenDataset("s3://bucket/train.bin", 4)


def test_missing_files(tmp_path: Path) -> None:
    for path, message in [
        (tmp_path / "no", r"there is no file .*no or .*no\.bin"),
        (f"{tmp_path}/*.bin", "no file matches"),
        (tmp_path, r"is a folder; give a pattern, such as .*\*\.bin"),
        ([], "the list of token files is empty"),
    ]:
        with pytest.raises(DataError, match=message):
            TokenDataset(path, 4)  # type: ignore[arg-type]
    Path(write_pair(tmp_path / "web", [[[1]]]) + ".bin").unlink()
    with pytest.raises(DataError, match=r"there is no file .*web\.bin"):
        TokenDataset(tmp_path / "web.idx")


def test_empty_files(tmp_path: Path) -> None:
    (tmp_path / "empty.bin").write_bytes(b"")
    with pytest.raises(DataError, match=r"empty\.bin is empty; leave it out"):
        TokenDataset(tmp_path / "empty.bin", 4, dtype="uint16")
    with pytest.raises(DataError, match="has no tokens"):
        TokenDataset(write_llm_c(tmp_path / "llm.bin", []), 4)
    numpy.save(tmp_path / "tokens.npy", numpy.zeros(0, numpy.uint16))
    with pytest.raises(DataError, match="has no tokens"):
        TokenDataset(tmp_path / "tokens.npy", 4)
    (tmp_path / "web.bin").write_bytes(b"\0\0")
    (tmp_path / "web.idx").write_bytes(make_index([], [0], "uint16"))
    with pytest.raises(DataError, match=r"web\.idx lists no documents"):
        TokenDataset(tmp_path / "web")
    with pytest.raises(DataError, match="no file has the 13 tokens of a block; the longest has 12"):
        TokenDataset(write_raw(tmp_path / "train.bin", TOKENS), 12, dtype="uint16", labels="shifted")
    assert len(TokenDataset(tmp_path / "train.bin", 12, dtype="uint16")) == 1


def test_truncated_files(tmp_path: Path) -> None:
    path = Path(write_raw(tmp_path / "train.bin", TOKENS, "uint32"))
    path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(DataError, match=r"46 bytes, which is not a multiple of the 4 bytes of a token"):
        TokenDataset(path, 4, dtype="uint32")
    path = Path(write_llm_c(tmp_path / "llm.bin", TOKENS))
    content = path.read_bytes()
    for wrong in (content[:-2], content + b"\0\0"):
        path.write_bytes(wrong)
        with pytest.raises(DataError, match=f"has {len(wrong)} bytes, but its header declares 12 tokens, 1048 bytes"):
            TokenDataset(path, 4)
    path.write_bytes(content[:100])
    with pytest.raises(DataError, match=r"its header of llm\.c has 100 bytes"):
        TokenDataset(path, 4)
    numpy.save(tmp_path / "tokens.npy", numpy.array(TOKENS, numpy.uint16))
    path = tmp_path / "tokens.npy"
    content = path.read_bytes()
    path.write_bytes(content[:-2])
    with pytest.raises(DataError, match="truncated or damaged file of NumPy"):
        TokenDataset(path, 4)
    path.write_bytes(content + b"\0")
    with pytest.raises(DataError, match="1 bytes after its array"):
        TokenDataset(path, 4)


def test_wrong_arrays_and_headers(tmp_path: Path) -> None:
    for array in (numpy.zeros((2, 3), numpy.uint16), numpy.zeros(3, numpy.float32)):
        numpy.save(tmp_path / "tokens.npy", array)
        with pytest.raises(DataError, match="give a one-dimensional array of integers"):
            TokenDataset(tmp_path / "tokens.npy", 2)
    with pytest.raises(DataError, match=r"version 9, and only version 1 can be read"):
        TokenDataset(write_llm_c(tmp_path / "llm.bin", TOKENS, version=9), 4)
    with pytest.raises(DataError, match="multiple-choice questions"):
        TokenDataset(write_llm_c(tmp_path / "hellaswag.bin", TOKENS, magic=20240522), 4)


def test_damaged_indexes(tmp_path: Path) -> None:
    prefix = write_pair(tmp_path / "web", [[[1, 2, 3]], [[4, 5]]])
    path = tmp_path / "web.idx"
    content = path.read_bytes()
    start = 34  # of the lengths
    for wrong, message in [
        (b"x" + content[1:], r"web\.idx is not an index .* begins with b'xMIDIDX"),
        (b"TNTIDX\0\0" + content[8:], "fairseq's"),
        (content[:20], "truncated: it has 20 bytes"),
        (content[:-1], f"{len(content) - 1} bytes instead of {len(content)}"),
        (content + b"\0\0\0", "instead of"),
        (content + b"\0\0", "multimodal"),
        (content[:9] + struct.pack("<Q", 2) + content[17:], "version 2 of the index format"),
        (content[:17] + b"\7" + content[18:], r"code 7 \(float32\), which cannot be token IDs"),
        (content[:17] + b"\x63" + content[18:], r"code 99 \(an unknown type\)"),
        (content[:17] + b"\4" + content[18:], "does not belong to its .bin file"),  # int32 instead of uint16
        (content[:-8] + struct.pack("<q", 1), "documents contain sequences 0 to 1 instead of 0 to 2"),
    ]:
        path.write_bytes(wrong)
        with pytest.raises(DataError, match=message):
            TokenDataset(prefix)
    for length in (2, 4, -1):
        path.write_bytes(content[:start] + struct.pack("<i", length) + content[start + 4 :])
        dataset = TokenDataset(prefix)
        assert dataset[1]["input_ids"].tolist() == [4, 5]
        with pytest.raises(
            DataError, match=r"web\.idx is damaged at document 0: its sequences do not follow each other"
        ):
            dataset[0]
    pointer = start + 8
    path.write_bytes(content[: pointer + 8] + struct.pack("<q", 5) + content[pointer + 16 :])
    with pytest.raises(DataError, match=r"does not belong to its \.bin file"):
        TokenDataset(prefix)


def test_index_of_another_file(tmp_path: Path) -> None:
    prefix = write_pair(tmp_path / "web", [[[1, 2, 3]], [[4, 5]]])
    write_pair(tmp_path / "other", [[[1, 2, 3]], [[4, 5, 6]]])
    (tmp_path / "web.idx").write_bytes((tmp_path / "other.idx").read_bytes())
    with pytest.raises(DataError, match=r"its sequences end at byte 12, and the \.bin file has 10 bytes"):
        TokenDataset(prefix)
    (tmp_path / "other.bin").write_bytes((tmp_path / "other.bin").read_bytes()[:-2])
    with pytest.raises(DataError, match="is truncated, or one of the two files is from another dataset"):
        TokenDataset(tmp_path / "other", 2)


def test_token_ids_are_checked(tmp_path: Path) -> None:
    tokens = numpy.zeros(400_000, numpy.uint16)
    tokens[399_999] = 900
    path = write_raw(tmp_path / "end.bin", tokens)
    with pytest.raises(
        DataError, match=r"end\.bin has the token ID 900 at position 399999, which is not below vocab_size=900"
    ):
        TokenDataset(path, 8, dtype="uint16", vocab_size=900)
    TokenDataset(path, 8, dtype="uint16", vocab_size=901)
    tokens[399_999], tokens[200_003] = 0, 900
    dataset = TokenDataset(write_raw(tmp_path / "middle.bin", tokens), 8, dtype="uint16", vocab_size=900)
    dataset[24_999]
    with pytest.raises(DataError, match=r"middle\.bin has the token ID 900 at position 200003"):
        dataset[25_000]
    with pytest.raises(DataError, match=r"middle\.bin has the token ID 900 at position 200003"):
        dataset.__getitems__([3, 25_000, 4])
    with pytest.raises(DataError, match="token ID -1 at position 2, which is negative"):
        TokenDataset(write_raw(tmp_path / "int32.bin", [1, 2, -1], "int32"), 3, dtype="int32")
    signed = numpy.zeros(400_000, numpy.int32)
    signed[200_003] = -5
    dataset = TokenDataset(write_raw(tmp_path / "signed.bin", signed, "int32"), 8, dtype="int32")
    with pytest.raises(DataError, match="token ID -5 at position 200003"):
        dataset[25_000]
    with pytest.raises(DataError, match="token ID -5 at position 200003"):
        dataset.__getitems__([1, 25_000])


@pytest.mark.parametrize("dtype", ["int8", "int16", "int32", "int64"])
def test_negative_token_ids_of_all_types_are_errors(tmp_path: Path, dtype: str) -> None:
    """Token IDs of a vocabulary with 50,257 IDs overflow if they are stored as int16."""
    tokens = numpy.zeros(400_000, dtype)
    tokens[200_003] = -100
    path = tmp_path / f"{dtype}.npy"
    numpy.save(path, tokens)
    dataset = TokenDataset(path, 8, vocab_size=50_257)
    for read in (lambda: dataset[25_000], lambda: dataset.__getitems__([1, 25_000])):
        with pytest.raises(DataError, match="token ID -100 at position 200003, which is negative"):
            read()


def test_wrong_types_are_found(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    generator = numpy.random.default_rng(0)
    narrow = write_raw(tmp_path / "narrow.bin", generator.integers(0, 50_000, 1000))
    with pytest.raises(DataError, match="which no vocabulary contains"):
        TokenDataset(narrow, 8, dtype="uint32")
    TokenDataset(narrow, 8, dtype="uint16")
    assert caplog.messages == []
    wide = write_raw(tmp_path / "wide.bin", generator.integers(0, 100_000, 1000), "uint32")
    TokenDataset(wide, 8, dtype="uint16")
    assert "give dtype='uint32' then" in caplog.text
    caplog.clear()
    wider = write_raw(tmp_path / "wider.bin", generator.integers(0, 100_000, 1000), "int64")
    TokenDataset(wider, 8, dtype="uint32")
    assert "probably have 8 bytes instead of 4; give dtype='uint64' then" in caplog.text
    caplog.clear()
    TokenDataset(wider, 8, dtype="uint64")
    TokenDataset(wide, 8, dtype="uint32")
    assert caplog.messages == []
    TokenDataset(narrow, 8, dtype="uint16", vocab_size=128_256)
    assert "uint16, which cannot hold all of vocab_size=128256 IDs" in caplog.text


def test_separators(tmp_path: Path) -> None:
    def cut(tokens: list[int], **separator: int) -> list[list[int]]:
        path = write_raw(tmp_path / "train.bin", tokens)
        return read_all(TokenDataset(path, dtype="uint16", cache_dir=tmp_path, **separator))

    assert cut([1, 2, 0, 3, 0], eos_token_id=0) == [[1, 2, 0], [3, 0]]
    assert cut([0, 0, 4], eos_token_id=0) == [[0], [0], [4]]
    assert cut([9, 1, 9, 9, 2], bos_token_id=9) == [[9, 1], [9], [9, 2]]
    assert cut([1, 9, 2], bos_token_id=9) == [[1], [9, 2]]
    assert cut([1, 2, 0], eos_token_id=0) == [[1, 2, 0]]
    with pytest.raises(DataError, match=r"eos_token_id=7 does not occur in .*train\.bin, so each file would be one"):
        cut([1, 2, 3], eos_token_id=7)
    with pytest.raises(DataError, match="bos_token_id=70000 does not occur"):
        cut([1, 2, 3], bos_token_id=70_000)
