"""Export weights for other programs, as safetensors files or with torch.save.

New files are written under temporary names in the target folder, then renamed.
"""

import io
import json
import logging
import pickle
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from fnmatch import fnmatch
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch

from headway.common.atomic import open_replacement, write_text
from headway.common.object_path import open_writable, to_path
from headway.common.text import parse_bytes
from headway.core.weights.parallel_writer import LazyFullTensor, ParallelWriter, count_threads
from headway.core.weights.pieces import get_memory_key
from headway.core.weights.ranged_file import RangedFile, check_specs, verify_range
from headway.core.weights.safetensors_format import order_widest_first, write_file
from headway.core.weights.tensor_bytes import TensorSpec
from headway.errors import ConfigError

# Not get_logger: HEADWAY_LOG_LEVEL would make a run print a line for each file.
logger = logging.getLogger(__name__)

SINGLE_FILE = "model.safetensors"
"""Name of the file if one file holds all weights."""
INDEX_FILE = "model.safetensors.index.json"
"""Name of the JSON file that maps each tensor to its file if there are several."""
PICKLED_FILE = "pytorch_model.bin"
"""Name of the file that `save_pickled` writes."""


def split_ties(tensors: Iterable[tuple[str, Any]]) -> tuple[dict[str, Any], dict[str, str]]:
    """Separate tensors that must be written from names that are tied to another tensor.

    Names that refer to exactly the same memory in the same layout are tied. Views that merely share a buffer are not,
    and neither are tensors without elements.

    Args:
        tensors: Pairs of (name, tensor).

    Returns:
        Pair of (tensors to write by name, mapping from each tied name to the name under which the tensor is written).
    """
    kept: dict[str, Any] = {}
    tied: dict[str, str] = {}
    owners: dict[tuple[Any, ...], str] = {}
    for name, tensor in tensors:
        key = get_memory_key(tensor)
        if prod(tensor.shape) and key in owners:
            tied[name] = owners[key]
        else:
            owners[key] = name
            kept[name] = tensor
    return kept, tied


def plan_shards(sizes: dict[str, int], max_shard_size: int) -> list[list[str]]:
    """Split tensor names, in order, into shards of at most `max_shard_size` bytes.

    A tensor that exceeds this size gets its own shard. The result equals that of huggingface_hub's
    `split_torch_state_dict_into_shards`. Therefore the shard of an oversized tensor is placed before the shard that is
    being filled, and filling then continues.

    Args:
        sizes: Sizes of the tensors in bytes, by name.
        max_shard_size: Maximum bytes per shard.

    Returns:
        Tensor names of each shard.
    """
    shards: list[list[str]] = []
    filling: list[str] = []
    free_bytes = max_shard_size
    for name, size in sizes.items():
        if size > max_shard_size:
            shards.append([name])
            continue
        if size > free_bytes:
            shards.append(filling)
            filling, free_bytes = [], max_shard_size
        filling.append(name)
        free_bytes -= size
    return [*shards, filling] if filling or not shards else shards


def save_weights(
    tensors: Iterable[tuple[str, "torch.Tensor | LazyFullTensor"]], folder: str | Path, max_shard_size: int | str
) -> list[Path]:
    """Write tensors to safetensors files in a folder and return the paths of the files.

    Files that earlier saves have left in the folder are replaced or removed.

    Args:
        tensors: Pairs of (name, tensor). Tensors that are not in memory are assembled one at a time, when they are
            written.
        folder: Folder to write. It is created if missing.
        max_shard_size: Maximum bytes per file, as a number or text such as "10GB".

    Raises:
        ConfigError: If the folder is a file, or `max_shard_size` is not a size.
        CheckpointError: If a file, when read back, differs from the tensors. The folder is then unchanged.
        OSError: If the disk is full or not writable. The folder is then unchanged.
    """
    target = _make_folder(folder)
    with open_writable(target) as local:
        files = [target / name for name in _write_tensors(tensors, local, max_shard_size)]
    _remove_stale(target, {file.name for file in files})
    return files


def _write_tensors(tensors: Iterable[tuple[str, Any]], folder: Path, max_shard_size: int | str) -> list[str]:
    """Write tensors to safetensors files, and an index if there are several. Return the names of the files.

    No existing file is replaced before all new ones are written.

    Args:
        tensors: Pairs of (name, tensor). Of tied tensors, only the first is written.
        folder: Folder of the files.
        max_shard_size: Maximum size of a file, in bytes or as text such as "5GB".
    """
    kept, tied = split_ties(tensors)
    shards = _assign_to_files(kept, max_shard_size)
    names = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    names = [SINGLE_FILE] if len(shards) == 1 else names
    with ExitStack() as stack:  # no file is replaced before all are written
        files = {
            stack.enter_context(open_replacement(folder / file)): {name: kept[name] for name in shard}
            for file, shard in zip(names, shards)
        }
        logger.info("writing %s to %s", ", ".join(names), folder)
        _write_and_compare(files, tied)
    if len(shards) > 1:
        total = sum(_make_spec(tensor).num_bytes for tensor in kept.values())
        weight_map = {name: file for file, shard in zip(names, shards) for name in shard}
        index = {"metadata": {"total_size": total, **tied}, "weight_map": weight_map}
        write_text(folder / INDEX_FILE, json.dumps(index, indent=2, sort_keys=True) + "\n")
        names.append(INDEX_FILE)
    return names


