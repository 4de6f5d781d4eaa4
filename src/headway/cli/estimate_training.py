"""`headway estimate --device`: what training a model or a script takes on a card, the largest batch, the cheapest way."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from headway.common.text import format_bytes
from headway.errors import ConfigError
from headway.tracking.report.forecast_page import forecast_page

_ONE_GPU = "it ranks ways to train on one GPU, and `headway plan` ranks layouts"
NOT_FOR_RANKING = {
    "batch_size": "the micro-batch is searched for",
    "gradient_accumulation_steps": "it follows from the micro-batch",
    "longest": "it is a search at one batch size",
    "lora": "it ranks ways to train the whole model",
    "page": "its charts are of one configuration",
    **dict.fromkeys(("strategy", "ranks", "machine_ranks"), _ONE_GPU),
}
"""Options of a forecast that do not go with --global_batch_size, and why."""


def forecast_text(
    model: str, page: Path | None = None, as_json: bool = False, longest: bool = False, **given: Any
) -> str:
    """The forecast for a transformers model as text, or as JSON.

    Args:
        model: a folder, a config file or a model type.
        page: file for an HTML page; None: no page.
        longest: search for the longest sequence, too.
        given: the other options.

    Raises:
        ConfigError: an option that cannot be.
    """
    if ("strategy" in given) != ("ranks" in given):
        raise ConfigError("--strategy and --ranks go together, as in --strategy fsdp --ranks 8; give both, or none")
    # Imported here so that the help does not wait for torch.
    from headway.planning.forecast import forecast
    from headway.planning.sources import find, lengths, lora_rank, trainable

    source = find(model, given.setdefault("batch_size", 1), given.pop("sequence", None), given.pop("task", None))
    rank = lora_rank(given.pop("lora")) if "lora" in given else None
    make, batch, loss = trainable(source, given.pop("attention", None), given.pop("dtype", None), rank)
    given["accumulation"] = given.pop("gradient_accumulation_steps", 1)
    given["recompute"] = given.pop("activation_checkpointing", False)
    given["precision"] = given.pop("mixed_precision", "no")
    found = forecast(make, batch, loss=loss, longest=lengths(source) if longest else None, **given)
    if found.peak_line.startswith(sys.argv[0]):  # the command itself, not a line of the user's
        found = replace(found, peak_line="")
    return _format_forecast(found, source.title, f"{source.title}, {source.batch}", page, as_json)


def script_text(
    script: Path, arguments: tuple[str, ...], page: Path | None = None, as_json: bool = False, **given: Any
) -> str:
    """The forecast of a user's own script as text, or as JSON; `given`: device and budget."""
    from headway.planning.forecast import forecast_script

    return _format_forecast(forecast_script(script, arguments, **given), script.name, str(script), page, as_json)


def _format_forecast(found: Any, title: str, heading: str, page: Path | None, as_json: bool) -> str:
    if page is not None:
        try:
            page.write_text(forecast_page(title, found.as_dict()), encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"cannot write {page} ({error.strerror}); name another file with --page") from error
    return json.dumps(found.as_dict(), indent=1) if as_json else f"{heading}\n{found.describe()}"


def ranking_text(model: str, as_json: bool = False, **given: Any) -> tuple[str, bool]:
    """The ways to train with a global batch as text or as JSON, the cheapest first, and whether one of them fits.

    Args:
        model: a folder, a config file or a model type.
        as_json: print JSON.
        given: global_batch_size, device, budget; mixed_precision, activation_checkpointing and attention are tried alone where
            they are given; optimizer: names, separated by commas.

    Raises:
        ConfigError: an option that is not for this.
    """
    for name in NOT_FOR_RANKING.keys() & given.keys():
        raise ConfigError(f"--{name} and --global_batch_size: {NOT_FOR_RANKING[name]}; give one of them")
    # Imported here so that the help does not wait for torch.
    from headway.planning.cheapest import cheapest, table
    from headway.planning.sources import find, trainable

    source = find(model, 1, given.get("sequence"), given.get("task"))
    make, batch, loss = trainable(source, dtype=given.get("dtype"))
    rows = cheapest(
        make,
        batch,
        global_batch_size=given["global_batch_size"],
        device=given["device"],
        budget=given.get("budget"),
        optimizers=tuple(given.get("optimizer", "adamw").split(",")),
        precisions=(given["mixed_precision"],) if "mixed_precision" in given else ("no", "bf16"),
        recompute=(True,) if "activation_checkpointing" in given else (False, True),
        attention=(given.get("attention"),),
        loss=loss,
        loop=given.get("loop", "plain"),
    )
    has_room = any(row.fits for row in rows)
    if as_json:
        return json.dumps([row.as_dict() for row in rows], indent=1), has_room
    lines = [f"{source.title}, {given['global_batch_size']} x {source.batch}, {given['device']}", table(rows)]
    lines += [f"not traced: {row.optimizer}, {row.precision}: {row.problem}" for row in rows if row.problem]
    lines.append("cost: of one update beside the first row's, from counted operations; not a forecast of time")
    if not has_room:
        lines.append(
            "nothing is sure to fit; give a larger --budget, another --device or --optimizer, or a shorter --sequence"
        )
    return "\n".join(lines), has_room


def calibration_text() -> str:
    """Measure this machine's card, keep what was found, and say it.

    Raises:
        DeviceUnavailable: there is no CUDA device.
        ConfigError: the record cannot be kept.
    """
    from headway.common import env
    from headway.forecasting.device import calibration, devices

    name, path = devices.named(), calibration.file(env.snapshot())
    record = calibration.measure()
    calibration.write(path, name, record)
    return (
        f"{record.product}: {format_bytes(record.overhead)} besides tensors, {format_bytes(record.kept)} of libraries' workspaces\n"
        f"stored as {name} in {path}; --device {name} or --device this uses it"
    )
