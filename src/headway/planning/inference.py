"""What running a model takes: its sizes, what this machine holds of it, and the rate that reading its weights allows."""

import inspect
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn

from headway.common.text import columns, format_bytes, format_number
from headway.errors import DeviceMapError
from headway.offload.placement.budget import OFFLOAD, Device, copy_bandwidth, disk_bandwidth, memory_bandwidth
from headway.offload.placement.device_map import DeviceMap, device_of, resolve_device_map
from headway.offload.placement.sizes import Dtype, TensorSizes, compute_module_sizes, get_max_layer_size
from headway.offload.placement.workload import Workload, cache_and_outputs
from headway.planning.sources import meta_model_from
from headway.runtime.device import detect
from headway.weights.files import WeightFiles, open_checkpoint

DTYPES = ("float32", "bfloat16", "int8", "int4")

_NUM_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")


@dataclass(frozen=True)
class ModelSizes:
    """A model in one dtype.

    Attributes:
        dtype: which one, by name.
        num_bytes: all weights and buffers.
        largest: bytes of the largest layer.
        largest_name: that layer's name.
        device_map: what `device_map="auto"` gives here; None where the largest layer fits nowhere.
        reason: why there is none.
        traffic: {device: bytes of weights there that a forward reads}.
    """

    dtype: str
    num_bytes: int
    largest: int
    largest_name: str
    device_map: DeviceMap | None
    reason: str = ""
    traffic: dict[Device, int] = field(default_factory=dict)

    def places(self) -> dict[Device, int]:
        """Bytes of weights for each device that holds some."""
        if self.device_map is None or self.device_map.plan is None:
            return {}
        return {row.device: row.weights for row in self.device_map.plan.rows if row.weights}


class Bandwidths:
    """What this machine's memories, links and disk give, each measured when it is first asked for.

    Args:
        files: the checkpoint's, for the disk.
        measure_memory: device -> bytes a second of its memory.
        measure_copy: accelerator -> bytes a second from main memory.
        measure_disk: files -> bytes a second.
    """

    def __init__(
        self,
        files: list[Path],
        measure_memory: Callable[[torch.device], float] = memory_bandwidth,
        measure_copy: Callable[[torch.device], float] = copy_bandwidth,
        measure_disk: Callable[[list[Path]], float | None] = disk_bandwidth,
    ) -> None:
        self._files = files
        self._measures = measure_memory, measure_copy, measure_disk
        self.known: dict[str, float | None] = {}

    def memory(self, device: Device) -> float:
        """Bytes a second of a device's own memory."""
        where = _torch_device(device)
        found = self._once("main memory" if device == "cpu" else f"memory of {where}", lambda: self._measures[0](where))
        assert found is not None
        return found

    def copy(self, device: Device) -> float:
        """Bytes a second from main memory to an accelerator."""
        where = _torch_device(device)
        found = self._once(f"main memory to {where}", lambda: self._measures[1](where))
        assert found is not None
        return found

    def disk(self) -> float | None:
        """Bytes a second of the disk with the weights; None where there are none, or it cannot be said."""
        return self._once("disk", lambda: self._measures[2](self._files)) if self._files else None

    def _once(self, name: str, measure: Callable[[], float | None]) -> float | None:
        if name not in self.known:
            self.known[name] = measure()
        return self.known[name]


def _torch_device(device: Device) -> torch.device:
    return torch.device(detect().kind, device) if isinstance(device, int) else torch.device(device)


def stored_weights(folder: str | Path) -> WeightFiles | None:
    """The folder's checkpoint, its headers read; None where it has none.

    Raises:
        CheckpointError: it is damaged, or there are several.
    """
    patterns = ("*.safetensors", "*.bin", "*.index.json")
    if not any(any(Path(folder).glob(pattern)) for pattern in patterns):
        return None
    return open_checkpoint(folder)


def size_up(model: nn.Module, dtype: Dtype, workload: Workload | None = None) -> ModelSizes:
    """Sizes, placement and traffic of a model in one dtype on this machine.

    Raises:
        DeviceMapError: the workload cannot be measured.
    """
    sizes = compute_module_sizes(model, dtype)
    classes = getattr(model, "_no_split_modules", None)
    parts: list[tuple[str, nn.Module | torch.Tensor]] = [
        *model.named_children(),
        *model.named_parameters(recurse=False),
    ]
    largest, names = get_max_layer_size(parts, sizes, classes)
    shown = str(dtype).removeprefix("torch.")
    found = shown, sizes[""], largest, names[0] if names else "the whole model"
    try:
        device_map = resolve_device_map(model, "auto", dtype=dtype, workload=workload)
    except DeviceMapError as error:
        if workload is not None and isinstance(error.__cause__, Exception):
            raise
        return ModelSizes(*found, device_map=None, reason=str(error))
    return ModelSizes(*found, device_map=device_map, traffic=traffic(model, device_map, dtype))


