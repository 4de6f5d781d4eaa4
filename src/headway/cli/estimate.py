"""`headway estimate`: estimate the memory and time for running or training a model, without reading its weights.

Without options, the command reports the requirements for running the model on this machine. With --device, it reports
those for training a model or a script on a GPU, the largest batch, and the cheapest configuration.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from headway.cli.model_options import EARLIER_NAMES, POSITIVE, make_model_option
from headway.cli.options import JSON, GroupedCommand, LocalPath, format_examples, make_option
from headway.cli.progress import show_progress
from headway.common.text import format_bytes
from headway.errors import ConfigError
from headway.planning import TASKS
from headway.planning.model_types import check_model_folder, check_model_name

_ABOUT = """Estimate the memory that a model needs, where it fits on this machine, and its highest speed.

FOLDER contains a transformers `config.json`; weights are not needed. The speed is an upper bound: the memory bandwidth, which is
measured in about two seconds, divided by the bytes that each token has to read.

With --device, forecast the memory of training on that GPU, which this machine need not have, and the largest batch size. FOLDER may
then also be a config file or a transformers model type. With --script, forecast your own training script instead: it runs up to its
second update, on tensors without values.
"""


_EPILOG = format_examples(
    "headway estimate llama/                        sizes, placement, highest speed",
    "headway estimate llama/ --dtype int4           placement in int4",
    "headway estimate bert --device rtx-3090        training on a GPU: memory, largest batch size",
    "headway estimate llama --device h100 --mixed_precision bf16 --strategy fsdp --ranks 8",
    "headway estimate llama --device l4 --dtype int4 --lora r=16   QLoRA",
    "headway estimate bert --device t4 --global_batch_size 256   the cheapest configuration that fits",
    "headway estimate --script train.py --device rtx-3090 -- --lr 3e-4",
)


_OF_SCRIPTS = ("device", "budget", "page", "as_json")
"""Options that can be combined with `--script`. The script itself determines what all other options would set."""


_OF_RUNNING = ("dtype", "batch_size", "sequence")


LOOPS = ("plain", "zero_grad_before_backward", "loss_function")


_ONE_GPU = "it ranks ways to train on one GPU, and `headway plan` ranks layouts"


NOT_FOR_RANKING = {
    "batch_size": "the micro-batch is searched for",
    "gradient_accumulation_steps": "it follows from the micro-batch",
    "longest": "it is a search at one batch size",
    "lora": "it ranks ways to train the whole model",
    "packing": "it ranks steps on whole sequences",
    "page": "its charts are of one configuration",
    **dict.fromkeys(("strategy", "ranks", "machine_ranks"), _ONE_GPU),
}
"""Options of a forecast that cannot be combined with `--global_batch_size`, mapped to the reason."""


_DTYPES = ("float32", "bfloat16", "float16", "int8", "int4")


def _run_estimate(
    folder: Path | None, arguments: tuple[str, ...], script: bool, calibrate: bool, **options: Any
) -> None:
    given = {name: value for name, value in options.items() if value not in (None, False) and name != "inference"}
    if calibrate:
        if folder is not None or given:
            raise ConfigError("--calibrate measures this machine's GPU and takes no other arguments; remove them")
        click.echo(calibrate_device())
        return
    if folder is None:
        raise ConfigError("FOLDER is missing: a folder with a config.json, or with --device a transformers model type")
    if given.get("device", "this").lower() != "this":
        from headway.forecasting.device import devices

        devices.find_device(given["device"])  # report an unknown name before torch is loaded
    _check_arguments(folder, arguments, script, given)
    # Import it now: a script's folder, which may contain files named like Python's modules, comes first on sys.path later.
    import headway.core.tracking.report.forecast_page  # noqa: F401

    show_progress()
    if script:
        click.echo(format_script_forecast(folder, arguments, **given))
        return
    if "device" in given:
        _echo_forecast(str(folder), given)
        return
    # Imported here so that `--help` does not wait for the import of torch.
    from headway.planning.inference import tabulate

    click.echo("\n".join(tabulate(folder, given.get("dtype"), given.get("batch_size", 1), given.get("sequence"))))


def _check_arguments(folder: Path, arguments: tuple[str, ...], script: bool, given: dict[str, Any]) -> None:
    """Raise `ConfigError` if options contradict each other or refer to unknown names.

    This check runs before torch is imported.

    Args:
        folder: Path of the script, or the model as the user typed it: a folder, config file or model type.
        arguments: Arguments of the script.
        script: Whether `--script` was given.
        given: Options by name.
    """
    if script:
        _check_script(given)
        return
    if arguments:
        raise ConfigError(f"{' '.join(arguments)}: only a script takes arguments; add --script, or remove them")
    if "device" in given:
        dtype = given.get("dtype", "")
        if dtype.startswith("int") and (dtype, "lora" in given) != ("int4", True):
            raise ConfigError(
                f"--dtype {dtype} is for running a model; training takes float32, bfloat16 or float16, or int4 with --lora (QLoRA)"
            )
        check_model_name(str(folder))
        return
    for name in given:
        if name not in _OF_RUNNING:
            raise ConfigError(f"{_format_flag(name)} is for training; add --device, such as --device a100-40gb")
    if "batch_size" in given and "sequence" not in given:
        raise ConfigError(f"--batch_size {given['batch_size']} needs --sequence, the tokens of each sample")
    check_model_folder(folder)


def _format_flag(name: str) -> str:
    """Return the flag that a user types for the option with the given name, such as "--device" for "device"."""
    return "--json" if name == "as_json" else f"--{name}"


def _echo_forecast(model: str, given: dict[str, Any]) -> None:
    if "global_batch_size" not in given:
        click.echo(format_forecast(model, **given))
        return
    found, has_room = format_ranking(model, **given)
    click.echo(found)
    if not has_room:
        raise SystemExit(1)


def _check_script(given: dict[str, Any]) -> None:
    if "device" not in given:
        raise ConfigError("--script needs --device, such as --device a100-40gb")
    for name in given:
        if name not in _OF_SCRIPTS:
            raise ConfigError(
                f"{_format_flag(name)} is decided by the script; with --script, pass it to the script instead"
            )


def format_forecast(
    model: str, page: Path | None = None, as_json: bool = False, longest: bool = False, **given: Any
) -> str:
    """Return the memory forecast for a transformers model as text or JSON.

    Args:
        model: Folder, config file or model type.
        page: File for an HTML page. Default: no page.
        as_json: Whether to return JSON. Default: False.
        longest: Whether to search for the longest sequence too. Default: False.
        given: Values of other command-line options by name, such as `device`. Missing options have their defaults.

    Raises:
        ConfigError: If an option is invalid, or the page cannot be written.
        UnsupportedError: If the training step cannot be traced.
    """
    if ("strategy" in given) != ("ranks" in given):
        raise ConfigError("--strategy and --ranks go together, as in --strategy fsdp --ranks 8; give both, or none")
    # Imported here so that `--help` does not wait for the import of torch.
    from headway.planning.forecast import forecast
    from headway.planning.sources import find_source, make_length_search, make_trainable, parse_lora_rank

    source = find_source(model, given.setdefault("batch_size", 1), given.pop("sequence", None), given.pop("task", None))
    rank = parse_lora_rank(given.pop("lora")) if "lora" in given else None
    is_packed = given.pop("packing", False)
    make, batch, loss = make_trainable(source, given.pop("attention", None), given.pop("dtype", None), rank, is_packed)
    given["accumulation"] = given.pop("gradient_accumulation_steps", 1)
    given["recompute"] = given.pop("activation_checkpointing", False)
    given["precision"] = given.pop("mixed_precision", "no")
    found = forecast(make, batch, loss=loss, longest=make_length_search(source) if longest else None, **given)
    if found.peak_line.startswith(sys.argv[0]):  # a line of this command is of no use to the user
        found = replace(found, peak_line="")
    return _format_found(found, source.title, f"{source.title}, {source.batch}", page, as_json)


def format_script_forecast(
    script: Path, arguments: tuple[str, ...], page: Path | None = None, as_json: bool = False, **given: Any
) -> str:
    """Return the memory forecast for a training script as text or JSON.

    Args:
        script: Path of the script.
        arguments: Arguments of the script.
        page: File for an HTML page. Default: no page.
        as_json: Whether to return JSON. Default: False.
        given: Values of the options `device` and `budget`.

    Raises:
        ConfigError: If an option is invalid, the page cannot be written, or the script does not exist, makes no update
            or ends with an error code.
        UnsupportedError: If the training step cannot be traced.
    """
    from headway.planning.forecast import forecast_script

    return _format_found(forecast_script(script, arguments, **given), script.name, str(script), page, as_json)


def _format_found(found: Any, title: str, heading: str, page: Path | None, as_json: bool) -> str:
    if page is not None:
        from headway.core.tracking.report.forecast_page import render_forecast_page

        try:
            page.write_text(render_forecast_page(title, found.as_dict()), encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"cannot write {page} ({error.strerror}); name another file with --page") from error
    where = "" if page is None else f"page written to {page}"
    if as_json:
        if where:
            click.echo(where, err=True)  # stdout holds JSON alone
        return json.dumps(found.as_dict(), indent=1)
    return "\n".join([heading, found.describe(), *([where] if where else [])])


def format_ranking(model: str, as_json: bool = False, **given: Any) -> tuple[str, bool]:
    """Return the configurations that can train with a given global batch size, cheapest first, as text or JSON.

    Args:
        model: Folder, config file or model type.
        as_json: Whether to return JSON. Default: False.
        given: Values of other options by name. global_batch_size and device are required. Without mixed_precision,
            "no" and "bf16" are tried. Without activation_checkpointing, both settings are tried. The value of optimizer
            is a comma-separated list of names to try.

    Returns:
        The text, and whether at least one of the configurations fits into memory.

    Raises:
        ConfigError: If an option is invalid or cannot be combined with a global batch size.
        UnsupportedError: If no configuration can be traced.
    """
    for name in NOT_FOR_RANKING.keys() & given.keys():
        raise ConfigError(f"{_format_flag(name)} and --global_batch_size: {NOT_FOR_RANKING[name]}; give one of them")
    # Imported here so that `--help` does not wait for the import of torch.
    from headway.planning.cheapest import cheapest, format_table
    from headway.planning.sources import find_source, make_trainable

    source = find_source(model, 1, given.get("sequence"), given.get("task"))
    make, batch, loss = make_trainable(source, dtype=given.get("dtype"))
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
    lines = [f"{source.title}, {given['global_batch_size']} x {source.batch}, {given['device']}", format_table(rows)]
    lines += [f"not traced: {row.optimizer}, {row.precision}: {row.problem}" for row in rows if row.problem]
    lines.append("cost: of one update beside the first row's, from counted operations; not a forecast of time")
    if not has_room:
        lines.append(
            "nothing is sure to fit; give a larger --budget, another --device or --optimizer, or a shorter --sequence"
        )
    return "\n".join(lines), has_room


def calibrate_device() -> str:
    """Measure the memory that a process needs on this machine's GPU besides tensors, and store it for forecasts.

    Returns:
        A text with the result and the path of the file in which it is stored.

    Raises:
        DeviceUnavailable: If there is no CUDA device.
        ConfigError: If the result cannot be stored.
    """
    from headway.common import env
    from headway.forecasting.device import calibration, devices

    name, path = devices.name_this_device(), calibration.locate_records(env.copy_variables())
    record = calibration.measure_overhead()
    calibration.write_record(path, name, record)
    return (
        f"{record.product}: {format_bytes(record.overhead)} besides tensors, {format_bytes(record.kept)} of libraries' workspaces\n"
        f"stored as {name} in {path}; --device {name} or --device this uses it"
    )


_SEARCHED = (
    "Rank the configurations that train with this many samples per update. --optimizer may then contain several names, separated "
    "by commas. The exit code is 1 if none is certain to fit."
)


_MEASURED = (
    "Measure the memory that a process needs on this machine's GPU besides tensors, and store it for later forecasts."
)


_DRAWN = "Also write an HTML page of a forecast: memory over the step and against the batch size."


_HERE = (
    'Forecast training on this GPU: a name such as h100 or rtx-4090, "this" for this machine\'s GPU, a product name as '
    "nvidia-smi prints it, or a memory size such as 48GiB."
)


_ATTENTION = "The model's attention.  [default: the model's]"


_TASK = f"The model's head: {', '.join(TASKS)}.  [default: the config's]"


_LORA = "Train LoRA adapters of this rank (PEFT); the model itself is frozen."


_LOOP = (
    f"Form of the training loop, which decides what memory is held between calls: {', '.join(LOOPS)}.  [default: plain]"
)


_RUN = "FOLDER is a training script, which gets ARGS."


_PLACED = (
    "Place the model in this dtype, or train its weights in it; int4 with --lora is QLoRA.  "
    "[default: that of the config]"
)


estimate = GroupedCommand(
    "estimate",
    callback=_run_estimate,
    aliases=EARLIER_NAMES,
    params=[
        click.Argument(["folder"], metavar="FOLDER", required=False, type=LocalPath(path_type=Path)),
        click.Argument(["arguments"], metavar="[-- ARGS]...", nargs=-1),
        make_model_option("batch_size", "Workload"),
        make_model_option("sequence", "Workload", "; without --device, no tokens are counted]"),
        make_option("--dtype", "|".join(_DTYPES), "Running", _PLACED, _DTYPES),
        make_option("--inference", None, "Running", "Run the model (the default).", hidden=True),
        make_option("--device", "NAME", "Training", _HERE),
        make_option("--script", None, "Training", _RUN),
        make_model_option("optimizer", "Training"),
        make_model_option("mixed_precision", "Training"),
        make_model_option("activation_checkpointing", "Training"),
        make_option(
            "--gradient_accumulation_steps", "N", "Training", "Micro-batches per update.  [default: 1]", POSITIVE
        ),
        make_option("--attention", "eager|sdpa", "Training", _ATTENTION, ("eager", "sdpa"), is_rare=True),
        make_option(
            "--packing", None, "Training", "Several documents in each sequence, masked from each other.", is_rare=True
        ),
        make_option("--task", "NAME", "Training", _TASK, tuple(TASKS), is_rare=True),
        make_option("--lora", "r=N", "Training", _LORA, is_rare=True),
        make_option("--loop", "NAME", "Training", _LOOP, LOOPS, is_rare=True),
        make_model_option("ranks", "Training", " Goes with --strategy."),
        make_model_option("strategy", "Training", " over --ranks; the answer is for rank 0."),
        make_model_option("machine_ranks", "Training", is_rare=True),
        make_model_option("budget", "Training", "  [default: all of the GPU's]"),
        make_option(
            "--longest", None, "Training", "Also search for the longest sequence at this batch size.", is_rare=True
        ),
        make_option("--global_batch_size", "N", "Training", _SEARCHED, POSITIVE),
        make_option("--calibrate", None, "Training", _MEASURED, is_rare=True),
        make_option("--page", "FILE", "Output", _DRAWN, LocalPath(path_type=Path, dir_okay=False), is_rare=True),
        JSON,
    ],
    help=_ABOUT,
    epilog=_EPILOG,
)
