"""`headway estimate`: estimate the memory and time for running or training a model, without reading its weights.

Without options, the command reports the requirements for running the model on this machine. With --device, it reports
those for training a model or a script on a GPU, the largest batch, and the cheapest configuration.
"""

import contextlib
import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO

import click

from headway.cli.model_options import EARLIER_NAMES, POSITIVE, make_model_option
from headway.cli.options import JSON, GroupedCommand, GroupedOption, LocalPath, format_examples, make_option
from headway.cli.progress import show_progress
from headway.common.text import format_bytes
from headway.errors import ConfigError
from headway.planning.model_types import check_model_folder, check_model_name
from headway.planning.tasks import TASKS

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
    "headway estimate -m my_package.train --device rtx-3090 -- --lr 3e-4",
)


_SCRIPT_OPTIONS = ("device", "budget", "page", "as_json")
"""Options that can be combined with `--script` or `--module`. The script itself determines what all other options would set."""

_INFERENCE_OPTIONS = ("dtype", "batch_size", "sequence")
"""Options that can be used without `--device`, when the command reports the requirements for running the model."""

LOOPS = ("plain", "zero_grad_before_backward", "loss_function")

_ONE_GPU = "it ranks ways to train on one GPU, and `headway plan` ranks layouts"

NOT_FOR_RANKING = {
    "batch_size": "the micro-batch is searched for",
    "gradient_accumulation_steps": "it follows from the micro-batch",
    "longest": "it is a search at one batch size",
    "lora": "it ranks ways to train the full model",
    "packing": "it ranks steps on full sequences",
    "page": "its charts are of one configuration",
    **dict.fromkeys(("strategy", "ranks", "machine_ranks"), _ONE_GPU),
}
"""Options of a forecast that cannot be combined with `--global_batch_size`, mapped to the reason."""

_DTYPES = ("float32", "bfloat16", "float16", "int8", "int4")


def _run_estimate(
    folder: Path | None, arguments: tuple[str, ...], script: bool, module: bool, calibrate: bool, **options: Any
) -> None:
    """Check the options before torch is imported, then print the estimate, the forecast or the calibration.

    Args:
        folder: Model folder, config file or model type; with `script`, the script. None: only `--calibrate` was given.
        arguments: Arguments of the script.
        script: Whether to forecast the memory of a script.
        module: Whether to forecast the memory of a script that is given by the name of its module.
        calibrate: Whether to measure this machine's GPU instead.
        **options: Values of the other flags, by the name of the flag without dashes.

    Raises:
        ConfigError: If `folder` is missing, if options do not fit together, or if the device is unknown.
    """
    script = script or module
    typed_options = {
        name: value for name, value in options.items() if value not in (None, False) and name != "inference"
    }
    if calibrate:
        if folder is not None or typed_options:
            raise ConfigError("--calibrate measures this machine's GPU and takes no other arguments; remove them")
        click.echo(calibrate_device())
        return
    if folder is None:
        raise ConfigError("FOLDER is missing: a folder with a config.json, or with --device a transformers model type")
    if typed_options.get("device", "this").lower() != "this":
        from headway.forecasting.device import devices

        devices.find_device(typed_options["device"])  # report an unknown name before torch is loaded
    _check_arguments(folder, arguments, script, typed_options)
    # Import it now: a script's folder, which may contain files named like Python's modules, comes first on sys.path later.
    import headway.core.tracking.report.forecast_page  # noqa: F401

    if script:
        output = _redirect_to_stderr()
        with show_progress():
            text = format_script_forecast(str(folder), arguments, module, **typed_options)
        click.echo(text, file=output)
        return
    if "device" in typed_options:
        _echo_forecast(str(folder), typed_options)
        return
    # Imported here so that `--help` does not wait for the import of torch.
    from headway.planning.inference_report import describe_inference

    dtype, sequence = typed_options.get("dtype"), typed_options.get("sequence")
    with show_progress():
        lines = list(describe_inference(folder, dtype, typed_options.get("batch_size", 1), sequence))
    for line in lines:
        click.echo(line)


