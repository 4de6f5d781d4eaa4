"""`headway estimate --device`: what training a transformers model takes on a card, and the largest batch."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from headway.cli.options import GroupedOption
from headway.errors import ConfigError
from headway.report.forecast_page import forecast_page
from headway.units import format_bytes


def trained(
    model: str,
    batch_size: int,
    device: str,
    sequence: int | None = None,
    precision: str = "no",
    optimizer: str = "adamw",
    recompute: bool = False,
    accumulation: int = 1,
    attention: str | None = None,
    budget: str | None = None,
    longest: bool = False,
    page: Path | None = None,
    as_json: bool = False,
    strategy: str | None = None,
    ranks: int | None = None,
    machine_ranks: int = 8,
) -> str:
    """The forecast as text, or as JSON.

    Args:
        page: file for an HTML page; None: no page.
        strategy, ranks, machine_ranks: as for `headway.forecast`.

    Raises:
        ConfigError: an option that cannot be.
    """
    if (strategy is None) != (ranks is None):
        raise ConfigError("--strategy and --ranks go together, as in --strategy fsdp --ranks 8; give both, or none")
    # Imported here so that the help does not wait for torch.
    from headway.planning.forecast import forecast
    from headway.planning.sources import find, lengths, trainable

    source = find(model, batch_size, sequence)
    make, batch, loss = trainable(source, attention)
    found = forecast(
        make,
        batch,
        batch_size=batch_size,
        optimizer=optimizer,
        loss=loss,
        device=device,
        budget=budget,
        precision=precision,
        recompute=recompute,
        accumulation=accumulation,
        longest=lengths(source) if longest else None,
        strategy=strategy,
        ranks=ranks,
        machine_ranks=machine_ranks,
    )
    if found.peak_line.startswith(sys.argv[0]):  # the command itself, not a line of the user's
        found = replace(found, peak_line="")
    if page is not None:
        _write(page, forecast_page(source.title, found.as_dict()))
    if as_json:
        return json.dumps(found.as_dict(), indent=1)
    return f"{source.title}, {source.batch}\n{found.describe()}"


def scripted(
    script: Path,
    arguments: tuple[str, ...],
    device: str,
    budget: str | None = None,
    page: Path | None = None,
    as_json: bool = False,
) -> str:
    """The forecast of a user's own script as text, or as JSON."""
    from headway.planning.forecast import forecast_script

    found = forecast_script(script, arguments, device=device, budget=budget)
    if page is not None:
        _write(page, forecast_page(script.name, found.as_dict()))
    return json.dumps(found.as_dict(), indent=1) if as_json else f"{script}\n{found.describe()}"


def calibrated() -> str:
    """Measure this machine's card, keep what was found, and say it.

    Raises:
        DeviceUnavailable: there is no CUDA device.
        ConfigError: the record cannot be kept.
    """
    from headway import env
    from headway.forecasting import calibration, devices

    name, path = devices.named(), calibration.file(env.snapshot())
    record = calibration.measure()
    calibration.write(path, name, record)
    return (
        f"{record.product}: {format_bytes(record.overhead)} besides tensors, {format_bytes(record.kept)} of libraries' workspaces\n"
        f"stored as {name} in {path}; --device {name} or --device this uses it"
    )


def _write(page: Path, content: str) -> None:
    try:
        page.write_text(content, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {page} ({error.strerror}); name another file with --page") from error


def _option(name: str, metavar: str | None, text: str, **more: Any) -> GroupedOption:
    return GroupedOption([name], metavar=metavar, group="Training", help=text, **more)


OPTIONS = [
    _option(
        "--device", "NAME", "Forecast training on this GPU, such as rtx-3090 or a100-80gb; this: the machine's own."
    ),
    _option(
        "--sequence",
        "N",
        "Tokens per sample.  [default: what the model allows, up to 4096]",
        type=click.IntRange(min=1),
    ),
    _option(
        "--precision",
        "no|bf16|fp16",
        "Mixed precision, by autocast.  [default: no]",
        type=click.Choice(["no", "bf16", "fp16"]),
    ),
    _option(
        "--optimizer",
        "NAME",
        "adamw, adam, sgd, momentum, adagrad, rmsprop, adafactor, adamw8bit, muon or none.  [default: adamw]",
    ),
    _option("--recompute", None, "Recompute activations in backward.", is_flag=True),
    _option("--accumulation", "N", "Micro-batches per update.  [default: 1]", type=click.IntRange(min=1)),
    _option(
        "--attention",
        "eager|sdpa",
        "The model's attention.  [default: the model's]",
        type=click.Choice(["eager", "sdpa"]),
    ),
    _option(
        "--strategy", "TEXT", "Layout over --ranks: ddp, fsdp, hsdp=8, tp, fsdp+tp=2 ...; the answer is for rank 0."
    ),
    _option("--ranks", "N", "Ranks of the run, with --strategy.", type=click.IntRange(min=1)),
    _option("--machine_ranks", "N", "Ranks on one machine, for hsdp.  [default: 8]", type=click.IntRange(min=1)),
    _option("--budget", "SIZE", "Memory that the process may take, such as 20GiB.  [default: all of the GPU's]"),
    _option("--longest", None, "Also search for the longest sequence at this batch size.", is_flag=True),
    _option(
        "--page",
        "FILE",
        "Also write an HTML page: memory over the step and against the batch size.",
        type=click.Path(path_type=Path, dir_okay=False),
    ),
    GroupedOption(["--json", "as_json"], group="Training", is_flag=True, help="Print the forecast as JSON."),
]
