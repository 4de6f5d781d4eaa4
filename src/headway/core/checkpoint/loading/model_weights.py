"""Open the weights of one model in a Headway checkpoint, so that `Accelerator.load_weights` can read them shard-wise."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from headway.common.object_path import ObjectPath, to_path
from headway.core.checkpoint.folders import find_store
from headway.core.checkpoint.format.manifest import Manifest, read_manifest
from headway.core.checkpoint.format.values import decode_value
from headway.core.checkpoint.loading.chunked import CheckpointFiles, ChunkedTensor
from headway.core.checkpoint.loading.compiled_names import rename_compiled
from headway.core.checkpoint.loading.files import MODEL
from headway.core.checkpoint.loading.reading import verify_ranges
from headway.core.checkpoint.loading.used_ranges import UsedRanges
from headway.core.checkpoint.state import is_extra
from headway.core.weights.files import StoredTensor, WeightFiles, is_headway_checkpoint, open_checkpoint
from headway.errors import CheckpointError, ConfigError

_MODEL_NAME = re.compile(r"model/(\d+)/(.+)", re.DOTALL)


@dataclass(frozen=True)
class CheckpointTensor(StoredTensor):
    """Tensor of a model in a Headway checkpoint, which may be stored as several chunks.

    Attributes:
        logical_name: Name of the tensor in the manifest.
        chunks: Chunks of the tensor in the checkpoint's files.
    """

    logical_name: str = ""
    chunks: ChunkedTensor | None = None

    def tensor(self) -> torch.Tensor:
        """Return all values in new host memory."""
        assert self.chunks is not None
        return self.chunks.assemble()

    def fill(self, box: torch.Tensor, offsets: Sequence[int]) -> None:
        """Read a rectangular block of the tensor into `box`, which may be on any device and of any dtype.

        Args:
            box: Tensor to fill. Its shape is the shape of the block.
            offsets: First index of the block along each dim.

        Raises:
            CheckpointError: If a file differs from the manifest.
        """
        assert self.chunks is not None
        if box.dtype == self.dtype:
            self.chunks.fill(box, offsets)
            return
        for where, values in self.chunks.iterate_tiles(offsets, box.shape):
            box[where].copy_(values)


class CheckpointWeights(WeightFiles):
    """Weights of one model in a Headway checkpoint, by their names in the model.

    Creating the object reads and verifies the extra states of the model's modules.

    Args:
        folder: Folder or URL of the checkpoint.
        manifest: Manifest of the checkpoint.
        index: Index of the model among the prepared models of the run that saved the checkpoint.
        average: Prefix of the tensors of an average that replace the model's own weights, or None.

    Raises:
        CheckpointDamaged: If an extra state differs from its hash.
        CheckpointError: If a file with an extra state is missing or cannot be read.
    """

    def __init__(self, folder: Path, manifest: Manifest, index: int, average: str | None) -> None:
        self._folder = folder
        self._manifest = manifest
        self._download = find_store(folder).prepare_download(manifest)
        # In an object store, each range is compared with its hash when it is downloaded to the local folder.
        self._local_folder = folder if self._download is None else self._download.folder
        self._files = CheckpointFiles(self._local_folder, manifest, self._download)
        prefix = f"{MODEL}{index}/"
        names = {name.removeprefix(prefix): name for name in manifest.tensors if name.startswith(prefix)}
        if average is not None:
            # The average does not include frozen weights.
            names |= {name.removeprefix(average): name for name in manifest.tensors if name.startswith(average)}
        tensors = {name: self._open_tensor(logical_name) for name, logical_name in names.items()}
        ties = {
            alias.removeprefix(prefix): target.removeprefix(prefix)
            for alias, target in manifest.aliases.items()
            if alias.startswith(prefix)
        }
        super().__init__(str(folder), tensors, ties, self._read_extra_states(index))

    def _open_tensor(self, logical_name: str) -> StoredTensor:
        """Return a stored tensor that reads its values from the checkpoint's chunks."""
        entry = self._manifest.tensors[logical_name]
        chunks = ChunkedTensor(entry, self._files)
        return CheckpointTensor(
            shape=entry.shape,
            dtype=chunks.dtype,
            file=self._folder,
            is_mapped=False,
            _data=None,  # `tensor` and `fill` read the chunks instead
            logical_name=logical_name,
            chunks=chunks,
        )

    def _read_extra_states(self, index: int) -> dict[str, Any]:
        """Return the extra states of a model's modules (`get_extra_state`) by name, after verifying their tensors."""
        extras = self._manifest.state.get("extra") or []
        saved = {
            name: state for name, state in (extras[index] if index < len(extras) else {}).items() if is_extra(name)
        }
        if not saved:
            return {}
        prefix = f"extra/{index}/"
        names = [name for name in self._manifest.tensors if name.startswith(prefix)]
        used = UsedRanges(self._local_folder, self._manifest, self._download)
        used.add_tensors(names)
        self._verify_ranges(used)
        tensors = {name: ChunkedTensor(self._manifest.tensors[name], self._files).assemble() for name in names}
        return {name: decode_value(state, tensors) for name, state in saved.items()}

    def verify(self, targets: Mapping[str, Any], others: Sequence[str]) -> None:
        """Compare the bytes that will be read with their hashes.

        Args:
            targets: This rank's tensors that receive the values, by the names of the stored tensors. Only the shards
                that they hold are read.
            others: Names of further tensors, which are read completely.

        Raises:
            CheckpointDamaged: If a file differs from its hashes.
            CheckpointError: If a file is missing or cannot be read.
        """
        used = UsedRanges(self._local_folder, self._manifest, self._download)
        logical_names = {
            name: stored.logical_name for name, stored in self.tensors.items() if isinstance(stored, CheckpointTensor)
        }
        used.add_shards({logical_names[name]: [own] for name, own in targets.items()})
        used.add_tensors([logical_names[name] for name in others])
        self._verify_ranges(used)

    def _verify_ranges(self, used: UsedRanges) -> None:
        """Compare byte ranges with their hashes. In an object store, download them first."""
        if self._download is None:
            verify_ranges(self._folder, self._manifest, used.ranges)
        else:
            self._download.download_ranges(used.ranges)


