"""Measure a model's inference: required memory, placement on this machine, and the speed that bandwidths allow."""

import inspect
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import nn

from headway.core.runtime.device import detect_hardware
from headway.core.weights.files import WeightFiles, open_checkpoint
from headway.errors import DeviceMapError
from headway.offload.placement.automatic_map import resolve_device_map
from headway.offload.placement.bandwidth import measure_copy_bandwidth, measure_disk_bandwidth, measure_memory_bandwidth
from headway.offload.placement.budget import OFFLOAD, Device
from headway.offload.placement.device_map import DeviceMap, get_device
from headway.offload.placement.sizes import Dtype, TensorSizes, compute_module_sizes, get_max_layer_size
from headway.offload.placement.workload import Workload, measure_cache_and_outputs

_NUM_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
"""Names under which transformers' configs store the number of experts."""


@dataclass(frozen=True)
class ModelSizes:
    """Sizes of a model in one dtype.

    Attributes:
        dtype: Name of the dtype.
        num_bytes: Bytes of all weights and buffers.
        largest: Bytes of the largest layer.
        largest_name: Name of the largest layer.
        device_map: Result of `device_map="auto"` on this machine, or None if the model cannot be placed, for example
            because the largest layer fits on no device.
        reason: Reason why there is no device map. Empty if there is one.
        traffic: Bytes of weights that a forward of one token reads, by the device that stores the weights. Empty if
            there is no device map.
    """

    dtype: str
    num_bytes: int
    largest: int
    largest_name: str
    device_map: DeviceMap | None
    reason: str = ""
    traffic: dict[Device, int] = field(default_factory=dict)

    def list_places(self) -> dict[Device, int]:
        """Return the bytes of weights on each device to which the model's weights are mapped.

        The dict is empty if there is no device map.
        """
        if self.device_map is None or self.device_map.plan is None:
            return {}
        return {row.device: row.weights for row in self.device_map.plan.rows if row.weights}


class Bandwidths:
    """Bandwidths of this machine's memories, links and disk. Each is measured when it is first requested.

    Args:
        files: Files of the checkpoint, which are read to measure the disk.
        measure_memory: Function that returns the memory bandwidth of a device in bytes per second.
        measure_copy: Function that returns the bandwidth from main memory to an accelerator in bytes per second.
        measure_disk: Function that returns the bandwidth in bytes per second at which the files are read, or None if it
            cannot be measured.

    Attributes:
        known: Measured bandwidths in bytes per second, by name. None means that the measurement is not possible.
    """

    def __init__(
        self,
        files: list[Path],
        measure_memory: Callable[[torch.device], float] = measure_memory_bandwidth,
        measure_copy: Callable[[torch.device], float] = measure_copy_bandwidth,
        measure_disk: Callable[[list[Path]], float | None] = measure_disk_bandwidth,
    ) -> None:
        self._files = files
        self._measure_memory = measure_memory
        self._measure_copy = measure_copy
        self._measure_disk = measure_disk
        self.known: dict[str, float | None] = {}

    def get_memory_rate(self, device: Device) -> float:
        """Return the memory bandwidth of a device in bytes per second."""
        torch_device = _get_torch_device(device)
        rate = self._measure_once(
            "main memory" if device == "cpu" else f"memory of {torch_device}",
            lambda: self._measure_memory(torch_device),
        )
        assert rate is not None
        return rate

    def get_copy_rate(self, device: Device) -> float:
        """Return the bandwidth from main memory to an accelerator in bytes per second."""
        torch_device = _get_torch_device(device)
        rate = self._measure_once(f"main memory to {torch_device}", lambda: self._measure_copy(torch_device))
        assert rate is not None
        return rate

    def get_disk_rate(self) -> float | None:
        """Return the bandwidth in bytes per second of the disk that stores the weights.

        Return None if there are no stored weights, or if the bandwidth cannot be measured.
        """
        return self._measure_once("disk", lambda: self._measure_disk(self._files)) if self._files else None

    def _measure_once(self, name: str, measure: Callable[[], float | None]) -> float | None:
        """Return a bandwidth in bytes per second, or None if it cannot be measured. It is measured in the first call
        only.

        Args:
            name: Name of the bandwidth.
            measure: Function that measures it, and returns None if it cannot.
        """
        if name not in self.known:
            self.known[name] = measure()
        return self.known[name]


def _get_torch_device(device: Device) -> torch.device:
    """Return torch's object for a device in a device map. A number is the index of an accelerator."""
    return torch.device(detect_hardware().kind, device) if isinstance(device, int) else torch.device(device)


def open_stored_weights(folder: str | Path) -> WeightFiles | None:
    """Open the checkpoint in a folder and read the headers of its files. Return None if there is no checkpoint.

    Raises:
        CheckpointError: If the checkpoint is damaged, or if there are several.
    """
    patterns = ("*.safetensors", "*.bin", "*.index.json")
    if not any(any(Path(folder).glob(pattern)) for pattern in patterns):
        return None
    return open_checkpoint(folder)


def measure_sizes(model: nn.Module, dtype: Dtype, workload: Workload | None = None) -> ModelSizes:
    """Return a model's sizes in one dtype, its placement on this machine, and the weights that a forward reads.

    Args:
        model: Model on the meta device.
        dtype: Dtype of the weights.
        workload: Workload whose activations and caches must fit in addition to the weights, or None. Default: None.

    Raises:
        DeviceMapError: If the workload cannot be measured.
    """
    sizes = compute_module_sizes(model, dtype)
    classes = getattr(model, "_no_split_modules", None)
    parts: list[tuple[str, nn.Module | torch.Tensor]] = [
        *model.named_children(),
        *model.named_parameters(recurse=False),
    ]
    largest, names = get_max_layer_size(parts, sizes, classes)
    base = ModelSizes(
        dtype=str(dtype).removeprefix("torch."),
        num_bytes=sizes[""],
        largest=largest,
        largest_name=names[0] if names else "the full model",
        device_map=None,
    )
    try:
        device_map = resolve_device_map(model, "auto", dtype=dtype, workload=workload)
    except DeviceMapError as error:
        if workload is not None and isinstance(error.__cause__, Exception):
            raise  # an error with a cause is from the measurement of the workload, not from the placement
        return replace(base, reason=str(error))
    return replace(base, device_map=device_map, traffic=count_traffic(model, device_map, dtype))


def count_traffic(model: nn.Module, device_map: DeviceMap, dtype: Dtype) -> dict[Device, int]:
    """Return the minimum bytes of weights that a forward of one token reads, by the device that stores the weights.

    Every weight counts once. Only one row of the input embedding is read, so the embedding counts only if it is tied to
    the output. In a mixture of experts, the bytes of the experts are multiplied by the fraction of experts that
    computes each token.

    Args:
        model: Model on the meta device.
        device_map: Placement of the model.
        dtype: Dtype of the weights.
    """
    get_num_bytes, expert_share = TensorSizes(dtype), get_expert_share(model)
    input_embedding = _find_input_embedding(model)
    traffic: Counter[Device] = Counter()
    for name, parameter in model.named_parameters():
        if parameter is not input_embedding:
            share = expert_share if ".experts." in name else 1.0
            traffic[get_device(device_map, name)] += round(get_num_bytes(name, parameter) * share)
    return dict(traffic)


def get_expert_share(model: nn.Module) -> float:
    """Return the fraction of a model's experts that computes each token, or 1 for a model without experts."""
    config = getattr(model, "config", None)
    num_active = getattr(config, "num_experts_per_tok", None)
    counts = [getattr(config, name, None) for name in _NUM_EXPERTS]
    num_experts = next((count for count in counts if count), None)
    return min(1.0, num_active / num_experts) if num_active and num_experts else 1.0


def _find_input_embedding(model: nn.Module) -> torch.Tensor | None:
    """Return the weight of the input embedding. Return None if the model has no such weight or also uses it elsewhere.

    A tied output layer is an example of another use.
    """
    try:
        embedding = model.get_input_embeddings()  # type: ignore[operator]
    except (AttributeError, NotImplementedError):
        return None
    if not isinstance(embedding, nn.Embedding):
        return None
    num_uses = sum(each is embedding.weight for _, each in model.named_parameters(remove_duplicate=False))
    return embedding.weight if num_uses == 1 else None