def traffic(model: nn.Module, device_map: DeviceMap, dtype: Dtype) -> dict[Device, int]:
    """{device: bytes of its weights that one forward of one token reads at least}.

    Every weight counts once. Of the input embedding, unless it is tied to the output, a row is read: it does not count.
    Of the experts of a mixture, only the share that a token is sent to counts.
    """
    price, share = TensorSizes(dtype), expert_share(model)
    skipped = _lookup_table(model)
    found: Counter[Device] = Counter()
    for name, parameter in model.named_parameters():
        if parameter is not skipped:
            part = share if ".experts." in name else 1.0
            found[device_of(device_map, name)] += round(price(name, parameter) * part)
    return dict(found)


def expert_share(model: nn.Module) -> float:
    """The share of a mixture's experts that serves one token; 1 for other models."""
    config = getattr(model, "config", None)
    chosen = getattr(config, "num_experts_per_tok", None)
    total = next((n for n in (getattr(config, name, None) for name in _NUM_EXPERTS) if n), None)
    return min(1.0, chosen / total) if chosen and total else 1.0


def _lookup_table(model: nn.Module) -> torch.Tensor | None:
    """The weight of the input embedding, where nothing else uses it."""
    try:
        table = getattr(model.get_input_embeddings(), "weight", None)  # type: ignore[operator]
    except (AttributeError, NotImplementedError):
        return None
    num_names = sum(parameter is table for _, parameter in model.named_parameters(remove_duplicate=False))
    is_lookup = isinstance(model.get_input_embeddings(), nn.Embedding)  # type: ignore[operator]
    return table if is_lookup and num_names == 1 else None


def ceiling(sizing: ModelSizes, bandwidths: Bandwidths) -> float | None:
    """Forwards a second that bandwidth alone allows; None where no placement is, or the disk's is not known.

    Accelerators work one after the other, each at the pace of its memory. Moving offloaded weights overlaps with
    computing, so the slowest of memory, link and disk counts. Of the weights on disk, main memory may keep as many as the
    placement leaves room for: those are not read again.
    """
    if sizing.device_map is None:
        return None
    main = sizing.device_map.main_device
    offloaded = sum(size for device, size in sizing.traffic.items() if device in OFFLOAD)
    times = [size / bandwidths.memory(device) for device, size in sizing.traffic.items() if device not in OFFLOAD]
    slowest = sum(times) + offloaded / bandwidths.memory(main)
    if main != "cpu" and offloaded:
        slowest = max(slowest, offloaded / bandwidths.copy(main))
    read = sizing.traffic.get("disk", 0) - _spare(sizing.device_map)
    if read > 0:
        disk = bandwidths.disk()
        if disk is None:
            return None
        slowest = max(slowest, read / disk)
    return 1 / slowest if slowest else None


def _spare(device_map: DeviceMap) -> int:
    """Bytes of main memory's budget that no weights lie in."""
    rows = device_map.plan.rows if device_map.plan is not None else []
    return sum(max(0, row.budget - row.weights) for row in rows if row.device == "cpu" and row.budget is not None)


@dataclass(frozen=True)
class Generation:
    """What generating keeps and returns beside the weights.

    Attributes:
        per_sample: bytes that the cache takes for each sample, whatever its length (a recurrent state).
        per_token: bytes that it grows by for each token of each sample, before any window of attention is full.
        cache: bytes of the cache of the declared workload; None without one.
        logits: bytes of the logits of all its tokens; None without one.
        last_logits: bytes of one token's logits for each of its samples, where the model can be asked for those alone, as
            transformers' generate() does; None where it cannot, or without a workload.
    """

    per_sample: int
    per_token: int
    cache: int | None = None
    logits: int | None = None
    last_logits: int | None = None


