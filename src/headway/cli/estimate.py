"""`headway estimate`: what running a model would take here, before a byte of its weights is read."""

from pathlib import Path
from typing import Any

import click

from headway.cli.estimate_training import calibration_text, forecast_text, ranking_text, script_text
from headway.cli.options import EARLIER_NAMES, JSON, POSITIVE, GroupedCommand, examples, model_option, option
from headway.common.units import format_bytes, format_number
from headway.errors import ConfigError
from headway.forecasting.device.devices import find

_ABOUT = """Say what running the model in FOLDER takes, what fits on this machine, and how fast it can run at most.

FOLDER is on this machine and holds a transformers `config.json`, with or without weights. The model is built without memory. The
rate is a ceiling: bandwidth, measured here in about two seconds, over the bytes that each token has to read.

With --device: what training takes on that GPU, which this machine need not have, and the largest batch. FOLDER may then also be a
config file or a transformers model type.

With --script and --device: what your own training script takes. The script runs up to its second update, on tensors without values.
"""

_EPILOG = examples(
    "headway estimate llama/                        the sizes, the placement, the ceiling",
    "headway estimate llama/ --dtype int4           placed as int4",
    "headway estimate llama/ --sequence 4096        with room for 4096 tokens and their cache",
    "headway estimate bert --device rtx-3090        training on a GPU: memory, and the largest batch",
    "headway estimate llama --device h100 --precision bf16 --strategy fsdp --ranks 8",
    "headway estimate bert --device t4 --global_batch_size 256   the cheapest configuration that fits",
    "headway estimate --calibrate                   once, on the machine with the GPU",
    "headway estimate --script train.py --device rtx-3090 -- --lr 3e-4",
)

_WORTH_SAYING = 1024
"""Bytes for each sample below which a cache's fixed part is bookkeeping, not a state."""

_OF_SCRIPTS = ("device", "budget", "page", "as_json")
"""Options that a script does not decide itself."""

_OF_RUNNING = ("dtype", "batch_size", "sequence")
_DTYPES = ("float32", "bfloat16", "float16", "int8", "int4")


def _estimate(folder: Path | None, arguments: tuple[str, ...], script: bool, calibrate: bool, **options: Any) -> None:
    given = {name: value for name, value in options.items() if value not in (None, False) and name != "inference"}
    if calibrate:
        if folder is not None or given:
            raise ConfigError("--calibrate measures this machine's GPU, and goes alone; remove all other arguments")
        click.echo(calibration_text())
        return
    if folder is None:
        raise ConfigError("FOLDER is missing: a folder with a config.json, or with --device a transformers model type")
    if given.get("device", "this").lower() != "this":
        find(given["device"])  # a name that is none is told before torch is loaded
    if script:
        _check_script(given)
        click.echo(script_text(folder, arguments, **given))
        return
    if arguments:
        raise ConfigError(f"{' '.join(arguments)}: only a script takes arguments; add --script, or remove them")
    if "device" in given:
        _echo_forecast(str(folder), given)
        return
    for name in given:
        if name not in _OF_RUNNING:
            raise ConfigError(f"--{name} is for training; add --device, such as --device a100-40gb")
    if "batch_size" in given and "sequence" not in given:
        raise ConfigError(f"--batch_size {given['batch_size']} needs --sequence, the tokens of each sample")
    _echo_sizes(folder, given.get("dtype"), given.get("batch_size"), given.get("sequence"))


def _echo_forecast(model: str, given: dict[str, Any]) -> None:
    if "dtype" in given:
        raise ConfigError("--dtype is for running a model and --device for training it; give one of them")
    if "global_batch_size" not in given:
        click.echo(forecast_text(model, **given))
        return
    found, has_room = ranking_text(model, **given)
    click.echo(found)
    if not has_room:
        raise SystemExit(1)


def _echo_sizes(folder: Path, dtype: str | None, batch_size: int | None, num_tokens: int | None) -> None:
    # Imported here so that the help does not wait for torch.
    from headway.offload.placement import estimate
    from headway.offload.placement.workload import Workload

    model = estimate.skeleton_from(folder)
    stored = estimate.stored_weights(folder)
    workload = Workload(batch_size or 1, num_tokens) if num_tokens is not None else None
    chosen = dtype or str(getattr(model.config, "dtype", None) or "float32").removeprefix("torch.")
    names = list(estimate.DTYPES) if chosen in estimate.DTYPES else [chosen, *estimate.DTYPES]
    sizings = [estimate.size_up(model, name, workload) for name in names]
    bandwidths = estimate.Bandwidths(stored.files if stored is not None else [])
    unit = "tokens/s" if estimate.generates(model) else "forwards/s"
    for line in (
        *_describe_weights(model, stored),
        "",
        *_tabulate_dtypes(sizings, bandwidths, unit, batch_size or 1),
        "",
        *_describe_placement(sizings[names.index(chosen)], unit),
        *_describe_generation(model, chosen, workload, unit),
        "",
        *_describe_ceiling(model, stored, bandwidths, unit),
    ):
        click.echo(line)


