"""Describe a model's inference as text: required memory, placement on this machine, and the speed that bandwidths allow."""

from collections.abc import Sequence
from pathlib import Path

from torch import nn

from headway.common.text import format_bytes, format_columns, format_number
from headway.core.weights.files import WeightFiles
from headway.offload.placement.workload import Workload
from headway.planning.inference import (
    Bandwidths,
    ModelSizes,
    can_generate,
    compute_ceiling,
    get_expert_share,
    measure_generation,
    measure_sizes,
    open_stored_weights,
)
from headway.planning.sources import load_meta_model

DTYPES = ("float32", "bfloat16", "int8", "int4")
"""Names of the dtypes that the report compares."""

_MIN_REPORTED_BYTES = 1024
"""Minimum bytes per sample for the report to mention the part of a cache that does not grow with the length.

Smaller parts contain only bookkeeping.
"""


def describe_inference(folder: Path, dtype: str | None, batch_size: int, num_tokens: int | None) -> list[str]:
    """Return the lines of a report on the model in a folder: its sizes, placement and maximum rate on this machine.

    Args:
        folder: Folder with a transformers config, and possibly weights.
        dtype: Name of the dtype in which the model is placed, or None for the dtype in the config.
        batch_size: Samples per forward.
        num_tokens: Tokens per sample, or None to leave out the sizes of caches, activations and logits.

    Raises:
        CheckpointError: If the weights in the folder are damaged, or if there are several checkpoints.
        ConfigError: If there is no such folder or config, or transformers cannot build a model from it.
        DeviceMapError: If the model does not run with `batch_size` samples of `num_tokens` tokens.
        OptionalDependencyMissing: If transformers is not installed.
    """
    model, stored = load_meta_model(folder), open_stored_weights(folder)
    workload = None if num_tokens is None else Workload(batch_size, num_tokens)
    chosen = dtype or str(getattr(model.config, "dtype", None) or "float32").removeprefix("torch.")
    names = list(DTYPES) if chosen in DTYPES else [chosen, *DTYPES]
    sizings = [measure_sizes(model, name, workload) for name in names]
    bandwidths = Bandwidths(stored.files if stored is not None else [])
    unit = "token" if can_generate(model) else "forward"
    return [
        *_describe_weights(model, stored),
        "",
        *_describe_dtypes(sizings, bandwidths, unit, batch_size),
        "",
        *_describe_placement(sizings[names.index(chosen)], unit),
        *_describe_generation(model, chosen, workload, unit),
        "",
        *_describe_ceiling(model, stored, bandwidths, unit),
    ]


def _describe_weights(model: nn.Module, stored: WeightFiles | None) -> list[str]:
    """Return lines of text about a model's size and its stored weights.

    Args:
        model: Model.
        stored: Weight files of the model, or None if there are none.
    """
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    lines = [f"{type(model).__name__}: {num_parameters:,} parameters"]
    if stored is None:
        return [*lines, "no weights in the folder, so the disk is not measured"]
    size = sum(tensor.num_bytes for tensor in stored.tensors.values())
    kinds = sorted({str(tensor.dtype).removeprefix("torch.") for tensor in stored.tensors.values()})
    lines.append(f"stored: {format_bytes(size)} in {len(stored.files)} file(s), {', '.join(kinds)}")
    if getattr(model.config, "quantization_config", None):
        lines.append("the stored weights are quantized; the sizes below are those of the plain model")
    return lines


