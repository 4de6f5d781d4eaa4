"""Readers of a checkpoint's tensors, for comparisons in tests."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import torch

from headway.core.checkpoint.format.manifest import Manifest
from headway.core.checkpoint.format.tensors import get_view
from headway.core.checkpoint.loading.files import open_tensors
from headway.core.weights.files import map_safetensors


def read_tensors(folder: Path, manifest: Manifest, prefix: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the name and tensor of each tensor like `open_tensors`, with chunked tensors assembled in memory."""
    for name, tensor in open_tensors(folder, manifest, prefix):
        yield name, tensor if isinstance(tensor, torch.Tensor) else tensor.assemble()


def read_shard(path: Path, expected: Iterable[tuple[str, torch.dtype, Sequence[int]]]) -> dict[str, torch.Tensor]:
    """Return the named tensors of a safetensors file as views of the mapped file.

    Args:
        path: The file.
        expected: Name, dtype and shape of each tensor.
    """
    stored, _ = map_safetensors(path)
    return {name: get_view(stored, path, name, dtype, shape) for name, dtype, shape in expected}
