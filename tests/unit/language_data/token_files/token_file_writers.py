"""Writers of token files by hand, with struct and NumPy only, and a small tokenizer."""

import struct
from pathlib import Path
from typing import Any

import numpy
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

TYPE_CODES = {"uint8": 1, "int8": 2, "int16": 3, "int32": 4, "int64": 5, "float64": 6, "float32": 7, "uint16": 8}


def write_raw(path: Path, tokens: Any, dtype: str = "uint16") -> str:
    """Write a file that contains only tokens, as nanoGPT and OLMo do, and return its path."""
    numpy.asarray(tokens, dtype).tofile(path)
    return str(path)


def write_llm_c(path: Path, tokens: Any, magic: int = 20240520, version: int = 1) -> str:
    """Write a file of llm.c: a header of 256 int32 and the tokens. Return its path."""
    header = numpy.zeros(256, numpy.int32)
    header[:3] = magic, version, len(tokens)
    dtype = "uint16" if magic == 20240520 else "uint32"
    path.write_bytes(header.tobytes() + numpy.asarray(tokens, dtype).tobytes())
    return str(path)


def make_index(lengths: list[int], bounds: list[int], dtype: str) -> bytes:
    """Return the content of an index of Megatron-LM for sequences of these lengths."""
    size = numpy.dtype(dtype).itemsize
    pointers, position = [], 0
    for length in lengths:
        pointers.append(position * size)
        position += length
    return (
        b"MMIDIDX\x00\x00"
        + struct.pack("<QBQQ", 1, TYPE_CODES[dtype], len(lengths), len(bounds))
        + struct.pack(f"<{len(lengths)}i", *lengths)
        + struct.pack(f"<{len(pointers)}q", *pointers)
        + struct.pack(f"<{len(bounds)}q", *bounds)
    )


def write_pair(prefix: Path, documents: list[list[list[int]]], dtype: str = "uint16") -> str:
    """Write a dataset of Megatron-LM, whose documents are lists of sequences, and return its prefix."""
    sequences = [sequence for document in documents for sequence in document]
    bounds = [0]
    for document in documents:
        bounds.append(bounds[-1] + len(document))
    tokens = [token for sequence in sequences for token in sequence]
    Path(f"{prefix}.bin").write_bytes(numpy.asarray(tokens, dtype).tobytes())
    Path(f"{prefix}.idx").write_bytes(make_index([len(each) for each in sequences], bounds, dtype))
    return str(prefix)


def make_tokenizer(texts: list[str]) -> Tokenizer:
    """Return a byte-level tokenizer, trained on texts, whose token 0 is `<|endoftext|>`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer
