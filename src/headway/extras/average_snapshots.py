"""Files of averaged weights: snapshots of single averages, and the averages in checkpoints of any layout.

A snapshot is a folder with safetensors files and `average.json`, which describes the average and is written last.
Tensors are read one block at a time, and one file is open at a time. Any number of snapshots can thus be combined.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from headway.common.atomic import write_text
from headway.common.object_path import ObjectPath, to_path
from headway.common.untrusted import read_regular_file
from headway.core.checkpoint.format.entries import TensorEntry
from headway.core.checkpoint.format.manifest import MANIFEST, Manifest, read_manifest
from headway.core.checkpoint.loading.reading import find_tensor_offset, read_file_header, read_files
from headway.core.training.gathered_tensors import gather_and_save, run_on_rank_0
from headway.core.training.run import Run
from headway.core.weights.compiled import remove_compiled_levels
from headway.core.weights.export import save_weights
from headway.core.weights.files import StoredTensor, open_checkpoint
from headway.core.weights.safetensors_format import TensorOffsets
from headway.core.weights.tensor_bytes import TensorSpec, find_dtype
from headway.errors import CheckpointError, ConfigError
from headway.extras.average_shards import slice_box

DESCRIPTION = "average.json"
"""Name of the file that describes the average in a snapshot."""
_MAX_DESCRIPTION_BYTES = 2**20


@dataclass(frozen=True)
class _StoredPart:
    """Box (rectangular block) of an average, with its values in a file.

    Attributes:
        offsets: First index of the box along each dim of the average.
        stored: Values of the box, which are read on request.
    """

    offsets: tuple[int, ...]
    stored: StoredTensor


class AverageDescription(NamedTuple):
    """Name, width and counters of a power-function average. The fields have the names of the keys in its state dict.

    Attributes:
        name: Name of the average.
        sigma_rel: Relative width of the average. The weights of the averaging steps form a distribution over step
            numbers. This is its standard deviation, divided by the number of steps.
        num_updates: Number of updates of the model since the average was created.
        num_averaged: Number of averaging steps.
        update_after: Number of updates after which averaging began.
        every: Number of updates from one averaging step to the next.
    """

    name: str
    sigma_rel: float
    num_updates: int
    num_averaged: int
    update_after: int
    every: int


@dataclass(frozen=True)
class StoredAverage:
    """Power-function average in a snapshot or a checkpoint.

    Attributes:
        source: Folder of the snapshot or checkpoint.
        description: Name, width and counters of the average.
        specs: Shape and dtype of each averaged tensor by name.
    """

    source: Path
    description: AverageDescription
    specs: Mapping[str, TensorSpec]
    _parts: Mapping[str, list[_StoredPart]]

    def add_to(self, total: torch.Tensor, name: str, coefficient: float) -> None:
        """Read an averaged tensor from the snapshot, and add a multiple of it to a tensor on the CPU.

        Args:
            total: Tensor with the shape of the average.
            name: Name of the averaged tensor.
            coefficient: Factor by which the read values are multiplied.

        Raises:
            CheckpointError: If the snapshot's file cannot be read.
        """
        for part in self._parts[name]:
            values = torch.empty(part.stored.shape, dtype=part.stored.dtype)
            part.stored.fill(values, (0,) * values.ndim)
            slice_box(total, part.offsets, values.shape).add_(values, alpha=coefficient)


def write_snapshot(folder: str | Path, state: Mapping[str, Any], run: Run | None) -> None:
    """Write an average to a snapshot folder from rank 0. Every rank must call this function.

    Args:
        folder: Folder of the snapshot, created if missing. An earlier snapshot in it is replaced.
        state: State that `ExponentialMovingAverage.state_dict` returned.
        run: Run that has prepared the model, or None.

    Raises:
        ConfigError: If the folder is a checkpoint. Ranks other than 0 raise CheckpointError.
        CheckpointError: If the files cannot be written.
    """
    place = to_path(folder)

    def remove_old_description() -> None:
        """Make the folder an incomplete snapshot until the new description is written.

        Raises:
            ConfigError: If the folder is a checkpoint.
        """
        if (place / MANIFEST).exists():
            raise ConfigError(f"{place} is a checkpoint; give another folder for the snapshot of an average")
        (place / DESCRIPTION).unlink(missing_ok=True)

    def write_description() -> None:
        description = {key: value for key, value in state.items() if key != "average"}
        write_text(place / DESCRIPTION, json.dumps(description, indent=2) + "\n")

    if run is None:
        remove_old_description()
        save_weights(state["average"].items(), place, "10GB")
        write_description()
    else:
        everyone = run.strategy.everyone
        run_on_rank_0(remove_old_description, everyone)
        gather_and_save(state["average"].items(), place, "10GB", everyone)
        run_on_rank_0(write_description, everyone)


def list_snapshots(folder: str | Path) -> list[Path]:
    """Return the paths of complete snapshots and checkpoints: the folder itself, and its direct subfolders.

    Raises:
        ConfigError: If none is found, or the folder is a URL.
    """
    place = to_path(folder)
    if isinstance(place, ObjectPath):
        raise ConfigError(f"{place} is a URL; copy the snapshots to a folder")
    candidates = [place, *sorted(place.glob("[!.]*/"))]  # a dot marks saves that are not complete
    snapshots = [each for each in candidates if (each / MANIFEST).is_file() or (each / DESCRIPTION).is_file()]
    if not snapshots:
        raise ConfigError(
            f"{place} contains neither checkpoints nor snapshots of averages; give a folder with those that save_state() or "
            "ExponentialMovingAverage.save_snapshot() wrote"
        )
    return snapshots


def find_power_averages(folder: str | Path) -> list[StoredAverage]:
    """Return the power-function averages in a snapshot or a checkpoint. Values are not read yet.

    The files of a checkpoint that contain averages are compared with their hashes.

    Args:
        folder: Folder of a snapshot or a checkpoint.

    Raises:
        ConfigError: If the folder is neither, contains no power-function average, or is a URL.
        CheckpointError: If a file is damaged.
    """
    place = to_path(folder)
    if isinstance(place, ObjectPath):
        raise ConfigError(f"{place} is a URL; copy the snapshot to a folder")
    if (place / MANIFEST).is_file():
        averages = list(_open_checkpoint_averages(place, read_manifest(place)))
    elif (place / DESCRIPTION).is_file():
        averages = list(_open_snapshot_averages(place))
    else:
        raise ConfigError(
            f"{place} is neither a checkpoint nor a snapshot of an average; give folders that save_state() or "
            "ExponentialMovingAverage.save_snapshot() wrote"
        )
    if not averages:
        raise ConfigError(
            f"{place} contains no average with a power-function decay; train with "
            "ExponentialMovingAverage(model, decay=headway.PowerDecay(0.05))"
        )
    return averages


def _open_snapshot_averages(place: Path) -> Iterator[StoredAverage]:
    """Yield the average in a snapshot. Yield nothing if it is not a power-function average.

    Raises:
        CheckpointError: If the description is not JSON, or if it or the files are damaged.
    """
    try:
        state = json.loads(read_regular_file(place / DESCRIPTION, _MAX_DESCRIPTION_BYTES))
    except ValueError as error:
        raise CheckpointError(f"{place / DESCRIPTION} is damaged ({error}); copy the snapshot again") from error
    description = _read_description(state, place)
    if description is None:
        return
    specs: dict[str, TensorSpec] = {}
    parts: dict[str, list[_StoredPart]] = {}
    for file in open_checkpoint(place).files:
        for name, (spec, start) in read_file_header(file).items():
            specs[name] = spec
            parts[name] = [_make_part((0,) * len(spec.shape), spec, file, start)]
    yield StoredAverage(place, description, specs, parts)


def _open_checkpoint_averages(place: Path, manifest: Manifest) -> Iterator[StoredAverage]:
    """Yield the power-function averages in a checkpoint, after comparing their files with the manifest's hashes."""
    headers: dict[str, TensorOffsets] = {}

    def open_parts(entry: TensorEntry) -> Iterator[_StoredPart]:
        """Yield the parts of a tensor in the files of the snapshot. The hash of each file is checked at its first use."""
        dtype = find_dtype(entry.dtype)
        for chunk in entry.chunks:
            path = place / chunk.file
            if chunk.file not in headers:
                read_files(place, [manifest.files[chunk.file]])
                headers[chunk.file] = read_file_header(path)
            start = find_tensor_offset(headers[chunk.file], path, chunk.key, dtype, chunk.shape)
            yield _make_part(tuple(chunk.offsets), TensorSpec(tuple(chunk.shape), dtype), path, start)

    for state in manifest.state.get("custom", ()):
        description = _read_description(state, place)
        if description is None:  # another registered object
            continue
        entries = {
            remove_compiled_levels(name): manifest.tensors[manifest.aliases.get(value["name"], value["name"])]
            for name, value in state["average"].items()
        }
        specs = {name: TensorSpec(tuple(entry.shape), find_dtype(entry.dtype)) for name, entry in entries.items()}
        parts = {name: list(open_parts(entry)) for name, entry in entries.items()}
        yield StoredAverage(place, description, specs, parts)


