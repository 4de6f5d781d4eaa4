"""Loading weights: mapped where they lie, converted or copied only where that is needed, all or nothing."""

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from headway.common.text import format_bytes
from headway.errors import ConfigError, UnsupportedError
from headway.log import get_logger
from headway.offload.offload_folder import offload
from headway.offload.placement.budget import Device
from headway.offload.placement.device_map import CPU, DISK, Home, is_offloaded, resolve_device_map, settle
from headway.offload.placement.sizes import Dtype, as_dtype
from headway.weights.files import StoredTensor, WeightFiles, open_checkpoint
from headway.weights.names import Conversion, TensorLocation, TensorSources, assign, match, places_of, tied_groups
from headway.weights.shards import TensorSpec

logger = get_logger(__name__)


def load_checkpoint_in_model(
    model: nn.Module,
    checkpoint: str | Path,
    device_map: Mapping[str, Device] | None = None,
    offload_folder: str | Path | None = None,
    dtype: Dtype | None = None,
    offload_state_dict: bool = False,
    offload_buffers: bool = False,
    keep_in_fp32_modules: Iterable[str] | None = None,
    offload_8bit_bnb: bool = False,
    strict: bool = False,
    full_state_dict: bool = True,
    broadcast_from_rank0: bool = False,
) -> None:
    """Load a checkpoint into a model, on the meta device or with values.

    On the CPU the weights ARE the files: they are mapped into memory, pages are read when they are first touched, and
    what is written to them (training) stays in memory and never reaches the file. Where the model wants another dtype,
    or transformers stores the model in another layout than its modules have, tensors are converted one at a time.
    Every name, shape and file is checked before the first value moves.

    Args:
        model: any module. One on the meta device gets new parameters; others keep theirs, with new values.
        checkpoint: a file, an index, a folder, or a model id on the Hugging Face Hub. Safetensors come before `.bin`,
            and `.bin` is read without executing anything.
        device_map: {module name: device}, as infer_auto_device_map gives it; "" is the whole model. "disk" leaves the
            weights in their files. None: where the model is, the CPU for the meta device.
        offload_folder: for what is placed on "disk" and cannot be used from its file: converted tensors and old `.bin`.
        dtype: of floating weights; None: what the model has.
        offload_state_dict: no effect; the state dict is never in memory.
        offload_buffers: also leave buffers on disk.
        keep_in_fp32_modules: parts of names (between dots) whose weights are float32 whatever `dtype` is.
        offload_8bit_bnb: not supported.
        strict: names that the model has no place for, and absent buffers, are an error too.
        full_state_dict: the checkpoint holds full tensors; False is not supported.
        broadcast_from_rank0: no effect; ranks of a machine share the mapped pages.

    Raises:
        CheckpointError: the checkpoint is missing or damaged, or does not fit; the model is untouched.
        ConfigError: the device map misses a tensor, or the offload folder is needed or another model's.
        UnsupportedError: bitsandbytes, or a sharded state dict.
    """
    check_kind(full_state_dict, offload_8bit_bnb)
    homes = None
    if device_map is not None:
        homes = settle(model, resolve_device_map(model, device_map), CPU, offload_buffers).homes
    load(model, checkpoint, homes, offload_folder, dtype, keep_in_fp32_modules or (), strict)


def check_kind(full_state_dict: bool, is_quantised: bool = False) -> None:
    """Refuse what is not a checkpoint of full, unquantised tensors.

    Raises:
        UnsupportedError: it is another one.
    """
    if is_quantised or not full_state_dict:
        raise UnsupportedError(
            "load_checkpoint_in_model() loads full, unquantised tensors; leave offload_8bit_bnb=False, full_state_dict=True"
        )


def load(
    model: nn.Module,
    checkpoint: str | Path,
    homes: Mapping[str, Home] | None,
    offload_folder: str | Path | None,
    dtype: Dtype | None,
    in_fp32: Iterable[str],
    strict: bool,
) -> None:
    """Load a checkpoint, each tensor to its home; the other arguments are those of load_checkpoint_in_model().

    Args:
        homes: where each tensor stays, by name; None: where it is, the CPU for the meta device.
    """
    opened = open_checkpoint(checkpoint)
    places = places_of(model)
    sources = match(model, places, opened, strict)
    target = as_dtype(dtype)
    if target is not None and not isinstance(target, torch.dtype):
        raise ConfigError(f"dtype={dtype!r} has no dtype in torch to load into; it is for estimates only")
    if homes is None:
        homes = {name: CPU if place.tensor.is_meta else place.tensor.device for name, place in places.items()}
    _Loading(opened, sources, places, homes, target, frozenset(in_fp32), offload_folder).run()


