"""Loading weights: mapped where they lie, converted or copied only where that is needed, all or nothing."""

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from headway.bigmodel.budget import Device
from headway.bigmodel.device_map import DeviceMap, device_of, resolve_device_map
from headway.bigmodel.files import Checkpoint, Stored, open_checkpoint
from headway.bigmodel.names import Conversion, Place, Plan, match, places_of, tied_groups
from headway.bigmodel.offload_folder import Spec, offload
from headway.bigmodel.sizes import Dtype, as_dtype
from headway.errors import ConfigError, UnsupportedError
from headway.log import get_logger
from headway.runtime.device import detect
from headway.units import format_bytes

logger = get_logger(__name__)


class CheckedMap(DeviceMap):
    """A device map that has been checked against the model at hand, and need not be again."""


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
    if offload_8bit_bnb or not full_state_dict:
        raise UnsupportedError(
            "load_checkpoint_in_model() loads full, unquantised tensors; leave offload_8bit_bnb=False, full_state_dict=True"
        )
    opened = open_checkpoint(checkpoint)
    places = places_of(model)
    plan = match(model, places, opened, strict)
    kept = frozenset(keep_in_fp32_modules or ())
    target = as_dtype(dtype)
    if target is not None and not isinstance(target, torch.dtype):
        raise ConfigError(f"dtype={dtype!r} has no dtype in torch to load into; it is for estimates only")
    resolved = device_map
    if device_map is not None and not isinstance(device_map, CheckedMap):
        resolved = resolve_device_map(model, device_map)
    devices = _devices(places, resolved, offload_buffers)
    _Loading(opened, plan, places, devices, target, kept, offload_folder).run()


@dataclass
class _Loading:
    """One load, after its names are settled."""

    checkpoint: Checkpoint
    plan: Plan
    places: dict[str, Place]
    devices: dict[str, str | torch.device]
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
            self.checkpoint.source, len(self.plan.shapes), format_bytes(total), format_bytes(num_mapped),
        )  # fmt: skip

    def _wanted_dtype(self, name: str) -> torch.dtype:
        own, stored = self.places[name].tensor.dtype, self.plan.shapes[name][1]
        if not stored.is_floating_point or own.itemsize < 2:
            return own
        if not self.in_fp32.isdisjoint(name.split(".")):
            return torch.float32
        return own if self.dtype is None else self.dtype

    def _values(self, offloaded: Mapping[str, Stored]) -> Iterator[tuple[str, torch.Tensor, bool]]:
        """(name, value, is it a mapped file?), one tensor in memory at a time beyond those already in their places."""
        for name, key in self.plan.direct.items():
            if name in offloaded:
                yield name, offloaded[name].tensor(), True
                continue
            stored, dtype, device = self.checkpoint.tensors[key], self._wanted_dtype(name), self.devices[name]
            value = stored.tensor()
            if device not in ("disk", torch.device("cpu")):
                value = value.to(device)
            is_mapped = stored.is_mapped and value.device.type == "cpu" and dtype == value.dtype
            yield name, value.to(dtype), is_mapped
        for conversion in self.plan.conversions:
            if conversion.target in offloaded:
                names = [name for name in offloaded if name in self._made_by(conversion)]
                yield from ((name, offloaded[name].tensor(), True) for name in names)
                continue
            for name, value in conversion.run(self._read).items():
                device = "cpu" if self.devices[name] == "disk" else self.devices[name]
                yield name, value.to(device).to(self._wanted_dtype(name)), False

    def _read(self, key: str) -> torch.Tensor:
        return self.checkpoint.tensors[key].tensor()

    def _made_by(self, conversion: Conversion) -> set[str]:
        return set(conversion.run(lambda key: self._read(key).to("meta")))

    def _offloaded(self) -> dict[str, Stored]:
        """What is placed on disk but cannot be used from its own file, written to the offload folder."""
        direct = {
            name: key
            for name, key in self.plan.direct.items()
            if self.devices[name] == "disk"
            and not (self.checkpoint.tensors[key].is_mapped and self._wanted_dtype(name) == self.plan.shapes[name][1])
        }
        conversions = [c for c in self.plan.conversions if self.devices[c.target] == "disk"]
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

        specs = {name: Spec(self.plan.shapes[name][0], self._wanted_dtype(name)) for name in names}
        return offload(self.folder, specs, _identity(self.checkpoint), values).tensors


def _identity(checkpoint: Checkpoint) -> str:
    """Files by name, size and time of change: what was converted from them is not used for others."""
    stats = [(file.name, (stat := file.stat()).st_size, stat.st_mtime_ns) for file in checkpoint.files]
    return hashlib.sha256(repr(stats).encode()).hexdigest()


def _devices(
    places: Mapping[str, Place], device_map: Mapping[str, Device] | None, offload_buffers: bool
) -> dict[str, str | torch.device]:
    """The device of every tensor; buffers that would be on disk are on the CPU unless `offload_buffers`."""
    found: dict[str, str | torch.device] = {}
    for name, place in places.items():
        if device_map is None:
            own = place.tensor.device
            found[name] = torch.device("cpu") if own.type == "meta" else own
            continue
        device = device_of(device_map, name)
        stays = device == "disk" and not (place.is_parameter or offload_buffers)
        found[name] = torch.device("cpu") if stays else as_place(device)
    return found


def as_place(device: Device) -> str | torch.device:
    """An entry of a device map as torch names it; "disk" stays.

    Raises:
        ConfigError: "meta", where no values are.
    """
    if device == "meta":
        raise ConfigError(
            "a device map with 'meta' leaves weights without values; give 'cpu', 'disk' or an accelerator"
        )
    if isinstance(device, int):
        return torch.device(detect().kind, device)
    return device if device == "disk" else torch.device(device)


def assign(places: Mapping[str, Place], names: list[str], value: torch.Tensor, is_mapped: bool) -> None:
    """Give a tensor, under all its names, its value: new data for one that has values, a new parameter for a meta one."""
    first = places[names[0]]
    old = first.tensor
    new: torch.Tensor
    if old.is_meta or old.device != value.device:
        new = nn.Parameter(value, requires_grad=old.requires_grad) if isinstance(old, nn.Parameter) else value
    else:
        old.data = value
        new = old
    if is_mapped:
        mark_mapped(new)
    for name in names:
        if places[name].tensor is not new:
            places[name].put(new)


def mark_mapped(tensor: torch.Tensor) -> None:
    """Remember that these values lie in a file; the mark holds as long as the tensor has this memory."""
    tensor.headway_mapped_at = tensor.data_ptr()  # type: ignore[attr-defined]


def is_mapped(tensor: torch.Tensor) -> bool:
    """Do the values lie in a mapped file?"""
    return bool(getattr(tensor, "headway_mapped_at", None) == tensor.data_ptr()) and tensor.numel() > 0
