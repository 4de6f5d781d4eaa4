"""Placing a model's parts on devices, in host memory and on disk, loading weights there, and running the model from there.

Weights are mapped where they lie, converted or copied only where that is needed, all or nothing.
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from headway.common.text import format_bytes
from headway.errors import ConfigError, UnsupportedError
from headway.log import get_logger
from headway.offload.execution import Execution, undispatch
from headway.offload.offload_folder import OffloadedWeightsLoader, existing, fitted, offload
from headway.offload.placement.budget import Device, check_presence
from headway.offload.placement.device_map import (
    CPU,
    DISK,
    DeviceMap,
    Home,
    Placement,
    compute_device,
    is_offloaded,
    resolve_device_map,
    settle,
)
from headway.offload.placement.sizes import Dtype, as_dtype
from headway.weights.files import StoredTensor, WeightFiles, open_checkpoint
from headway.weights.names import (
    Conversion,
    TensorLocation,
    TensorSources,
    assign,
    is_mapped,
    match,
    places_of,
    tied_groups,
)
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
        for name, value, is_in_file in self._values(offloaded):
            assign(self.places, groups[name], value, is_in_file)
            num_mapped += value.nbytes if is_in_file else 0
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
            is_in_file = stored.is_mapped and value.device.type == "cpu" and dtype == value.dtype
            yield name, value.to(dtype), is_in_file
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


def load_checkpoint_and_dispatch(
    model: nn.Module,
    checkpoint: str | Path,
    device_map: str | int | torch.device | Mapping[str, Device | torch.device] | None = None,
    max_memory: Mapping[Device, int | str] | None = None,
    no_split_module_classes: list[str] | str | None = None,
    offload_folder: str | Path | None = None,
    offload_buffers: bool = False,
    dtype: Dtype | None = None,
    offload_state_dict: bool | None = None,
    skip_keys: str | list[str] | None = None,
    preload_module_classes: list[str] | None = None,
    force_hooks: bool = False,
    strict: bool = False,
    full_state_dict: bool = True,
    broadcast_from_rank0: bool = False,
) -> nn.Module:
    """Load a checkpoint into a model and place its parts; returns the model.

    Args:
        model: usually built under init_empty_weights().
        checkpoint: as for load_checkpoint_in_model().
        device_map: "auto", "balanced", "balanced_low_0", "sequential", one device for all, or {module name: device}.
            None loads without placing.
        max_memory: {device: bytes or "10GiB"} for the words above.
        no_split_module_classes: classes whose modules stay on one device; None: what the model says itself.
        skip_keys: keyword arguments of forwards that are not moved between devices.
        preload_module_classes: as for dispatch_model().

    The other arguments are those of load_checkpoint_in_model() and dispatch_model().

    Raises:
        CheckpointError: the checkpoint is damaged or does not fit; the model is untouched.
        DeviceMapError: the map does not fit the model or the machine.
    """
    check_kind(full_state_dict)
    placement = None
    if device_map is not None:
        check_presence(max_memory)
        found = resolve_device_map(
            model, device_map, max_memory, no_split_module_classes, dtype, offload_buffers=offload_buffers
        )
        placement = settle(model, found, None, offload_buffers)
    homes = None if placement is None else placement.homes
    load(model, checkpoint, homes, offload_folder, dtype, (), strict)
    if placement is not None:
        undispatch(model)
        _run(model, placement, offload_folder, skip_keys, preload_module_classes, force_hooks)
    return model


def dispatch_model(
    model: nn.Module,
    device_map: str | int | torch.device | Mapping[str, Device | torch.device],
    main_device: Device | torch.device | None = None,
    state_dict: Mapping[str, torch.Tensor] | None = None,
    offload_dir: str | Path | None = None,
    offload_index: Mapping[str, Mapping[str, object]] | None = None,
    offload_buffers: bool = False,
    skip_keys: str | list[str] | None = None,
    preload_module_classes: list[str] | None = None,
    force_hooks: bool = False,
) -> nn.Module:
    """Place a model's parts and run it from there; returns the model, with the map as `hf_device_map`.

    Parts on an accelerator stay and run there. Parts on "cpu" and "disk" run on the main device: where that is an
    accelerator, their weights are copied ahead of use; where it is the CPU, they are used where they lie, and those on
    disk are read ahead. Outside of a forward every weight holds its real values, so a state dict is that of the
    undivided model. A model that has been dispatched before is placed again.

    Args:
        device_map: as for load_checkpoint_and_dispatch().
        main_device: where offloaded parts run; None: the first accelerator in the map, else the CPU.
        state_dict: values for parts that are on the meta device.
        offload_dir: where weights go that are placed on "disk" and are not in a mapped file yet.
        offload_index: {name: {"safetensors_file": path, "weight_name": name there}} for values that are in files, or
            {name: {"dtype": ..., "shape": ...}} for `<name>.dat` in the offload folder, as read_offload_index() gives them.
        offload_buffers: also offload buffers; they are small, and stay on the main device otherwise.
        skip_keys: keyword arguments of forwards that are not moved between devices.
        preload_module_classes: classes whose modules use the weights of modules inside them without calling those;
            their weights are brought in together. torch's MultiheadAttention and TransformerEncoderLayer are known.
        force_hooks: attach hooks also where everything is on one device.

    Raises:
        DeviceMapError: the map does not fit the model or the machine.
        ConfigError: a tensor has no values, or the offload folder is missing or another model's.
    """
    undispatch(model)
    placement = settle(model, resolve_device_map(model, device_map), main_device, offload_buffers)
    _fill(places_of(model), state_dict, offload_index, offload_dir)
    _run(model, placement, offload_dir, skip_keys, preload_module_classes, force_hooks)
    return model


def _run(
    model: nn.Module,
    placement: Placement,
    folder: str | Path | None,
    skip_keys: str | list[str] | None,
    preload: list[str] | None,
    force_hooks: bool,
) -> None:
    """Move every tensor home and attach what runs the model from there."""
    _move(places_of(model), placement.homes, folder)
    kinds = set(placement.homes.values())
    if force_hooks or len(kinds) > 1 or DISK in kinds or kinds == {CPU} != {placement.main}:
        skipped = [skip_keys] if isinstance(skip_keys, str) else list(skip_keys or ())
        Execution(model, placement, skipped, preload or []).attach()
    model.hf_device_map = dict(placement.device_map)  # type: ignore[assignment]


def cpu_offload(
    model: nn.Module,
    execution_device: Device | torch.device | None = None,
    offload_buffers: bool = False,
    state_dict: Mapping[str, torch.Tensor] | None = None,
    preload_module_classes: list[str] | None = None,
) -> nn.Module:
    """Keep all weights in host memory and run on `execution_device`, each part's weights copied there ahead of its use.

    Args:
        execution_device: None: this process's current accelerator. On the CPU there is nothing to move.
        offload_buffers: also offload buffers.
        state_dict: values for parts that are on the meta device.
        preload_module_classes: as for dispatch_model().
    """
    return dispatch_model(
        model,
        DeviceMap({"": "cpu"}),
        _accelerator(execution_device),
        state_dict,
        offload_buffers=offload_buffers,
        preload_module_classes=preload_module_classes,
    )


def disk_offload(
    model: nn.Module,
    offload_dir: str | Path,
    execution_device: Device | torch.device | None = None,
    offload_buffers: bool = False,
    preload_module_classes: list[str] | None = None,
) -> nn.Module:
    """Keep all weights on disk and run on `execution_device`, read ahead of use.

    Args:
        offload_dir: where weights are written that are in no mapped file yet. What an earlier call wrote of the same
            model is used again; another model's is refused.
        execution_device: None: this process's current accelerator, else the CPU.
        offload_buffers: also offload buffers.
        preload_module_classes: as for dispatch_model().

    Raises:
        ConfigError: the folder holds another model's weights.
    """
    return dispatch_model(
        model,
        DeviceMap({"": "disk"}),
        _accelerator(execution_device),
        offload_dir=offload_dir,
        offload_buffers=offload_buffers,
        preload_module_classes=preload_module_classes,
    )


def default_device() -> torch.device:
    """This process's accelerator; the CPU where there is none."""
    found = torch.accelerator.current_accelerator(check_available=True)
    # With its index: without one it would be the first device on every rank.
    return torch.device("cpu") if found is None else torch.device(found.type, torch.accelerator.current_device_index())