def generation(model: nn.Module, dtype: Dtype, workload: Workload | None = None) -> Generation | None:
    """Measure the cache and the logits by forwards on the meta device; None where the model does not run there.

    Raises:
        DeviceMapError: the declared workload cannot be measured.
    """
    try:
        one, two = (cache_and_outputs(model, Workload(1, number), dtype)[0] for number in (1, 2))
    except DeviceMapError:
        return None
    known = 2 * one - two, two - one
    if workload is None:
        return Generation(*known)
    cache, logits = cache_and_outputs(model, workload, dtype)
    can_skip = "logits_to_keep" in inspect.signature(model.forward).parameters
    return Generation(*known, cache, logits, logits // workload.num_tokens if can_skip else None)


def generates(model: nn.Module) -> bool:
    """Is one forward one token: a decoder that transformers' generate() can use?"""
    config = getattr(model, "config", None)
    can = getattr(model, "can_generate", None)
    return bool(callable(can) and can()) and not getattr(config, "is_encoder_decoder", False)


_WORTH_SAYING = 1024
"""Bytes for each sample below which a cache's fixed part is bookkeeping, not a state."""


def tabulate(folder: Path, dtype: str | None, batch_size: int, num_tokens: int | None) -> list[str]:
    """Sizes, placement and ceiling of the model in a folder, measured on this machine.

    Args:
        folder: holds a transformers config, and maybe weights.
        dtype: the one to place; None: what the config says.
        batch_size: samples of a forward.
        num_tokens: of each sample; None: none is counted.
    """
    model, stored = meta_model_from(folder), stored_weights(folder)
    workload = None if num_tokens is None else Workload(batch_size, num_tokens)
    chosen = dtype or str(getattr(model.config, "dtype", None) or "float32").removeprefix("torch.")
    names = list(DTYPES) if chosen in DTYPES else [chosen, *DTYPES]
    sizings = [size_up(model, name, workload) for name in names]
    bandwidths = Bandwidths(stored.files if stored is not None else [])
    unit = "tokens/s" if generates(model) else "forwards/s"
    return [
        *_weights(model, stored),
        "",
        *_dtypes(sizings, bandwidths, unit, batch_size),
        "",
        *_placement(sizings[names.index(chosen)], unit),
        *_generation(model, chosen, workload, unit),
        "",
        *_ceiling(model, stored, bandwidths, unit),
    ]


def _weights(model: nn.Module, stored: WeightFiles | None) -> list[str]:
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    lines = [f"{type(model).__name__}: {num_parameters:,} parameters"]
    if stored is None:
        return [*lines, "no weights in the folder: they would come from elsewhere, and the disk is not measured"]
    size = sum(tensor.num_bytes for tensor in stored.tensors.values())
    kinds = sorted({str(tensor.dtype).removeprefix("torch.") for tensor in stored.tensors.values()})
    lines.append(f"stored: {format_bytes(size)} in {len(stored.files)} file(s), {', '.join(kinds)}")
    if getattr(model.config, "quantization_config", None):
        lines.append("the weights are stored quantised; the sizes below are those of the plain model")
    return lines


def _dtypes(sizings: Sequence[ModelSizes], bandwidths: Bandwidths, unit: str, batch_size: int) -> list[str]:
    rows = [["dtype", "weights", "largest layer", "lies on", "at most"]]
    for sizing in sizings:
        rate = ceiling(sizing, bandwidths)
        per_forward = batch_size if unit == "tokens/s" else 1
        places = ", ".join(f"{device} {format_bytes(size)}" for device, size in sizing.places().items())
        rows.append(
            [
                sizing.dtype,
                format_bytes(sizing.num_bytes),
                f"{format_bytes(sizing.largest)} {sizing.largest_name}",
                places or "does not fit",
                "-" if rate is None else f"{format_number(rate * per_forward)} {unit}",
            ]
        )
    return columns(rows)


def _placement(sizing: ModelSizes, unit: str) -> list[str]:
    if sizing.device_map is None:
        return [f"no placement in {sizing.dtype}: {sizing.reason}"]
    read = sum(sizing.traffic.values())
    return [
        f'device_map="auto" in {sizing.dtype}:',
        *sizing.device_map.explain().splitlines(),
        f"read for each {unit.partition('s/')[0]}: {format_bytes(read)}",
    ]


def _generation(model: nn.Module, dtype: str, workload: Workload | None, unit: str) -> list[str]:
    """What generating needs beside the weights: the cache, which grows, and the logits, which come and go."""
    found = generation(model, dtype, workload) if unit == "tokens/s" else None
    if found is None:
        return []
    growth = f"cache: {format_bytes(found.per_token)} for each token of each sample"
    if found.per_sample >= _WORTH_SAYING:
        growth += f", and {format_bytes(found.per_sample)} for each sample"
    if workload is None or found.cache is None or found.logits is None:
        return [growth]
    samples = f"{workload.batch_size} sample{'s' if workload.batch_size > 1 else ''}"
    last = ""
    if found.last_logits is not None:
        last = f"; {format_bytes(found.last_logits)} if only the last token's are asked for, as generate() does"
    return [
        f"{growth}; {format_bytes(found.cache)} for {samples} of {workload.num_tokens:,} tokens",
        f"logits of all these tokens: {format_bytes(found.logits)}, counted with the activations{last}",
    ]


def _ceiling(model: nn.Module, stored: WeightFiles | None, bandwidths: Bandwidths, unit: str) -> list[str]:
    disk, lines = bandwidths.disk(), []
    found = [f"{name} {format_bytes(rate)}/s" for name, rate in bandwidths.known.items() if rate is not None]
    if found:
        lines.append(f"measured: {', '.join(found)}")
    if stored is not None and disk is not None:
        size = sum(tensor.num_bytes for tensor in stored.tensors.values())
        lines.append(
            f"reading the stored weights once takes at least {format_number(size / disk)} s, unless they are in the page cache"
        )
    share, unit = expert_share(model), unit.partition("s/")[0]
    mixture = f", and {share:.0%} of the experts" if share < 1 else ""
    return [
        *lines,
        f"'at most' is a ceiling, not a forecast: bandwidth over the bytes that each {unit} has to read, which are",
        f"all weights once (but one row of an untied input embedding{mixture}). Computing and caches are left out.",
        "A run with offloaded weights logs the rate it reaches after its second forward.",
    ]