def _make_part(offsets: tuple[int, ...], spec: TensorSpec, file: Path, start: int) -> _StoredPart:
    """Return a box (rectangular block) of an average, whose values are read from a file on request.

    The file is not memory-mapped, and is open only while values are read.

    Args:
        offsets: First index of the box along each dim of the average.
        spec: Shape and dtype of the box.
        file: File that contains its values.
        start: Offset of the values in the file.
    """
    return _StoredPart(offsets, StoredTensor(spec.shape, spec.dtype, file, False, None, start))


def _read_description(state: Any, place: Path) -> AverageDescription | None:
    """Return the name, width and counters in a power-function average's state, or None for any other state.

    Args:
        state: State dict of an average, or of any other object that is registered for checkpoints.
        place: Folder that the state was read from, for messages.

    Raises:
        CheckpointError: If the width or a counter has the wrong type, or the number of averaging steps is negative.
    """
    if not isinstance(state, dict) or not set(AverageDescription._fields) <= state.keys():
        return None
    description = AverageDescription(*(state[key] for key in AverageDescription._fields))
    counters = [description.num_updates, description.num_averaged, description.update_after, description.every]
    if (
        not isinstance(description.sigma_rel, float)
        or {type(each) for each in counters} != {int}
        or description.num_averaged < 0
    ):
        raise CheckpointError(f"{place}: the description of the average {state['name']!r} is damaged: {counters}")
    return description._replace(name=str(description.name))