def _redirect_to_stderr() -> TextIO:
    """Send what this process and its children print from now on to stderr, and return a stream for the result.

    The script's own output stays redirected after the result is printed. Threads and functions registered with `atexit`
    print later, and worker processes inherit the file descriptor of stdout.
    """
    result_stream = sys.stdout
    with contextlib.suppress(OSError, ValueError):  # stdout may be an object without a file descriptor
        sys.stdout.flush()
        descriptor = sys.stdout.fileno()
        result_stream = os.fdopen(os.dup(descriptor), "w", encoding=sys.stdout.encoding)
        os.dup2(sys.stderr.fileno(), descriptor)
    sys.stdout = sys.stderr
    return result_stream


def _check_arguments(folder: Path, arguments: tuple[str, ...], script: bool, typed_options: dict[str, Any]) -> None:
    """Raise `ConfigError` if options contradict each other or refer to unknown names.

    This check runs before torch is imported.

    Args:
        folder: Path of the script, or the model as the user typed it: a folder, config file or model type.
        arguments: Arguments of the script.
        script: Whether `--script` or `--module` was given.
        typed_options: Options by name.
    """
    if script:
        _check_script(typed_options)
        return
    if arguments:
        raise ConfigError(f"{' '.join(arguments)}: only a script takes arguments; add --script, or remove them")
    if "device" in typed_options:
        dtype = typed_options.get("dtype", "")
        if dtype.startswith("int") and (dtype, "lora" in typed_options) != ("int4", True):
            raise ConfigError(
                f"--dtype {dtype} is for running a model; training takes float32, bfloat16 or float16, or int4 with --lora (QLoRA)"
            )
        check_model_name(str(folder))
        return
    for name in typed_options:
        if name not in _INFERENCE_OPTIONS:
            raise ConfigError(f"{_format_flag(name)} is for training; add --device, such as --device a100-40gb")
    if "batch_size" in typed_options and "sequence" not in typed_options:
        raise ConfigError(f"--batch_size {typed_options['batch_size']} needs --sequence, the tokens of each sample")
    check_model_folder(folder)


def _format_flag(name: str) -> str:
    """Return the flag that a user types for the option with the given name, such as "--device" for "device"."""
    return "--json" if name == "as_json" else f"--{name}"


def _echo_forecast(model: str, typed_options: dict[str, Any]) -> None:
    """Print a forecast, or a ranking if a global batch size is given.

    Raises:
        SystemExit: With code 1, if no layout of the ranking fits.
    """
    if "global_batch_size" not in typed_options:
        with show_progress():
            text = format_forecast(model, **typed_options)
        click.echo(text)
        return
    with show_progress():
        table, has_room = format_ranking(model, **typed_options)
    click.echo(table)
    if not has_room:
        raise SystemExit(1)


def _check_script(typed_options: dict[str, Any]) -> None:
    """Raise `ConfigError` if an option is not allowed with `--script`, or `--device` is missing."""
    if "device" not in typed_options:
        raise ConfigError("--script needs --device, such as --device a100-40gb")
    for name in typed_options:
        if name not in _SCRIPT_OPTIONS:
            raise ConfigError(
                f"{_format_flag(name)} is decided by the script; with --script, pass it to the script instead"
            )


def format_forecast(
    model: str, page: Path | None = None, as_json: bool = False, longest: bool = False, **options: Any
) -> str:
    """Return the memory forecast for a transformers model as text or JSON.

    Args:
        model: Folder, config file or model type.
        page: File for an HTML page. Default: no page.
        as_json: Whether to return JSON. Default: False.
        longest: Whether to search for the longest sequence too. Default: False.
        options: Values of other command-line options by name, such as `device`. Missing options have their defaults.

    Raises:
        ConfigError: If an option is invalid, or the page cannot be written.
        UnsupportedError: If the training step cannot be traced.
    """
    if ("strategy" in options) != ("ranks" in options):
        raise ConfigError("--strategy and --ranks go together, as in --strategy fsdp --ranks 8; give both, or none")
    # Imported here so that `--help` does not wait for the import of torch.
    from headway.planning.forecast import forecast
    from headway.planning.forecast_functions import make_forecast_functions, make_length_search, parse_lora_rank
    from headway.planning.sources import find_source

    source = find_source(
        model, options.setdefault("batch_size", 1), options.pop("sequence", None), options.pop("task", None)
    )
    lora_rank = parse_lora_rank(options.pop("lora")) if "lora" in options else None
    is_packed = options.pop("packing", False)
    make_model, batch, loss = make_forecast_functions(
        source, options.pop("attention", None), options.pop("dtype", None), lora_rank, is_packed
    )
    options["accumulation"] = options.pop("gradient_accumulation_steps", 1)
    options["recompute"] = options.pop("activation_checkpointing", False)
    options["precision"] = options.pop("mixed_precision", "no")
    forecast_result = forecast(
        make_model, batch, loss=loss, longest=make_length_search(source) if longest else None, **options
    )
    if forecast_result.peak_line.startswith(sys.argv[0]):  # a line of this command is of no use to the user
        forecast_result = replace(forecast_result, peak_line="")
    return _format_forecast(forecast_result, source.title, f"{source.title}, {source.batch}", page, as_json)


