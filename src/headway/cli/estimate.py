"""`headway estimate`: what running a model would take here, before a byte of its weights is read."""

from pathlib import Path
from typing import Any

import click

from headway.cli.estimate_cheapest import OPTION, ranked
from headway.cli.estimate_training import OPTIONS, calibrated, scripted, trained
from headway.cli.options import GroupedCommand, GroupedOption, examples
from headway.errors import ConfigError
from headway.forecasting.devices import find
from headway.units import format_bytes, format_number

_ABOUT = """Say what running the model in FOLDER takes, what fits on this machine, and how fast it can run at most.

FOLDER is on this machine and holds a transformers `config.json`, with or without weights. The model is built without memory. The
rate is a ceiling: bandwidth, measured here in about two seconds, over the bytes that each token has to read.

With --device: what training takes on that GPU, which this machine need not have, and the largest batch. FOLDER may then also be a
config file or a transformers model type.

With --script and --device: what your own training script takes. The script runs up to its second update, on tensors without values.
"""

_EPILOG = examples(
    [
        "headway estimate llama/                        the sizes, the placement, the ceiling",
        "headway estimate llama/ --dtype int4           placed as int4",
        "headway estimate llama/ --num_tokens 4096      with room for 4096 tokens and their cache",
        "headway estimate bert --device rtx-3090        training on a GPU: memory, and the largest batch",
        "headway estimate llama --device h100 --precision bf16 --strategy fsdp --ranks 8",
        "headway estimate bert --device t4 --global_batch_size 256   the cheapest configuration that fits",
        "headway estimate --calibrate                   once, on the machine with the GPU",
        "headway estimate --script train.py --device rtx-3090 -- --lr 3e-4",
    ]
)

_WORTH_SAYING = 1024
"""Bytes for each sample below which a cache's fixed part is bookkeeping, not a state."""

_OF_SCRIPTS = ("device", "budget", "page", "as_json")
"""Options that a script does not decide itself."""

_DTYPES = ("float32", "bfloat16", "float16", "int8", "int4")


def _estimate(
    folder: Path | None,
    arguments: tuple[str, ...],
    inference: bool,
    script: bool,
    calibrate: bool,
    dtype: str | None,
    batch_size: int | None,
    num_tokens: int | None,
    **training: Any,
) -> None:
    del inference  # what there is to estimate
    if calibrate:
        if folder is not None or any(value not in (None, False) for value in (*training.values(), dtype, batch_size)):
            raise ConfigError("--calibrate measures this machine's GPU, and goes alone; remove all other arguments")
        click.echo(calibrated())
        return
    if folder is None:
        raise ConfigError("FOLDER is missing: a folder with a config.json, or with --device a transformers model type")
    given = {name: value for name, value in training.items() if value not in (None, False)}
    if given.get("device", "this").lower() != "this":
        find(given["device"])  # a name that is none is told before torch is loaded
    if script:
        more = {"dtype": dtype, "batch_size": batch_size, "num_tokens": num_tokens, **given}
        _check_script(more)
        click.echo(scripted(folder, arguments, **given))
        return
    if arguments:
        raise ConfigError(f"{' '.join(arguments)}: only a script takes arguments; add --script, or remove them")
    if "device" in given:
        for name, value in (("dtype", dtype), ("num_tokens", num_tokens)):
            if value is not None:
                raise ConfigError(f"--{name} is for running a model and --device for training it; give one of them")
        _train(str(folder), batch_size, given)
        return
    if given:
        raise ConfigError(f"--{next(iter(given))} is for training; add --device, such as --device a100-40gb")
    if batch_size is not None and num_tokens is None:
        raise ConfigError(f"--batch_size {batch_size} needs --num_tokens, the tokens of each sample")
    _run(folder, dtype, batch_size, num_tokens)


def _train(model: str, batch_size: int | None, given: dict[str, Any]) -> None:
    if "global_batch_size" not in given:
        click.echo(trained(model, batch_size or 1, **given))
        return
    found, has_room = ranked(model, batch_size=batch_size, **given)
    click.echo(found)
    if not has_room:
        raise SystemExit(1)


