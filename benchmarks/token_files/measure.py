"""Cost of a batch from a file of tokens, compared with slices of a NumPy memory map, as nanoGPT reads them.

All readers return batches of 16 shuffled blocks of 1,024 tokens and their next tokens, on one process without workers. "by
hand" is a map-style dataset that slices a `numpy.memmap`. With megatron-core (`pip install megatron-core`), documents are
read from the same pair of files by its IndexedDataset, too.

Run it with `python -m benchmarks.token_files.measure`.
"""

import importlib.util
import tempfile
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy
import torch
from torch.utils.data import DataLoader, Dataset

from benchmarks.timing import get_num_repeats, make_rows, save_result, time_interleaved
from headway import Accelerator, TokenDataset
from headway.language_data.token_files.indexed import write_index

NUM_TOKENS, LENGTH, BATCH, NUM_BATCHES = 2**25, 1024, 16, 200
DOCUMENT = 700
"""Tokens of each document."""
VOCABULARY = 50_257


class Blocks(Dataset[Any]):
    """Blocks of a file of uint16 tokens, and the next token of each position, as nanoGPT slices them."""

    def __init__(self, path: Path) -> None:
        self.tokens = numpy.memmap(path, numpy.uint16, "r")

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // LENGTH

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        start = index * LENGTH
        inputs = torch.from_numpy(self.tokens[start : start + LENGTH].astype(numpy.int64))
        targets = torch.from_numpy(self.tokens[start + 1 : start + 1 + LENGTH].astype(numpy.int64))
        return inputs, targets


class Documents(Dataset[Any]):
    """Documents of megatron-core's IndexedDataset, as int64 tensors."""

    def __init__(self, prefix: Path) -> None:
        from megatron.core.datasets.indexed_dataset import IndexedDataset

        self.documents = IndexedDataset(str(prefix))

    def __len__(self) -> int:
        return len(self.documents)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": torch.from_numpy(self.documents[index].astype(numpy.int64))}


def write_files(folder: Path) -> None:
    """Write random tokens as a file without an index, and as a pair with an index of documents."""
    tokens = numpy.random.default_rng(0).integers(0, VOCABULARY, NUM_TOKENS, dtype=numpy.uint16)
    tokens.tofile(folder / "train.bin")
    num_documents = NUM_TOKENS // DOCUMENT
    tokens[: num_documents * DOCUMENT].tofile(folder / "pair.bin")
    with (folder / "pair.idx").open("wb") as index:
        write_index(index, numpy.full(num_documents, DOCUMENT), numpy.dtype("uint16"))


def make_pass(build_loader: Callable[[], Any]) -> Callable[[], None]:
    """Return a function that reads NUM_BATCHES batches from a new loader."""

    def run() -> None:
        torch.manual_seed(0)
        assert sum(1 for _ in islice(build_loader(), NUM_BATCHES)) == NUM_BATCHES

    return run


def main() -> None:
    """Measure all readers in turn and write result.json."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_files(folder)

        def load(dataset: Any) -> DataLoader[Any]:
            return DataLoader(dataset, batch_size=BATCH, shuffle=True)

        def open_blocks(vocab_size: int | None) -> TokenDataset:
            path = folder / "train.bin"
            return TokenDataset(path, LENGTH, dtype="uint16", labels="shifted", vocab_size=vocab_size)

        passes = {
            "by hand": make_pass(lambda: load(Blocks(folder / "train.bin"))),
            "by hand, again (A/A)": make_pass(lambda: load(Blocks(folder / "train.bin"))),
            "TokenDataset": make_pass(lambda: load(open_blocks(None))),
            "TokenDataset, vocab_size=": make_pass(lambda: load(open_blocks(VOCABULARY))),
            "by hand, prepared": make_pass(lambda: Accelerator(cpu=True).prepare(load(Blocks(folder / "train.bin")))),
            "TokenDataset, vocab_size=, prepared": make_pass(
                lambda: Accelerator(cpu=True).prepare(load(open_blocks(VOCABULARY)))
            ),
            "documents: TokenDataset": make_pass(lambda: load(TokenDataset(folder / "pair", vocab_size=VOCABULARY))),
        }
        if importlib.util.find_spec("megatron") is not None:
            passes["documents: megatron-core"] = make_pass(lambda: load(Documents(folder / "pair")))
        times = time_interleaved(passes, get_num_repeats(15))
    rows = {name: row for name, row in make_rows(times, 1e6 / NUM_BATCHES).items() if name in passes}
    save_result("token_files", f"us per batch of {BATCH} samples", rows, "The first row is the floor of blocks")


if __name__ == "__main__":
    main()