def compute_ceiling(sizing: ModelSizes, bandwidths: Bandwidths) -> float | None:
    """Return the maximum number of forwards per second that the bandwidths of memory, links and disk allow.

    Accelerators work one after the other, each at its memory bandwidth. Transfers of offloaded weights overlap with
    computation, so the slowest of memory, link and disk determines the time. Main memory that the placement leaves free
    is assumed to cache weights from the disk, so that a forward reads only the other weights from the disk.

    Args:
        sizing: Sizes and placement of the model.
        bandwidths: Bandwidths of this machine.

    Returns:
        Forwards per second. None if there is no placement, if a forward reads no weights, or if the disk must be
        measured and cannot be.
    """
    if sizing.device_map is None:
        return None
    main_device = sizing.device_map.main_device
    offloaded = sum(size for device, size in sizing.traffic.items() if device in OFFLOAD)
    placed = {device: size for device, size in sizing.traffic.items() if device not in OFFLOAD}
    seconds = sum(size / bandwidths.get_memory_rate(device) for device, size in placed.items())
    seconds += offloaded / bandwidths.get_memory_rate(main_device)  # the main device computes with offloaded weights
    if main_device != "cpu" and offloaded:
        seconds = max(seconds, offloaded / bandwidths.get_copy_rate(main_device))
    disk_bytes = sizing.traffic.get("disk", 0) - _count_spare_bytes(sizing.device_map)
    if disk_bytes > 0:
        disk_rate = bandwidths.get_disk_rate()
        if disk_rate is None:
            return None
        seconds = max(seconds, disk_bytes / disk_rate)
    return 1 / seconds if seconds else None


def _count_spare_bytes(device_map: DeviceMap) -> int:
    """Return the part of main memory's budget, in bytes, that the placement leaves free."""
    rows = device_map.plan.rows if device_map.plan is not None else []
    return sum(max(0, row.budget - row.weights) for row in rows if row.device == "cpu" and row.budget is not None)


@dataclass(frozen=True)
class Generation:
    """Memory that generation needs in addition to the weights. Sizes are in bytes.

    Attributes:
        per_sample: Size of the part of the cache that each sample needs at any length, such as a recurrent state.
        per_token: Growth of the cache per token and sample, as long as no attention window is full.
        cache: Size of the cache for the given workload, or None without a workload.
        logits: Size of the logits of all tokens of the workload, or None without a workload.
        last_logits: Size of the logits of one token per sample, which are those that transformers' `generate()`
            requests. None without a workload, or if the model cannot return these alone.
    """

    per_sample: int
    per_token: int
    cache: int | None = None
    logits: int | None = None
    last_logits: int | None = None


def measure_generation(model: nn.Module, dtype: Dtype, workload: Workload | None = None) -> Generation | None:
    """Return the sizes of the key-value cache and the logits in generation, or None if they cannot be measured.

    They are measured with forwards on the meta device. The result is None if the model does not run there.

    Args:
        model: Model on the meta device.
        dtype: Dtype of the model.
        workload: Batch size and length to measure, or None to measure only how the cache grows. Default: None.

    Raises:
        DeviceMapError: If the model runs with one short sample, but not with the size of `workload`.
    """
    try:
        one_token, two_tokens = (measure_cache_and_outputs(model, Workload(1, tokens), dtype)[0] for tokens in (1, 2))
    except DeviceMapError:
        return None
    base = Generation(per_sample=2 * one_token - two_tokens, per_token=two_tokens - one_token)
    if workload is None:
        return base
    cache, logits = measure_cache_and_outputs(model, workload, dtype)
    can_skip = "logits_to_keep" in inspect.signature(model.forward).parameters
    last_logits = logits // workload.num_tokens if can_skip else None
    return replace(base, cache=cache, logits=logits, last_logits=last_logits)


def can_generate(model: nn.Module) -> bool:
    """Whether transformers' `generate()` can use the model as a decoder, so that each forward generates one token."""
    config = getattr(model, "config", None)
    model_can_generate = getattr(model, "can_generate", None)
    return bool(callable(model_can_generate) and model_can_generate()) and not getattr(
        config, "is_encoder_decoder", False
    )