def _run(folder: Path, dtype: str | None, batch_size: int | None, num_tokens: int | None) -> None:
    # Imported here so that the help does not wait for torch.
    from headway.placement import estimate
    from headway.placement.workload import Workload

    model = estimate.skeleton_from(folder)
    stored = estimate.stored_weights(folder)
    workload = Workload(batch_size or 1, num_tokens) if num_tokens is not None else None
    chosen = dtype or str(getattr(model.config, "dtype", None) or "float32").removeprefix("torch.")
    names = list(estimate.DTYPES) if chosen in estimate.DTYPES else [chosen, *estimate.DTYPES]
    sizings = [estimate.size_up(model, name, workload) for name in names]
    bandwidths = estimate.Bandwidths(stored.files if stored is not None else [])
    unit = "tokens/s" if estimate.generates(model) else "forwards/s"
    for line in (
        *_head(model, stored),
        "",
        *_table(sizings, bandwidths, unit, batch_size or 1),
        "",
        *_placement(sizings[names.index(chosen)], unit),
        *_generation(model, chosen, workload, unit),
        "",
        *_ceiling(model, stored, bandwidths, unit),
    ):
        click.echo(line)


def _check_script(given: dict[str, Any]) -> None:
    if "device" not in given:
        raise ConfigError("--script needs --device, such as --device a100-40gb")
    for name, value in given.items():
        if value is not None and name not in _OF_SCRIPTS:
            raise ConfigError(f"--{name} is decided by the script; with --script, pass it to the script instead")


def _head(model: Any, stored: Any) -> list[str]:
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


def _table(sizings: list[Any], bandwidths: Any, unit: str, batch_size: int) -> list[str]:
    from headway.placement.estimate import ceiling

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


def _placement(sizing: Any, unit: str) -> list[str]:
    if sizing.device_map is None:
        return [f"no placement in {sizing.dtype}: {sizing.reason}"]
    read = sum(sizing.traffic.values())
    return [
        f'device_map="auto" in {sizing.dtype}:',
        *sizing.device_map.explain().splitlines(),
        f"read for each {unit.partition('s/')[0]}: {format_bytes(read)}",
    ]


def _generation(model: Any, dtype: str, workload: Any, unit: str) -> list[str]:
    """What generating needs beside the weights: the cache, which grows, and the logits, which come and go."""
    from headway.placement.estimate import generation

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


def _ceiling(model: Any, stored: Any, bandwidths: Any, unit: str) -> list[str]:
    from headway.placement.estimate import expert_share

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


command = GroupedCommand(
    "estimate",
    callback=_estimate,
    params=[
        click.Argument(["folder"], metavar="FOLDER", required=False, type=click.Path(path_type=Path)),
        click.Argument(["arguments"], metavar="[-- ARGS]...", nargs=-1),
        GroupedOption(
            ["--script"],
            group="Training",
            is_flag=True,
            help="FOLDER is your training script; it runs with ARGS up to its second update.",
        ),
        GroupedOption(
            ["--calibrate"],
            group="Training",
            is_flag=True,
            help="Measure what a process takes on this machine's GPU besides tensors, and store it for later forecasts.",
        ),
        GroupedOption(["--inference"], group="What", is_flag=True, hidden=True, help="The default: running the model."),
        GroupedOption(
            ["--dtype"],
            group="What",
            type=click.Choice(_DTYPES),
            metavar="|".join(_DTYPES),
            help="Place the model in this dtype.  [default: what the config says]",
        ),
        GroupedOption(
            ["--num_tokens"],
            metavar="N",
            group="Workload",
            type=click.IntRange(min=1),
            help="Include the cache and activations of this many tokens per sample.",
        ),
        GroupedOption(
            ["--batch_size"],
            metavar="N",
            group="Workload",
            type=click.IntRange(min=1),
            help="Samples at once, with --num_tokens or --device.  [default: 1]",
        ),
        OPTION,
        *OPTIONS,
    ],
    help=_ABOUT,
    epilog=_EPILOG,
)
