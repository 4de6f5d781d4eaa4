"""Compare token files with those of megatron-core's own reader and writer, if it is installed."""

import json
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from click.testing import CliRunner

from headway import TokenDataset
from headway.cli.main import group
from tests.unit.language_data.token_files.token_file_writers import make_tokenizer

pytestmark = pytest.mark.filterwarnings("ignore")
TEXTS = [f"Document {number}: " + "the quick brown fox jumps over it. " * (number % 5) for number in range(60)]


@pytest.fixture
def megatron() -> Any:
    reason = "megatron-core is not among the pinned packages; in an environment of your own: pip install megatron-core"
    return pytest.importorskip("megatron.core.datasets.indexed_dataset", reason=reason)


def read_all(dataset: TokenDataset) -> list[list[int]]:
    return [sample["input_ids"].tolist() for sample in dataset]


def test_megatron_reads_and_writes_the_same_files(tmp_path: Path, megatron: Any) -> None:
    encoder = make_tokenizer(TEXTS)
    encoder.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    words = ["tokenize", tmp_path / "a.jsonl", "--tokenizer", tmp_path / "tokenizer.json", "--eos", 0]
    words += ["--output", tmp_path / "ours", "--cache_dir", tmp_path / "cache", "--processes", 1]
    result = CliRunner().invoke(group, list(map(str, words)))
    assert result.exit_code == 0, result.exception
    documents = [[*encoder.encode(text, add_special_tokens=False).ids, 0] for text in TEXTS]
    ours = megatron.IndexedDataset(str(tmp_path / "ours"))
    assert [ours[number].tolist() for number in range(len(ours))] == documents
    assert ours.document_indices.tolist() == list(range(61))
    builder = megatron.IndexedDatasetBuilder(
        str(tmp_path / "theirs.bin"), dtype=megatron.DType.optimal_dtype(encoder.get_vocab_size())
    )
    for document in documents:
        builder.add_document(document, [len(document)])
    builder.finalize(str(tmp_path / "theirs.idx"))
    for suffix in (".bin", ".idx"):
        assert (tmp_path / f"theirs{suffix}").read_bytes() == (tmp_path / f"ours{suffix}").read_bytes()


@pytest.mark.parametrize("dtype", ["uint8", "int8", "int16", "int32", "int64", "uint16"])
def test_files_of_megatron_with_several_sequences(tmp_path: Path, megatron: Any, dtype: str) -> None:
    generator = numpy.random.default_rng(1)
    builder = megatron.IndexedDatasetBuilder(str(tmp_path / "theirs.bin"), dtype=getattr(numpy, dtype))
    documents = []
    for _ in range(50):
        sequences = [generator.integers(0, 127, generator.integers(1, 20)) for _ in range(generator.integers(0, 5))]
        for sequence in sequences:
            builder.add_item(torch.tensor(sequence))
        builder.end_document()
        documents.append([token for sequence in sequences for token in sequence.tolist()])
    builder.finalize(str(tmp_path / "theirs.idx"))
    dataset = TokenDataset(tmp_path / "theirs")
    assert read_all(dataset) == documents
    assert dataset.lengths.tolist() == [len(document) for document in documents]