def _accelerator(given: Device | torch.device | None) -> torch.device:
    if given is not None:
        return compute_device(given, "execution_device")
    return default_device()


def _fill(
    places: Mapping[str, TensorLocation],
    state_dict: Mapping[str, torch.Tensor] | None,
    index: Mapping[str, Mapping[str, object]] | None,
    folder: str | Path | None,
) -> None:
    """Give values to what is on the meta device, from the caller's state dict and files."""
    if state_dict is None and index is None:
        return
    groups, stored = tied_groups(places), OffloadedWeightsLoader(save_folder=folder, index=index or {})
    for name, place in places.items():
        if not place.tensor.is_meta:
            continue
        if state_dict is not None and name in state_dict:
            assign(places, groups[name], state_dict[name], is_mapped=False)
        elif name in stored:
            value = fitted(name, place.tensor, stored[name])
            assign(places, groups[name], value, stored.is_mapped(name, value.dtype))


def _move(places: Mapping[str, TensorLocation], homes: Mapping[str, Home], folder: str | Path | None) -> None:
    """Move every tensor home; what goes to disk and is in no mapped file is written to the folder first."""
    groups = tied_groups(places)
    leaders = {name: group[0] for name, group in groups.items()}
    on_disk = [
        name
        for name, place in places.items()
        if homes[name] == DISK and leaders[name] == name and not is_mapped(place.tensor)
    ]
    specs = {name: TensorSpec(tuple(places[name].tensor.shape), places[name].tensor.dtype) for name in on_disk}
    values: dict[str, torch.Tensor] = {}
    if on_disk:
        values = _written(places, on_disk, specs, folder)
    empty = [name for name, place in places.items() if place.tensor.is_meta and leaders[name] not in values]
    if empty:
        raise ConfigError(
            f"{len(empty)} tensors have no values: {', '.join(empty[:5])}; load a checkpoint first, or pass state_dict="
        )
    for name, value in values.items():
        assign(places, groups[name], value, is_mapped=True)
    for name, place in places.items():
        home = homes[name]
        if home == DISK or place.tensor.device == home:
            continue
        assert isinstance(home, torch.device)
        together = [other for other in groups[name] if homes[other] == home]
        assign(places, together, place.tensor.detach().to(home), is_mapped=False)


def _written(
    places: Mapping[str, TensorLocation], names: Iterable[str], specs: dict[str, TensorSpec], folder: str | Path | None
) -> dict[str, torch.Tensor]:
    if all(places[name].tensor.is_meta for name in names):
        found = existing(folder, specs)
        return {} if found is None else {name: found.tensors[name].tensor() for name in names}
    if folder is None:
        raise ConfigError(
            f"{len(specs)} tensors on disk are in no file that can be mapped: {', '.join(list(specs)[:5])}; give an offload folder"
        )
    empty = [name for name in names if places[name].tensor.is_meta]
    if empty:
        raise ConfigError(
            f"{len(empty)} tensors placed on disk have no values: {', '.join(empty[:5])}; load them first"
        )

    def values() -> Iterator[tuple[str, torch.Tensor]]:
        for name in names:
            yield name, places[name].tensor

    written: dict[str, Any] = offload(folder, specs, "", values).tensors
    return {name: written[name].tensor() for name in names}