def _check_script(given: dict[str, Any]) -> None:
    if "device" not in given:
        raise ConfigError("--script needs --device, such as --device a100-40gb")
    for name in given:
        if name not in _OF_SCRIPTS:
            raise ConfigError(f"--{name} is decided by the script; with --script, pass it to the script instead")


def _describe_weights(model: Any, stored: Any) -> list[str]:
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


def _tabulate_dtypes(sizings: list[Any], bandwidths: Any, unit: str, batch_size: int) -> list[str]:
    from headway.offload.placement.estimate import ceiling

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
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return ["  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths)).rstrip() for row in rows]


def _describe_placement(sizing: Any, unit: str) -> list[str]:
    if sizing.device_map is None:
        return [f"no placement in {sizing.dtype}: {sizing.reason}"]
    read = sum(sizing.traffic.values())
    return [
        f'device_map="auto" in {sizing.dtype}:',
        *sizing.device_map.explain().splitlines(),
        f"read for each {unit.partition('s/')[0]}: {format_bytes(read)}",
    ]


def _describe_generation(model: Any, dtype: str, workload: Any, unit: str) -> list[str]:
    """What generating needs beside the weights: the cache, which grows, and the logits, which come and go."""
    from headway.offload.placement.estimate import generation

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


def _describe_ceiling(model: Any, stored: Any, bandwidths: Any, unit: str) -> list[str]:
    from headway.offload.placement.estimate import expert_share

    disk, lines = bandwidths.disk(), []
    found = [f"{name} {format_bytes(rate)}/s" for name, rate in bandwidths.known.items() if rate is not None]
    if found:
        lines.append(f"measured: {', '.join(found)}")
    if disk is not None:
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


_SEARCHED = (
    "Rank micro-batch, accumulation, precision and activation checkpointing for this many samples per update; --optimizer may "
    "then be several, separated by commas. Exit code 1 if nothing is sure to fit."
)
_MEASURED = "Measure what a process takes on this machine's GPU besides tensors, and store it for later forecasts."
_DRAWN = "Also write an HTML page of a forecast: memory over the step and against the batch size."
_HERE = "Forecast training on this GPU, such as rtx-3090 or a100-80gb; this: the machine's own."
_RUN = "FOLDER is your training script; it runs with ARGS up to its second update."
_PLACED = "Place the model in this dtype.  [default: what the config says]"

command = GroupedCommand(
    "estimate",
    callback=_estimate,
    aliases=EARLIER_NAMES,
    params=[
        click.Argument(["folder"], metavar="FOLDER", required=False, type=click.Path(path_type=Path)),
        click.Argument(["arguments"], metavar="[-- ARGS]...", nargs=-1),
        model_option("batch_size", "Workload"),
        model_option("sequence", "Workload", "; without --device, no tokens are counted]"),
        option("--dtype", "|".join(_DTYPES), "Running", _PLACED, _DTYPES),
        option("--inference", None, "Running", "The default: running the model.", hidden=True),
        option("--device", "NAME", "Training", _HERE),
        option("--script", None, "Training", _RUN),
        model_option("optimizer", "Training"),
        model_option("precision", "Training", "  [default: no]"),
        model_option("activation_checkpointing", "Training"),
        option("--accumulation", "N", "Training", "Micro-batches per update.  [default: 1]", POSITIVE),
        option(
            "--attention", "eager|sdpa", "Training", "The model's attention.  [default: the model's]", ("eager", "sdpa")
        ),
        model_option("ranks", "Training", " Goes with --strategy."),
        model_option("strategy", "Training", " over --ranks; the answer is for rank 0."),
        model_option("machine_ranks", "Training"),
        model_option("budget", "Training", "  [default: all of the GPU's]"),
        option("--longest", None, "Training", "Also search for the longest sequence at this batch size."),
        option("--global_batch_size", "N", "Training", _SEARCHED, POSITIVE),
        option("--calibrate", None, "Training", _MEASURED),
        option("--page", "FILE", "Output", _DRAWN, click.Path(path_type=Path, dir_okay=False)),
        JSON,
    ],
    help=_ABOUT,
    epilog=_EPILOG,
)