def _describe_dtypes(sizings: Sequence[ModelSizes], bandwidths: Bandwidths, unit: str, batch_size: int) -> list[str]:
    """Return a table of the model's size and placement in each dtype, as lines of text.

    Args:
        sizings: Sizes of the model, one for each dtype.
        bandwidths: Measured bandwidths of the devices.
        unit: "token" if the model generates tokens, else "forward". The limit is in this unit per second.
        batch_size: Number of samples in a forward pass. Each sample of a generating model yields one token.
    """
    rows = [["dtype", "weights", "largest layer", "placed on", "at most"]]
    for sizing in sizings:
        rate = compute_ceiling(sizing, bandwidths)
        per_forward = batch_size if unit == "token" else 1
        places = ", ".join(f"{device} {format_bytes(size)}" for device, size in sizing.list_places().items())
        rows.append(
            [
                sizing.dtype,
                format_bytes(sizing.num_bytes),
                f"{format_bytes(sizing.largest)} {sizing.largest_name}",
                places or "does not fit",
                "-" if rate is None else f"{format_number(rate * per_forward)} {unit}s/s",
            ]
        )
    return format_columns(rows)


def _describe_placement(sizing: ModelSizes, unit: str) -> list[str]:
    """Return lines of text about a model's placement on devices, and the bytes that it reads.

    Args:
        sizing: Sizes of the model in one dtype.
        unit: "token" if the model generates tokens, else "forward".
    """
    if sizing.device_map is None:
        return [f"no placement in {sizing.dtype}: {sizing.reason}"]
    read = sum(sizing.traffic.values())
    return [
        f'device_map="auto" in {sizing.dtype}:',
        *sizing.device_map.explain().splitlines(),
        f"read for each {unit}: {format_bytes(read)}",
    ]


def _describe_generation(model: nn.Module, dtype: str, workload: Workload | None, unit: str) -> list[str]:
    """Return lines of text about the memory that generation needs in addition to the weights.

    This memory consists of a growing cache and temporary logits. The list is empty if the model does not generate
    tokens, or the memory cannot be measured.

    Args:
        model: Model on the meta device.
        dtype: Name of the model's dtype.
        workload: Batch size and length to measure, or None to describe only how the cache grows.
        unit: "token" if the model generates tokens, else "forward".
    """
    generation = measure_generation(model, dtype, workload) if unit == "token" else None
    if generation is None:
        return []
    growth = f"cache: {format_bytes(generation.per_token)} for each token of each sample"
    if generation.per_sample >= _MIN_REPORTED_BYTES:
        growth += f", and {format_bytes(generation.per_sample)} for each sample"
    if workload is None or generation.cache is None or generation.logits is None:
        return [growth]
    samples = f"{workload.batch_size} sample{'s' if workload.batch_size > 1 else ''}"
    last = ""
    if generation.last_logits is not None:
        last = f"; {format_bytes(generation.last_logits)} if only the last token's are requested, as by generate()"
    return [
        f"{growth}; {format_bytes(generation.cache)} for {samples} of {workload.num_tokens:,} tokens",
        f"logits of all these tokens: {format_bytes(generation.logits)}, counted with the activations{last}",
    ]


def _describe_ceiling(model: nn.Module, stored: WeightFiles | None, bandwidths: Bandwidths, unit: str) -> list[str]:
    """Return lines of text that explain the upper limit of the speed.

    Args:
        model: Model.
        stored: Weight files of the model, or None if there are none.
        bandwidths: Measured bandwidths of the devices.
        unit: "token" if the model generates tokens, else "forward".
    """
    disk, lines = bandwidths.get_disk_rate(), []
    measured = [f"{name} {format_bytes(rate)}/s" for name, rate in bandwidths.known.items() if rate is not None]
    if measured:
        lines.append(f"measured: {', '.join(measured)}")
    if stored is not None and disk is not None:
        size = sum(tensor.num_bytes for tensor in stored.tensors.values())
        lines.append(
            f"reading the stored weights once takes at least {format_number(size / disk)} s, unless they are in the page cache"
        )
    share = get_expert_share(model)
    mixture = f", of the experts {share:.0%}" if share < 1 else ""
    return [
        *lines,
        f"'at most' is an upper limit, not a forecast. For each {unit}, all weights are read once (of an untied input",
        f"embedding only one row{mixture}), and no run reads faster than the measured bandwidth. Computation and caches",
        "are not counted. With offloaded weights, a run logs the rate that it reaches after its second forward pass.",
    ]