def open_weights(source: str | Path, model: torch.nn.Module, weights: str | None = None) -> WeightFiles:
    """Open a Headway checkpoint, or any checkpoint that `open_checkpoint` accepts. Only headers are read.

    Args:
        source: Folder or URL of a Headway checkpoint, or an argument of `open_checkpoint`.
        model: Model to load into. If the checkpoint holds several models, the one with all tensors of this one is
            opened.
        weights: Name of an `ExponentialMovingAverage` whose averages replace the weights, such as "ema". Default: None,
            the model's own weights.

    Raises:
        CheckpointError: If there is no checkpoint, it is damaged, or none or several of its models fit.
        ConfigError: If the checkpoint has no average of this name.
    """
    folder = to_path(source)
    if not isinstance(folder, ObjectPath) and not is_headway_checkpoint(folder):
        if weights is not None:
            raise ConfigError(f"weights={weights!r} needs a checkpoint that save_state wrote, and {source} is none")
        return open_checkpoint(source)
    folder = find_store(folder).find_folder()
    manifest = rename_compiled(read_manifest(folder))
    return CheckpointWeights(
        folder, manifest, _find_model(folder, manifest, model), _find_average(folder, manifest, weights)
    )


def _find_model(folder: Path, manifest: Manifest, model: torch.nn.Module) -> int:
    """Return the index of the checkpoint's only model, or of the only one with all parameters of `model`.

    Args:
        folder: Folder of the checkpoint, for messages.
        manifest: Manifest of the checkpoint.
        model: Model that loads the weights.

    Raises:
        CheckpointError: If the checkpoint has no model, or has several, of which not exactly one fits.
    """
    shapes: dict[int, dict[str, tuple[int, ...]]] = {}
    for logical_name in (*manifest.tensors, *manifest.aliases):
        match = _MODEL_NAME.fullmatch(logical_name)
        if match is not None:
            entry = manifest.tensors[manifest.aliases.get(logical_name, logical_name)]
            shapes.setdefault(int(match[1]), {})[match[2]] = entry.shape
    if not shapes:
        raise CheckpointError(f"{folder} contains no model; its run prepared none")
    if len(shapes) == 1:
        return next(iter(shapes))
    own = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    fitting = [index for index, saved in shapes.items() if all(saved.get(name) == shape for name, shape in own.items())]
    if len(fitting) != 1:
        raise CheckpointError(
            f"{folder} contains {len(shapes)} models, and {len(fitting)} of them have all parameters of {type(model).__name__}. "
            f"Write one of them with `headway merge {folder} OUTPUT --model N`, and load OUTPUT"
        )
    return fitting[0]


def _find_average(folder: Path, manifest: Manifest, name: str | None) -> str | None:
    """Return the prefix of the tensors of a weight average in the checkpoint.

    Args:
        folder: Folder of the checkpoint, for messages.
        manifest: Manifest of the checkpoint.
        name: Name of the average. None: no average is requested, and None is returned.

    Raises:
        ConfigError: If the checkpoint has no average of this name, or several.
    """
    if name is None:
        return None
    registered = enumerate(manifest.state.get("custom", ()))
    averages = {index: state for index, state in registered if isinstance(state, dict) and "average" in state}
    indices = [index for index, state in averages.items() if state.get("name") == name]
    if len(indices) != 1:
        names = ", ".join(repr(state.get("name")) for state in averages.values()) or "none"
        raise ConfigError(f"{folder} has {len(indices)} averages named {name!r}; its averages: {names}")
    return f"custom/{indices[0]}.average."