@dataclass
class _Loading:
    """One load, after its names are settled."""

    checkpoint: WeightFiles
    sources: TensorSources
    places: dict[str, TensorLocation]
    homes: Mapping[str, Home]
    dtype: torch.dtype | None
    in_fp32: frozenset[str]
    folder: str | Path | None

    def run(self) -> None:
        """Put every value in its place."""
        groups = tied_groups(self.places)
        offloaded = self._offloaded()
        num_mapped = 0
        for name, value, is_mapped in self._values(offloaded):
            assign(self.places, groups[name], value, is_mapped)
            num_mapped += value.numel() * value.element_size() if is_mapped else 0
        total = sum(stored.num_bytes for stored in self.checkpoint.tensors.values())
        logger.info(
            "%s: %d tensors, %s, of which %s are used from the file",
            self.checkpoint.source,
            len(self.sources.shapes),
            format_bytes(total),
            format_bytes(num_mapped),
        )

    def _wanted_dtype(self, name: str) -> torch.dtype:
        own, stored = self.places[name].tensor.dtype, self.sources.shapes[name][1]
        if not stored.is_floating_point or own.itemsize < 2:
            return own
        if not self.in_fp32.isdisjoint(name.split(".")):
            return torch.float32
        return own if self.dtype is None else self.dtype

    def _values(self, offloaded: Mapping[str, StoredTensor]) -> Iterator[tuple[str, torch.Tensor, bool]]:
        """(name, value, is it a mapped file?), one tensor in memory at a time beyond those already in their places."""
        for name, key in self.sources.direct.items():
            if name in offloaded:
                yield name, offloaded[name].tensor(), True
                continue
            stored, dtype, home = self.checkpoint.tensors[key], self._wanted_dtype(name), self.homes[name]
            value = stored.tensor()
            if not is_offloaded(home):
                value = value.to(home)
            is_mapped = stored.is_mapped and value.device.type == "cpu" and dtype == value.dtype
            yield name, value.to(dtype), is_mapped
        for conversion in self.sources.conversions:
            if conversion.target in offloaded:
                names = [name for name in offloaded if name in self._made_by(conversion)]
                yield from ((name, offloaded[name].tensor(), True) for name in names)
                continue
            for name, value in conversion.run(self._read).items():
                home = CPU if self.homes[name] == DISK else self.homes[name]
                yield name, value.to(home).to(self._wanted_dtype(name)), False

    def _read(self, key: str) -> torch.Tensor:
        return self.checkpoint.tensors[key].tensor()

    def _made_by(self, conversion: Conversion) -> set[str]:
        return set(conversion.run(lambda key: self._read(key).to("meta")))

    def _offloaded(self) -> dict[str, StoredTensor]:
        """What is placed on disk but cannot be used from its own file, written to the offload folder."""
        direct = {
            name: key
            for name, key in self.sources.direct.items()
            if self.homes[name] == DISK
            and not (
                self.checkpoint.tensors[key].is_mapped and self._wanted_dtype(name) == self.sources.shapes[name][1]
            )
        }
        conversions = [c for c in self.sources.conversions if self.homes[c.target] == DISK]
        names = [*direct, *(name for c in conversions for name in self._made_by(c))]
        if not names:
            return {}
        if self.folder is None:
            raise ConfigError(
                f"{len(names)} tensors placed on disk cannot be used from their files as they are (converted in dtype or "
                f"layout, or in an old format): {', '.join(names[:5])}; give offload_folder=, or load with the files' dtype"
            )

        def values() -> Iterator[tuple[str, torch.Tensor]]:
            for name, key in direct.items():
                yield name, self._read(key).to(self._wanted_dtype(name))
            for conversion in conversions:
                for name, value in conversion.run(self._read).items():
                    yield name, value.to(self._wanted_dtype(name))

        specs = {name: TensorSpec(self.sources.shapes[name][0], self._wanted_dtype(name)) for name in names}
        return offload(self.folder, specs, _identity(self.checkpoint), values).tensors


def _identity(checkpoint: WeightFiles) -> str:
    """Files by name, size and time of change: what was converted from them is not used for others."""
    stats = [(file.name, (stat := file.stat()).st_size, stat.st_mtime_ns) for file in checkpoint.files]
    return hashlib.sha256(repr(stats).encode()).hexdigest()
