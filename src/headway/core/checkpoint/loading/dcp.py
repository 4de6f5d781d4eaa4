"""Weights in torch.distributed.checkpoint's format: write them, and read them without executing pickles.

A folder in this format stores its index, `.metadata`, as a pickle. It is read by an unpickler that accepts only the
torch classes which the index needs. Tensors are read by torch with `weights_only`. Other objects in the folder are
skipped.
"""

import pickle
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from headway.common.text import join_names
from headway.errors import CheckpointError

INDEX = ".metadata"
"""Name of the index file in a folder that torch.distributed.checkpoint has written."""
_METADATA = "torch.distributed.checkpoint.metadata"
"""Module of torch that defines the classes of the index."""
_ALLOWED_CLASSES = {
    (_METADATA, "Metadata"), (_METADATA, "MetadataIndex"), (_METADATA, "StorageMeta"), (_METADATA, "TensorStorageMetadata"),
    (_METADATA, "BytesStorageMetadata"), (_METADATA, "ChunkStorageMetadata"), (_METADATA, "TensorProperties"),
    (_METADATA, "_MEM_FORMAT_ENCODING"), ("collections", "OrderedDict"), ("builtins", "set"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"), ("torch.serialization", "_get_layout"), ("torch", "Size"),
    ("torch", "device"), ("pathlib", "PosixPath"), ("pathlib._local", "PosixPath"),
}  # fmt: skip
"""Pairs of (module, name) of the objects that the unpickler may load, in addition to dtypes, layouts and memory formats."""
_MODEL_KEYS = ("model", "module", "state_dict", "app")
"""Keys under which programs save a model's state dict, in order of preference."""


class _IndexUnpickler(pickle.Unpickler):
    """Unpickler that loads only the classes which an index needs, so that a malicious file cannot execute code."""

    def find_class(self, module: str, name: str) -> Any:
        """Return a class or torch constant that the metadata file names, if it is on the list of allowed ones.

        Raises:
            CheckpointError: If it is not allowed. Nothing is imported or run then.
        """
        value = getattr(torch, name, None) if module == "torch" else None
        is_dtype = isinstance(value, torch.dtype | torch.layout | torch.memory_format)
        if is_dtype or (module, name) in _ALLOWED_CLASSES:
            return super().find_class(module, name)
        raise CheckpointError(
            f"{INDEX} names {module}.{name}, which no metadata file needs: the file is damaged or malicious"
        )


class _SafeReader(FileSystemReader):
    """torch's reader of a folder, with an index that is read by `_IndexUnpickler`."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Read the metadata of the checkpoint without executing code that the file may contain.

        Raises:
            CheckpointError: If the file cannot be read, or does not hold metadata.
        """
        path = Path(self.path) / INDEX
        try:
            with path.open("rb") as file:
                metadata = _IndexUnpickler(file).load()
        except CheckpointError:
            raise
        except Exception as error:
            raise CheckpointError(f"{path} cannot be read: {type(error).__name__}: {error}") from error
        if not isinstance(metadata, Metadata):
            raise CheckpointError(f"{path} contains a {type(metadata).__name__}, not a checkpoint's metadata")
        metadata.storage_meta = getattr(metadata, "storage_meta", None) or StorageMeta()  # older versions had none
        metadata.storage_meta.load_id = self.load_id
        return metadata


def write_folder(named: Iterable[tuple[str, Any]], folder: Path) -> list[Path]:
    """Write named tensors to a folder in torch.distributed.checkpoint's format.

    They can be read with `torch.distributed.checkpoint.load(model.state_dict(), checkpoint_id=folder)`.

    Args:
        named: Pairs of (name, tensor). Tensors that are not in memory yet are assembled. All are in memory at once.
        folder: Folder to write. It is created if missing.

    Returns:
        The written files.
    """
    tensors = {name: each if isinstance(each, torch.Tensor) else each.assemble() for name, each in named}
    save(tensors, storage_writer=FileSystemWriter(folder, overwrite=True), no_dist=True)
    return sorted(file for file in folder.iterdir() if file.name == INDEX or file.suffix == ".distcp")


class DcpTensor:
    """Tensor in a folder in torch.distributed.checkpoint's format. Its values are read on request.

    Args:
        reader: Reader of the folder.
        key: Name in the folder.
        entry: Entry of the tensor in the folder's index.

    Attributes:
        shape: Shape of the tensor.
        dtype: Dtype of the tensor.
    """

    def __init__(self, reader: _SafeReader, key: str, entry: TensorStorageMetadata) -> None:
        self.shape = entry.size
        self.dtype = entry.properties.dtype
        self._reader = reader
        self._key = key

    def assemble(self) -> torch.Tensor:
        """Return the full tensor in new host memory.

        Raises:
            CheckpointError: If the values cannot be read.
        """
        state_dict = {self._key: torch.empty(self.shape, dtype=self.dtype)}
        planner = DefaultLoadPlanner(flatten_state_dict=False)
        try:
            load(state_dict, storage_reader=self._reader, planner=planner, no_dist=True)
        except Exception as error:
            place = f"{self._key} in {self._reader.path}"
            raise CheckpointError(f"{place} cannot be read: {type(error).__name__}: {error}") from error
        return state_dict[self._key]


def open_folder(folder: Path) -> dict[str, DcpTensor]:
    """Return the tensors of a model in a folder, by their names in the model. Their values are read on request.

    If the state was saved as `{"model": model.state_dict(), ...}` (or under "module", "state_dict" or "app"), the
    result contains only that entry. If that entry has a nested entry "model", it contains only the nested one. If the
    state was saved as a flat state dict of one model, it contains all tensors.

    Args:
        folder: Folder in torch.distributed.checkpoint's format.

    Raises:
        CheckpointError: If the folder cannot be read, or if it has several entries and none is a model.
    """
    reader = _SafeReader(folder)
    metadata = reader.read_metadata()
    entries = {
        key: entry for key, entry in metadata.state_dict_metadata.items() if isinstance(entry, TensorStorageMetadata)
    }
    names = _map_model_names(entries, metadata.planner_data or {})
    return {name: DcpTensor(reader, key, entries[key]) for key, name in names.items()}


def read_folder(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, tensor) for each tensor of a model in a folder, one at a time, as `open_folder` finds them.

    Args:
        folder: Folder in torch.distributed.checkpoint's format.

    Raises:
        CheckpointError: If the folder cannot be read, or if it has several entries and none is a model.
    """
    for name, stored in open_folder(folder).items():
        yield name, stored.assemble()


def _map_model_names(keys: Iterable[str], paths: dict[str, Any]) -> dict[str, str]:
    """Return a dict from names in the folder to names in the model. Tensors outside the model are left out.

    Args:
        keys: Names of the tensors in the folder.
        paths: For each name, the keys of the nested dicts that lead to the tensor in the saved state.

    Raises:
        CheckpointError: If the saved state has several entries and none is a model.
    """
    path_by_key = {key: tuple(map(str, paths.get(key, (key,)))) for key in keys}
    if all(len(path) == 1 for path in path_by_key.values()):
        return {key: key for key in path_by_key}
    for model_key in _MODEL_KEYS:
        inside = {key: path[1:] for key, path in path_by_key.items() if path[0] == model_key and len(path) > 1}
        # The `Stateful` object in torch's tutorials is saved as {"app": {"model": ..., "optim": ...}}.
        nested = {key: path[1:] for key, path in inside.items() if path[0] == "model" and len(path) > 1}
        if inside:
            return {key: ".".join(path) for key, path in (nested or inside).items()}
    parts = sorted({path[0] for path in path_by_key.values()})
    raise CheckpointError(
        f"none of the parts {join_names(parts, 5)} is a model; expected one of {', '.join(_MODEL_KEYS)}"
    )