def format_script_forecast(
    script: str,
    arguments: tuple[str, ...],
    is_module: bool,
    page: Path | None = None,
    as_json: bool = False,
    **options: Any,
) -> str:
    """Return the memory forecast for a training script as text or JSON.

    Args:
        script: Path of the script, or name of a module.
        arguments: Arguments of the script.
        is_module: Whether `script` is the name of a module.
        page: File for an HTML page. Default: no page.
        as_json: Whether to return JSON. Default: False.
        options: Values of the options `device` and `budget`.

    Raises:
        ConfigError: If an option is invalid, the page cannot be written, or the script does not exist, makes no update
            or ends with an error code.
        UnsupportedError: If the training step cannot be traced.
    """
    from headway.planning.forecast import forecast_script

    forecast = forecast_script(script, arguments, is_module=is_module, **options)
    return _format_forecast(forecast, Path(script).name, script, page, as_json)


def _format_forecast(forecast: Any, title: str, heading: str, page: Path | None, as_json: bool) -> str:
    """Return a forecast as text or JSON, and write its HTML page if `page` is given.

    Args:
        forecast: Forecast of a model or a script.
        title: Title of the page.
        heading: First line of the text.
        page: File for the page. None: no page.
        as_json: Whether to return JSON. A note about the page then goes to standard error.

    Raises:
        ConfigError: If the page cannot be written.
    """
    if page is not None:
        from headway.core.tracking.report.forecast_page import render_forecast_page

        try:
            page.write_text(render_forecast_page(title, forecast.as_dict()), encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"cannot write {page} ({error.strerror}); name another file with --page") from error
    page_note = "" if page is None else f"page written to {page}"
    if as_json:
        if page_note:
            click.echo(page_note, err=True)  # stdout holds JSON alone
        return json.dumps(forecast.as_dict(), indent=1)
    return "\n".join([heading, forecast.describe(), *([page_note] if page_note else [])])


def format_ranking(model: str, as_json: bool = False, **options: Any) -> tuple[str, bool]:
    """Return the configurations that can train with a given global batch size, cheapest first, as text or JSON.

    Args:
        model: Folder, config file or model type.
        as_json: Whether to return JSON. Default: False.
        options: Values of other options by name. global_batch_size and device are required. Without mixed_precision,
            "no" and "bf16" are tried. Without activation_checkpointing, both settings are tried. The value of optimizer
            is a comma-separated list of names to try.

    Returns:
        The text, and whether at least one of the configurations fits into memory.

    Raises:
        ConfigError: If an option is invalid or cannot be combined with a global batch size.
        UnsupportedError: If no configuration can be traced.
    """
    for name in NOT_FOR_RANKING.keys() & options.keys():
        raise ConfigError(f"{_format_flag(name)} and --global_batch_size: {NOT_FOR_RANKING[name]}; give one of them")
    # Imported here so that `--help` does not wait for the import of torch.
    from headway.planning.cheapest import cheapest, format_table
    from headway.planning.forecast_functions import make_forecast_functions
    from headway.planning.sources import find_source

    source = find_source(model, 1, options.get("sequence"), options.get("task"))
    make_model, batch, loss = make_forecast_functions(source, dtype=options.get("dtype"))
    rows = cheapest(
        make_model,
        batch,
        global_batch_size=options["global_batch_size"],
        device=options["device"],
        budget=options.get("budget"),
        optimizers=tuple(options.get("optimizer", "adamw").split(",")),
        precisions=(options["mixed_precision"],) if "mixed_precision" in options else ("no", "bf16"),
        recompute=(True,) if "activation_checkpointing" in options else (False, True),
        attention=(options.get("attention"),),
        loss=loss,
        loop=options.get("loop", "plain"),
    )
    has_room = any(row.fits for row in rows)
    if as_json:
        return json.dumps([row.as_dict() for row in rows], indent=1), has_room
    lines = [
        f"{source.title}, {options['global_batch_size']} x {source.batch}, {options['device']}",
        format_table(rows),
    ]
    lines += [f"not traced: {row.optimizer}, {row.precision}: {row.problem}" for row in rows if row.problem]
    lines.append("cost: of one update relative to the first row's, from counted operations; not a forecast of time")
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


