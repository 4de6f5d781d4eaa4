"""What running a model takes, as text."""

from collections.abc import Sequence
from pathlib import Path

from torch import nn

from headway.common.text import columns, format_bytes, format_number
from headway.offload.placement.workload import Workload
from headway.planning import inference
from headway.planning.sources import skeleton_from
from headway.weights.files import WeightFiles

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
    model, stored = skeleton_from(folder), inference.stored_weights(folder)
    workload = None if num_tokens is None else Workload(batch_size, num_tokens)
    chosen = dtype or str(getattr(model.config, "dtype", None) or "float32").removeprefix("torch.")
    names = list(inference.DTYPES) if chosen in inference.DTYPES else [chosen, *inference.DTYPES]
    sizings = [inference.size_up(model, name, workload) for name in names]
    bandwidths = inference.Bandwidths(stored.files if stored is not None else [])
    unit = "tokens/s" if inference.generates(model) else "forwards/s"
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


def _dtypes(
    sizings: Sequence[inference.ModelSizes], bandwidths: inference.Bandwidths, unit: str, batch_size: int
) -> list[str]:
    rows = [["dtype", "weights", "largest layer", "lies on", "at most"]]
    for sizing in sizings:
        rate = inference.ceiling(sizing, bandwidths)
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


def _placement(sizing: inference.ModelSizes, unit: str) -> list[str]:
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
    found = inference.generation(model, dtype, workload) if unit == "tokens/s" else None
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


def _ceiling(model: nn.Module, stored: WeightFiles | None, bandwidths: inference.Bandwidths, unit: str) -> list[str]:
    disk, lines = bandwidths.disk(), []
    found = [f"{name} {format_bytes(rate)}/s" for name, rate in bandwidths.known.items() if rate is not None]
    if found:
        lines.append(f"measured: {', '.join(found)}")
    if stored is not None and disk is not None:
        size = sum(tensor.num_bytes for tensor in stored.tensors.values())
        lines.append(
            f"reading the stored weights once takes at least {format_number(size / disk)} s, unless they are in the page cache"
        )
    share, unit = inference.expert_share(model), unit.partition("s/")[0]
    mixture = f", and {share:.0%} of the experts" if share < 1 else ""
    return [
        *lines,
        f"'at most' is a ceiling, not a forecast: bandwidth over the bytes that each {unit} has to read, which are",
        f"all weights once (but one row of an untied input embedding{mixture}). Computing and caches are left out.",
        "A run with offloaded weights logs the rate it reaches after its second forward.",
    ]