def save_pickled(state: dict[str, torch.Tensor], folder: str | Path) -> Path:
    """Write tensors with torch.save to one `pytorch_model.bin`, and remove files of earlier saves from the folder.

    Args:
        state: State dict to write.
        folder: Folder to write. It is created if missing.

    Returns:
        Path of the written file.

    Raises:
        ConfigError: If the folder is a file.
    """
    target = _make_folder(folder)
    _warn_of_code(state)
    save_object(state, target / PICKLED_FILE)
    _remove_stale(target, {PICKLED_FILE})
    return target / PICKLED_FILE


def _warn_of_code(state: Mapping[str, Any]) -> None:
    """Warn about modules' extra states that Headway will refuse to load, because reading them could execute code."""
    for name, value in state.items():
        if isinstance(value, torch.Tensor):
            continue
        try:
            buffer = io.BytesIO()
            torch.save(value, buffer)
            buffer.seek(0)
            torch.load(buffer, weights_only=True)
        except pickle.UnpicklingError:
            logger.warning(
                "%s contains an object (%s) that torch.load(weights_only=True) and load_checkpoint_in_model() refuse: the whole "
                "file can only be read with torch.load(weights_only=False). Let get_extra_state() return numbers, text, tensors, "
                "and lists and dicts of them",
                name,
                type(value).__name__,
            )


def save_object(obj: Any, path: str | Path, safe_serialization: bool = False) -> None:
    """Write an object with torch.save, or a dict of tensors as safetensors. The file is replaced atomically.

    In safetensors, a tied tensor is written once. The metadata records its other names.

    Args:
        obj: Object to write.
        path: File to write.
        safe_serialization: Whether to use safetensors. Default: False.

    Raises:
        ConfigError: If safetensors was requested and the object is not a dict of tensors.
    """
    if safe_serialization and not _is_state(obj):
        raise ConfigError(
            f"safe_serialization=True got a {type(obj).__name__}; a safetensors file contains a dict of names and tensors. Pass "
            "safe_serialization=False for other objects"
        )
    path = to_path(path)
    with open_writable(path.parent) as folder, open_replacement(folder / path.name) as staged:
        if safe_serialization:
            kept, tied = split_ties(obj.items())
            write_file(
                staged, order_widest_first({name: _make_spec(each) for name, each in kept.items()}), kept.items(), tied
            )
        else:
            torch.save(obj, staged)


def _is_state(obj: Any) -> bool:
    """Whether an object is a state dict: a mapping that contains only tensors."""
    return isinstance(obj, Mapping) and all(isinstance(value, torch.Tensor) for value in obj.values())


def _assign_to_files(tensors: Mapping[str, Any], max_shard_size: int | str) -> list[list[str]]:
    """Return the names of the tensors in each file.

    Args:
        tensors: Tensors by name.
        max_shard_size: Maximum size of a file, in bytes or as text such as "5GB".
    """
    return plan_shards(
        {name: _make_spec(each).num_bytes for name, each in tensors.items()}, parse_bytes(max_shard_size)
    )


def list_write_order(tensors: Mapping[str, Any], max_shard_size: int | str) -> list[str]:
    """Return the tensors' names in the order in which `save_weights` writes them. No two of the tensors may be tied.

    Args:
        tensors: Tensors by name.
        max_shard_size: Maximum bytes per file, as a number or text such as "10GB".
    """
    shards = _assign_to_files(tensors, max_shard_size)
    return [
        name for shard in shards for name in order_widest_first({each: _make_spec(tensors[each]) for each in shard})
    ]


def _make_spec(tensor: Any) -> TensorSpec:
    """Return the shape and dtype of a tensor, or of one that is assembled only when it is written."""
    return TensorSpec(tuple(tensor.shape), tensor.dtype)


def _write_and_compare(files: Mapping[Path, Mapping[str, Any]], tied: Mapping[str, str]) -> None:
    """Write files. Each file is read back and compared. If several threads write, the next file is written meanwhile.

    Args:
        files: Tensors by name, for each file.
        tied: Mapping from each tied name to the name under which the tensor is written.

    Raises:
        CheckpointError: If a file, when read back, differs from the tensors.
    """
    num_bytes = sum(_make_spec(tensor).num_bytes for tensors in files.values() for tensor in tensors.values())
    with ParallelWriter(count_threads(num_bytes)) as writer:

        def compare_file(specs: Mapping[str, TensorSpec], file: RangedFile) -> None:
            check_specs(file.path, specs)
            for number in range(len(file.digests)):
                writer.add_task(partial(verify_range, file, number))

        for path, tensors in files.items():
            specs = order_widest_first({name: _make_spec(tensor) for name, tensor in tensors.items()})
            values = ((name, tensors[name]) for name in specs)
            writer.write(path, specs, values, tied, on_written=partial(compare_file, specs))


def _make_folder(path: str | Path) -> Path:
    """Create a folder if it does not exist, and return its path. Raise `ConfigError` if the path is that of a file."""
    folder = to_path(path)
    if folder.is_file():
        raise ConfigError(f"{folder} is a file; give a folder for the weights")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _remove_stale(folder: Path, current: set[str]) -> None:
    """Remove files of earlier saves from the folder, so that a later load does not read them.

    Args:
        folder: Folder of the weights.
        current: Names of the files to keep.
    """
    stale = (SINGLE_FILE, INDEX_FILE, "model-*-of-*.safetensors", PICKLED_FILE)
    for path in list(folder.iterdir()):
        if path.name not in current and any(fnmatch(path.name, pattern) for pattern in stale):
            path.unlink()