_GLOBAL_BATCH_SIZE_HELP = (
    "Rank the configurations that train with this many samples per update. --optimizer may then contain several names, separated "
    "by commas. The exit code is 1 if none is certain to fit."
)

_CALIBRATE_HELP = (
    "Measure the memory that a process needs on this machine's GPU besides tensors, and store it for later forecasts."
)

_PAGE_HELP = "Also write an HTML page of a forecast: memory over the step and against the batch size."

_DEVICE_HELP = (
    'Forecast training on this GPU: a name such as h100 or rtx-4090, "this" for this machine\'s GPU, a product name as '
    "nvidia-smi prints it, or a memory size such as 48GiB."
)

_ATTENTION_HELP = "The model's attention.  [default: the model's]"

_TASK_HELP = f"The model's head: {', '.join(TASKS)}.  [default: the config's]"

_LORA_HELP = "Train LoRA adapters of this rank (PEFT); the model itself is frozen."

_LOOP_HELP = (
    f"Form of the training loop, which decides what memory is held between calls: {', '.join(LOOPS)}.  [default: plain]"
)

_SCRIPT_HELP = "FOLDER is a training script, which gets ARGS."

_MODULE_HELP = "FOLDER is the name of a training script's module, as for python -m."

_DTYPE_HELP = (
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
        make_option("--dtype", "|".join(_DTYPES), "Running", _DTYPE_HELP, _DTYPES),
        make_option("--inference", None, "Running", "Run the model (the default).", hidden=True),
        make_option("--device", "NAME", "Training", _DEVICE_HELP),
        make_option("--script", None, "Training", _SCRIPT_HELP),
        GroupedOption(["-m", "--module"], is_flag=True, group="Training", help=_MODULE_HELP, is_rare=True),
        make_model_option("optimizer", "Training"),
        make_model_option("mixed_precision", "Training"),
        make_model_option("activation_checkpointing", "Training"),
        make_option(
            "--gradient_accumulation_steps", "N", "Training", "Micro-batches per update.  [default: 1]", POSITIVE
        ),
        make_option("--attention", "eager|sdpa", "Training", _ATTENTION_HELP, ("eager", "sdpa"), is_rare=True),
        make_option(
            "--packing", None, "Training", "Several documents in each sequence, masked from each other.", is_rare=True
        ),
        make_option("--task", "NAME", "Training", _TASK_HELP, tuple(TASKS), is_rare=True),
        make_option("--lora", "r=N", "Training", _LORA_HELP, is_rare=True),
        make_option("--loop", "NAME", "Training", _LOOP_HELP, LOOPS, is_rare=True),
        make_model_option("ranks", "Training", " Goes with --strategy."),
        make_model_option("strategy", "Training", " over --ranks; the answer is for rank 0."),
        make_model_option("machine_ranks", "Training", is_rare=True),
        make_model_option("budget", "Training", "  [default: all of the GPU's]"),
        make_option(
            "--longest", None, "Training", "Also search for the longest sequence at this batch size.", is_rare=True
        ),
        make_option("--global_batch_size", "N", "Training", _GLOBAL_BATCH_SIZE_HELP, POSITIVE),
        make_option("--calibrate", None, "Training", _CALIBRATE_HELP, is_rare=True),
        make_option("--page", "FILE", "Output", _PAGE_HELP, LocalPath(path_type=Path, dir_okay=False), is_rare=True),
        JSON,
    ],
    help=_ABOUT,
    epilog=_EPILOG,
)
